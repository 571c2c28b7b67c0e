"""Count the bytes of the decoded media that exist, so that clients cannot fill the server's memory with them. No torch."""

from __future__ import annotations

import weakref
from collections import deque

from culet.errors import QueueFull
from culet.media.items import Medium


class HeldBytes:
    """The size of all decoded media that are in use, within a bound. An item counts until nothing refers to it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._freed: deque[int] = deque()  # sizes of items that are gone. Any thread may add to it.

    @property
    def num_bytes(self) -> int:
        while self._freed:
            self._num_bytes -= self._freed.popleft()
        return self._num_bytes

    def add(self, medium: Medium) -> None:
        """Count a medium. Raise if there are too many bytes with it. Call from one thread."""
        num_bytes = self.num_bytes + sum([len(item.data) for item in medium.items])
        if num_bytes > self._max_bytes:
            problem = f"media: those of all requests would take {num_bytes} bytes, above {self._max_bytes}"
            raise QueueFull(problem, hint="try again later, or raise --max-media-bytes")
        self._num_bytes = num_bytes
        for item in medium.items:
            weakref.finalize(item, self._freed.append, len(item.data)).atexit = False
