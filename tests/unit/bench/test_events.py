"""The bench's own client: it finds the events of a stream however the bytes arrive, and says what went wrong otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from culet.bench.serve.client import Client, Load, Prompt
from culet.bench.serve.events import EventClient
from culet.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = b'data: {"a": 1}\n\ndata: {"b": 2}\r\n\r\n: a comment\n\ndata: [DONE]\n\n'
FOUND = [b'{"a": 1}', b'{"b": 2}']


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


STREAMS = {
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS, 1000),
    "small chunks": HEAD + b"transfer-encoding: Chunked\r\n\r\n" + chunked(EVENTS, 3),
    "length": HEAD + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
    "interim reply": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
    "last headers": HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(EVENTS, 20)[:-2] + b"x-sum: 1\r\n\r\n",
}


class Replies:
    """A server that answers each request with the next reply, in pieces of `size` bytes."""

    def __init__(self, replies: Sequence[bytes], size: int = 1 << 20, *, closes: bool = False) -> None:
        self._replies, self._size, self._closes = list(replies), size, closes
        self.requests: list[bytes] = []
        self.num_connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while self._replies:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                reply = self._replies.pop(0)
                for at in range(0, len(reply), self._size):
                    writer.write(reply[at : at + self._size])
                    await writer.drain()
                    if self._size < 100:
                        await asyncio.sleep(0)
                if self._closes:
                    break
        except asyncio.IncompleteReadError:  # the client has gone
            pass
        finally:
            writer.close()


def talk(replies: Replies, use: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        server = await asyncio.start_server(replies, "127.0.0.1", 0)
        async with server:
            await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base")

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_events_are_found_however_the_bytes_arrive(name: str, size: int) -> None:
    replies = Replies([STREAMS[name]] * 2, size)

    async def use(url: str) -> None:
        client = EventClient(url, {"authorization": "Bearer key"}, 60.0)
        for _ in range(2):
            events: list[bytes] = []
            assert await client.post(client.prepare("/v1/x", {"n": 1}), events.append) == (200, b"")
            assert events == FOUND
        client.close()

    talk(replies, use)
    assert replies.num_connections == 1, "a connection is used again"
    assert replies.requests[0].startswith(b"POST /base/v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"authorization: Bearer key\r\n" in replies.requests[0]
    assert replies.requests[0].endswith(b'\r\n\r\n{"n": 1}')


def test_a_body_may_end_with_the_connection() -> None:
    replies = Replies([HEAD + b"\r\n" + EVENTS] * 2, closes=True)

    async def use(url: str) -> None:
        client = EventClient(url, {}, 60.0)
        for _ in range(2):
            events: list[bytes] = []
            assert (await client.post(client.prepare("/", {}), events.append))[0] == 200
            assert events == FOUND
        client.close()

    talk(replies, use)
    assert replies.num_connections == 2


def test_the_body_of_an_error_is_returned() -> None:
    replies = Replies(
        [b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nslow", b"HTTP/1.1 500 \r\nconnection: close\r\n\r\noh"],
        closes=True,
    )

    async def use(url: str) -> None:
        client = EventClient(url, {}, 60.0)
        assert await client.post(client.prepare("/", {}), lambda data: None) == (429, b"slow")
        assert await client.post(client.prepare("/", {}), lambda data: None) == (500, b"oh")
        client.close()

    talk(replies, use)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"hello\r\n\r\n", "not HTTP/1.1"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nmany\r\n", "not HTTP/1.1"),
        (HEAD + b"content-length: 100\r\n\r\ndata: {}\n\n", "closed the connection"),
        (HEAD, "closed the connection"),
    ],
)
def test_a_broken_reply_is_an_error(reply: bytes, words: str) -> None:
    async def use(url: str) -> None:
        client = Client(Load(url, "m", timeout_s=60.0))
        answer = await client.ask(Prompt([1, 2], 2, 4), "m")
        assert words in answer.error
        await client.close()

    talk(Replies([reply], closes=True), use)


def test_events_become_an_answer() -> None:
    body = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 7}}\n\ndata: [DONE]\n\n'
    replies = [
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(part, 9) for part in (body + usage, b"data: {oops\n\n", b"")
    ]

    async def use(url: str) -> None:
        client = Client(Load(url, "m", timeout_s=60.0))
        good, bad, empty = [await client.ask(Prompt([1, 2], 2, 4), "m") for _ in replies]
        assert (good.error, good.input_len, good.output_len, len(good.token_times)) == ("", 7, 3, 2)
        assert 0 < good.ttft_s <= good.latency_s
        assert "not JSON: {oops" in bad.error
        assert empty.error == "the answer was empty"
        await client.close()

    talk(Replies(replies), use)


def test_no_server_and_no_answer(port: int) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            client = Client(Load(url, "m", timeout_s=0.2))
            assert "TimeoutError" in (await client.ask(Prompt([1], 1, 1), "m")).error
            await client.close()
        client = Client(Load(f"http://127.0.0.1:{port}", "m"))
        assert "Connect" in (await client.ask(Prompt([1], 1, 1), "m")).error
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an address"):
        EventClient("localhost:8000", {}, 1.0)
