"""Answers on their way to a client: server-sent events, whole answers, and what happens when the client leaves.

Events are written with ASGI's own `send`, several at a time where several are there: no generator, no task per token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from culet.errors import CuletError
from culet.log import logger
from culet.serve.errors import facts_of, openai_body
from culet.serve.generation import Generation, Piece
from culet.serve.service import Service

SEND = "culet.send"  # in the scope: the gate's own `send`, past the layers in between
ABORT = "culet.abort"  # in the scope: breaks the connection off, unsent bytes and all
DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE_S = 15.0  # after this long without an event, a comment; before the first event it also begins the answer
_WATCH_PERIOD_S = 5.0
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx collects the events
]


class ClientGone(Exception):
    """The client left before its answer was there."""


class EventStream(Response):
    """Streams one or several generations as server-sent events.

    `open` submits them; `write(index, pieces)` gives the bytes of what came to the one of that number, `begin` and `end` what
    stands before and after. Nothing is sent before the first piece, so that what fails until then has a status of its own.
    """

    def __init__(
        self,
        service: Service,
        open: Sequence[Callable[[], Generation]],
        write: Callable[[int, Generation, list[Piece]], bytes],
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
        self._abort: Callable[[], None] = lambda: None
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = scope.get(SEND, send)
        async with AsyncExitStack() as stack:
            generations = [await stack.enter_async_context(open_one()) for open_one in self._open]
            me = asyncio.current_task()
            assert me is not None
            self._abort = scope.get(ABORT, self._abort)
            watcher = asyncio.create_task(self._watch(generations, receive, send, me))
            try:
                await self._run(generations, send)
            finally:
                watcher.cancel()

    async def _run(self, generations: Sequence[Generation], send: Send) -> None:
        try:
            if len(generations) == 1:
                async for pieces in generations[0].pieces():
                    await self._send(send, self._write(0, generations[0], pieces))
            else:
                async for index, pieces in _pieces_of_all(generations):
                    await self._send(send, self._write(index, generations[index], pieces))
            await self._send(send, self._end(generations))
        except CuletError as error:
            if not self._has_started:
                raise
            logger.warning("a stream ends with an error: %s", error.message)
            await self._send(send, self._write_error(error))
        if not self._is_gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not data or self._is_gone:
            return
        if not self._has_started:
            self._has_started = True
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            data = self._begin + data
        self._sent_at, self._is_sending = time.monotonic(), True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False

    async def _watch(self, generations: Sequence[Generation], receive: Receive, send: Send, stream: asyncio.Task[None]) -> None:
        """Cancel when the client leaves or takes nothing any more; keep the connection alive while nothing comes."""
        gone = asyncio.ensure_future(_wait_gone(receive))
        try:
            while not (await asyncio.wait({gone}, timeout=_WATCH_PERIOD_S))[0]:
                quiet_s = time.monotonic() - self._sent_at
                if self._is_sending and quiet_s > self._service.limits.write_s:
                    logger.warning("a client takes nothing for %d s: its stream is dropped", quiet_s)
                    self._abort()
                    stream.cancel()
                    break
                if not self._is_sending and quiet_s > _KEEP_ALIVE_S:
                    await self._send(send, _KEEP_ALIVE)
        finally:
            gone.cancel()
        self._is_gone = True
        for generation in generations:
            generation.cancel()


def _openai_error_event(error: CuletError) -> bytes:
    return b"data: " + openai_body(facts_of(error)) + b"\n\n" + DONE


async def _pieces_of_all(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, list[Piece]]]:
    """Pieces of several generations, as they come."""
    queue: asyncio.Queue[tuple[int, list[Piece] | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, generation: Generation) -> None:
        try:
            async for pieces in generation.pieces():
                queue.put_nowait((index, pieces))
            queue.put_nowait((index, None))
        except BaseException as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
    try:
        num_running = len(tasks)
        while num_running:
            index, pieces = await queue.get()
            if isinstance(pieces, BaseException):
                raise pieces
            if pieces is None:
                num_running -= 1
            else:
                yield index, pieces
    finally:
        for task in tasks:
            task.cancel()


async def _wait_gone(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


async def run_all(request: Request, open: Sequence[Callable[[], Generation]]) -> list[Generation]:
    """Submit generations and wait until all have ended; a client that leaves meanwhile cancels them."""
    async with AsyncExitStack() as stack:
        generations = [await stack.enter_async_context(open_one()) for open_one in open]
        await _unless_gone(request, asyncio.gather(*(generation.run() for generation in generations)))
        return generations


async def _unless_gone(request: Request, work: Awaitable[object]) -> None:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        for each in (task, gone):
            each.cancel()
