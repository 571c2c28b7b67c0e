"""Limit the number of HTTP connections, and the size and time of a request's head."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from culet.config import Limits
from culet.serve.streams import ABORT

_MAX_HEAD_BYTES = 64 << 10
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


def make_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol class with these limits."""

    class BoundedProtocol(HttpToolsProtocol):
        """Limits the number of connections, and the size and time of a request's head."""

        _timer: asyncio.TimerHandle | None = None
        _num_head_bytes = 0
        _in_head = True

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._refuse(_TOO_MANY)
            else:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._num_head_bytes += len(data)
                if self._timer is None:  # the next request on a kept-alive connection
                    self._start_timer()
            super().data_received(data)
            if self._in_head and self._num_head_bytes > _MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort

        def on_headers_complete(self) -> None:
            self._in_head, self._num_head_bytes = False, 0
            self._stop_timer()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head = True
            super().on_message_complete()

        def _start_timer(self) -> None:
            self._timer = asyncio.get_running_loop().call_later(limits.header_s, self._time_out)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _time_out(self) -> None:
            self._timer = None
            if self._in_head and (self.cycle is None or self.cycle.response_complete):
                self._refuse(_TOO_SLOW)

        def _refuse(self, answer: bytes) -> None:
            self._stop_timer()
            if not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()

    return BoundedProtocol
