"""Pydantic AI."""

from checks import CALLS, GREETING, MODEL, PERSON, TRANSLATE, URL, check_person, check_stream, run, translate
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"), settings={"temperature": 0})


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def plain() -> None:
    assert Agent(model).run_sync(GREETING).output


async def stream() -> None:
    async with Agent(model).run_stream(GREETING) as result:
        check_stream([part async for part in result.stream_text(delta=True, debounce_by=None)])


def tools() -> None:
    CALLS.clear()
    assert Agent(model, tools=[translate]).run_sync(TRANSLATE).output
    assert CALLS == [("house", "French")], CALLS


def structured() -> None:
    check_person(Agent(model, output_type=NativeOutput(Person)).run_sync(PERSON).output)
    check_person(Agent(model, output_type=Person).run_sync(PERSON).output)


run(plain=plain, stream=stream, tools=tools, structured=structured)
