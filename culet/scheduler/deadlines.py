"""The deadlines of requests that have not ended."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

_FEW = 64  # as many deadlines of ended requests may always stay


class Deadlines:
    """Deadlines in order. `is_alive` tells from its id and arrival whether a request has not ended."""

    def __init__(self, is_alive: Callable[[str, int], bool]) -> None:
        self._is_alive = is_alive
        self._heap: list[tuple[float, int, str]] = []  # deadline, arrival, request id

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, arrival: int, request_id: str, num_alive: int) -> None:
        """Add a deadline. Forget those of requests that have ended, whenever they may be the larger part."""
        if len(self._heap) > 2 * num_alive + _FEW:
            self._heap = [entry for entry in self._heap if self._is_alive(entry[2], entry[1])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline, arrival, request_id))

    def expired(self, now: float) -> Iterator[str]:
        """Remove the deadlines that have passed, and yield the ids of requests that have not ended."""
        while self._heap and self._heap[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._heap)
            if self._is_alive(request_id, arrival):
                yield request_id
