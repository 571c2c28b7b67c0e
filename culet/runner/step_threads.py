"""Choose how many threads torch uses for a step on a CPU: all of them or one.

Torch's threads wait for each other after every operation. That is fast on idle cores. While other programs are using the cores,
one of the threads is almost always without a core, and the others wait for it. A single thread is then several times as fast
(docs/log/cpu.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# The share of a step that the engine's thread may wait. On idle cores it waits for up to a quarter, on busy ones for half.
MAX_WAIT = 1 / 3
MIN_IDLE = 0.5  # of the other threads' cores. Below, they are not used again.
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
_STAT = Path("/proc/stat")


def idle_seconds() -> float:
    """Return the total idle time of the machine's cores, or infinity if the system does not report it."""
    try:
        fields = _STAT.read_text().split(maxsplit=6)
        return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return float("inf")


class StepThreads:
    """Measures steps and decides how many threads the next one uses.

    A step that waited long for its threads is the last with all of them. When enough cores are idle, all are used again. If
    that fails soon, the next try comes later.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        idle_clock: Callable[[], float] = idle_seconds,
    ) -> None:
        """Use at most the threads that torch has now."""
        self._most = self.num_threads = torch.get_num_threads()
        self._clock, self._cpu_clock, self._idle_clock = clock, cpu_clock, idle_clock
        self._retry_s = FIRST_RETRY_S
        self._changed_at = self._looked_at = clock()
        self._idle_s = 0.0  # idle time at `_looked_at`

    @contextmanager
    def use(self) -> Iterator[None]:
        """Set torch's number of threads for a step, and restore it afterwards."""
        if self._most == 1:
            yield
            return
        if self.num_threads == 1:
            self._look_for_idle_cores()
        usual = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(usual)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure a part of a step that waits for nothing but its threads and the cores."""
        began, cpu_began = self._clock(), self._cpu_clock()
        yield
        if self.num_threads > 1:
            self._note(self._clock() - began, self._cpu_clock() - cpu_began)

    def _note(self, seconds: float, cpu_seconds: float) -> None:
        """Learn from a step with several threads."""
        if seconds - cpu_seconds <= MAX_WAIT * seconds:
            return
        now = self._clock()
        has_failed_soon = now - self._changed_at < self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S) if has_failed_soon else FIRST_RETRY_S
        self.num_threads = 1
        self._changed_at = self._looked_at = now
        self._idle_s = self._idle_clock()

    def _look_for_idle_cores(self) -> None:
        now = self._clock()
        if now - self._looked_at < self._retry_s:
            return
        idle_s = self._idle_clock()
        # If the system does not report idle time, the only way to find out is to try.
        if idle_s == float("inf") or idle_s - self._idle_s >= MIN_IDLE * (self._most - 1) * (now - self._looked_at):
            self.num_threads, self._changed_at = self._most, now
        self._looked_at, self._idle_s = now, idle_s
