"""Anthropic's client."""

from anthropic import Anthropic
from checks import (
    GREETING,
    MODEL,
    PARAMETERS,
    PERSON,
    PERSON_SCHEMA,
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


def image() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": image_base64()}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "Which colour is it?"}]
    messages = [{"role": "user", "content": parts}]
    answer = Anthropic(base_url=SEEING_URL, api_key="none").messages.create(model=SEEING_MODEL, max_tokens=8, messages=messages)
    usage = answer.usage
    check_seen(answer.content[0].text, usage.input_tokens + (usage.cache_read_input_tokens or 0))


run(plain=plain, stream=stream, tools=tools, structured=structured, image=image)
