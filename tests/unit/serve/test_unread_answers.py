"""A connection whose client does not read the end of an answer is aborted."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from culet.limits import Limits
from culet.serve.http.connection import make_protocol
from culet.serve.http.intake import Intake

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


class FakeTransport(asyncio.Transport):
    """Keeps everything that is written, as if the client read nothing until `num_left` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.num_left = 0
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.num_left += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_left

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        """Wait until everything is read."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * 1000})


async def answer(*, reads: bool) -> bool:
    """Answer a request, and return whether the connection was aborted after the time for writes."""
    protocol = make_protocol(Limits(write_s=1), Intake(1 << 20))(uvicorn.Config(app), ServerState(), {})
    transport = FakeTransport()
    protocol.connection_made(transport)
    protocol.data_received(REQUEST)
    async with asyncio.timeout(60):
        while not protocol.cycle.response_complete:
            await asyncio.sleep(0.01)
    if reads:
        transport.num_left = 0
    await asyncio.sleep(1.5)
    return transport.is_aborted


def test_an_unread_answer_is_dropped() -> None:
    assert asyncio.run(answer(reads=False))
    assert not asyncio.run(answer(reads=True))
