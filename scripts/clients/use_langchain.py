"""LangChain's models for OpenAI's and Anthropic's APIs. The first argument is openai or anthropic."""

import sys

from checks import GREETING, MODEL, PERSON, TRANSLATE, URL, check_call, check_person, check_stream, run, translate
from pydantic import BaseModel

if sys.argv[1] == "openai":
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0)
else:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=URL, api_key="none", temperature=0, max_tokens=256)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def plain() -> None:
    assert model.invoke(GREETING).text


def stream() -> None:
    check_stream(chunk.text for chunk in model.stream(GREETING))


def tools() -> None:
    (call,) = model.bind_tools([translate], tool_choice="any").invoke(TRANSLATE).tool_calls
    check_call(call["name"], call["args"])


def structured() -> None:
    check_person(model.with_structured_output(Person).invoke(PERSON))


run(plain=plain, stream=stream, tools=tools, structured=structured)
