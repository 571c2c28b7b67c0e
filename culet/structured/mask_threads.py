"""Compute the masks of a step in threads, for at most a fixed time per step.

Most masks take microseconds, but a grammar that a client chooses can make one take a tenth of a second. The step does not wait
for it: draws whose masks are not there in time do not count, and are drawn again in a later step. The computation goes on
meanwhile, and sequences without a grammar notice little. Matchers whose masks are slow have threads of their own, so that they
do not hold up the others, and the one that has used least time comes first.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import inf

from culet.structured.matcher import Matcher

SLOW_S = 0.005  # a matcher whose last masks took longer is slow
Job = tuple[Matcher, tuple[int, ...]]  # a matcher, and the drafts that it computes masks for


class MaskThreads:
    """Threads that compute masks. Call it only from the engine's thread."""

    def __init__(self) -> None:
        num_cores = os.cpu_count() or 1
        self._num_quick = max(1, min(8, num_cores // 2))
        self._quick = ThreadPoolExecutor(self._num_quick, "masks")
        self._slow = ThreadPoolExecutor(max(1, num_cores // 4), "slow-masks")
        self._late: set[Future[None]] = set()  # work that earlier steps did not wait for

    def compute(self, wanted: Sequence[Job], limit_s: float | None, *, skip_slow: bool) -> None:
        """Have each matcher compute its masks. Return when all have them, or when the time is over.

        A matcher that is still busy then has its masks later. With `skip_slow`, do not wait for slow ones.
        """
        deadline = inf if limit_s is None else time.monotonic() + limit_s
        jobs = sorted([job for job in wanted if not job[0].is_busy], key=lambda job: job[0].mask_s)
        for matcher, _ in jobs:
            matcher.is_busy = True
        # Sort out the slow ones before any thread starts, because threads change who is slow.
        quick, slow = deque([job for job in jobs if not job[0].is_slow]), [job for job in jobs if job[0].is_slow]
        threads = {self._quick.submit(_work, quick, deadline) for _ in range(min(self._num_quick, len(quick)))}
        self._late = {future for future in self._late if not future.done()}
        self._late |= {self._slow.submit(_work, deque([job]), deadline) for job in slow}
        wait(threads if skip_slow else threads | self._late, limit_s)
        self._late |= threads
        for matcher, _ in _drain(quick):  # not begun, so the next step asks again
            matcher.is_busy = False


def _work(jobs: deque[Job], deadline: float) -> None:
    """Compute masks until there are no more jobs."""
    for matcher, drafts in _drain(jobs):
        began = time.perf_counter()
        try:
            matcher.compute(drafts, deadline)
        except BaseException as error:  # A panic in llguidance is no Exception. Nobody would see it in this thread.
            matcher.give_up(f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - began
        matcher.mask_s += seconds
        matcher.is_slow = seconds > SLOW_S
        matcher.is_busy = False


def _drain(jobs: deque[Job]) -> Iterator[Job]:
    """Take jobs until there are none. Several threads may do so."""
    while True:
        try:
            yield jobs.popleft()
        except IndexError:
            return
