"""Do long work on the event loop in short turns, so that other requests are served in between.

The work is Python code that holds the interpreter's lock, so a thread would not help. All long work of the process takes turns:
between two turns, whoever does them, every other task that is ready runs once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar

TURN_S = 0.002
T = TypeVar("T")


class Turns:
    """The turns of one event loop."""

    def __init__(self, turn_s: float = TURN_S) -> None:
        self._turn_s = turn_s
        self._lock = asyncio.Lock()  # first come, first served

    async def run(self, steps: Iterator[T]) -> AsyncIterator[list[T]]:
        """Run an iterator of short steps to its end. Yield what each turn produced."""
        has_more = True
        while has_more:
            async with self._lock:
                produced, has_more = self._take(steps)
                if has_more:
                    await asyncio.sleep(0)  # before the next turn, of this or of other work, everything else runs once
            yield produced

    async def finish(self, steps: Iterator[object]) -> None:
        """Run an iterator of short steps to its end and drop what they yield."""
        async for _ in self.run(steps):
            pass

    def _take(self, steps: Iterator[T]) -> tuple[list[T], bool]:
        """Run steps until the turn is over. Return (what they yielded, whether there may be more)."""
        end = time.perf_counter() + self._turn_s
        produced = []
        for step in steps:
            produced.append(step)
            if time.perf_counter() > end:
                return produced, True
        return produced, False


def json_size(value: Any, max_size: int) -> Iterator[int]:
    """Yield the approximate size of a value as JSON, growing, as steps of a turn. Stop when it exceeds `max_size`."""
    stack: list[Iterable[Any]] = [(value,)]
    size = count = 0
    while stack:
        for item in stack.pop():
            count += 1
            size += 2
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict):
                stack += (item, item.values())  # keys and values
            elif isinstance(item, list | tuple):
                stack.append(item)
            else:
                size += 4
            if size > max_size:
                yield size
                return
            if count % 256 == 0:
                yield size
    yield size
