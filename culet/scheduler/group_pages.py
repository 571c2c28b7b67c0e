"""The pages of one sequence in one KV group."""

from __future__ import annotations

from typing import NamedTuple

from culet.cache.spec import KVGroup
from culet.types import PageTable

HOLE = -1  # marks a page that was never taken because all its positions were skipped


def span(num_tokens: int, page_tokens: int) -> int:
    """Return the most pages that `num_tokens` consecutive tokens can touch, wherever they begin."""
    return 0 if num_tokens == 0 else (num_tokens + page_tokens - 2) // page_tokens + 1


def max_held_pages(group: KVGroup, num_new: int, num_logits: int) -> int | None:
    """Return the most pages a sequence holds in `group` while a row of `num_new` tokens is in flight.

    Return None if only the sequence's length bounds them. The pages cover the window before the first new token, and the
    tokens that the row stores. A chunk longer than the window leaves a hole between the two, and the tokens on either side of
    it may start and end anywhere in a page.
    """
    if group.reach is None:
        return None
    context = max(group.reach - 1, 1)  # even a window of one token keeps the page for the next token
    num_stored = min(num_new, group.reach + max(num_logits, 1) - 1)
    if num_stored == num_new:
        return span(context + num_new, group.page_tokens)
    return span(context, group.page_tokens) + span(num_stored, group.page_tokens)


class ParkedPages(NamedTuple):
    """The pages of one sequence in one KV group, while they are in host memory."""

    first: int  # logical page of the first one
    host_pages: list[int]
    stored_from: int  # as in GroupPages


class GroupPages:
    """The pages of one sequence in one KV group, starting at logical page `first`."""

    def __init__(self, group: KVGroup) -> None:
        self.group = group
        # Copied from the group because they are read for every row of every step.
        self.reach = group.reach
        self.page_tokens = group.page_tokens
        self.ahead = group.ahead
        self.first = 0
        self.pages: list[int] = []  # page ids, or HOLE
        self.stored_from = 0  # all computed tokens from here on are stored, as far back as there are pages
        self._table: PageTable | None = None

    @property
    def held(self) -> list[int]:
        return [page for page in self.pages if page != HOLE]

    @property
    def num_held(self) -> int:
        return len(self.pages) - self.pages.count(HOLE)

    @property
    def table(self) -> PageTable:
        """The page table as the runner reads it. It is cached until the pages change, since most decode steps change none."""
        if self._table is None:
            self._table = PageTable(self.first, tuple(0 if page == HOLE else page for page in self.pages))
        return self._table

    @property
    def unchanged_until(self) -> int:
        """The longest length that decoding can reach without allocating or freeing a page."""
        full = (self.first + len(self.pages)) * self.page_tokens - self.ahead
        return full if self.reach is None else min(full, (self.first + 1) * self.page_tokens + self.reach - 1)

    def reset(self, first: int, pages: list[int]) -> None:
        """Replace all pages."""
        self.first, self.pages, self._table = first, pages, None

    def to_go_on(self, earliest: int, num_tokens: int) -> tuple[int, list[int]] | None:
        """Return the pages with content that a sequence needs to go on at token `earliest` or later, and the first's number.

        It has `num_tokens` computed tokens. Return None if some of these pages are not there.
        """
        begin, end = self.group.first_visible(earliest) // self.page_tokens, self.group.pages_for(num_tokens)
        pages = self.pages[max(0, begin - self.first) : end - self.first]
        return (begin, pages) if len(pages) == end - begin and HOLE not in pages else None

    def num_behind(self, position: int) -> int:
        """Return how many pages no query at `position` or later sees."""
        if self.reach is None:
            return 0
        behind = self.pages[: max(0, (position - self.reach + 1) // self.page_tokens - self.first)]
        return len(behind) - behind.count(HOLE)

    def cut_behind(self, position: int) -> list[int]:
        """Drop the pages that no query at `position` or later sees. Return those that were held."""
        if self.reach is None:
            return []
        first = (position - self.reach + 1) // self.page_tokens
        if first <= self.first or not self.pages:
            return []
        behind = [page for page in self.pages[: first - self.first] if page != HOLE]
        self.reset(first, self.pages[first - self.first :])
        return behind

    def cut_beyond(self, num_tokens: int) -> list[int]:
        """Drop the pages past `num_tokens` tokens, except those kept ahead. Return the dropped pages."""
        end = -(-(num_tokens + self.ahead) // self.page_tokens) - self.first
        if end >= len(self.pages):
            return []
        beyond = self.pages[end:]
        assert HOLE not in beyond, "the rollback reaches into tokens that were not stored"
        self.reset(self.first, self.pages[:end])
        return beyond

    def first_stored(self, start: int, num_new: int, num_queries: int) -> int:
        """Return the position of the first new token that a row stores.

        The row stores every token that its last `num_queries` queries or a later step can see.
        """
        if self.reach is None:
            return start
        return max(start, start + num_new - self.reach - max(num_queries, 1) + 1)

    def num_missing(self, end: int, stored: int) -> int:
        """Return how many fresh pages are needed to hold positions `stored .. end - 1`."""
        begin = max(self.first + len(self.pages), stored // self.page_tokens)
        return max(0, -(-end // self.page_tokens) - begin)

    def extend(self, end: int, stored: int, fresh: list[int]) -> None:
        """Add pages up to position `end`. Pages from `stored` on are `fresh`, and those before it are holes."""
        if not self.pages:
            self.first = max(self.first, stored // self.page_tokens)
        num_added = -(-end // self.page_tokens) - self.first - len(self.pages)
        if num_added > 0:
            self.reset(self.first, [*self.pages, *[HOLE] * (num_added - len(fresh)), *fresh])

    def go_back(self, num_tokens: int) -> None:
        """Keep the pages of a row that skipped tokens, but count only the `num_tokens` tokens before it as computed."""
        self.stored_from = self.group.first_visible(num_tokens)
        begin = self.stored_from // self.page_tokens
        if 0 < begin < self.first:  # a window of one token had no page between two pages, so the row's pages became the first
            self.reset(begin, [*[HOLE] * (self.first - begin), *self.pages])
