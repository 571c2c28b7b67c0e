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

There are at most as many points as pages, or `MIN_BOUND` if that is more. Pages are freed by the last use of any point that
holds them. So points are evicted by last use, but a point that would free nothing is only **covered**: sequences, or points
that were used later, hold its pages. It stays until one of its pages has no such holder any more, and is then the next to go.
A request often leaves several points on the same pages. If they did not count as one, points in use would go before them.
Nothing is scanned for that. A point is covered at most once after each use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from culet.cache.arena import Arena
from culet.cache.changes import PointRemoved, PrefixChange, stored_change
from culet.cache.content import PrefixContent
from culet.cache.point_tree import Match, PointTree, ResumePoint
from culet.cache.spec import CacheLayout
from culet.types import PageTable

POINT_SLACK = 32  # tokens before its end at which a point can still be resumed, if they are stored
MIN_BOUND = 256  # points that may exist in any case


class PrefixCache:
    """Resume points by content. They keep pages only until a sequence needs them, and the least recently used go first."""

    def __init__(self, arena: Arena, layout: CacheLayout) -> None:
        self._arena = arena
        self._groups = layout.groups
        self._tree = PointTree()
        self._max_points = max(MIN_BOUND, arena.num_pages)
        self._by_use: OrderedDict[ResumePoint, None] = OrderedDict()  # without the covered ones, which are older
        self._covered: OrderedDict[ResumePoint, None] = OrderedDict()
        self._covered_at: dict[int, set[ResumePoint]] = {}  # covered points by the pages that they may free
        self._num_uses = 0
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
        return len(self._by_use) + len(self._covered)

    def resume_points(self) -> list[ResumePoint]:
        """Return all points, the least recently used first."""
        return sorted([*self._covered, *self._by_use], key=lambda point: point.last_use)

    def find(self, tokens: Sequence[int], content: PrefixContent, limit: int) -> Match:
        """Find the point that resumes `tokens` furthest, at `limit` tokens at most."""
        return self._tree.find(tokens, content, limit)

    def touch(self, point: ResumePoint) -> None:
        """Mark `point` as used, so that it is evicted later."""
        if point in self._covered:
            self._uncover(point)
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
        if self.num_resume_points > self._max_points:
            self._remove(next(iter(self._covered or self._by_use)))

    def make_room(self, num_pages: int) -> None:
        """Evict points until `num_pages` are free or none can be freed. The pages that were not used for longest go first."""
        while self._arena.num_free < num_pages and self._arena.num_reclaimable:
            self._remove(self._next_to_go())

    def _next_to_go(self) -> ResumePoint:
        """Return the least recently used point whose pages are not held by any sequence or by any point used later."""
        self._uncover_bare()
        while self._by_use:
            point = next(iter(self._by_use))
            if any(map(self._arena.is_last_open, self._own_pages(point))):
                return point
            self._cover(point)
        return next(iter(self._covered))

    def _own_pages(self, point: ResumePoint) -> list[int]:
        """Return the pages that a point may free. Whoever holds a page without a window holds all pages before it."""
        pages: list[int] = []
        for group, table in zip(self._groups, point.tables, strict=True):
            pages += table.pages[-1:] if group.window is None else table.pages
        return pages

    def _cover(self, point: ResumePoint) -> None:
        del self._by_use[point]
        self._covered[point] = None
        for page in self._own_pages(point):
            self._covered_at.setdefault(page, set()).add(point)
        self._arena.cover(point.pages)

    def _uncover(self, point: ResumePoint) -> None:
        """Let `point` be the next that may be evicted."""
        del self._covered[point]
        for page in self._own_pages(point):
            self._covered_at[page].discard(point)
            if not self._covered_at[page]:
                del self._covered_at[page]
        self._arena.uncover(point.pages)
        self._by_use[point] = None
        self._by_use.move_to_end(point, last=False)

    def _uncover_bare(self) -> None:
        """Uncover the points on pages that only covered points hold, and put them where their last use belongs."""
        bare = [page for page in self._arena.drain_bare() if self._arena.is_bare(page)]
        points = {point for page in bare for point in self._covered_at.get(page, ())}
        for point in points:
            self._uncover(point)
        newest = max((point.last_use for point in points), default=0)
        older = list(takewhile(lambda point: point.last_use < newest or point in points, self._by_use))
        for point in sorted(older, key=lambda point: -point.last_use):
            self._by_use.move_to_end(point, last=False)

    def clear(self) -> None:
        """Remove all points."""
        for point in self.resume_points():
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

    def _remove(self, point: ResumePoint) -> None:
        if point in self._covered:
            self._uncover(point)
        del self._by_use[point]
        self._tree.remove(point)
        if self._changes is not None:
            self._changes.append(PointRemoved(point.point_id))
        self._arena.drop(point.pages)
