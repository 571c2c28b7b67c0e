"""Ollama's own client."""

from checks import (
    GREETING,
    MODEL,
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
    translate,
)
from ollama import Client

client = Client(host=URL)


def ask(text: str, **fields):
    return client.chat(MODEL, [{"role": "user", "content": text}], options={"temperature": 0}, **fields)


def plain() -> None:
    assert ask(GREETING).message.content
    assert client.generate(MODEL, GREETING).response
    assert client.list().models
    assert client.show(MODEL).capabilities


def stream() -> None:
    check_stream(part.message.content for part in ask(GREETING, stream=True))


def tools() -> None:
    first = ask(TRANSLATE, tools=[translate]).message
    (call,) = first.tool_calls
    check_call(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_name": "translate", "content": translate(**call.function.arguments)}
    messages = [{"role": "user", "content": TRANSLATE}, first, result]
    assert client.chat(MODEL, messages, tools=[translate], options={"temperature": 0}).message.content


def structured() -> None:
    check_person(ask(PERSON, format=PERSON_SCHEMA).message.content)


def image() -> None:
    message = {"role": "user", "content": "Which colour is it?", "images": [image_base64()]}
    answer = Client(host=SEEING_URL).chat(SEEING_MODEL, [message], options={"num_predict": 8})
    check_seen(answer.message.content, answer.prompt_eval_count)


run(plain=plain, stream=stream, tools=tools, structured=structured, image=image)
