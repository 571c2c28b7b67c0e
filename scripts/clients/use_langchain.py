"""LangChain's models for OpenAI's and Anthropic's APIs. The first argument is openai or anthropic."""

import sys

from checks import (
    GREETING,
    MODEL,
    PERSON,
    SEEING_MODEL,
    SEEING_URL,
    TRANSLATE,
    URL,
    check_call,
    check_person,
    check_seen,
    check_stream,
    image_base64,
    run,
    translate,
)
from langchain_core.messages import HumanMessage
from pydantic import BaseModel


def make_model(name: str, url: str, max_tokens: int):
    if sys.argv[1] == "openai":
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=max_tokens)
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=name, base_url=url, api_key="none", temperature=0, max_tokens=max_tokens)


model = make_model(MODEL, URL, 256)


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


def image() -> None:
    picture = {"type": "image", "base64": image_base64(), "mime_type": "image/png"}
    question = HumanMessage(content=[picture, {"type": "text", "text": "Which colour is it?"}])
    answer = make_model(SEEING_MODEL, SEEING_URL, 8).invoke([question])
    check_seen(answer.text, answer.usage_metadata["input_tokens"])


run(plain=plain, stream=stream, tools=tools, structured=structured, image=image)
