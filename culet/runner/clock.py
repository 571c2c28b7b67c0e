"""Measure how long parts of steps take on the device, without waiting for it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

EVERY = 8  # on a GPU, only one in this many spans of a name is timed and counts for all, because events cost host time


class DeviceClock:
    """Counts seconds by name. On a GPU, a span is counted by a later call, once the device has passed both its ends."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._num_spans: Counter[str] = Counter()
        self._open: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time everything that is launched within the span."""
        if not self._is_gpu:
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began)
            return
        self._num_spans[name] += 1
        if self._num_spans[name] % EVERY != 1:
            yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._open.append((name, begin, end))
        self._collect()

    def seconds(self, name: str) -> float:
        """Return the total of all spans of `name` that have ended."""
        self._collect()
        return self._seconds.get(name, 0.0)

    def _collect(self) -> None:
        while self._open and self._open[0][2].query():
            name, begin, end = self._open.popleft()
            self._add(name, EVERY * begin.elapsed_time(end) / 1e3)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
