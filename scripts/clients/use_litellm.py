"""LiteLLM, through its paths for OpenAI's and Anthropic's APIs. The first argument is openai or anthropic."""

import sys

import litellm
from checks import GREETING, MODEL, PERSON, PERSON_SCHEMA, TOOL, TRANSLATE, URL, check_call, check_person, check_stream, run

KIND = sys.argv[1]


def ask(text: str, **fields):
    return litellm.completion(
        model=f"{KIND}/{MODEL}",
        api_base=f"{URL}/v1" if KIND == "openai" else URL,
        api_key="none",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        **fields,
    )


def plain() -> None:
    assert ask(GREETING).choices[0].message.content


def stream() -> None:
    check_stream(chunk.choices[0].delta.content for chunk in ask(GREETING, stream=True))


def tools() -> None:
    (call,) = ask(TRANSLATE, tools=[TOOL], tool_choice="required", max_tokens=100).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def structured() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True}}
    check_person(ask(PERSON, response_format=form).choices[0].message.content)


run(plain=plain, stream=stream, tools=tools, structured=structured)
