"""Anthropic's client."""

from anthropic import Anthropic
from checks import (
    GREETING,
    MODEL,
    PARAMETERS,
    PERSON,
    PERSON_SCHEMA,
    TRANSLATE,
    URL,
    check_call,
    check_person,
    check_stream,
    run,
)

client = Anthropic(base_url=URL, api_key="none")
TOOL = {"name": "translate", "description": "Translate a word.", "input_schema": PARAMETERS}


def fields(text: str, **more):
    return {"model": MODEL, "max_tokens": 256, "messages": [{"role": "user", "content": text}], **more}


def plain() -> None:
    assert client.messages.create(**fields(GREETING)).content[0].text


def stream() -> None:
    with client.messages.stream(**fields(GREETING)) as stream:
        check_stream(stream.text_stream)


def tools() -> None:
    answer = client.messages.create(**fields(TRANSLATE, tools=[TOOL], tool_choice={"type": "any"}))
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    check_call(call.name, call.input)


def structured() -> None:
    form = {"format": {"type": "json_schema", "schema": PERSON_SCHEMA}}
    answer = client.messages.create(**fields(PERSON), extra_body={"output_config": form})
    check_person(answer.content[0].text)


run(plain=plain, stream=stream, tools=tools, structured=structured)
