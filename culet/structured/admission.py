"""Let requests wait on the event loop until their grammars are checked."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from culet.errors import QueueFull
from culet.structured.check import Check, GrammarCheck, GrammarForm, Verdict, key_of
from culet.types import GrammarSpec

GRACE_S = 0.5  # A check that nobody waits for any more may run this long. Killing its process at once would cost more.


class _Waiting:
    """The requests that wait for the same check."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.result: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self.num_requests = 0


class GrammarAdmission:
    """Admits requests whose grammars can be used. Call it only from the event loop.

    A known grammar never waits. Others wait for a process, at most `max_waiting` requests at a time. A check that is still
    waiting for a process when its time is over is refused, and one that nobody waits for any more is stopped.
    """

    def __init__(self, check: GrammarCheck, *, max_waiting: int) -> None:
        self._check, self._max_waiting = check, max_waiting
        self._waiting: dict[str, _Waiting] = {}  # by the key of the form
        self.num_waiting = 0  # requests

    async def admit(self, form: GrammarForm) -> GrammarSpec:
        """Return the grammar of a form. Raise if it cannot be used, or if too many requests wait."""
        key = key_of(form)
        if (known := self._check.find(form, key)) is not None:
            return known
        if self.num_waiting >= self._max_waiting:
            raise QueueFull(f"{self.num_waiting} requests already wait for their grammars", hint="try again later")
        waiting = self._waiting.get(key) or self._begin(form, key)
        waiting.num_requests += 1
        self.num_waiting += 1
        try:
            return (await asyncio.shield(waiting.result)).spec(form)
        finally:
            waiting.num_requests -= 1
            self.num_waiting -= 1
            if not waiting.num_requests and not waiting.result.done():
                self._abandon(key, waiting)

    def close(self) -> None:
        """End the processes."""
        self._check.close()

    def _begin(self, form: GrammarForm, key: str) -> _Waiting:
        loop = asyncio.get_running_loop()
        check = self._check.begin(form, key)
        waiting = self._waiting[key] = _Waiting(check)
        timer = loop.call_later(self._check.time_limit_s, self._expire, key, waiting)

        def deliver() -> None:
            timer.cancel()
            if self._waiting.get(key) is waiting:
                del self._waiting[key]
            if waiting.result.done():
                return
            if check.future.cancelled():
                waiting.result.cancel()
            elif (error := check.future.exception()) is not None:
                waiting.result.set_exception(error)
                waiting.result.exception()  # it is no fault if every request has left
            else:
                waiting.result.set_result(check.future.result())

        def on_done(_: Future[Verdict]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver)

        check.future.add_done_callback(on_done)
        return waiting

    def _expire(self, key: str, waiting: _Waiting) -> None:
        """Refuse a check that has not been given a process. A running one ends by itself."""
        if waiting.check.future.cancel() and not waiting.result.done():
            waiting.result.set_exception(QueueFull("too many grammars are being compiled", hint="try again later"))
            waiting.result.exception()

    def _abandon(self, key: str, waiting: _Waiting) -> None:
        if waiting.check.future.cancel():  # it has not been given a process
            return
        if self._waiting.get(key) is waiting:
            del self._waiting[key]  # the next request with this grammar starts a new check
        asyncio.get_running_loop().call_later(GRACE_S, waiting.check.stop)
