"""Track who holds which slab, with one free list of equal pages and reference counts. No torch, no bytes.

A page has two kinds of holders. **Sequences** (and pending copies) hold it with `take` and `share`, and release it with
`give_back`. **Resume points** of the prefix cache hold it with `keep` and release it with `drop`. A page that only resume
points hold is *reclaimable*, because dropping them frees it. So a running sequence can get exactly
`num_free + num_reclaimable` pages. The prefix cache says which of its points are *covered*: sequences or other points hold
their pages anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

from culet.errors import OutOfPages


class Arena:
    """Equal pages, each free or held. Freeing a page twice or sharing a free one fails an assertion."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"an arena needs at least one page, got {num_pages}"
        self.num_pages = num_pages
        self.num_reclaimable = 0
        # The page freed last is taken first, because its memory is most likely still in a CPU's cache. Low page ids come first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._held = [0] * num_pages  # references by sequences
        self._kept = [0] * num_pages  # references by resume points
        self._open = [0] * num_pages  # references by resume points that are not covered
        self._newly_bare: set[int] = set()  # see `drain_bare`

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, page: int) -> bool:
        return not (self._held[page] or self._kept[page])

    def num_references(self, page: int) -> tuple[int, int]:
        """Return the numbers of references by sequences and by resume points."""
        return self._held[page], self._kept[page]

    def is_last_open(self, page: int) -> bool:
        """Return whether `page` is held by one resume point that is not covered, and by no sequence."""
        return self._held[page] == 0 and self._open[page] == 1

    def is_bare(self, page: int) -> bool:
        """Return whether only covered resume points hold `page`."""
        return self._held[page] == 0 and self._open[page] == 0 and self._kept[page] > 0

    def take(self, num_pages: int) -> list[int]:
        """Take `num_pages` free pages. Each is then held once."""
        if num_pages > len(self._free):
            raise OutOfPages(f"asked for {num_pages} pages, but only {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._held[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a sequence to the holders of each of `pages`."""
        for page in pages:
            assert not self.is_free(page), f"page {page} is free and cannot be shared"
            self.num_reclaimable -= self._held[page] == 0
            self._held[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Release each of `pages` for one sequence."""
        for page in pages:
            assert self._held[page] > 0, f"page {page} was given back, but no sequence holds it"
            self._held[page] -= 1
            if self._held[page] == 0:
                if self._kept[page]:
                    self.num_reclaimable += 1
                    self._note_bare(page)
                else:
                    self._free.append(page)

    def keep(self, pages: Iterable[int]) -> None:
        """Add a resume point to the holders of each of `pages`."""
        for page in pages:
            assert not self.is_free(page), f"page {page} is free and cannot be kept"
            self._kept[page] += 1
            self._open[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Release each of `pages` for one resume point, which is not covered."""
        for page in pages:
            assert self._open[page] > 0, f"page {page} was dropped, but no resume point keeps it"
            self._kept[page] -= 1
            self._open[page] -= 1
            if self.is_free(page):
                self.num_reclaimable -= 1
                self._free.append(page)
            else:
                self._note_bare(page)

    def cover(self, pages: Iterable[int]) -> None:
        """Count a resume point that keeps `pages` as covered."""
        for page in pages:
            assert self._open[page] > 0, f"page {page} was covered, but no resume point keeps it"
            self._open[page] -= 1
            self._note_bare(page)

    def uncover(self, pages: Iterable[int]) -> None:
        """Undo `cover`."""
        for page in pages:
            assert self._open[page] < self._kept[page], f"page {page} was uncovered, but no covered resume point keeps it"
            self._open[page] += 1

    def drain_bare(self) -> set[int]:
        """Return the pages that, since the last call, became pages that only covered points hold. Some may have changed."""
        pages, self._newly_bare = self._newly_bare, set()
        return pages

    def _note_bare(self, page: int) -> None:
        if self.is_bare(page):
            self._newly_bare.add(page)
