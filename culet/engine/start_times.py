"""Where the time of a start goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from culet.log import logger


class StartTimes:
    """Seconds of each part of a start, in order; what is between the parts counts as `other`."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._began = time.perf_counter()
        self.total = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - began

    def note(self, name: str, text: str) -> None:
        """A word on a part, for the log."""
        self._notes[name] = text

    def finish(self) -> None:
        """All parts are done: tell."""
        self.total = time.perf_counter() - self._began
        self.parts["other"] = max(0.0, self.total - sum(self.parts.values()))
        said = [f"{name} {seconds:.1f}" + self._note(name) for name, seconds in self.parts.items()]
        logger.info("ready after %.1f s: %s", self.total, ", ".join(said))

    def _note(self, name: str) -> str:
        return f" ({self._notes[name]})" if name in self._notes else ""
