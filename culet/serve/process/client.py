"""Start the engine process from the web process, submit requests to it and deliver their tokens."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol, Self, cast

from culet.cache.changes import PrefixChange
from culet.child import exit_error, start_bound_process
from culet.errors import CuletError, InternalError, WorkerDied, error_of
from culet.frames import FrameReader, frame
from culet.log import logger
from culet.serve.process.wire import (
    Cancel,
    Command,
    Deltas,
    Failed,
    PrefixChanges,
    Ready,
    Refused,
    Report,
    Start,
    Stats,
    Stop,
    report_decoder,
    submit_frames,
)
from culet.types import FinishReason, Request, TokenDelta

_STOP_LIMIT_S = 5.0  # time for the process to end on its own
_MAX_SUBMITS = 3  # A request that saw this many engines die may be the cause, so no other engine gets it.
_ids = itertools.count()  # unique over all engine processes, because requests outlive them


class State(StrEnum):
    """The state of an engine process."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class Canceller(Protocol):
    """What a stream needs from the engine that runs its request."""

    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = ...) -> None: ...
    def forget(self, request_id: str) -> None: ...


class TokenStream:
    """The tokens of one request, as an async iterator. Each item is a list of the deltas since the previous one.

    It ends when all samples have ended, and raises if the engine refuses the request. Closing it cancels the samples that are
    still running. If the engine dies, the request starts over in the next one, and the reader must forget what it has read
    whenever `num_starts` has changed. Before the client is sent a part of the answer, the reader must set `is_seen`. From then
    on the stream raises if the engine dies.
    """

    def __init__(self, client: Canceller, request: Request) -> None:
        self.request = request
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None
        self.client = client
        self.is_seen = False  # the client has a part of the answer, so no other engine can give it another answer
        self.num_starts = 0
        self.num_submits = 0
        self._running = set(range(request.n))  # samples that have not ended
        self._deltas: list[TokenDelta] = []
        self._error: CuletError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        if not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self._deltas:
                return await self.__anext__()
        deltas, self._deltas = self._deltas, []
        return deltas

    def cancel(self, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL) -> None:
        """End the request, or one sample of it. No more tokens are delivered for the ended samples."""
        self.client.cancel(self.request.request_id, sample, reason)
        self._running -= self._running if sample is None else {sample}
        if not self._running:
            self._wake()

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended or the request has failed."""
        return not self._running or self._error is not None

    def close(self) -> None:
        """Cancel the samples that have not ended."""
        if not self.is_done:
            self.cancel()
        self.client.forget(self.request.request_id)

    # Called by the client

    def put(self, delta: TokenDelta) -> None:
        """Add the result of a step."""
        if self.first_token_at is None and delta.token_ids:
            self.first_token_at = time.monotonic()
        if delta.finish_reason is not None:
            self._running.discard(delta.sample)
        self._deltas.append(delta)
        self._wake()

    def lose_engine(self) -> None:
        """Forget what a dead engine has sent, so that another one can answer. Fail if the client has seen some of it."""
        if self.num_submits >= _MAX_SUBMITS or self.is_seen:
            self.fail(WorkerDied("the engine died while it answered this request", hint="send the request again"))
            return
        self._deltas.clear()
        self._running = set(range(self.request.n))
        self.first_token_at = None
        self.num_starts += 1

    def fail(self, error: CuletError) -> None:
        """End the stream with an error."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient(asyncio.Protocol):
    """Owns one engine process. If the process dies, create a new client, which takes over the requests that can start over."""

    def __init__(self, name: str = "the engine") -> None:
        self.name = name  # in errors
        self.state = State.STARTING
        self.facts: Ready | None = None  # set when the engine is ready
        self.stats: Stats | None = None  # the latest report
        self.heard_at = time.monotonic()  # time of the last message
        self.num_samples = 0  # of all requests that have not been forgotten
        self.on_death: Callable[[], None] = lambda: None
        self.on_prefix_changes: Callable[[list[PrefixChange]], None] = lambda changes: None
        self._failure: CuletError | None = None
        self._frames = FrameReader(report_decoder)
        self._streams: dict[str, TokenStream] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._changed = asyncio.Event()

    @classmethod
    async def start(
        cls, start: Start, *, environment: Mapping[str, str] | None = None, previous: EngineClient | None = None
    ) -> EngineClient:
        """Start the process without waiting for the model to load.

        `environment` adds variables to its environment. The client takes over the requests that a `previous` engine left when
        it died.
        """
        client = cls(start.name)
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                client._process = start_bound_process("culet.serve.process.engine", theirs.fileno(), environment)
        except OSError as error:
            raise WorkerDied(f"cannot start the engine process: {error}") from error
        await asyncio.get_running_loop().create_connection(lambda: client, sock=ours)
        client._send(start)
        if previous is not None:  # It keeps them if the start fails. Until here, it may be given more.
            for stream in previous.give_away():
                client.take(stream)
        return client

    async def wait_ready(self) -> Ready:
        """Wait until the model is loaded and warm. Raise if that fails."""
        while self.state is State.STARTING:
            self._changed.clear()
            await self._changed.wait()
        if self.facts is None or self.state is State.DEAD:
            if self._failure is None:
                await self._ends_in_time()  # its exit code is known a moment after the end of the connection
            raise self.death()
        return self.facts

    @property
    def num_in_flight(self) -> int:
        """The number of requests in progress, including finished answers that clients are still reading."""
        return len(self._streams)

    @property
    def has_work(self) -> bool:
        """Whether the engine has something to do."""
        return any(not stream.is_done for stream in self._streams.values())

    @property
    def unfinished(self) -> list[Request]:
        """The requests whose answers have not ended."""
        return [stream.request for stream in self._streams.values() if not stream.is_done]

    @staticmethod
    def next_id() -> str:
        """Return an id for the next request."""
        return str(next(_ids))

    def submit(self, request: Request) -> TokenStream:
        """Send a request to the engine."""
        if self.state is not State.READY:
            raise self.death()
        if not self.has_work:
            self.heard_at = time.monotonic()  # an idle engine is silent
        stream = TokenStream(self, request)
        self.take(stream)
        return stream

    def take(self, stream: TokenStream) -> None:
        """Answer the request of a stream, now or when the engine is ready."""
        stream.client = self
        self._streams[stream.request.request_id] = stream
        self.num_samples += stream.request.n
        if self.state is State.READY:
            self._submit(stream)

    def give_away(self) -> list[TokenStream]:
        """Return the streams that are not done, in the order of their arrival, for other engines to take."""
        streams = [stream for stream in self._streams.values() if not stream.is_done]
        for stream in streams:
            self.forget(stream.request.request_id)
        return streams

    def _submit(self, stream: TokenStream) -> None:
        stream.num_submits += 1
        for data in submit_frames(stream.request):
            self._write(data)

    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL) -> None:
        """End a request, or one sample of it, before the engine's next step."""
        if request_id in self._streams and self.state is State.READY:
            self._send(Cancel(request_id, sample, reason))

    def forget(self, request_id: str) -> None:
        """Stop delivering tokens for this request."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.num_samples -= stream.request.n

    def fail_all(self, error: CuletError) -> None:
        """End every running request with `error`."""
        for stream in list(self._streams.values()):
            if not stream.is_done:
                self.cancel(stream.request.request_id)
                stream.fail(error)

    async def stop(self) -> int:
        """End the process, by force if it takes too long, and return its exit code."""
        process = self._process
        assert process is not None
        self.on_death = lambda: None
        if self.state is State.STARTING:
            self.kill(WorkerDied("the engine was stopped while it started"))  # it reads no commands while it loads
        self._send(Stop())
        if not await self._ends_in_time():
            self.kill(WorkerDied(f"the engine process did not end within {_STOP_LIMIT_S:g} s, so it was killed"))
            await asyncio.get_running_loop().run_in_executor(None, process.wait)
        if self._transport is not None:
            self._transport.close()
        return process.returncode

    async def _ends_in_time(self) -> bool:
        """Wait for the end of the process. Return False if it takes too long."""
        process = self._process
        if process is None:
            return False
        try:
            await asyncio.get_running_loop().run_in_executor(None, lambda: process.wait(_STOP_LIMIT_S))
        except subprocess.TimeoutExpired:
            return False
        return True

    def death(self) -> CuletError:
        """Return the error that says why the engine accepts no requests."""
        if self.state is State.STARTING:
            return WorkerDied("the model is still loading", hint="try again later")
        if self._failure is not None:
            return self._failure
        if self._process is None or self._process.poll() is None:  # the connection has ended, the process not yet
            return WorkerDied("the engine process has ended", hint="see the log for the reason")
        return exit_error(self._process, f"{self.name}'s process")

    def _send(self, command: Command) -> None:
        self._write(frame(command))

    def _write(self, data: bytes | bytearray) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the methods but not the class

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        try:
            for report in self._frames.push(data):
                self._handle(report)
        except Exception as error:  # the engine process sent invalid data
            logger.exception("cannot decode a message from the engine process")
            self._failure = InternalError(f"cannot decode a message from the engine process: {type(error).__name__}")
            self.kill()

    def _handle(self, report: Report) -> None:
        if isinstance(report, Deltas):
            streams = self._streams
            for delta in report.deltas:
                stream = streams.get(delta.request_id)
                if stream is not None:
                    stream.put(delta)
        elif isinstance(report, Stats):
            self.stats = report
        elif isinstance(report, PrefixChanges):
            self.on_prefix_changes(report.changes)
        elif isinstance(report, Refused):
            stream = self._streams.get(report.request_id)
            if stream is not None:
                stream.fail(error_of(report.kind, report.message, report.hint))
        elif isinstance(report, Ready):
            self.facts, self.state = report, State.READY
            for stream in self._streams.values():  # taken over, in the order of their arrival
                if not stream.is_done:
                    self._submit(stream)
            self._changed.set()
        elif isinstance(report, Failed):
            self._failure = error_of(report.kind, report.message, report.hint)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the streams that cannot start over, because the engine process is gone. The others wait for another engine."""
        was_dead, self.state = self.state is State.DEAD, State.DEAD
        self._changed.set()
        for stream in list(self._streams.values()):
            if stream.is_done:
                continue
            stream.lose_engine()
        if not was_dead:
            self.on_death()

    def kill(self, failure: CuletError | None = None) -> None:
        """End the process by force, because of `failure`, unless another failure is known."""
        if self._process is not None and self._process.poll() is None:
            self._failure = self._failure or failure
            self._process.kill()
