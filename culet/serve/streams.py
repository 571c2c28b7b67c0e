"""Stream answers as server-sent events or wait for complete answers, and cancel requests when a client disconnects.

Events are written with ASGI's own `send`, several at a time if several are ready. This needs no generator or task per token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from culet.errors import CuletError
from culet.log import logger
from culet.serve.generation import Generation
from culet.serve.http.intake import release_body
from culet.serve.http_errors import error_body, reply_to
from culet.serve.service import Service
from culet.text.output import OutputDelta

SEND = "culet.send"  # scope key of the middleware's own `send`, which bypasses the layers in between
HOLD_HEAD = "culet.hold_head"  # scope key of a function that makes the head wait for the first bytes of the body
ABORT = "culet.abort"  # scope key of a function that aborts the connection and drops unsent bytes
HALF_CLOSED = "culet.half_closed"  # scope key that is set when the client will send nothing more, and perhaps has left
DONE = b"data: [DONE]\n\n"
T = TypeVar("T")
_KEEP_ALIVE_S = 15.0  # Send a comment after this time without events. It starts the response if there was no event yet.
_WATCH_PERIOD_S = 5.0
_PATIENCE_S = 0.02  # before the connection is watched: most requests are prepared sooner
_FIRST_LOOKS = 3  # Several turns of the event loop notice a connection that was closed right after the request.
_FIRST_LOOK_S = 0.005
_PROBED_S = 0.3  # After a half-close, the connection needs this time to find out whether the client still reads.
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps nginx from buffering events
]


class ClientGone(Exception):
    """The client disconnected before its answer was complete."""


class EventStream(Response):
    """Streams one or several generations as server-sent events.

    `open` submits them. `write(index, generation, deltas)` returns the bytes for new deltas of generation `index`, or an async
    iterator if they may be many. `begin` is sent before them, and the result of `end` after them. Nothing is sent before the
    first delta or keep-alive comment, so earlier failures get an HTTP status. A subclass may write another kind of stream.
    """

    kind = b"text/event-stream; charset=utf-8"  # the content type
    keep_alive = b": keep-alive\n\n"  # a comment, which clients skip

    def __init__(
        self,
        service: Service,
        open: Sequence[Callable[[], Generation]],
        write: Callable[[int, Generation, list[OutputDelta]], bytes | AsyncIterator[bytes]],
        *,
        begin: bytes = b"",
        end: Callable[[Sequence[Generation]], bytes] = lambda generations: DONE,
        write_error: Callable[[CuletError], bytes] | None = None,
    ) -> None:
        self._service, self._open, self._write = service, open, write
        self._begin, self._end = begin, end
        self._write_error = write_error or _openai_error_event
        self._is_gone = self._has_started = False
        self._sent_at = time.monotonic()
        self._is_sending = False
        self._scope: Scope = {}
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = scope.get(SEND, send)
        self._scope = scope
        async with AsyncExitStack() as stack:
            generations = [await stack.enter_async_context(open_generation()) for open_generation in self._open]
            release_body(scope)
            stream_task = asyncio.current_task()
            assert stream_task is not None
            watcher: asyncio.Task[None] | None = None

            def watch() -> None:
                nonlocal watcher
                watcher = asyncio.create_task(self._watch(generations, receive, send, stream_task))

            timer = asyncio.get_running_loop().call_later(_PATIENCE_S, watch)  # two tasks would delay the first token
            try:
                await self._run(generations, send)
            finally:
                timer.cancel()
                if watcher is not None:
                    watcher.cancel()

    async def _run(self, generations: Sequence[Generation], send: Send) -> None:
        try:
            if len(generations) == 1:
                async for deltas in generations[0].deltas():
                    await self._write_deltas(send, 0, generations[0], deltas)
            else:
                async for index, deltas in _interleave(generations):
                    await self._write_deltas(send, index, generations[index], deltas)
            last = self._end(generations)
        except CuletError as error:
            if not self._has_started:
                raise
            logger.warning("a stream ended with an error: %s", error.message)
            last = self._write_error(error)
        await self._send(send, last, is_last=True)

    async def _write_deltas(self, send: Send, index: int, generation: Generation, deltas: list[OutputDelta]) -> None:
        """Write and send deltas. If there is nothing to send, the request may still start over."""
        written = self._write(index, generation, deltas)
        if written:
            generation.mark_seen()
        if isinstance(written, bytes):
            await self._send(send, written)
            return
        async for data in written:
            if self._is_gone:
                return
            await self._send(send, data)

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        """Send events. The head goes with the first and the end of the response with the last, since each write costs time."""
        if self._is_gone or not (data or is_last):
            return
        self._sent_at, self._is_sending = time.monotonic(), True
        if not self._has_started:
            self._has_started = True
            data = self._begin + data
            if data:
                self._scope.get(HOLD_HEAD, _do_nothing)()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", self.kind), *_HEADERS]})
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._is_sending = False

    async def _watch(
        self, generations: Sequence[Generation], receive: Receive, send: Send, stream_task: asyncio.Task[None]
    ) -> None:
        """Cancel if the client disconnects or stops reading. Keep the connection alive while there are no events.

        If the client has half-closed the connection, a comment also finds out whether it has left.
        """
        gone = asyncio.ensure_future(_wait_gone(receive))
        try:
            while not (await asyncio.wait({gone}, timeout=_WATCH_PERIOD_S))[0]:
                quiet_s = time.monotonic() - self._sent_at
                if self._is_sending and quiet_s > self._service.limits.write_s:
                    logger.warning("dropping the stream of a client that has read nothing for %d s", quiet_s)
                    self._scope.get(ABORT, _do_nothing)()
                    stream_task.cancel()
                    break
                is_doubtful = self._has_started and HALF_CLOSED in self._scope
                if not self._is_sending and (quiet_s > _KEEP_ALIVE_S or is_doubtful):
                    await self._send(send, self.keep_alive)
        finally:
            gone.cancel()
        self._is_gone = True
        for generation in generations:
            generation.cancel()


def _do_nothing() -> None:
    """For a server that has no function under a scope key."""


def _openai_error_event(error: CuletError) -> bytes:
    return b"data: " + error_body(reply_to(error)) + b"\n\n" + DONE


async def _interleave(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, list[OutputDelta]]]:
    """Yield (index, deltas) from several generations, in order of arrival."""
    # The last part says how often the generation had started over.
    queue: asyncio.Queue[tuple[int, list[OutputDelta] | Exception | None, int]] = asyncio.Queue(len(generations))

    async def pump(index: int, generation: Generation) -> None:
        try:
            async for deltas in generation.deltas():
                await queue.put((index, deltas, generation.num_starts))
            await queue.put((index, None, generation.num_starts))
        except Exception as error:
            await queue.put((index, error, generation.num_starts))

    tasks = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
    try:
        num_running = len(tasks)
        while num_running:
            index, deltas, num_starts = await queue.get()
            if isinstance(deltas, Exception):
                raise deltas
            if deltas is None:
                num_running -= 1
            elif num_starts == generations[index].num_starts:  # otherwise the engine died while they waited here
                yield index, deltas
    finally:
        for task in tasks:
            task.cancel()


async def _wait_gone(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


class AnswerBuilder(Protocol):
    """Builds an answer while the tokens of several generations arrive."""

    async def read(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> None:
        """Take new deltas of generation `index`. Long work must await now and then, so that it does not block."""

    def forget(self, index: int) -> None:
        """Drop what was read of generation `index`, which starts over because the engine died."""


async def run_all(
    request: Request, open: Sequence[Callable[[], Generation]], builder: AnswerBuilder | None = None
) -> list[Generation]:
    """Submit generations and wait until all have ended. Cancel them if the client disconnects."""

    async def run(index: int, generation: Generation) -> None:
        num_starts = 0
        async for deltas in generation.deltas():
            if builder is None:
                continue
            if generation.num_starts != num_starts:
                num_starts = generation.num_starts
                builder.forget(index)
            await builder.read(index, generation, deltas)

    async with AsyncExitStack() as stack:
        generations = []
        for open_generation in open:
            generations.append(await stack.enter_async_context(open_generation()))
            await asyncio.sleep(0)  # submitting takes time that grows with the prompt
        release_body(request.scope)

        async def run_each() -> None:
            await asyncio.gather(*(run(*entry) for entry in enumerate(generations)))

        await unless_gone(request, run_each)
        return generations


async def unless_gone(request: Request, start: Callable[[], Awaitable[T]], *, is_large: bool = False) -> T:
    """Start work and wait for it, and cancel it if the client disconnects.

    Most work ends soon, so the connection is watched only after a while. Work for a large request is expensive, so it is not
    even started if the client has already left. The work runs in this task, because another one would cost every request time.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = asyncio.ensure_future(_wait_gone(request.receive)) if is_large else None
    has_left = is_over = False

    def leave(gone: asyncio.Future[None]) -> None:
        nonlocal has_left
        if not (gone.cancelled() or is_over):
            has_left = True
            task.cancel()

    def watch() -> None:
        nonlocal gone
        gone = gone or asyncio.ensure_future(_wait_gone(request.receive))
        gone.add_done_callback(leave)

    timer: asyncio.TimerHandle | None = None
    try:
        if gone is not None:
            for _ in range(_FIRST_LOOKS):
                await asyncio.wait({gone}, timeout=_FIRST_LOOK_S)
            if request.scope.get(HALF_CLOSED):
                await asyncio.wait({gone}, timeout=_PROBED_S)
            if gone.done():
                raise ClientGone
            watch()
        else:
            timer = asyncio.get_running_loop().call_later(_PATIENCE_S, watch)
        return await start()
    except asyncio.CancelledError:
        if has_left and task.cancelling() == 1:  # nobody else has cancelled this task
            raise ClientGone from None
        raise
    finally:
        is_over = True
        if has_left:
            task.uncancel()
        if timer is not None:
            timer.cancel()
        if gone is not None:
            gone.remove_done_callback(leave)
            gone.cancel()
