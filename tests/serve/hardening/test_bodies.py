"""All bodies share one budget, costly JSON is refused before it is decoded, and a lost sender is not an error."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serve.hardening.raw_http import (
    HEAD,
    MEGABYTE,
    connect,
    error_of,
    metric,
    read_all,
    status_of,
    web_memory_bytes,
)
from tests.serve.running import Running, wait_for

HELLO: Any = [{"role": "user", "content": "Hello"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(scripted: Callable[..., Running]) -> Iterator[Running]:
    with scripted(settings={"limits": "body_mb=8,bodies_mb=16,body_s=600"}, is_fresh=True) as running:
        yield running


def half_sent(server: Running, num_bytes: int) -> socket.socket:
    """Begin a request and send that much of its body."""
    sock = connect(server)
    sock.sendall(HEAD + b"content-length: %d\r\n\r\n" % (8 * MEGABYTE) + b'{"messages":"' + b"x" * num_bytes)
    return sock


def test_one_budget_for_all_bodies(server: Running) -> None:
    """Half-sent bodies take 16 MB together, not 140. Those that do not fit get a 503, and others are served."""
    before = web_memory_bytes(server)
    sockets = [half_sent(server, 7 * MEGABYTE) for _ in range(20)]
    wait_for(lambda: metric(server, "culet:http_refusals_total") >= 18, what="refusals")
    assert metric(server, "culet:http_body_bytes") <= 16 * MEGABYTE
    assert web_memory_bytes(server) - before < 60 * MEGABYTE
    assert server.chat().status_code == 200
    long_text = [{"role": "user", "content": "x" * (3 * MEGABYTE)}]
    assert server.chat(messages=long_text).status_code == 400, "it is read, and found to be too long for the context"
    answers = []
    for sock in sockets:
        sock.settimeout(0.2)
        try:
            if answer := sock.recv(65536):
                answers.append(answer)
        except TimeoutError:
            pass
        sock.close()
    assert len(answers) >= 18
    for answer in answers:
        assert status_of(answer) == 503
        assert b"retry-after: " in answer
        assert error_of(answer)["code"] == "bodies_full"
    wait_for(lambda: metric(server, "culet:http_body_bytes") == 0, what="the budget to be free")


def test_the_budget_is_given_back(server: Running) -> None:
    """Every way a request can end gives its bytes back."""
    large = json.dumps({"messages": HELLO, "max_tokens": 2, "user": "x" * (7 * MEGABYTE)}).encode()
    for _ in range(4):
        for stream in (b"false", b"true"):
            body = large[:-1] + b',"stream":' + stream + b"}"
            assert server.http.post("/v1/chat/completions", content=body, headers=JSON).status_code == 200
        assert server.http.post("/v1/chat/completions", content=large[:-1], headers=JSON).status_code == 400
        assert server.http.post("/nope", content=large, headers=JSON).status_code == 404
        assert server.http.post("/v1/messages", content=large + b"x" * 2 * MEGABYTE, headers=JSON).status_code == 413
        half_sent(server, 6 * MEGABYTE).close()
        assert server.http.request("GET", "/health", content=b"x" * 100_000).status_code == 200
    wait_for(lambda: metric(server, "culet:http_body_bytes") == 0, what="the budget to be free")


def bodies_with_many_values() -> dict[str, bytes]:
    messages = b",".join([b'{"role":"user","content":"x"}'] * 150_000)
    properties = b",".join(b'"p%d":{}' % number for number in range(400_000))
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{%s}}}}' % properties
    return {
        "messages": b'{"messages":[%s]}' % messages,
        "bad_messages": b'{"messages":[%s,{"role":"robot"}]}' % messages,
        "properties": b'{"messages":[{"role":"user","content":"x"}],"tools":[%s]}' % tool,
        "unknown_field": b'{"messages":[{"role":"robot","content":"x"}],"zz":[%s]}' % b",".join([b"[]"] * 1_000_000),
    }


@pytest.mark.parametrize("name", bodies_with_many_values())
def test_costly_bodies_are_not_decoded(server: Running, name: str) -> None:
    before = web_memory_bytes(server)
    body = bodies_with_many_values()[name]
    answer = server.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert "more than 300000 values" in answer.json()["error"]["message"]
    assert "json_values" in answer.json()["error"]["message"]
    assert web_memory_bytes(server) - before < 20 * MEGABYTE


def test_long_texts_cost_nothing(server: Running) -> None:
    """Brackets and commas in a text are not values."""
    text = '{"a": [1, 2, 3], "b\\\\": "\\""},' * 100_000
    answer = server.chat(messages=[{"role": "user", "content": text}])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "messages", [[{"role": "x" * MEGABYTE, "content": "x"}], [{"role": "user", "content": "x"}, "y" * MEGABYTE]]
)
def test_errors_are_short(server: Running, messages: list[Any]) -> None:
    answer = server.chat(messages=messages)
    assert answer.status_code == 400
    assert len(answer.content) < 3000


def test_a_disconnect_within_a_body_is_not_an_error(server: Running) -> None:
    for num_bytes in (0, 10, 3 * MEGABYTE):
        half_sent(server, num_bytes).close()
    with half_sent(server, 1000) as sock:
        sock.shutdown(socket.SHUT_WR)
        read_all(sock)
    wait_for(lambda: server.log().count(" 499 in ") >= 4, what="four lines in the log")
    assert "Traceback" not in server.log()
    assert "ERROR" not in server.log()
    assert " 500 in " not in server.log()
