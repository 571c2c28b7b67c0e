"""Prefix reuse with resume points. A prompt that begins like an earlier one resumes from a point in all KV groups at once.

A layer with a window cannot be rebuilt from its last window alone, since every layer looks one window further back. So a hit
resumes only where everything that the next query needs was kept. A **resume point** at p tokens holds all pages of [0, p) in
groups without a window. In groups with a window, it holds the pages of the window before p.

If one more token before the window is available (always at the end of a prompt), it is kept too, so that the point can also
resume at p - 1. A resumed request must compute at least one token to have logits. So the same prompt resumes at its last
token, and a longer one at p.

Points are kept at the end of a prompt and of an answer, where prompts were seen to diverge, and at the lengths that a request
names. A request names lengths because a chat's next prompt begins like this one only up to the model's turn.

Points are found by content. Each full page of tokens has a key that is chained from the key before it. The tokens after the
last full page are the point's tail. A look-up follows the keys of the prompt as far as they are known, then tries tails from
the deepest page back. Keys cover the token ids, the content keys of media in the page, and the request's salt, which keeps
tenants apart. Keys are cryptographic digests, because a collision would answer one user's prompt with another's cache.

Points are evicted by last use, first those that free a page at once. Nothing is scanned for that. The arena reports pages that
only one point holds, and these points are kept in a heap. An entry of the heap may be out of date. It is checked when it
reaches the top, so that each use and each change of a page costs one entry.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import cast

from culet.cache.arena import Arena
from culet.cache.changes import PageRemoved, PageStored, PointRemoved, PointStored, PrefixChange
from culet.cache.spec import CacheLayout
from culet.types import MediaSpan, PageTable

DIGEST_BYTES = 16
_MIN_COMPACTED = 64  # entries of removed points that the heap of candidates may have in any case
Tail = tuple[int | tuple[int, int, bytes], ...]  # token ids, then the media among them


class PageKeys:
    """The chained content keys of one sequence. `upto(tokens, n)[i]` is the key of its first i full pages."""

    def __init__(self, page_tokens: int, salt: str = "", media: Sequence[MediaSpan] = ()) -> None:
        self.page_tokens = page_tokens
        self._media = tuple(media)
        self._keys = [_digest(salt.encode("utf-8", "surrogatepass"))]

    def upto(self, tokens: Sequence[int], num_tokens: int) -> list[bytes]:
        """Return the keys of the pages that `num_tokens` tokens fill. Each is computed once, since tokens never change."""
        num_pages = num_tokens // self.page_tokens
        num_known = len(self._keys) - 1
        if num_known < num_pages:
            first = num_known * self.page_tokens
            fresh = array("I", tokens[first : num_pages * self.page_tokens])
            for begin in range(0, len(fresh), self.page_tokens):
                content = fresh[begin : begin + self.page_tokens].tobytes()
                for start, length, key in self._media_in(first + begin, first + begin + self.page_tokens):
                    content += array("q", (start, length, len(key))).tobytes() + key
                self._keys.append(_digest(self._keys[-1] + content))
        return self._keys[: num_pages + 1]

    def extra_of(self, page: int) -> tuple[str, ...]:
        """Return what the key of a page covers besides token ids: the salt, if there is one, and the keys of media."""
        media = self._media_in(page * self.page_tokens, (page + 1) * self.page_tokens)
        salt = () if self._keys[0] == _UNSALTED else (self._keys[0].hex(),)
        return (*salt, *(key.hex() for _, _, key in media))

    def tail(self, tokens: Sequence[int], begin: int, end: int) -> Tail:
        """Return the content from `begin` to `end`, which tells apart sequences with the same full pages before `begin`."""
        return (*tokens[begin:end], *self._media_in(begin, end))

    def may_resume(self, length: int) -> bool:
        """Return whether a sequence may resume at `length` tokens. It may not inside media that are computed as a whole."""
        return not (self._media and any(span.is_whole and span.start < length < span.end for span in self._media))

    def _media_in(self, begin: int, end: int) -> list[tuple[int, int, bytes]]:
        """Return (start relative to `begin`, length, key) of the media that overlap tokens `begin .. end - 1`."""
        if not self._media:
            return []
        return [(span.start - begin, span.length, span.key) for span in self._media if span.start < end and span.end > begin]


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


_UNSALTED = _digest(b"")


def tail_key(tail: Tail, tail_len: int) -> bytes:
    """Return a key of a tail with this number of tokens."""
    return _digest(array("I", cast(tuple[int, ...], tail[:tail_len])).tobytes() + repr(tail[tail_len:]).encode())


@dataclass(eq=False, slots=True)
class ResumePoint:
    """Pages to resume a sequence from, at any length from `earliest` to `length` tokens (they differ by at most one)."""

    length: int
    earliest: int
    tables: tuple[PageTable, ...]  # one per KV group
    key: bytes  # key of the full pages
    tail: Tail  # the content after them
    tail_len: int  # number of tokens in the tail
    point_id: int
    last_use: int  # a count of uses, larger for later ones
    is_candidate: bool = False  # whether it is in the heap of points that may free a page

    @property
    def pages(self) -> list[int]:
        return [page for table in self.tables for page in table.pages]


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a look-up, which says how much of a prompt is known."""

    point: ResumePoint | None  # the best point to resume from
    resume: int  # tokens that need not be computed
    known: int  # tokens of full pages that some resume point begins with. Beyond `resume`, they mark a junction.


