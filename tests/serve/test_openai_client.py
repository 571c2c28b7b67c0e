"""The official `openai` client against a running server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.serve.conftest import ANSWER
from tests.serve.running import Running

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'


def test_chat(fake: Running) -> None:
    answer = fake.openai().chat.completions.create(model="gemma", messages=HELLO)
    choice = answer.choices[0]
    assert (answer.object, answer.model) == ("chat.completion", "gemma")
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert choice.message.tool_calls is None
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens > 5


def test_streaming_gives_the_same(fake: Running) -> None:
    client = fake.openai()
    options: Any = {"stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="gemma", messages=HELLO, stream=True, n=2, **options))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == ANSWER
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
    whole = client.chat.completions.create(model="gemma", messages=HELLO, n=2)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_one_chunk_per_token(fake: Running, encode: Callable[[str], list[int]]) -> None:
    stream = fake.openai().chat.completions.create(model="gemma", messages=HELLO, stream=True)
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
    assert len(pieces) == len(encode(ANSWER))


def test_thoughts_and_tools_and_a_second_turn(scripted: Callable[..., Running]) -> None:
    """Thoughts are separated, two calls arrive together, their results are sent back, and the answer follows."""
    first = f"<|channel>thought\nParis, then.\n<channel|>{CALL}{CALL}<|tool_response>"
    second = "It rains.<turn|>"
    with scripted(first, second, first, second) as server:
        client = server.openai()
        whole = client.chat.completions.create(model="gemma", messages=HELLO, tools=[WEATHER])
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == "Paris, then."
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens
        calls: Any = message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris", "days": 3}] * 2
        assert len({call.id for call in calls}) == 2
        results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        history: Any = [*HELLO, message.model_dump(exclude_none=True), *results]
        final = client.chat.completions.create(model="gemma", messages=history, tools=[WEATHER])
        assert final.choices[0].message.content == "It rains."

        # The model sees its calls and their results within one turn.
        rendered = server.http.post("/tokenize", json={"messages": history, "tools": [WEATHER]}).json()["tokens"]
        prompt = server.http.post("/detokenize", json={"tokens": rendered}).json()["prompt"]
        assert prompt.count("<|turn>model") == 1
        assert prompt.count('<|tool_response>response:get_weather{value:<|"|>rain<|"|>}<tool_response|>') == 2

        # The same exchange, streamed.
        reasoning, names, arguments = "", {}, {}
        for chunk in client.chat.completions.create(model="gemma", messages=HELLO, tools=[WEATHER], stream=True):
            delta = chunk.choices[0].delta
            reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
            for call in delta.tool_calls or []:
                assert call.function is not None
                names.setdefault(call.index, (call.id, call.function.name))
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
        assert reasoning == "Paris, then."
        assert [name for _, name in names.values()] == ["get_weather"] * 2
        assert [json.loads(text) for text in arguments.values()] == [{"city": "Paris", "days": 3}] * 2
        assert chunk.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice(scripted: Callable[..., Running], stream: bool) -> None:
    """Check what clients see for each tool_choice. Tests with a model check that it is enforced."""
    calls = f"{CALL}{CALL}<|tool_response>"
    with scripted(calls, calls, "Hello.<turn|>", calls) as server:

        def ask(**fields: Any) -> tuple[str, list[tuple[str, str]], str]:
            client = server.openai()
            fields = {"model": "gemma", "messages": HELLO, "tools": [WEATHER], **fields}
            if not stream:
                choice = client.chat.completions.create(**fields).choices[0]
                calls: Any = choice.message.tool_calls or []
                return (
                    choice.message.content or "",
                    [(c.function.name, c.function.arguments) for c in calls],
                    choice.finish_reason,
                )
            content, calls, reason = "", {}, ""
            for chunk in client.chat.completions.create(stream=True, **fields):
                delta = chunk.choices[0].delta
                content += delta.content or ""
                for call in delta.tool_calls or []:
                    name, text = calls.get(call.index, ("", ""))
                    calls[call.index] = (name or call.function.name, text + (call.function.arguments or ""))
                reason = chunk.choices[0].finish_reason or reason
            return content, list(calls.values()), reason

        paris = ("get_weather", '{"city":"Paris","days":3}')
        named = {"type": "function", "function": {"name": "get_weather"}}
        assert ask(tool_choice=named) == ("", [paris, paris], "tool_calls")
        assert ask(tool_choice="required") == ("", [paris, paris], "tool_calls")
        assert ask(tool_choice="none") == ("Hello.", [], "stop")
        assert ask(parallel_tool_calls=False) == ("", [paris], "tool_calls")
        for choice, tools in (("required", []), ({"type": "function", "function": {"name": "other"}}, [WEATHER])):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                ask(tool_choice=choice, tools=tools)


def test_stop_strings_and_length(fake: Running) -> None:
    client = fake.openai()
    answer = client.chat.completions.create(model="gemma", messages=HELLO, stop=["point", "nothing"])
    assert answer.choices[0].message.content == "The small facet at the "
    assert answer.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(model="gemma", messages=HELLO, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(tiny: Running, stream: bool) -> None:
    client = tiny.openai()
    options: Any = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    if stream:
        chunks = [c.choices[0] for c in client.chat.completions.create(model="gemma", messages=HELLO, stream=True, **options)]
        entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or []]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
    else:
        choice = client.chat.completions.create(model="gemma", messages=HELLO, **options).choices[0]
        assert choice.logprobs is not None
        entries, text = choice.logprobs.content or [], choice.message.content or ""
    assert "".join(entry.token for entry in entries) == text
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0], "greedy draws the likeliest"
        assert bytes(entry.bytes or []).decode() == entry.token


def test_seeds_and_greedy(tiny: Running) -> None:
    client = tiny.openai()

    def draw(**fields: Any) -> str | None:
        fields = {"model": "gemma", "messages": HELLO, "max_tokens": 12, **fields}
        return client.chat.completions.create(**fields).choices[0].message.content

    assert draw(temperature=0) == draw(temperature=0)
    assert draw(seed=7, temperature=2) == draw(seed=7, temperature=2)
    assert len({draw(seed=seed, temperature=2, extra_body={"top_k": 0, "top_p": 1}) for seed in range(4)}) > 1
    assert draw(seed=-1) == draw(seed=-1)


def test_models_and_errors(fake: Running) -> None:
    client = fake.openai()
    assert [model.id for model in client.models.list()] == ["gemma"]
    assert client.models.retrieve("gemma").id == "gemma"
    with pytest.raises(openai.NotFoundError, match="available models: gemma"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="gemma", messages=HELLO, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="the context holds only 32768") as long:
        client.chat.completions.create(model="gemma", messages=HELLO, max_tokens=40000)
    assert long.value.code == "context_length_exceeded"
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}]
    with pytest.raises(openai.BadRequestError, match="only text"):
        client.chat.completions.create(model="gemma", messages=image)


def test_completions(tiny: Running) -> None:
    """Several prompts, texts and token ids, with echo and log-probabilities of the prompt."""
    client = tiny.openai()
    options: Any = {"model": "gemma", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    text = client.completions.create(prompt="What is the", **options).choices[0]
    ids = tiny.http.post("/tokenize", json={"prompt": "What is the"}).json()["tokens"]
    both = client.completions.create(prompt=[ids, ids[:-1]], **options).choices
    assert [choice.index for choice in both] == [0, 1]
    assert both[0].text == text.text
    for choice, prompt in ((text, ids), (both[0], ids), (both[1], ids[:-1])):
        scores = choice.logprobs
        assert scores is not None
        assert scores.tokens is not None
        assert scores.token_logprobs is not None
        assert scores.top_logprobs is not None
        assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(prompt) + 1
        assert scores.token_logprobs[0] is None
        assert all(value < 0 for value in scores.token_logprobs[1:] if value is not None)
        assert max(scores.top_logprobs[-1].values()) == scores.token_logprobs[-1]
    first, second = both[0].logprobs, both[1].logprobs
    assert first is not None
    assert second is not None
    # A token's log-probability does not depend on what follows, so the longer prompt starts with the shorter one's values.
    assert first.token_logprobs[1:3] == pytest.approx(second.token_logprobs[1:3], abs=1e-4)  # type: ignore[index]
    streamed = "".join(c.choices[0].text for c in client.completions.create(prompt="What is the", stream=True, **options))
    assert streamed == text.text


def test_echo_without_output(tiny: Running) -> None:
    answer = tiny.openai().completions.create(model="gemma", prompt="What is", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "What is"
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.tokens == ["<bos>", "What", " is"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_usage_reports_cached_tokens(tiny: Running) -> None:
    messages: Any = [{"role": "user", "content": "older than the wheel is the stone " * 8}]
    for expected in (False, True):
        answer = tiny.openai().chat.completions.create(model="gemma", messages=messages, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        # Other tests may have left the beginning of a chat.
        assert ((answer.usage.prompt_tokens_details.cached_tokens or 0) > answer.usage.prompt_tokens // 2) is expected


CUTTER = "You cut diamonds. " + "Each stone is held to the wheel until it shines. " * 12
TOOL = {"name": "weigh", "description": "weighs a stone", "parameters": {"type": "object", "properties": {}}}
CHATS: dict[str, tuple[str, dict[str, Any], str]] = {
    "openai": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": CUTTER}], "tools": [{"type": "function", "function": TOOL}]},
        "messages",
    ),
    "responses": ("/v1/responses", {"instructions": CUTTER, "tools": [{"type": "function", **TOOL}], "input": []}, "input"),
    "anthropic": (
        "/v1/messages",
        {"system": CUTTER, "tools": [{"name": "weigh", "input_schema": TOOL["parameters"]}], "messages": []},
        "messages",
    ),
    "ollama": (
        "/api/chat",
        {
            "messages": [{"role": "system", "content": CUTTER}],
            "tools": [{"type": "function", "function": TOOL}],
            "stream": False,
            "options": {"num_predict": 2},
        },
        "messages",
    ),
}


@pytest.mark.parametrize(("first", "second"), [(api, api) for api in CHATS if api != "ollama"] + [("ollama", "openai")])
def test_the_second_chat_reuses_the_system_turn_of_the_first(tiny: Running, first: str, second: str) -> None:
    """Answers of Ollama's API do not say what was found, so what it leaves is found through another."""
    for api, question in ((first, "Why is the sky blue?"), (second, "How old is the wheel?")):
        path, fields, messages = CHATS[api]
        limit = {"responses": {"max_output_tokens": 2}, "ollama": {}}.get(api, {"max_tokens": 2})
        body = {"model": "gemma", **limit, **fields, messages: [*fields[messages], {"role": "user", "content": question}]}
        # Each case has a system message of its own, so that it cannot find what another one has left.
        response = tiny.http.post(path, json=json.loads(json.dumps(body).replace("You cut", f"{first} cuts")))
        assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    assert details.get("cached_tokens", usage.get("cache_read_input_tokens")) > 100
