"""OpenAI's Agents SDK, through the responses API and through chat completions. The argument is responses or chat."""

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import CALLS, GREETING, MODEL, PERSON, TRANSLATE, URL, check_person, check_stream, run, translate
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
kind = OpenAIResponsesModel if sys.argv[1] == "responses" else OpenAIChatCompletionsModel


class Person(BaseModel):
    name: str
    age: int


def agent(**options) -> Agent:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    settings = options.pop("settings", ModelSettings(temperature=0))
    return Agent(name="agent", model=kind(MODEL, client), model_settings=settings, **options)


async def plain() -> None:
    assert (await Runner.run(agent(), GREETING)).final_output


async def stream() -> None:
    events = [event async for event in Runner.run_streamed(agent(), GREETING).stream_events()]
    raw = [event.data for event in events if event.type == "raw_response_event"]
    check_stream(event.delta for event in raw if event.type == "response.output_text.delta")


async def tools() -> None:
    CALLS.clear()
    settings = ModelSettings(temperature=0, tool_choice="required")  # the SDK resets it after the first call
    assert (await Runner.run(agent(tools=[function_tool(translate)], settings=settings), TRANSLATE)).final_output
    assert CALLS, "no call"


async def structured() -> None:
    check_person((await Runner.run(agent(output_type=Person), PERSON)).final_output)


run(plain=plain, stream=stream, tools=tools, structured=structured)