@dataclass(slots=True)
class _Node:
    """A known run of full pages, and the resume points that end within the page after it."""

    parent: bytes | None
    num_children: int = 0
    tails: dict[Tail, ResumePoint] = field(default_factory=dict)
    num_of_len: dict[int, int] = field(default_factory=dict)  # tail length -> number of points


class PrefixCache:
    """Resume points by content. They keep pages only until a sequence needs them, and the least recently used go first."""

    def __init__(self, arena: Arena, layout: CacheLayout) -> None:
        self._arena = arena
        self._groups = layout.groups
        # Keys use the page size of a group without a window, which holds the whole history. A drafter's group does not count,
        # so that prompts diverge where they would without a drafter.
        whole = [group.page_tokens for group in layout.groups if group.window is None and not group.spec.owner]
        self.page_tokens = max(whole or [group.page_tokens for group in layout.groups])
        self._nodes: dict[bytes, _Node] = {}
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

    def find(self, tokens: Sequence[int], keys: PageKeys, limit: int) -> Match:
        """Find the point that resumes `tokens` furthest, at `limit` tokens at most."""
        path = []
        for key in keys.upto(tokens, len(tokens)):
            if key not in self._nodes:
                break
            path.append(self._nodes[key])
        known = max(0, len(path) - 1) * self.page_tokens
        for depth in range(len(path) - 1, -1, -1):
            node, begin = path[depth], depth * self.page_tokens
            for tail_len in sorted(node.num_of_len, reverse=True):
                if begin + tail_len > len(tokens):
                    continue
                point = node.tails.get(keys.tail(tokens, begin, begin + tail_len))
                if point is None or max(1, point.earliest) > limit:
                    continue
                resume = min(point.length, limit)
                if keys.may_resume(resume):
                    return Match(point, resume, known)
        return Match(None, 0, known)

    def touch(self, point: ResumePoint) -> None:
        """Mark `point` as used, so that it is evicted later."""
        self._by_use.move_to_end(point)
        point.last_use = self._next_use()

    def _next_use(self) -> int:
        self._num_uses += 1
        return self._num_uses

    def touch_at(self, tokens: Sequence[int], length: int, keys: PageKeys) -> None:
        """Touch the point at `length` tokens, if it exists."""
        node = self._nodes.get(keys.upto(tokens, length)[-1])
        point = node.tails.get(keys.tail(tokens, length - length % self.page_tokens, length)) if node else None
        if point is not None:
            self.touch(point)

    def insert(self, tokens: Sequence[int], length: int, keys: PageKeys, tables: Sequence[PageTable]) -> None:
        """Keep a point that resumes `tokens` at `length`. `tables` belong to the sequence that computed them."""
        key, tail_len = keys.upto(tokens, length)[-1], length % self.page_tokens
        tail = keys.tail(tokens, length - tail_len, length)
        earliest, kept = self._cut(length, tables)
        known = self._nodes[key].tails.get(tail) if key in self._nodes else None
        if known is not None:
            if known.earliest <= earliest:
                self.touch(known)
                return
            self._remove(known)
        use = self._next_use()
        point = ResumePoint(length, earliest, kept, key, tail, tail_len, point_id=use, last_use=use)
        self._arena.keep(point.pages)
        self._link(point, tokens, keys)
        self._by_use[point] = None
        self._points[point.point_id] = point
        self._mark_holder(point)

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

    def _cut(self, length: int, tables: Sequence[PageTable]) -> tuple[int, tuple[PageTable, ...]]:
        """Return the earliest length that `tables` can resume at, and the part of them that a point at `length` needs."""
        earliest = length - 1
        for group, table in zip(self._groups, tables, strict=True):
            if table.first > group.first_visible(length - 1) // group.page_tokens:
                earliest = length
        kept = []
        for group, table in zip(self._groups, tables, strict=True):
            first = group.first_visible(earliest) // group.page_tokens
            pages = table.pages[first - table.first : group.pages_for(length) - table.first]
            assert len(pages) == max(0, group.pages_for(length) - first), "a resume point lacks pages"
            assert min(pages, default=0) >= 0, "a resume point reaches into tokens that were not stored"
            kept.append(PageTable(first, pages))
        return earliest, tuple(kept)

    def _frees_any(self, point: ResumePoint) -> bool:
        """Return whether dropping `point` frees a page."""
        for group, table in zip(self._groups, point.tables, strict=True):
            # Without a window, whoever holds a page holds all pages before it, so the last page is shared least.
            pages = table.pages[-1:] if group.window is None else table.pages
            if any(self._arena.frees(page) for page in pages):
                return True
        return False

    def _link(self, point: ResumePoint, tokens: Sequence[int], keys: PageKeys) -> None:
        parent = None
        for num_pages, key in enumerate(keys.upto(tokens, point.length)):
            if key not in self._nodes:
                self._nodes[key] = _Node(parent)
                if parent is not None:
                    self._nodes[parent].num_children += 1
                if self._changes is not None:
                    begin = max(0, num_pages - 1) * self.page_tokens
                    page = tuple(tokens[begin : num_pages * self.page_tokens])
                    extra = keys.extra_of(num_pages - 1) if num_pages else ()
                    self._changes.append(PageStored(key, parent or b"", num_pages, page, extra))
            parent = key
        if self._changes is not None:
            num_pages = point.length // self.page_tokens
            self._changes.append(PointStored(point.key, num_pages, point.tail_len, tail_key(point.tail, point.tail_len)))
        node = self._nodes[point.key]
        node.tails[point.tail] = point
        node.num_of_len[point.tail_len] = node.num_of_len.get(point.tail_len, 0) + 1

    def _remove(self, point: ResumePoint) -> None:
        del self._by_use[point], self._points[point.point_id]
        self._mark_holder(point)
        self._arena.drop(point.pages)
        if len(self._candidates) > 2 * len(self._points) + _MIN_COMPACTED:
            self._candidates = [entry for entry in self._candidates if entry[1] in self._points]
            heapq.heapify(self._candidates)
        node = self._nodes[point.key]
        del node.tails[point.tail]
        node.num_of_len[point.tail_len] -= 1
        if not node.num_of_len[point.tail_len]:
            del node.num_of_len[point.tail_len]
        key: bytes | None = point.key
        num_pages = point.length // self.page_tokens
        if self._changes is not None:
            self._changes.append(PointRemoved(point.key, num_pages, point.tail_len, tail_key(point.tail, point.tail_len)))
        while key is not None and not self._nodes[key].tails and not self._nodes[key].num_children:
            if self._changes is not None:
                self._changes.append(PageRemoved(key, num_pages))
            num_pages -= 1
            key = self._nodes.pop(key).parent
            if key is not None:
                self._nodes[key].num_children -= 1
