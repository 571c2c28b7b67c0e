"""Ollama's API through the official `ollama` client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import ollama
import pytest

from culet import __version__
from culet.serve.api.ollama.protocol import OllamaChatRequest, read_thinking
from tests.serve.conftest import ANSWER
from tests.serve.running import Running
from tests.serve.test_structured_requests import SCHEMA

HELLO: Any = [{"role": "user", "content": "Hello"}]
CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'


def get_weather(city: str, days: int) -> str:
    """Get the weather.

    Args:
        city: The city
        days: The number of days
    """
    return f"sunny in {city} for {days} days"


def client(server: Running) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"authorization": f"Bearer {server.key}"})


@pytest.fixture(scope="module")
def agent(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server that thinks and calls a tool twice, then answers, and so on. It needs a key."""
    first = f"<|channel>thought\nWhich city?<channel|>Let me see.{CALL}{CALL}<|tool_response>"
    with scripted(first, "Sun.<channel|>It is sunny.<turn|>", settings={"api_key": "secret"}) as server:
        yield server


def test_chat(fake: Running) -> None:
    answer = client(fake).chat("gemma", HELLO)
    assert (answer.model, answer.message.role, answer.message.content) == ("gemma", "assistant", ANSWER)
    assert (answer.done, answer.done_reason, answer.message.thinking) == (True, "stop", None)
    assert answer.prompt_eval_count > 0
    assert answer.eval_count > 5
    for duration in (answer.total_duration, answer.prompt_eval_duration, answer.eval_duration):
        assert 0 < duration < 300e9
    assert answer.total_duration >= answer.eval_duration
    cut = client(fake).chat("gemma:latest", HELLO, options={"num_predict": 2})
    assert (cut.done_reason, cut.eval_count) == ("length", 2)
    assert client(fake).chat("gemma", HELLO, options={"num_predict": -1, "num_ctx": 4096}).message.content == ANSWER


def test_streaming_gives_the_same(fake: Running) -> None:
    parts = list(client(fake).chat("gemma", HELLO, stream=True))
    assert "".join(part.message.content for part in parts) == ANSWER
    assert len(parts) > 5
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == client(fake).chat("gemma", HELLO).eval_count
    texts = list(client(fake).generate("gemma", "Hello", stream=True))
    assert "".join(part.response for part in texts) == ANSWER
    assert (texts[-1].done, texts[-1].done_reason) == (True, "stop")


def test_streaming_is_the_default(fake: Running) -> None:
    answer = fake.http.post("/api/chat", json={"model": "gemma", "messages": HELLO})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == ANSWER


def test_generate(fake: Running) -> None:
    assert client(fake).generate("gemma", "Hello", system="Be brief.").response == ANSWER
    raw = client(fake).generate("gemma", "Hello", raw=True)
    assert raw.response == ANSWER
    assert raw.prompt_eval_count < client(fake).generate("gemma", "Hello").prompt_eval_count
    with pytest.raises(ollama.ResponseError, match="system: cannot be combined with raw"):
        client(fake).generate("gemma", "Hello", raw=True, system="Be brief.")


def test_a_request_without_a_prompt_loads_the_model(fake: Running) -> None:
    assert client(fake).generate("gemma", keep_alive=-1).done_reason == "load"
    assert client(fake).chat("gemma").done_reason == "load"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_tools_and_results(agent: Running, stream: bool) -> None:
    def ask(messages: Any) -> ollama.Message:
        answer = client(agent).chat("gemma", messages, tools=[get_weather], think=True, stream=stream)
        if not stream:
            return answer.message
        whole = ollama.Message(role="assistant", content="", thinking="", tool_calls=[])
        for part in answer:
            whole.content += part.message.content
            whole.thinking += part.message.thinking or ""
            whole.tool_calls += part.message.tool_calls or []
        return whole

    first = ask(HELLO)
    assert (first.content, first.thinking) == ("Let me see.", "Which city?")
    assert [dict(call.function.arguments) for call in first.tool_calls] == [{"city": "Paris", "days": 3}] * 2
    results = [
        {"role": "tool", "tool_name": call.function.name, "content": get_weather(**call.function.arguments)}
        for call in first.tool_calls
    ]
    assert ask([*HELLO, first, *results]).content == "It is sunny."


