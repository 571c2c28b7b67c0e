"""Prefix reuse with resume points. A prompt that begins like an earlier one resumes from a point in all KV groups at once.

A layer with a window cannot be rebuilt from its last window alone, since every layer looks one window further back. So a hit
resumes only where everything that the next query needs was kept. A **resume point** at p tokens holds all pages of [0, p) in
groups without a window. In groups with a window, it holds the pages of the window before p.

A point can also be resumed before its end, as far back as its pages reach. A point shorter than every window can be resumed at
any length. A longer one has up to `POINT_SLACK` more tokens before its window, if they were stored. So prompts that happen to
share a few tokens more than others leave a point that serves the others too. A resumed request must compute at least one token
to have logits, so the same prompt resumes at its last token.

Points are kept at the end of a prompt and of an answer, where prompts were seen to diverge, and at the lengths that a request
names. A request names lengths because a chat's next prompt begins like this one only up to the model's turn.

Points are found by content: the token ids, the content keys of media, and the request's salt, which keeps tenants apart. The
content is compared itself, not a hash of it, because a collision would answer one user's prompt with another's cache.

There are at most as many points as pages, or `MIN_BOUND` if that is more. Points are evicted by last use, first those that free
a page at once. Nothing is scanned for that. The arena reports pages that only one point holds, and these points are kept in a
heap. An entry of the heap may be out of date. It is checked when it reaches the top, so that each use and each change of a page
costs one entry.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from culet.cache.arena import Arena
from culet.cache.changes import PointRemoved, PrefixChange, stored_change
from culet.cache.content import PrefixContent
from culet.cache.point_tree import Match, PointTree, ResumePoint
from culet.cache.spec import CacheLayout
from culet.types import PageTable

POINT_SLACK = 32  # tokens before its end at which a point can still be resumed, if they are stored
MIN_BOUND = 256  # points that may exist in any case
_MIN_COMPACTED = 64  # entries of removed points that the heap of candidates may have in any case


class PrefixCache:
    """Resume points by content. They keep pages only until a sequence needs them, and the least recently used go first."""

    def __init__(self, arena: Arena, layout: CacheLayout) -> None:
        self._arena = arena
        self._groups = layout.groups
        self._tree = PointTree()
        self._max_points = max(MIN_BOUND, arena.num_pages)
        self._by_use: OrderedDict[ResumePoint, None] = OrderedDict()
        self._num_uses = 0
        self._points: dict[int, ResumePoint] = {}  # by point_id
        # By page, the ids of all points that hold it, combined by exclusive or. If only one point holds it, this is its id.
        self._holders = [0] * arena.num_pages
        self._candidates: list[tuple[int, int]] = []  # a heap of (last_use, point_id)
        self._changes: list[PrefixChange] | None = None  # since the last `drain_changes`, if anyone follows them

    def record_changes(self) -> None:
        """Forget all points, and record changes from now on. Someone must drain them."""
        self.clear()
        self._changes = []

    def drain_changes(self) -> list[PrefixChange]:
        """Return the changes since the last call, in order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    @property
    def num_resume_points(self) -> int:
        return len(self._by_use)

    def resume_points(self) -> list[ResumePoint]:
        """Return all points, the least recently used first."""
        return list(self._by_use)

    def find(self, tokens: Sequence[int], content: PrefixContent, limit: int) -> Match:
        """Find the point that resumes `tokens` furthest, at `limit` tokens at most."""
        return self._tree.find(tokens, content, limit)

    def touch(self, point: ResumePoint) -> None:
        """Mark `point` as used, so that it is evicted later."""
        self._by_use.move_to_end(point)
        point.last_use = self._next_use()

    def _next_use(self) -> int:
        self._num_uses += 1
        return self._num_uses

    def touch_at(self, tokens: Sequence[int], length: int, content: PrefixContent) -> None:
        """Touch the point at `length` tokens, if it exists."""
        point = self._tree.at(content, content.upto(tokens, length), length)
        if point is not None:
            self.touch(point)

    def insert(
        self,
        tokens: Sequence[int],
        length: int,
        content: PrefixContent,
        tables: Sequence[PageTable],
        stored_from: Sequence[int],
    ) -> None:
        """Keep a point that resumes `tokens` at `length`.

        `tables` belong to the sequence that computed them. In each group, it has stored all tokens from `stored_from` on.
        """
        units, media = content.upto(tokens, length), content.media_before(length)
        earliest, kept = self._cut(length, tables, stored_from)
        known = self._tree.at(content, units, length)
        if known is not None:
            if known.earliest <= earliest and known.media == media:
                self.touch(known)
                return
            self._remove(known)
        use = self._next_use()
        point = ResumePoint(length, earliest, kept, tuple(stored_from), content.salt, media, point_id=use, last_use=use)
        self._arena.keep(point.pages)
        if self._changes is not None:
            self._changes.append(stored_change(self._tree, point, units))
        self._tree.add(point, units)
        self._by_use[point] = None
        self._points[point.point_id] = point
        self._mark_holder(point)
        if len(self._points) > self._max_points:
            self._remove(next(iter(self._by_use)))

    def make_room(self, num_pages: int) -> None:
        """Evict points until `num_pages` are free or none can be freed. Points that free a page immediately go first."""
        while self._arena.num_free < num_pages and self._arena.num_reclaimable:
            # If every page has several holders, the oldest point goes, and others free more when their turn comes.
            self._remove(self._oldest_that_frees() or next(iter(self._by_use)))

    def _oldest_that_frees(self) -> ResumePoint | None:
        """Return the least recently used point that frees a page when it is removed, or None if none does."""
        for page in self._arena.drain_alone():
            if self._arena.frees(page):
                self._nominate(self._points[self._holders[page]])
        while self._candidates:
            last_use, point_id = heapq.heappop(self._candidates)
            point = self._points.get(point_id)
            if point is None:
                continue
            point.is_candidate = False
            if point.last_use != last_use:
                self._nominate(point)
            elif self._frees_any(point):
                return point
        return None

    def _nominate(self, point: ResumePoint) -> None:
        if not point.is_candidate:
            point.is_candidate = True
            heapq.heappush(self._candidates, (point.last_use, point.point_id))

    def _mark_holder(self, point: ResumePoint) -> None:
        """Add `point` to the holders of its pages, or remove it."""
        for page in point.pages:
            self._holders[page] ^= point.point_id

    def clear(self) -> None:
        """Remove all points."""
        for point in list(self._by_use):
            self._remove(point)

    def _cut(self, length: int, tables: Sequence[PageTable], stored_from: Sequence[int]) -> tuple[int, tuple[PageTable, ...]]:
        """Return the earliest length that a point at `length` can be resumed at, and the part of `tables` that it needs."""
        first_stored = [
            max(first, table.first * group.page_tokens)
            for group, table, first in zip(self._groups, tables, stored_from, strict=True)
        ]
        wanted = max(self._earliest(first_stored), length - POINT_SLACK)
        assert wanted <= length, "a resume point lacks pages"
        kept = []
        for group, table in zip(self._groups, tables, strict=True):
            first = group.first_visible(wanted) // group.page_tokens
            pages = table.pages[first - table.first : group.pages_for(length) - table.first]
            assert len(pages) == max(0, group.pages_for(length) - first), "a resume point lacks pages"
            assert min(pages, default=0) >= 0, "a resume point reaches into tokens that were not stored"
            kept.append(PageTable(first, pages))
        first_kept = [table.first * group.page_tokens for group, table in zip(self._groups, kept, strict=True)]
        return self._earliest([max(pair) for pair in zip(first_stored, first_kept, strict=True)]), tuple(kept)

    def _earliest(self, first_stored: Sequence[int]) -> int:
        """Return the shortest length whose next query finds all its keys, if each group has those from `first_stored` on."""
        earliest = 0
        for group, first in zip(self._groups, first_stored, strict=True):
            if first:
                assert group.reach is not None, "a resume point lacks pages"
                earliest = max(earliest, first + group.reach - 1)
        return earliest

    def _frees_any(self, point: ResumePoint) -> bool:
        """Return whether dropping `point` frees a page."""
        for group, table in zip(self._groups, point.tables, strict=True):
            # Without a window, whoever holds a page holds all pages before it, so the last page is shared least.
            pages = table.pages[-1:] if group.window is None else table.pages
            if any(self._arena.frees(page) for page in pages):
                return True
        return False

    def _remove(self, point: ResumePoint) -> None:
        del self._by_use[point], self._points[point.point_id]
        self._mark_holder(point)
        self._tree.remove(point)
        if self._changes is not None:
            self._changes.append(PointRemoved(point.point_id))
        self._arena.drop(point.pages)
        if len(self._candidates) > 2 * len(self._points) + _MIN_COMPACTED:
            self._candidates = [entry for entry in self._candidates if entry[1] in self._points]
            heapq.heapify(self._candidates)
