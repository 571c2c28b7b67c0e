"""Bound what one HTTP connection may cost: bytes, pieces and seconds of a request, and the time to close.

The parser sees trailers, chunk extensions and heads before anything can refuse them. So it is fed in slices, and all bytes that
are neither body nor part of an allowed head count against a bound. After a refusal, bytes are dropped without being parsed.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from culet.limits import Limits
from culet.serve.http.intake import BODY, IncomingBody, Intake
from culet.serve.http_errors import HttpError, error_body, reply_to
from culet.serve.streams import ABORT, HALF_CLOSED, HOLD_HEAD

_Bytes = bytes | bytearray | memoryview
_SLICE_BYTES = 16 << 10  # what the parser gets at once
_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256
_MAX_EXTRA_BYTES = 16 << 10  # chunk extensions and trailers of one body, besides 1/16 of its size
_CHUNK_FRAME_BYTES = 12  # size and line ends of one chunk
_MANY_CHUNKS = 4096  # from here on, chunks must have _MIN_CHUNK_BYTES on average
_MIN_CHUNK_BYTES = 256
_MAX_PIPELINED = 16  # requests that wait on one connection. One with a body is the last.
_LINGER_BYTES = 64 << 20  # how much of a refused request is read and dropped, so that the client sees the reply
_LINGER_S = 5.0
_MAX_LINGERING = 64  # connections above the limit that may linger
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}  # notice a client whose machine has vanished
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_AT_S = (0.1, 5.0, 60.0)  # after a half-close. Clients accept few interim replies, so there are three.
_MIN_POLL_S, _MAX_POLL_S = 0.05, 1.0


def make_protocol(limits: Limits, intake: Intake) -> type[BoundedProtocol]:
    """Return a protocol class with these limits, whose connections share `intake`."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits, "intake": intake})


class _RequestRefused(Exception):
    """Stops the parser in a callback, after the refusal has been handled."""


