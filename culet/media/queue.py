"""Run work on media in threads, within bounds. First come, first served, except that videos leave a thread to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from culet.errors import QueueFull
from culet.line_process import Stopper
from culet.media.limits import MEGABYTE

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    """The work on one medium, waiting or running."""

    work: Callable[[Stopper], Any]
    num_bytes: int
    is_long: bool
    result: asyncio.Future[Any]
    stopper: Stopper = field(default_factory=Stopper)


class MediaQueue:
    """Runs work in threads. Use it from one event loop. The work of a client that has left is dropped or stopped."""

    def __init__(
        self, num_threads: int, *, max_waiting: int, max_waiting_mb: int, purpose: str, patience_s: float = 0.0
    ) -> None:
        """Create a queue. `purpose` says in errors what is done with media.

        Work whose client has left gets `patience_s` to end by itself before it is stopped.
        """
        self.num_refused = 0
        self.num_dropped = 0  # because the client left
        self._num_threads = num_threads
        self._max_waiting, self._max_waiting_mb = max_waiting, max_waiting_mb
        self._purpose, self._patience_s = purpose, patience_s
        self._threads = ThreadPoolExecutor(num_threads, "media")
        self._waiting: list[_Job] = []
        self._waiting_bytes = 0
        self._num_running = 0
        self._num_long_running = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def run(self, work: Callable[[Stopper], T], num_bytes: int, *, is_long: bool = False) -> T:
        """Run `work` in a thread and return its result. If this task is cancelled, the work is dropped or stopped."""
        if len(self._waiting) >= self._max_waiting or self._waiting_bytes + num_bytes > self._max_waiting_mb * MEGABYTE:
            self.num_refused += 1
            got = f"{len(self._waiting)}, {self._waiting_bytes / MEGABYTE:.0f} MB"
            raise QueueFull(f"too many media are waiting to be {self._purpose} ({got})", hint="try again later")
        job = _Job(work, num_bytes, is_long, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._waiting_bytes += num_bytes
        self._start_waiting()
        try:
            result: T = await job.result
        except asyncio.CancelledError:
            self._leave(job)
            raise
        return result

    def close(self) -> None:
        """Drop all work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self, job: _Job) -> None:
        self.num_dropped += 1
        if job in self._waiting:
            self._take(job)
        else:
            asyncio.get_running_loop().call_later(self._patience_s, job.stopper.stop)  # without effect once it has ended

    def _take(self, job: _Job) -> None:
        self._waiting.remove(job)
        self._waiting_bytes -= job.num_bytes

    def _start_waiting(self) -> None:
        while self._num_running < self._num_threads and (job := self._next()) is not None:
            self._take(job)
            self._num_running += 1
            self._num_long_running += job.is_long
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work, job.stopper)
            job.work = _do_nothing  # frees the medium when it is done
            running.add_done_callback(partial(self._on_done, job))

    def _next(self) -> _Job | None:
        is_full = self._num_long_running >= max(1, self._num_threads - 1)
        return next((job for job in self._waiting if not (job.is_long and is_full)), None)

    def _on_done(self, job: _Job, running: asyncio.Future[Any]) -> None:
        self._num_running -= 1
        self._num_long_running -= job.is_long
        error = None if running.cancelled() else running.exception()
        if job.result.done():  # the client has left
            pass
        elif running.cancelled():
            job.result.cancel()
        elif error is not None:
            job.result.set_exception(error)
        else:
            job.result.set_result(running.result())
        self._start_waiting()


def _do_nothing(stopper: Stopper) -> None:
    """The work of a job that was taken."""
