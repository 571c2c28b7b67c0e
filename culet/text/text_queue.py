"""Run the rendering and tokenizing of prompts in threads, within bounds, so that long prompts do not hold up short ones.

Short prompts may use every thread. Long ones leave one thread free, and shorter ones go first among them, up to a point: each
prompt waits as if it had arrived later by a time that grows with its length, so nothing waits forever. The work of a client
that has left is dropped.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from culet.errors import QueueFull
from culet.line_process import Stopper

SHORT_BYTES = 64 << 10  # up to this size, a prompt takes a few milliseconds
_BYTES_PER_S = 100e3  # how much later a long prompt counts as arrived
_MEGABYTE = 1 << 20

# The size of the current request. It is known before anything is done with the request.
request_bytes: ContextVar[int] = ContextVar("request_bytes", default=0)
T = TypeVar("T")


@dataclass
class _Job:
    """One prompt that waits or is worked on."""

    work: Callable[[Stopper], Any]
    num_bytes: int
    result: asyncio.Future[Any]
    stopper: Stopper = field(default_factory=Stopper)
    is_running: bool = False

    @property
    def is_long(self) -> bool:
        return self.num_bytes > SHORT_BYTES


class _Lane:
    """The waiting prompts of one kind, short or long, in the order in which they are started."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_bytes = 0
        self._heap: list[tuple[float, int, _Job]] = []
        self._numbers = itertools.count()

    def add(self, job: _Job, now: float) -> None:
        heapq.heappush(self._heap, (now + job.num_bytes / _BYTES_PER_S, next(self._numbers), job))
        self.num_waiting += 1
        self.num_bytes += job.num_bytes

    def remove(self, job: _Job) -> None:
        """Remove a job. Its entry is dropped once it is the first one."""
        self._count_out(job)
        job.work = _do_nothing  # frees the prompt
        self.first()

    def first(self) -> float | None:
        """Return when the first waiting job counts as arrived, or None if none waits."""
        while self._heap and self._heap[0][2].result.done():
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self) -> _Job:
        """Remove and return the first job."""
        job = heapq.heappop(self._heap)[2]
        self._count_out(job)
        return job

    def _count_out(self, job: _Job) -> None:
        self.num_waiting -= 1
        self.num_bytes -= job.num_bytes


class TextQueue:
    """Runs work in threads. Use it from one event loop."""

    def __init__(self, num_threads: int, *, max_waiting: int, max_waiting_mb: int, purpose: str = "tokenized") -> None:
        """Create a queue. The bounds on waiting prompts hold for short and long prompts separately.

        `purpose` says in errors what is done with a prompt.
        """
        self.num_refused = 0
        self.num_dropped = 0  # because the client left
        self._num_threads = num_threads
        self._max_waiting, self._max_waiting_mb = max_waiting, max_waiting_mb
        self._purpose = purpose
        self._threads = ThreadPoolExecutor(num_threads, "text")
        self._short, self._long = _Lane(), _Lane()
        self._num_running = 0
        self._num_long_running = 0

    @property
    def num_waiting(self) -> int:
        """The number of prompts that wait for a thread."""
        return self._short.num_waiting + self._long.num_waiting

    async def run(self, work: Callable[[Stopper], T], num_bytes: int) -> T:
        """Run `work` in a thread and return its result. If this task is cancelled, the work is dropped or stopped."""
        loop = asyncio.get_running_loop()
        job = _Job(work, num_bytes, loop.create_future())
        lane = self._long if job.is_long else self._short
        if lane.num_waiting >= self._max_waiting or lane.num_bytes + num_bytes > self._max_waiting_mb * _MEGABYTE:
            self.num_refused += 1
            raise QueueFull(
                f"too many prompts are waiting to be {self._purpose} ({lane.num_waiting}, {lane.num_bytes / _MEGABYTE:.0f} MB)",
                hint="try again later",
            )
        lane.add(job, loop.time())
        self._start_waiting()
        try:
            result: T = await job.result
        except asyncio.CancelledError:
            self._leave(job, lane)
            raise
        finally:
            del job  # as in `_work`
        return result

    def close(self) -> None:
        """Drop all work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self, job: _Job, lane: _Lane) -> None:
        self.num_dropped += 1
        if not job.is_running:
            lane.remove(job)
        elif job.is_long:  # a short one ends sooner than a new process would start
            job.stopper.stop()

    def _start_waiting(self) -> None:
        while self._num_running < self._num_threads and (job := self._take_next()) is not None:
            self._num_running += 1
            self._num_long_running += job.is_long
            job.is_running = True
            self._threads.submit(self._work, job, job.work)
            job.work = _do_nothing

    def _take_next(self) -> _Job | None:
        short, long = self._short.first(), self._long.first()
        if self._num_long_running >= max(1, self._num_threads - 1):
            long = None
        if short is None and long is None:
            return None
        return self._long.take() if short is None or (long is not None and long < short) else self._short.take()

    def _work(self, job: _Job, work: Callable[[Stopper], Any]) -> None:
        """Do the work of a job, in a thread, and tell the event loop. A future of the pool would do so more slowly."""
        result, error = None, None
        try:
            result = work(job.stopper)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            job.result.get_loop().call_soon_threadsafe(self._on_done, job, result, error)
        del job, work, error  # the error refers to this frame, which would keep all of them until a garbage collection

    def _on_done(self, job: _Job, result: Any, error: BaseException | None) -> None:
        self._num_running -= 1
        self._num_long_running -= job.is_long
        if not job.result.done():  # otherwise the client has left
            if error is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(result)
        self._start_waiting()


def _do_nothing(stopper: Stopper) -> None:
    """The work of a job that was taken or removed."""
