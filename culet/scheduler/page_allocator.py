"""Pages for sequences: the arena, resume points that give way, and the page copies that the next step makes.

Steps run in the order they are planned. So a page is free for the next plan as soon as its last holder is done planning with
it, even if the step that reads it has not finished. Within one plan, no page is both read and reused.
"""

from __future__ import annotations

from collections.abc import Sequence

from culet.cache.arena import Arena
from culet.cache.prefix import PrefixCache
from culet.cache.spec import CacheLayout


class PageAllocator:
    """Takes pages from the arena, evicts resume points when it must, and lists the copies to make."""

    def __init__(self, layout: CacheLayout, num_pages: int, *, prefix_caching: bool) -> None:
        self.arena = Arena(num_pages)
        self.prefix = PrefixCache(self.arena, layout) if prefix_caching else None
        self._copies: dict[int, int] = {}  # target -> source

    @property
    def available(self) -> int:
        """Pages that `take` can give, by evicting resume points if necessary."""
        return self.arena.num_free + self.arena.num_reclaimable

    def take(self, num_pages: int) -> list[int]:
        """Fresh pages."""
        if self.prefix is not None and self.arena.num_free < num_pages:
            self.prefix.make_room(num_pages)
        return self.arena.take(num_pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Release `pages`. A copy into a page that nobody holds any more is not made."""
        self.arena.give_back(pages)
        if self._copies:
            for page in pages:
                if page in self._copies and self.arena.is_free(page):
                    self.arena.give_back([self._copies.pop(page)])

    def copy_of(self, source: int) -> int:
        """A fresh page that gets the content of `source` at the beginning of the next plan.

        The source is held until then: a page is never both source and target, so the copies may be made in any order.
        """
        assert source not in self._copies, f"page {source} copied before it has its own content"
        self.arena.share([source])
        target = self.take(1)[0]
        self._copies[target] = source
        return target

    def is_awaiting_copy(self, pages: Sequence[int]) -> bool:
        """Whether one of `pages` does not have its content yet."""
        return bool(self._copies) and any(page in self._copies for page in pages)

    @property
    def pending_sources(self) -> list[int]:
        """Pages held as the source of a pending copy."""
        return list(self._copies.values())

    def drain_copies(self) -> tuple[tuple[int, int], ...]:
        """(from page, to page) of all copies for the plan being sent; the sources are released."""
        copies = tuple((source, target) for target, source in self._copies.items())
        self._copies.clear()
        self.arena.give_back([source for source, _ in copies])
        return copies
