"""What an engine can resume, as far as its reports say. The router asks it with the same page keys that the engine uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from culet.cache.changes import PageRemoved, PageStored, PointStored, PrefixChange
from culet.cache.prefix import PageKeys, tail_key

MAX_ENTRIES = 1 << 17  # pages and points that are remembered of one engine, in about 30 MB


@dataclass(frozen=True, slots=True)
class Overlap:
    """What an engine has of a prompt."""

    resume: int = 0  # tokens that it need not compute
    known: int = 0  # tokens of full pages that some of its resume points begin with


class KnownPrefixes:
    """The resume points of one engine. If there are very many, those that were reported first are forgotten."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self._points: OrderedDict[tuple[bytes, int, bytes], None] = OrderedDict()  # page key, tail length and tail key
        self._tail_lens: dict[bytes, dict[int, int]] = {}  # page key -> tail length -> number of points

    @property
    def num_points(self) -> int:
        return len(self._points)

    def clear(self) -> None:
        """Forget everything, because the engine is gone."""
        self._pages.clear()
        self._points.clear()
        self._tail_lens.clear()

    def apply(self, changes: Iterable[PrefixChange]) -> None:
        """Follow what the engine reports."""
        for change in changes:
            if isinstance(change, PageStored):
                self._pages[change.key] = None
                if len(self._pages) > self._max_entries:
                    self._pages.popitem(last=False)
            elif isinstance(change, PageRemoved):
                self._pages.pop(change.key, None)
            elif isinstance(change, PointStored):
                self._add(change.key, change.tail_len, change.tail_key)
            else:
                self._discard((change.key, change.tail_len, change.tail_key))

    def find(self, tokens: Sequence[int], keys: PageKeys) -> Overlap:
        """Return what the engine has of a prompt. At least one token must be computed."""
        limit = len(tokens) - 1
        path = []
        for key in keys.upto(tokens, len(tokens)):
            if key not in self._pages:
                break
            path.append(key)
        known = max(0, len(path) - 1) * keys.page_tokens
        for num_pages in range(len(path) - 1, -1, -1):
            key, begin = path[num_pages], num_pages * keys.page_tokens
            for tail_len in sorted(self._tail_lens.get(key, ()), reverse=True):
                end = begin + tail_len
                if end > len(tokens):
                    continue
                if (key, tail_len, tail_key(keys.tail(tokens, begin, end), tail_len)) not in self._points:
                    continue
                resume = min(end, limit)
                if resume > 0 and keys.may_resume(resume):
                    return Overlap(resume, known)
        return Overlap(0, known)

    def _add(self, key: bytes, tail_len: int, tail: bytes) -> None:
        point = (key, tail_len, tail)
        if point in self._points:
            return
        self._points[point] = None
        counts = self._tail_lens.setdefault(key, {})
        counts[tail_len] = counts.get(tail_len, 0) + 1
        if len(self._points) > self._max_entries:
            self._discard(next(iter(self._points)))

    def _discard(self, point: tuple[bytes, int, bytes]) -> None:
        if point not in self._points:
            return
        del self._points[point]
        key, tail_len, _ = point
        counts = self._tail_lens[key]
        counts[tail_len] -= 1
        if not counts[tail_len]:
            del counts[tail_len]
        if not counts:
            del self._tail_lens[key]
