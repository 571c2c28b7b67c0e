"""/v1/responses through the official `openai` client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from msgspec import convert

from culet.serve.api.openai.responses_protocol import ResponsesRequest, messages_of
from tests.serve.conftest import ANSWER
from tests.serve.running import Running
from tests.serve.test_structured_requests import SCHEMA

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "strict": False,
}
CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'


def test_create(fake: Running) -> None:
    answer = fake.openai().responses.create(model="gemma", input="Hello", instructions="Be brief.", metadata={"a": "b"})
    assert (answer.object, answer.status, answer.output_text, answer.model) == ("response", "completed", ANSWER, "gemma")
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    cut = fake.openai().responses.create(model="gemma", input="Hello", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]


TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}]


@pytest.mark.parametrize(
    ("answer", "cut_after", "statuses"),
    [
        ("<|channel>thought\nHm.<channel|>Well, well, well.<turn|>", "well", ["completed", "incomplete"]),
        ("<|channel>thought\nHm, let me see.<channel|>Well.<turn|>", "let", ["incomplete"]),
        ("<|channel>thought\nHm.<channel|>Well.<turn|>", "<turn|>", ["completed", "completed"]),
        ('Well.<|tool_call>call:f{a:<|"|>long text<|"|>}<tool_call|><turn|>', "long", ["completed", "incomplete"]),
    ],
    ids=["text", "thought", "nothing", "call"],
)
def test_the_item_that_was_cut_is_incomplete(
    scripted: Callable[..., Running], encode: Callable[[str], list[int]], answer: str, cut_after: str, statuses: list[str]
) -> None:
    num_tokens = len(encode(answer[: answer.index(cut_after) + len(cut_after)]))
    body = {"input": "Hello", "max_output_tokens": num_tokens, "tools": TOOLS}
    with scripted(answer) as server:
        whole = server.http.post("/v1/responses", json=body).json()
        stream = server.http.post("/v1/responses", json={**body, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in whole["output"]] == statuses
    assert [item["status"] for item in done] == [item["status"] for item in events[-1]["response"]["output"]] == statuses
    assert whole["status"] == events[-1]["response"]["status"] == statuses[-1]


def test_streaming_gives_the_same(fake: Running) -> None:
    events = list(fake.openai().responses.create(model="gemma", input=[{"role": "user", "content": "Hello"}], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    whole = events[-1].response  # type: ignore[union-attr]
    assert whole.output_text == ANSWER
    assert whole.id == events[0].response.id  # type: ignore[union-attr]


def test_thoughts_tools_and_a_second_turn(scripted: Callable[..., Running]) -> None:
    first = f"<|channel>thought\nWhich city?<channel|>Let me see.{CALL}{CALL}<|tool_response>"
    with scripted(first, "Sun.<channel|>It is sunny.<turn|>") as server:
        for stream in (False, True):
            check_two_turns(server, stream)


def check_two_turns(server: Running, stream: bool) -> None:
    def ask(items: Any) -> Any:
        client = server.openai()
        fields: Any = {"model": "gemma", "input": items, "tools": [TOOL], "reasoning": {"effort": "low"}}
        if not stream:
            return client.responses.create(**fields)
        with client.responses.stream(**fields) as events:
            return events.get_final_response()

    # With thinking on, the turn after a tool result starts inside a thought, so the second answer closes it.
    talk: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    answer = ask(talk)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[0].content[0].text == "Which city?"
    calls = answer.output[2:]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris", "days": 3}] * 2
    talk += [item.model_dump(exclude_none=True) for item in answer.output]
    talk += [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
    assert ask(talk).output_text == "It is sunny."


def test_a_schema_and_a_required_tool_are_enforced(tiny: Running) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "stone", "schema": SCHEMA, "strict": True}}
    # Room for the longest document, with white space wherever it is allowed. There is no seed in this API.
    answer = tiny.openai().responses.create(model="gemma", input="Hello", max_output_tokens=1800, text=form)
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    tool: Any = {**TOOL, "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}}
    fields: Any = {"model": "gemma", "input": "Hello", "max_output_tokens": 300, "tools": [tool], "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        (call,) = tiny.openai().responses.create(tool_choice=choice, **fields).output
        assert isinstance(json.loads(call.arguments)["days"], int)


def test_text_after_a_call_belongs_to_its_message() -> None:
    """A stream has its items in the order of the answer, and clients send them back."""
    call = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    result = {"type": "function_call_output", "call_id": "a", "output": "sun"}
    for items in ([call, said, result], [said, call, result]):
        body = convert({"model": "gemma", "input": [{"role": "user", "content": "Weather?"}, *items]}, ResponsesRequest)
        _, spoken, told = messages_of(body, 100)
        assert (spoken["content"], len(spoken["tool_calls"]), told["role"]) == ("I look.", 1, "tool")


def test_thoughts_belong_to_their_answers() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"}
    asked = {"role": "user", "content": "Weather?"}

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    def thoughts_of(*items: dict[str, Any]) -> list[str | None]:
        body = convert({"model": "gemma", "input": [asked, *items]}, ResponsesRequest)
        return [message.get("reasoning_content") for message in messages_of(body, 100) if message["role"] == "assistant"]

    assert thoughts_of(thought("old"), asked, call) == [None], "a thought that was cut has no answer"
    assert thoughts_of(thought("a"), thought("b"), call) == ["a\nb"]
    assert thoughts_of(thought("a"), call, thought("b"), {**call, "call_id": "b"}) == ["a\nb"]


def test_a_streamed_answer_can_be_sent_back(tiny: Running) -> None:
    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    call = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "sun"}
    items = [{"role": "user", "content": "Weather?"}, said("I look."), call, said("One moment."), result]
    response = tiny.http.post("/v1/responses", json={"model": "gemma", "input": items, "max_output_tokens": 4})
    assert response.status_code == 200, response.text


def test_stored_state_is_refused(fake: Running) -> None:
    client = fake.openai()
    bad: list[dict[str, Any]] = [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://example.com/a.png"}]}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}, "strict": True}}},
    ]
    for fields in bad:
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**{"model": "gemma", "input": "Hello", **fields})
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="Hello")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    fake.check_well()