class _ReplyTransport(asyncio.Transport):
    """What a response sees of its connection. Closing it lets a client that is still sending see the reply first."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._head: _Bytes = b""
        self._write_now()

    def hold_head(self) -> None:
        """Keep the next write, a head, and put it before the one after it. The client then gets both at once."""
        self.write = self._keep  # type: ignore[method-assign]

    def _keep(self, data: _Bytes) -> None:
        self._head = data
        self.write = self._write_with_head  # type: ignore[method-assign]

    def _write_with_head(self, data: _Bytes) -> None:
        self._write_now()
        self._protocol.transport.write(b"".join((self._head, data)))

    def _write_now(self) -> None:
        self.write = self._protocol.transport.write  # type: ignore[method-assign]  # no call in between, for every token

    def is_closing(self) -> bool:
        return self._protocol.is_lingering or self._protocol.transport.is_closing()

    def close(self) -> None:
        self._protocol.close()


class _PacedFlow(FlowControl):
    """uvicorn's flow control, which stops reading while the application does not read the body. `rest` stops it in any case."""

    _is_resting = False

    def rest(self) -> None:
        self._is_resting = True
        self._transport.pause_reading()

    def end_rest(self) -> None:
        self._is_resting = False
        if not self.read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._is_resting:
            self.read_paused = False
        else:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on everything a client can send."""

    flow: _PacedFlow

    limits: ClassVar[Limits]
    intake: ClassVar[Intake]
    is_lingering = False  # the reply has been sent, and the rest of the request is dropped
    _timer: asyncio.TimerHandle | None = None  # of the head, or of the linger
    _in_head = True  # false from the end of a head to the end of its message
    _is_dropping = False  # no more bytes are parsed
    _is_half_closed = False
    _num_head_bytes = 0
    _num_extra_bytes = 0  # of a message: everything but its body, including the head
    _num_body_bytes = 0
    _num_chunks = 0
    _num_dropped_bytes = 0
    _body: IncomingBody | None = None
    _running: RequestResponseCycle | None = None  # the request that is answered now. Later ones wait in the pipeline.

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _PacedFlow(transport)
        self._reply_transport = _ReplyTransport(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):  # not on every platform
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if len(self.connections) <= self.limits.connections:
            self._set_timer(self.limits.header_s, self._time_out)
            return
        self._refuse(HttpError(503, "too many connections are open", hint="try again later", code="connections_full"))
        if len(self.connections) > self.limits.connections + _MAX_LINGERING:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._body is not None:
            self._body.release()
        running = self._running
        super().connection_lost(exc)
        for cycle in (running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._in_head and self._timer is None and not self._is_dropping:  # the next request on a kept-alive connection
            self._set_timer(self.limits.header_s, self._time_out)
        view, begin = memoryview(data), 0
        while begin < len(data) and not self._is_dropping:
            end = begin + _SLICE_BYTES
            if self._in_head:
                end = min(end, begin + _MAX_HEAD_BYTES - self._num_head_bytes)
                if end <= begin:
                    self._refuse(HttpError(431, f"the head is larger than {_MAX_HEAD_BYTES >> 10} KB", code="head_too_large"))
                    break
            self._feed(view[begin:end])
            begin = end
        if not self._in_head and not self._is_dropping:
            self._pace(len(data))
        if self._is_dropping:
            self._num_dropped_bytes += len(data) - min(begin, len(data))
            if self._num_dropped_bytes > _LINGER_BYTES:
                self.transport.abort()
            else:
                self.flow.pause_reading()
                self.loop.call_later(self.intake.drop_pause_s(len(data)), self.flow.resume_reading)

    def _pace(self, num_bytes: int) -> None:
        """Stop reading for a moment if bodies arrive too fast."""
        pause_s = self.intake.read_pause_s(num_bytes)
        if pause_s:
            self.flow.rest()
            self.loop.call_later(pause_s, self.flow.end_rest)

    def _feed(self, piece: memoryview) -> None:
        num_bytes = len(piece)
        self._num_head_bytes += num_bytes
        self._num_extra_bytes += num_bytes
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # there is no other protocol here, so the request is an ordinary one
            self._end_requests()
        except httptools.HttpParserError:
            if not self._is_dropping:
                self._refuse(HttpError(400, "the request is not valid HTTP/1.1", code="invalid_http"))
        else:
            if not self._in_head and not self._is_dropping:
                self._check_framing()

    def _check_framing(self) -> None:
        """Refuse a body that consists mostly of trailers, chunk extensions or tiny chunks."""
        allowed = _MAX_HEAD_BYTES + _MAX_EXTRA_BYTES + self._num_chunks * _CHUNK_FRAME_BYTES + self._num_body_bytes // 16
        if self._num_extra_bytes > allowed:
            self._refuse(HttpError(400, "body: the chunk extensions or trailers are too large", code="framing_too_large"))
        elif self._num_chunks > _MANY_CHUNKS + self._num_body_bytes // _MIN_CHUNK_BYTES:
            self._refuse(HttpError(400, "body: the chunks are too small", hint="send larger chunks", code="framing_too_large"))

    # The parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which nobody reads
        if len(self.headers) >= _MAX_HEADERS:
            self._refuse(HttpError(431, f"the head has more than {_MAX_HEADERS} fields", code="head_too_large"))
            raise _RequestRefused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        names = [name for name, _ in self.headers]
        num_hosts = names.count(b"host")
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._refuse(HttpError(400, f"host: got {num_hosts} Host headers, expected one", code="bad_host"))
            raise _RequestRefused
        has_length = b"content-length" in names and (b"content-length", b"0") not in self.headers
        has_body = has_length or b"transfer-encoding" in names
        # A client may have the whole response, and send its next request, a moment before the response counts as complete.
        if self._is_answering and self._is_crowded:
            self._end_requests()
            raise _RequestRefused
        self._in_head = False
        self._num_body_bytes = self._num_chunks = 0
        scope = cast(dict[str, Any], self.scope)
        scope[ABORT] = self.transport.abort
        scope[HOLD_HEAD] = self._reply_transport.hold_head
        if has_body:
            if self._body is not None and not self._is_answering:
                self._body.release()
            scope[BODY] = self._body = IncomingBody(self.intake, self._stop_body)
        super().on_headers_complete()
        self.cycle.transport = self._reply_transport

    def on_chunk_header(self) -> None:
        self._num_chunks += 1

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_extra_bytes -= len(body)
        super().on_body(body)
        if self._body is not None and not self._is_dropping and not self.cycle.response_complete:
            self._body.add(len(body))

    def on_message_complete(self) -> None:
        self._in_head = True
        self._num_head_bytes = self._num_extra_bytes = 0
        if self._body is not None:
            self._body.is_complete = True
        super().on_message_complete()

    # Responses

    @property
    def _is_crowded(self) -> bool:
        return len(self.pipeline) >= _MAX_PIPELINED or any(BODY in cycle.scope for cycle, _ in self.pipeline)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._body is not None and not self._is_answering:
            self._body.release()
        self._watch_writes(self.transport.get_write_buffer_size())
        if not self._in_head and not self._is_answering:  # the client is still sending a body that nobody wants
            self._linger()
        if self.is_lingering:
            self.server_state.total_requests += 1
        else:
            super().on_response_complete()

    def _watch_writes(self, num_left: int) -> None:
        """Abort the connection if the client reads nothing of what is left of a response."""
        if num_left and not self._is_answering:
            last = self.cycle

            def check() -> None:
                left = self.transport.get_write_buffer_size()
                if left >= num_left and self.cycle is last:
                    self.transport.abort()
                else:
                    self._watch_writes(left)

            self.loop.call_later(self.limits.write_s, check)

    def close(self) -> None:
        """Close after a response."""
        if not self._in_head or self._is_dropping:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Read and drop what the client still sends. It might miss the reply if the connection closed at once."""
        if self.is_lingering or self.transport.is_closing():
            return
        self._is_dropping = self.is_lingering = True
        self._unset_keepalive_if_required()
        if self._is_half_closed:
            self.transport.close()
            return
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(_LINGER_S, self.transport.abort)

    # Refusals

    def _refuse(self, error: HttpError) -> None:
        """Parse no more. Answer with `error`, unless a response to an earlier request is still under way."""
        self._stop_timer()
        is_in_body, body = not self._in_head, self._body
        self._end_requests()
        if is_in_body and body is not None:
            body.refuse(error)  # the middleware answers
            return
        self.intake.refusals[error.code or ""] += 1
        if not self._is_answering and not self.transport.is_closing():
            self.transport.write(_reply(error))
            self._linger()

    def _end_requests(self) -> None:
        """Drop everything that follows. The connection closes after the responses to the requests so far."""
        self._is_dropping = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _stop_body(self) -> None:
        """Drop a body that was refused and wake its reader."""
        self._end_requests()
        self.cycle.body.clear()
        self.cycle.message_event.set()

    def _time_out(self) -> None:
        self._timer = None
        if self._in_head and not self._is_answering:
            self._refuse(HttpError(408, "the head did not arrive in time", code="request_timeout"))

    def _set_timer(self, seconds: float, action: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Half-closed connections

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for the answer if the request was complete. Find out whether the client still reads."""
        cycle = self.cycle
        is_pending = self._is_answering and self._in_head and not self.is_lingering
        if not is_pending or self.scheme == "https" or cycle.scope["http_version"] != "1.1":
            return False
        self._is_half_closed = True
        cycle.keep_alive = False
        for pending in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if pending is not None:
                cast(dict[str, Any], pending.scope)[HALF_CLOSED] = True
        self.loop.call_later(_MIN_POLL_S, self._probe, self.loop.time(), 0, _MIN_POLL_S)
        return True

    def _probe(self, began: float, num_probes: int, pause_s: float) -> None:
        """Abort if the client has left. Its machine says so only when it gets data, so send an interim reply now and then."""
        if self.transport.is_closing() or not self._is_answering:
            return
        sock = self.transport.get_extra_info("socket")
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if num_probes < len(_PROBE_AT_S) and self.loop.time() - began >= _PROBE_AT_S[num_probes]:
            num_probes, pause_s = num_probes + 1, _MIN_POLL_S
            if self._running is not None and not self._running.response_started:
                self.transport.write(_CONTINUE)
        self.loop.call_later(pause_s, self._probe, began, num_probes, min(_MAX_POLL_S, 2 * pause_s))


def _reply(error: HttpError) -> bytes:
    """Return a whole response, for a request that never reached the middleware."""
    reply = reply_to(error)
    body = error_body(reply)
    retry = b"retry-after: %d\r\n" % reply.retry_after_s if reply.retry_after_s is not None else b""
    head = b"HTTP/1.1 %d %s\r\n" % (reply.status, HTTPStatus(reply.status).phrase.encode())
    fields = b"content-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n" % (len(body), retry)
    return head + fields + body
