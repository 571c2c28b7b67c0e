"""The account of pages in host memory, where preempted sequences keep their KV.

A host page has the bytes of any page of the arena. All groups share it, as they share slabs. A plan first saves pages of the
arena, then loads host pages, and only then computes. So a page that was saved may be used again in the same plan. A host page
that is loaded may be used again in the next one.
"""

from __future__ import annotations

from collections.abc import Sequence


class HostPages:
    """Host pages, each free or held by one sequence, and the transfers of the next plan."""

    def __init__(self) -> None:
        """Start without pages."""
        self.num_pages = 0
        self._free: list[int] = []  # The page freed last is taken first, so that memory is not touched without need.
        self._held: set[int] = set()
        self._saves: dict[int, int] = {}  # host page -> page
        self._loads: dict[int, int] = {}  # page -> host page

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, num_pages: int) -> None:
        """Note that `num_pages` pages are allocated so far. More may follow while the engine runs."""
        if num_pages > self.num_pages:
            self._free[:0] = range(num_pages - 1, self.num_pages - 1, -1)
            self.num_pages = num_pages

    def save(self, pages: Sequence[int]) -> list[int]:
        """Return host pages that receive the content of `pages` with the next plan."""
        assert len(pages) <= len(self._free), f"asked for {len(pages)} host pages, but only {len(self._free)} are free"
        taken = [self._free.pop() for _ in pages]
        self._held.update(taken)
        self._saves.update(zip(taken, pages, strict=True))
        return taken

    def load(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Give `pages` the content of `host_pages` with the next plan."""
        for host_page, page in zip(host_pages, pages, strict=True):
            assert host_page in self._held, f"host page {host_page} is loaded, but no sequence holds it"
            assert page not in self._loads, f"page {page} was already loaded"
            self._loads[page] = host_page

    def give_back(self, host_pages: Sequence[int]) -> None:
        """Release host pages. Those that the next plan loads become free after it. The others no longer need to be saved."""
        loading = set(self._loads.values())
        for host_page in host_pages:
            assert host_page in self._held, f"host page {host_page} was given back, but no sequence holds it"
            self._held.remove(host_page)
            if host_page not in loading:
                self._saves.pop(host_page, None)
                self._free.append(host_page)

    def drain(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Return the transfers for the plan being sent: saves as (page, host page), and loads as (host page, page)."""
        saves = tuple((page, host_page) for host_page, page in self._saves.items())
        loads = tuple((host_page, page) for page, host_page in self._loads.items())
        self._saves.clear()
        self._loads.clear()
        self._free += [host_page for host_page, _ in loads]
        return saves, loads
