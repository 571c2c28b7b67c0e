"""The official `anthropic` client against a running server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import msgspec
import pytest

from culet.serve.api.anthropic_blocks import ToolResultBlock, result_of
from tests.serve.conftest import ANSWER
from tests.serve.running import Running

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'


def client_of(server: Running) -> anthropic.Anthropic:
    http_client = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0, http_client=http_client)


def test_messages(fake: Running) -> None:
    answer = client_of(fake).messages.create(model="gemma", max_tokens=100, messages=HELLO, system="Be brief.")
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", "gemma", "end_turn")
    (block,) = answer.content
    assert (block.type, block.text) == ("text", ANSWER)
    assert answer.usage.output_tokens > 5
    counted = client_of(fake).messages.count_tokens(model="gemma", messages=HELLO, system="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_system_messages_between_others(tiny: Running) -> None:
    """Claude Code sends them. They are turns of their own, in their place."""

    def count(*messages: Any) -> int:
        return client_of(tiny).messages.count_tokens(model="gemma", messages=list(messages)).input_tokens

    blocks: Any = [{"type": "text", "text": "Be brief."}]
    system: Any = {"role": "system", "content": blocks}
    assert count(*HELLO, system) == count(*HELLO, system | {"content": "Be brief."}) > count(*HELLO)
    answer = client_of(tiny).messages.create(model="gemma", max_tokens=2, messages=[*HELLO, system])
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == count(*HELLO, system)


def test_streaming_gives_the_same(fake: Running) -> None:
    with client_of(fake).messages.stream(model="gemma", max_tokens=100, messages=HELLO) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events if event.type not in ("text",)]
    assert kinds[0] == "message_start"
    assert kinds[1] == "content_block_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    whole = client_of(fake).messages.create(model="gemma", max_tokens=100, messages=HELLO)
    assert [(block.type, block.text) for block in final.content] == [(block.type, block.text) for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_length_and_stop_sequences(fake: Running) -> None:
    client = client_of(fake)
    assert client.messages.create(model="gemma", max_tokens=2, messages=HELLO).stop_reason == "max_tokens"
    answer = client.messages.create(model="gemma", max_tokens=100, messages=HELLO, stop_sequences=["point", "never"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "point")
    assert answer.content[0].text == ANSWER.partition("point")[0]


def test_thoughts_tools_and_a_second_turn(scripted: Callable[..., Running]) -> None:
    first = f"<|channel>thought\nWhich city?<channel|>Let me see.{CALL}{CALL}<|tool_response>"
    with scripted(first, "It is sunny.<turn|>") as server:
        for stream in (False, True):
            check_two_turns(client_of(server), stream)


def check_two_turns(client: anthropic.Anthropic, stream: bool) -> None:
    def ask(**fields: Any) -> Any:
        fields = {"model": "gemma", "max_tokens": 200, "messages": HELLO, "tools": [WEATHER], **fields}
        if not stream:
            return client.messages.create(**fields)
        with client.messages.stream(**fields) as events:
            return events.get_final_message()

    answer = ask(thinking={"type": "enabled", "budget_tokens": 1024})
    assert answer.stop_reason == "tool_use"
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert (answer.content[0].thinking, answer.content[1].text) == ("Which city?", "Let me see.")
    calls = answer.content[2:]
    assert [call.input for call in calls] == [{"city": "Paris", "days": 3}] * 2
    assert calls[0].id != calls[1].id
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]} for call in calls]
    content = [
        block.model_dump(include={"type", "thinking", "signature", "text", "id", "name", "input"}) for block in answer.content
    ]
    talk: Any = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    second = ask(messages=talk)
    assert second.content[0].text == "It is sunny."
    silent = ask(thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    assert [block.type for block in silent.content] == kinds
    assert (silent.content[0].thinking, silent.content[1].text) == ("", "Let me see.")
    content[0]["thinking"] = ""
    assert ask(messages=talk).content[0].text == "It is sunny."
    counted = client.messages.count_tokens(model="gemma", messages=talk, tools=[WEATHER])
    assert counted.input_tokens > client.messages.count_tokens(model="gemma", messages=HELLO).input_tokens + 20


def test_a_required_tool_is_called(tiny: Running) -> None:
    client = client_of(tiny)
    tool: Any = {
        **WEATHER,
        "input_schema": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
    }
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(model="gemma", max_tokens=200, messages=HELLO, tools=[tool], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert isinstance(call.input["days"], int)
    form: Any = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}}
    answer = client.messages.create(model="gemma", max_tokens=50, messages=HELLO, extra_body=form)
    assert answer.content[0].text.strip() in ("true", "false")


def test_errors_raise_the_clients_exceptions(fake: Running) -> None:
    client = client_of(fake)
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="other", max_tokens=5, messages=HELLO)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    bad: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [image]}]},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}]},
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}},
        {"tools": [WEATHER], "tool_choice": {"type": "tool"}},
        {"max_tokens": 0},
        {"extra_body": {"temperature": -1}},
    ]
    for fields in bad:
        with pytest.raises((anthropic.BadRequestError, ValueError)) as failed:
            client.messages.create(**{"model": "gemma", "max_tokens": 5, "messages": HELLO, **fields})
        if isinstance(failed.value, anthropic.BadRequestError):
            assert failed.value.body["type"] == "error"  # type: ignore[index]
    too_long: Any = {"model": "gemma", "messages": [{"role": "user", "content": "x " * 100_000}], "max_tokens": 5}
    with pytest.raises(anthropic.BadRequestError, match="context"):
        list(client.messages.create(stream=True, **too_long))
    fake.check_well()


def test_a_key_is_required(scripted: Callable[..., Running]) -> None:
    with scripted(settings={"api_key": "secret"}) as server:
        good = client_of(server).messages.create(model="gemma", max_tokens=20, messages=HELLO)
        assert good.content[0].text
        wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(model="gemma", max_tokens=20, messages=HELLO)
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/metrics", headers={"authorization": "Bearer wrong"}).status_code == 401


IMAGE: Any = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
SAID: Any = {"type": "text", "text": "no such file"}


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("no such file", "error: no such file"),
        ([SAID], "error: no such file"),
        ([SAID, IMAGE, SAID], ["error: no such file", None, "no such file"]),
        ([IMAGE, SAID], [None, "error: no such file"]),
        ([IMAGE], ["error:", None]),
        (None, "error: "),
    ],
)
def test_the_result_of_a_tool_that_failed(content: Any, texts: Any) -> None:
    fields = {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": True}
    result = result_of(msgspec.convert(fields, ToolResultBlock), "x")
    assert (result if isinstance(result, str) else [part.get("text") for part in result]) == texts
