"""Allocate pages to sequences, evict resume points when pages run short, and collect transfers of pages for the next step.

Steps run in the order they are planned. So the next plan may use a page as soon as its last holder has planned its last use,
even if the step that reads the page has not finished. Within one plan, no page is both read and reused.
"""

from __future__ import annotations

from collections.abc import Sequence

from culet.cache.arena import Arena
from culet.cache.host_pages import HostPages
from culet.cache.prefix import PrefixCache
from culet.cache.spec import CacheLayout


class PageAllocator:
    """Takes pages from the arena, evicts resume points when it must, and lists the copies to make."""

    def __init__(self, layout: CacheLayout, num_pages: int, *, prefix_caching: bool) -> None:
        self.arena = Arena(num_pages)
        self.prefix = PrefixCache(self.arena, layout) if prefix_caching else None
        self.host = HostPages()
        self._copies: dict[int, int] = {}  # target -> source

    @property
    def available(self) -> int:
        """Number of pages that `take` can return, by evicting resume points if necessary."""
        return self.arena.num_free + self.arena.num_reclaimable

    def take(self, num_pages: int) -> list[int]:
        """Return `num_pages` fresh pages. Evict resume points if necessary."""
        if self.prefix is not None and self.arena.num_free < num_pages:
            self.prefix.make_room(num_pages)
        return self.arena.take(num_pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Release `pages`. Cancel pending copies into pages that nobody holds any more."""
        self.arena.give_back(pages)
        if self._copies:
            for page in pages:
                if page in self._copies and self.arena.is_free(page):
                    self.arena.give_back([self._copies.pop(page)])

    def copy_of(self, source: int) -> int:
        """Return a fresh page that receives the content of `source` at the beginning of the next plan.

        The source is held until then. A page is never both source and target, so the copies may be made in any order.
        """
        assert source not in self._copies, f"page {source} was copied before it had its own content"
        self.arena.share([source])
        target = self.take(1)[0]
        self._copies[target] = source
        return target

    def is_awaiting_copy(self, pages: Sequence[int]) -> bool:
        """Return whether any of `pages` still waits for its content."""
        return bool(self._copies) and any(page in self._copies for page in pages)

    @property
    def pending_sources(self) -> list[int]:
        """Pages held as sources of pending copies."""
        return list(self._copies.values())

    def drain_copies(self) -> tuple[tuple[int, int], ...]:
        """Return all copies for the plan being sent, as (from page, to page), and release their sources."""
        copies = tuple((source, target) for target, source in self._copies.items())
        self._copies.clear()
        self.arena.give_back([source for source, _ in copies])
        return copies
