"""Send an answer that consists of many parts, in messages of moderate size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from culet.serve.answers.limits import AnswerSize

MESSAGE_BYTES = 1 << 16
Part = bytes | bytearray


def in_messages(parts: Iterable[Part]) -> Iterator[bytes]:
    """Yield the same bytes in messages of moderate size."""
    gathered: list[Part | memoryview] = []
    size = 0
    for part in parts:
        rest = memoryview(part)
        while size + len(rest) >= MESSAGE_BYTES:
            taken = MESSAGE_BYTES - size
            yield b"".join([*gathered, rest[:taken]])
            gathered, size, rest = [], 0, rest[taken:]
        if rest:
            gathered.append(rest)
            size += len(rest)
    if gathered:
        yield b"".join(gathered)


class BigAnswer(Response):
    """A JSON answer in parts. Each message waits until the client has read enough of those before."""

    def __init__(self, parts: list[Part], size: AnswerSize | None = None) -> None:
        """Create an answer. `size` is closed when the answer has been sent or the client has left."""
        super().__init__(media_type="application/json")
        self._parts, self._size = parts, size
        self.headers["content-length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            num_left = int(self.headers["content-length"])
            for message in in_messages(self._parts):
                num_left -= len(message)
                # The last byte must end the response: a client that has read it may send its next request at once.
                await send({"type": "http.response.body", "body": message, "more_body": num_left > 0})
                await asyncio.sleep(0)  # sending does not wait while the client reads fast
        finally:
            self._parts = []
            if self._size is not None:
                self._size.close()
