"""No part of a request escapes a bound: heads, trailers, chunk extensions, pipelines, and what follows a refusal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.serve.hardening.raw_http import (
    CHUNKED,
    HEAD,
    HEALTH,
    MEGABYTE,
    chat_bytes,
    connect,
    error_of,
    exchange,
    metric,
    read_all,
    status_of,
    web_memory_bytes,
)
from tests.serve.running import Running, wait_for

CHUNK = b"2\r\n{}\r\n"


@pytest.fixture(scope="module")
def server(scripted: Callable[..., Running]) -> Iterator[Running]:
    with scripted(step_s=0.02, is_fresh=True) as running:
        yield running


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNK + b"0\r\n"] + [b"a: b\r\n" * 10_000] * 200,
        [CHUNK + b"0\r\na: "] + [b"x" * 65536] * 200,
        [b"2;"] + [b"x" * 65536] * 200,
        [CHUNK] + [b"2;%s\r\n{}\r\n" % (b"x" * 60_000)] * 200,
        [b"1\r\n \r\n" * 10_000] * 200,
        [b"0" * 65536] * 200,
    ],
    ids=["trailers", "one_trailer", "one_extension", "extensions", "tiny_chunks", "long_size"],
)
def test_framing_is_bounded(server: Running, pieces: list[bytes]) -> None:
    """12 MB that are not body are refused early, with a reply that the client can read, and cost no memory."""
    before, refused = web_memory_bytes(server), metric(server, "culet:http_refusals_total")
    answer = exchange(server, CHUNKED, *pieces)
    assert status_of(answer) == 400
    assert error_of(answer)["code"] in ("framing_too_large", "invalid_http")
    assert web_memory_bytes(server) - before < 8 * MEGABYTE
    assert metric(server, "culet:http_refusals_total") == refused + 1


def test_ordinary_chunks_are_accepted(server: Running) -> None:
    """Chunks of a few bytes, extensions and trailers are fine, in moderation."""
    body = chat_bytes(max_tokens=2).partition(b"\r\n\r\n")[2]
    for size in (1, 5, 1000):
        chunks = b"".join(
            b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (body[at : at + size] for at in range(0, len(body), size))
        )
        request = CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + chunks + b"0\r\nx-sum: 1\r\n\r\n"
        assert status_of(exchange(server, request)) == 200


def test_a_head_in_one_write(server: Running) -> None:
    def head(num_bytes: int) -> bytes:
        start = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: "
        return start + b"y" * (num_bytes - len(start) - 4) + b"\r\n\r\n"

    assert status_of(exchange(server, head(64 << 10))) == 200
    for num_bytes in ((64 << 10) + 1, 100_000, 1_000_000):
        answer = exchange(server, head(num_bytes))
        assert status_of(answer) == 431
        assert error_of(answer)["code"] == "head_too_large"


def test_many_header_fields(server: Running) -> None:
    fields = b"".join(b"x%d: 1\r\n" % number for number in range(300))
    assert status_of(exchange(server, HEALTH[:-2] + fields + b"\r\n")) == 431


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 200),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_exactly_one_host(server: Running, head: bytes, status: int) -> None:
    assert status_of(exchange(server, head)) == status


def test_nothing_is_parsed_after_a_refusal(server: Running) -> None:
    """What follows a refused head is dropped, even if it looks like a request. The client reads one reply."""
    answer = exchange(server, b"GET / HTTP/1.1\r\n\r\n" + HEALTH * 1000)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status_of(answer) == 400


def test_the_linger_is_bounded(server: Running) -> None:
    """After a refusal, the server reads on for a while so that the client sees the reply. Then it closes the connection."""
    with connect(server) as sock:
        sock.sendall(HEAD.replace(b"json", b"text") + b"content-length: 1000000000\r\n\r\n")
        assert status_of(read_all(sock)) == 415

        def is_closed() -> bool:
            try:
                sock.sendall(b"x")
            except ConnectionError:
                return True
            return False

        wait_for(is_closed, 10, "the connection to be closed")
    with connect(server) as sock:
        sock.sendall(HEAD.replace(b"json", b"text") + b"content-length: 1000000000\r\n\r\n")
        with pytest.raises(ConnectionError):
            sock.sendall(bytes(200 * MEGABYTE))


def test_an_unwanted_body_ends_the_connection(server: Running) -> None:
    """A GET request is answered without reading its body, which might never end."""
    answer = exchange(server, HEALTH[:-2] + b"content-length: 1000000\r\n\r\n" + b"x" * 1000)
    assert status_of(answer) == 200


def test_pipelines_are_bounded(server: Running) -> None:
    """A few requests may wait on one connection. The rest is dropped and the connection closes, so the client can retry."""
    assert 1 <= exchange(server, HEALTH * 2000).count(b"HTTP/1.1 200") <= 20
    few = HEALTH * 4 + HEALTH[:-2] + b"connection: close\r\n\r\n"
    assert exchange(server, few).count(b"HTTP/1.1 200") == 5


def test_one_body_waits(server: Running) -> None:
    """A request with a body may arrive before the previous response has ended, but nothing after it is read."""
    answer = exchange(server, chat_bytes(max_tokens=4, ignore_eos=True) + chat_bytes(max_tokens=2) * 5)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert b"connection: close" in answer.rpartition(b"HTTP/1.1 200")[2]


def test_a_body_that_waits_is_bounded(server: Running) -> None:
    """It is not read far while the previous response goes on."""
    before = web_memory_bytes(server)
    sockets = [connect(server) for _ in range(20)]
    for sock in sockets:
        sock.sendall(chat_bytes(stream=True, max_tokens=2000, ignore_eos=True))
        sock.settimeout(1)
        with contextlib.suppress(OSError):
            sock.sendall(HEAD + b"content-length: 12000000\r\n\r\n" + bytes(11 * MEGABYTE))
    assert web_memory_bytes(server) - before < 100 * MEGABYTE
    for sock in sockets:
        sock.close()
    wait_for(lambda: not server.stats()["requests"]["in_flight"], 10, "the requests to be cancelled")


def test_garbage_does_not_break_a_running_response(server: Running) -> None:
    request = chat_bytes(stream=True, max_tokens=20, ignore_eos=True)
    answer = exchange(server, request, b"\x00\x01 not HTTP\r\n\r\n" * 100)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_pipeline_hides_no_disconnect(server: Running) -> None:
    """The running request is cancelled when its client leaves, also if another request waits behind it."""
    sock = connect(server)
    sock.sendall(chat_bytes(stream=True, max_tokens=20_000, ignore_eos=True) + HEALTH)
    wait_for(lambda: server.stats()["requests"]["in_flight"], what="the request")
    sock.close()
    wait_for(lambda: not server.stats()["requests"]["in_flight"], 5, "the request to be cancelled")
