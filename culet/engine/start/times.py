"""Measure how long each part of the startup takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from culet.log import logger
from culet.parallel.progress import begin


class StartTimes:
    """The duration of each part of the startup in seconds, in order. The remaining time counts as `other`."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._started = time.perf_counter()
        self.total = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started

    def note(self, name: str, text: str) -> None:
        """Add a remark about a part to the log line."""
        self._notes[name] = text

    def finish(self) -> None:
        """Log the parts and the total."""
        self.total = time.perf_counter() - self._started
        self.parts["other"] = max(0.0, self.total - sum(self.parts.values()))
        parts = [f"{name} {seconds:.1f}" + self._note(name) for name, seconds in self.parts.items()]
        logger.info("engine loaded in %.1f s: %s", self.total, ", ".join(parts))

    def _note(self, name: str) -> str:
        return f" ({self._notes[name]})" if name in self._notes else ""
