"""Bodies that make a server expand schemas, repeat prompts or compile grammars: other clients do not notice them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.serve.hardening.attacks import HEALTH_LIMIT_S, SLOW_MACHINE, Report, check, measure
from tests.serve.running import Running

HELLO: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
KNOWN: Any = {**HELLO, "structured_outputs": {"regex": "[a-z]+"}}
WORDS = "".join(chr(ord("a") + (index * 7) % 26) for index in range(6000))


@pytest.fixture(scope="module")
def server(scripted: Callable[..., Running]) -> Iterator[Running]:
    with scripted(is_fresh=True) as server:
        server.http.post("/v1/chat/completions", json=KNOWN).raise_for_status()
        yield server


@pytest.fixture(scope="module")
def unloaded(server: Running) -> Report:
    return measure(server, KNOWN)


def post(path: str, body: Any) -> Callable[[httpx.Client, int], int]:
    data = json.dumps(body)

    def send(client: httpx.Client, number: int) -> int:
        return client.post(path, content=data, headers={"content-type": "application/json"}).status_code

    return send


def aliases() -> dict[str, Any]:
    """A body of 0.2 MB whose tool refers to one large schema in thousands of ways."""
    large = {"enum": [f"value {index}" for index in range(6000)]}
    properties = {f"k{index:04}": {"$ref": f"#{index}/$defs/large"} for index in range(2000)}
    parameters = {"type": "object", "properties": properties, "required": list(properties), "$defs": {"large": large}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {**HELLO, "tools": [tool], "tool_choice": "required"}


def test_schemas_that_multiply(server: Running, unloaded: Report) -> None:
    report = measure(server, KNOWN, post("/v1/chat/completions", aliases()))
    check(unloaded, report)
    assert report.statuses.keys() <= {400, 429}
    assert report.statuses[400]


def test_an_answer_a_thousand_times_as_long_as_the_request(server: Running, unloaded: Report) -> None:
    body = {"prompt": [WORDS[:5800]] * 24, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1}
    report = measure(server, KNOWN, post("/v1/completions", body))
    check(unloaded, report)
    assert report.statuses.keys() == {400}
    message = server.http.post("/v1/completions", json=body).json()["error"]["message"]
    assert "answer could have" in message
    assert "answer_mb" in message


@pytest.mark.parametrize("stream", [False, True])
def test_answers_just_below_the_limit(server: Running, unloaded: Report, stream: bool) -> None:
    """Long answers are built and sent without blocking anyone."""
    body = {"prompt": [WORDS[:1200]] * 24, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": stream}
    report = measure(server, HELLO, post("/v1/completions", body))
    assert report.health_p99_s <= max(HEALTH_LIMIT_S, SLOW_MACHINE * unloaded.health_p99_s), report
    assert report.peak_bytes < 300 << 20, report
    assert report.statuses.keys() <= {200, 429}
    assert report.statuses[200]


def test_many_token_ids(server: Running, unloaded: Report) -> None:
    few, many = [5] * (1 << 18), [5] * (1 << 21)
    report = measure(server, KNOWN, post("/detokenize", {"tokens": few}), num_senders=2)
    check(unloaded, report)
    assert report.statuses.keys() == {200}
    assert server.http.post("/detokenize", json={"tokens": many}).status_code == 400


def test_forty_grammars_that_never_compile(server: Running, unloaded: Report) -> None:
    """A known grammar does not wait for them, and each of them gets an answer when its time is over."""

    def send(client: httpx.Client, number: int) -> int:
        schema = {
            "title": str(number),
            "allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)],
        }
        body = {**HELLO, "structured_outputs": {"json": schema}}
        return client.post("/v1/chat/completions", json=body).status_code

    report = measure(server, KNOWN, send, num_senders=40)
    check(unloaded, report)
    assert report.statuses.keys() <= {400, 429}
