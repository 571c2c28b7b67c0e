"""A client that has sent its request and shut down its side still gets its answer. One that has left costs nothing more."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.serve.hardening.raw_http import HEALTH, chat_bytes, connect, read_all
from tests.serve.running import Running, wait_for

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def server(scripted: Callable[..., Running]) -> Iterator[Running]:
    """A server whose answers take longer than the first question whether a half-closed client still reads."""
    with scripted(step_s=0.02, config={"max_num_seqs": 1}) as running:
        yield running


def half_closed(server: Running, request: bytes) -> bytes:
    with connect(server) as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        return read_all(sock)


def final(answer: bytes) -> bytes:
    """Remove interim responses, which every HTTP/1.1 client must accept."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    while answer.startswith(interim):
        answer = answer.removeprefix(interim)
    return answer


def test_a_short_answer(server: Running) -> None:
    assert final(half_closed(server, HEALTH)).startswith(b"HTTP/1.1 200 ")
    assert half_closed(server, HEALTH * 3).count(b"HTTP/1.1 200") == 3


def test_a_long_answer(server: Running) -> None:
    answer = half_closed(server, chat_bytes(max_tokens=NUM_TOKENS, ignore_eos=True))
    assert answer.count(b"100 Continue") <= 3
    assert final(answer).startswith(b"HTTP/1.1 200 ")
    assert b'"completion_tokens":%d' % NUM_TOKENS in answer


def test_a_stream(server: Running) -> None:
    answer = half_closed(server, chat_bytes(max_tokens=NUM_TOKENS, ignore_eos=True, stream=True))
    assert final(answer).startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first_shut_down", [True, False])
def test_a_client_that_left(server: Running, stream: bool, first_shut_down: bool) -> None:
    """Its request is cancelled, whether it runs or waits, although a close looks like a half-close at first."""
    sockets = []
    for number in range(2):
        sock = connect(server)
        sock.sendall(chat_bytes(max_tokens=30_000, ignore_eos=True, stream=stream))
        sockets.append(sock)
        wait_for(lambda wanted=number + 1: server.stats()["requests"]["in_flight"] == wanted, what="the request")
    for sock in sockets:
        if first_shut_down:
            sock.shutdown(socket.SHUT_WR)
        sock.close()
    wait_for(lambda: not server.stats()["requests"]["in_flight"], 2, "the requests to be cancelled")
    server.check_well()