def test_without_tools_a_call_is_text(agent: Running) -> None:
    answers = [client(agent).generate("gemma", "Hello", think=True) for _ in range(2)]
    (answer,) = [answer for answer in answers if answer.thinking == "Which city?"]
    assert (answer.response, answer.done_reason) == (f"Let me see.{CALL}{CALL}", "stop")


def test_results_reach_the_prompt(tiny: Running) -> None:
    """A result with and without the tool's name gives the same prompt."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    counts = set()
    for name in ({"tool_name": "get_weather"}, {}):
        result = {"role": "tool", "content": "sunny", **name}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, result]
        counts.add(client(tiny).chat("gemma", messages, options={"num_predict": 1}).prompt_eval_count)
    assert len(counts) == 1


def test_formats(tiny: Running) -> None:
    options = {"temperature": 1, "seed": 7, "num_predict": 40, "stop": ["\n\n"]}
    answer = client(tiny).chat("gemma", HELLO, format=SCHEMA, options=options)
    if answer.done_reason == "stop":
        jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    assert answer.message.content.startswith("{")
    assert client(tiny).generate("gemma", "Hello", format="json", options=options).response.startswith("{")
    assert client(tiny).generate("gemma", "Hello", format="json", raw=True, options=options).response.startswith("{")
    refused = tiny.http.post("/api/chat", json={"model": "gemma", "messages": HELLO, "format": "xml"})
    assert (refused.status_code, refused.json()["error"]) == (400, 'format: expected "json" or a JSON schema')


def test_forms_that_format_cannot_say(tiny: Running) -> None:
    for fields in ({"guided_choice": ["red", "blue"]}, {"structured_outputs": {"regex": "red|blue"}}):
        for path, asked in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "Hello", "raw": True})):
            body = {"model": "gemma", "stream": False, "options": {"seed": 7}, **asked, **fields}
            answer = tiny.http.post(path, json=body).json()
            assert (answer["response"] if "response" in answer else answer["message"]["content"]) in ("red", "blue")
    both = {"model": "gemma", "messages": HELLO, "format": "json", "regex": "a"}
    assert "cannot be combined with" in tiny.http.post("/api/chat", json=both).json()["error"]


def test_one_call_at_a_time(agent: Running) -> None:
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    body = {"model": "gemma", "messages": HELLO, "tools": [{"type": "function", "function": function}], "stream": False}
    body |= {"think": True, "constrain_tool_calls": False, "unmarked_tool_calls": False, "parallel_tool_calls": False}
    for _ in range(2):  # every other answer of this server has calls
        if calls := agent.http.post("/api/chat", json=body).json()["message"].get("tool_calls"):
            assert len(calls) == 1
            return
    pytest.fail("no calls")


def test_options_reach_the_sampler(tiny: Running) -> None:
    def ask(**options: Any) -> str:
        answer = client(tiny).chat("gemma", HELLO, options={"num_predict": 12, **options})
        return str(answer.message.content)

    assert ask(temperature=0) == ask(top_k=1) == ask(min_p=1.0) == ask(temperature=0, seed=-1)
    assert ask(temperature=5, seed=3) == ask(temperature=5, seed=3)
    assert ask(temperature=5, seed=3) != ask(temperature=5, seed=4)
    assert ask(temperature=0, repeat_penalty=50) != ask(temperature=0)
    assert ask(temperature=0, repeat_penalty=50, repeat_last_n=0) == ask(temperature=0)
    assert ask(temperature=0, repeat_penalty=1.0, repeat_last_n=64, stop="") == ask(temperature=0)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n"),
        ({"options": {"num_predict": "many"}}, "options.num_predict"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": [{"role": "user", "content": "What is this?", "images": ["aGVsbG8="]}]}, "messages[0].images[0]"),
        ({"path": "/api/generate", "images": ["aGVsbG8="]}, "images[0]"),
        ({"path": "/api/generate", "suffix": "end"}, "suffix"),
        ({"path": "/api/generate", "template": "{{ .Prompt }}"}, "template"),
        ({"path": "/api/generate", "context": [1, 2]}, "context"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused(fake: Running, fields: dict[str, Any], name: str) -> None:
    path = fields.get("path", "/api/chat")
    asked: dict[str, Any] = {"messages": HELLO} if path == "/api/chat" else {"prompt": "Hello"}
    body = {"model": "gemma", **asked, **fields}
    answer = fake.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].startswith(f"{name}:")
    neutral = {"options": {"mirostat": 0, "tfs_z": 1.0, "repeat_last_n": 64}, "logprobs": False, "suffix": "", "context": []}
    assert fake.http.post(path, json={**body, "images": [], **asked, "template": "", **neutral}).status_code == 200


def test_models(fake: Running) -> None:
    (model,) = client(fake).list().models
    assert (model.model, model.details.family, len(model.digest)) == ("gemma", "gemma4", 64)
    assert model.size > 0
    shown = client(fake).show("gemma")
    assert shown.modelinfo["gemma4.context_length"] == 32768
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}  # no vision
    older = fake.http.post("/api/show", json={"name": "gemma"}).json()
    assert older["model_info"] == fake.http.post("/api/show", json={"model": "gemma"}).json()["model_info"]
    assert fake.http.post("/api/show", json={}).json() == {"error": "model: expected the name of a model"}
    (running,) = client(fake).ps().models
    assert (running.model, running.context_length) == ("gemma", 32768)
    assert fake.http.get("/api/version").json()["culet"] == __version__


def test_requests_of_the_go_client_and_of_curl(fake: Running, agent: Running) -> None:
    for path in ("/", "/api/tags", "/api/version"):
        answer = fake.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert agent.http.head("/api/tags", headers={"authorization": ""}).status_code == 401, "as for GET"
    form = {"content-type": "application/x-www-form-urlencoded"}
    for more, status in (
        (form, 200),
        ({}, 200),
        ({**form, "origin": "https://evil.example"}, 415),
        ({**form, "origin": "null"}, 415),
        ({**form, "sec-fetch-site": "cross-site"}, 415),
    ):
        answer = fake.http.post("/api/show", content=b'{"model": "gemma"}', headers=more)
        assert answer.status_code == status, more


def test_errors(fake: Running, agent: Running) -> None:
    with pytest.raises(ollama.ResponseError, match="the model 'llama' is not served") as error:
        client(fake).chat("llama", HELLO)
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="is not served"):
        list(client(fake).chat("llama", HELLO, stream=True))
    with pytest.raises(ollama.ResponseError, match="/api/pull: not supported"):
        client(fake).pull("gemma")
    with pytest.raises(ollama.ResponseError, match="/api/embed: not supported"):
        client(fake).embed("gemma", "Hello")
    with pytest.raises(ollama.ResponseError, match="/api/delete: not supported"):
        client(fake).delete("gemma")
    with pytest.raises(ollama.ResponseError, match="the API key is missing") as error:
        ollama.Client(host=agent.url).chat("gemma", HELLO)
    assert error.value.status_code == 401


def test_a_client_that_leaves_ends_its_request(scripted: Callable[..., Running]) -> None:
    with scripted("word ", step_s=0.01) as server:
        stream = client(server).chat("gemma", HELLO, stream=True)
        assert next(stream).message.content
        stream.close()
        server.check_well()
        finished = server.http.get("/metrics").text
        assert 'vllm:request_success_total{finished_reason="abort",model_name="gemma"} 1.0' in finished


def test_a_level_of_thinking_is_a_budget() -> None:
    service: Any = SimpleNamespace(settings=SimpleNamespace(thinking_budgets="low=7"))
    for think, expected in ((None, (None, None)), (True, (True, None)), (False, (False, None)), ("low", (True, 7))):
        assert read_thinking(service, OllamaChatRequest(model="gemma", think=think)) == expected  # type: ignore[arg-type]
