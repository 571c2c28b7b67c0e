"""OpenAI's client: chat completions and responses."""

from checks import (
    GREETING,
    MODEL,
    PERSON,
    SEEING_MODEL,
    SEEING_URL,
    TOOL,
    TRANSLATE,
    URL,
    check_call,
    check_person,
    check_seen,
    check_stream,
    image_base64,
    run,
)
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key="none")


class Person(BaseModel):
    name: str
    age: int


def ask(text: str, **fields):
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, **fields)


def plain() -> None:
    assert ask(GREETING).choices[0].message.content


def stream() -> None:
    check_stream(chunk.choices[0].delta.content for chunk in ask(GREETING, stream=True))


def tools() -> None:
    (call,) = ask(TRANSLATE, tools=[TOOL]).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)
    (call,) = ask(GREETING, tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def structured() -> None:
    messages = [{"role": "user", "content": PERSON}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person)
    check_person(answer.choices[0].message.parsed)


def responses() -> None:
    first = client.responses.create(model=MODEL, input="My name is Anna.", temperature=0)
    assert first.output_text
    events = client.responses.create(model=MODEL, input=GREETING, previous_response_id=first.id, stream=True)
    check_stream(event.delta for event in events if event.type == "response.output_text.delta")
    check_person(client.responses.parse(model=MODEL, input=PERSON, text_format=Person).output_parsed)


def image() -> None:
    seeing = OpenAI(base_url=f"{SEEING_URL}/v1", api_key="none")
    url = f"data:image/png;base64,{image_base64()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which colour is it?"}]
    messages = [{"role": "user", "content": parts}]
    answer = seeing.chat.completions.create(model=SEEING_MODEL, messages=messages, max_tokens=8)
    check_seen(answer.choices[0].message.content, answer.usage.prompt_tokens)
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "Which colour is it?"}]
    response = seeing.responses.create(model=SEEING_MODEL, input=[{"role": "user", "content": parts}], max_output_tokens=8)
    check_seen(response.output_text, response.usage.input_tokens)


run(plain=plain, stream=stream, tools=tools, structured=structured, responses=responses, image=image)
