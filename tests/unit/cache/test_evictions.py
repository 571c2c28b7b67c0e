"""Evictions look at a few resume points, however many there are, and free the pages that were not used for longest."""

from __future__ import annotations

import random

import pytest

from culet.cache.arena import Arena
from culet.cache.content import PrefixContent
from culet.cache.point_tree import ResumePoint
from culet.cache.prefix import PrefixCache
from culet.cache.spec import CacheLayout, KVGroup, KVSpec
from culet.types import PageTable


def group(index: int, window: int | None, page_tokens: int) -> KVGroup:
    spec = KVSpec(index, num_kv_heads=1, head_dim=2, rotated_dims=2, window=window, latent=False, itemsize=4)
    return KVGroup(f"g{index}", index, (spec,), page_tokens)


LAYOUT = CacheLayout(1, (group(0, 6, 2), group(1, None, 4)))


class Cache:
    """A prefix cache, and sequences that may hold pages of its points."""

    def __init__(self, num_pages: int) -> None:
        self.arena = Arena(num_pages)
        self.prefix = PrefixCache(self.arena, LAYOUT)
        self.held: list[list[int]] = []

    def insert(self, tokens: list[int], *, hold: bool = False) -> None:
        tables = [PageTable(0, tuple(self.arena.take(group.pages_for(len(tokens))))) for group in LAYOUT.groups]
        self.prefix.insert(tokens, len(tokens), PrefixContent(), tables, (0, 0))
        pages = [page for table in tables for page in table.pages]
        if hold:
            self.held.append(pages)
        else:
            self.arena.give_back(pages)

    def insert_beside(self, point: ResumePoint) -> None:
        """Insert a point that is one token longer than this one, on the same pages if they have room for it."""
        tokens = [*memoryview(self.prefix._tree.content_of(point.point_id)).cast("i"), len(self.held)]
        fresh = [self.arena.take(group.pages_for(len(tokens)) - group.pages_for(point.length)) for group in LAYOUT.groups]
        tables = [PageTable(table.first, (*table.pages, *new)) for table, new in zip(point.tables, fresh, strict=True)]
        self.prefix.insert(tokens, len(tokens), PrefixContent(), tables, point.stored_from)
        self.arena.give_back([page for pages in fresh for page in pages])


@pytest.mark.parametrize("num_points", [50, 2000])
def test_an_eviction_does_not_look_at_all_points(num_points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(20 * num_points)
    for number in range(num_points):  # the oldest points, whose pages running sequences hold
        cache.insert([number, *range(9)], hold=True)
    for number in range(40):
        cache.insert([10**6 + number, *range(9)])
    num_looks = 0
    is_last_open = Arena.is_last_open

    def count(self: Arena, page: int) -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_last_open(self, page)

    cache.prefix.make_room(cache.arena.num_free + 1)  # reads what has changed since the start
    monkeypatch.setattr(Arena, "is_last_open", count)
    for _ in range(20):
        cache.prefix.make_room(cache.arena.num_free + 1)
    assert num_looks < 20 * 20
    assert cache.prefix.num_resume_points == num_points + 40 - 21


def oldest_by_scan(prefix: PrefixCache) -> int:
    """Return when the page was last used that a scan of all points and pages frees next."""
    last_uses: dict[int, int] = {}
    for point in prefix.resume_points():
        for page in point.pages:
            last_uses[page] = max(last_uses.get(page, 0), point.last_use)
    return min(last_use for page, last_use in last_uses.items() if not prefix._arena.num_references(page)[0])


@pytest.mark.parametrize("seed", range(20))
def test_evictions_choose_as_a_scan_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No point is evicted that was used later than all holders of some page."""
    chance = random.Random(seed)
    cache = Cache(400)
    remove = PrefixCache._remove
    is_evicting = False
    num_evicted = 0

    def check(self: PrefixCache, point: ResumePoint) -> None:
        nonlocal num_evicted
        if is_evicting:
            assert point.last_use <= oldest_by_scan(self)
            num_evicted += 1
        remove(self, point)

    monkeypatch.setattr(PrefixCache, "_remove", check)
    for _ in range(400):
        move = chance.random()
        points = cache.prefix.resume_points()
        if move < 0.4 and cache.arena.num_free > 30:
            cache.insert([chance.randrange(3) for _ in range(chance.randint(1, 12))], hold=chance.random() < 0.4)
        elif move < 0.5 and points and cache.arena.num_free > 30:
            cache.insert_beside(chance.choice(points))
        elif move < 0.65 and points:
            cache.prefix.touch(chance.choice(points))
        elif move < 0.8 and points:
            shared = chance.choice(points).pages
            cache.arena.share(shared)
            cache.held.append(shared)
        elif move < 0.9 and cache.held:
            cache.arena.give_back(cache.held.pop(chance.randrange(len(cache.held))))
        else:
            is_evicting = True
            cache.prefix.make_room(min(cache.arena.num_pages, cache.arena.num_free + chance.randint(1, 10)))
            is_evicting = False
    assert num_evicted > 20
    for pages in cache.held:
        cache.arena.give_back(pages)
    cache.prefix.make_room(cache.arena.num_pages)
    assert cache.arena.num_free == cache.arena.num_pages
    assert not cache.prefix._covered_at


def test_points_in_use_outlive_older_ones_on_shared_pages() -> None:
    """Each of many old prompts has left three points on the same pages. A prompt that is used again and again stays."""
    cache = Cache(300)
    for number in range(20):
        cache.insert([number, *range(9)])
        for _ in range(2):
            cache.insert_beside(cache.prefix.resume_points()[-1])
    cache.insert([99, *range(9)])
    hot = cache.prefix.resume_points()[-1]
    for _ in range(20):
        cache.prefix.make_room(cache.arena.num_free + 1)
        assert hot in cache.prefix.resume_points()
        cache.prefix.touch(hot)
    cache.prefix.make_room(cache.arena.num_pages)
    assert cache.arena.num_free == cache.arena.num_pages


def test_a_covered_point_that_is_used_again_stays() -> None:
    cache = Cache(100)
    cache.insert([1, *range(9)])
    first = cache.prefix.resume_points()[0]
    cache.insert_beside(first)
    cache.insert([2, *range(9)])
    cache.arena.share(first.pages)
    cache.prefix.make_room(cache.arena.num_free + 1)
    assert cache.prefix.num_resume_points == 2
    cache.insert([3, *range(9)])
    cache.prefix.touch(first)
    cache.arena.give_back(first.pages)
    cache.prefix.make_room(cache.arena.num_free + 1)
    assert first in cache.prefix.resume_points()
    assert cache.prefix.num_resume_points == 2


def test_if_there_are_too_many_points_covered_ones_go_first() -> None:
    cache = Cache(400)
    for number in range(3):  # the oldest points, whose pages running sequences hold
        cache.insert([number, *range(9)], hold=True)
    for number in range(10, 15):
        cache.insert([number, *range(9)])
    oldest = cache.prefix.resume_points()[:3]
    cache.prefix.make_room(cache.arena.num_free + 1)  # covers them, and evicts the next
    cache.prefix._max_points = 7
    cache.insert([20, *range(9)])
    assert cache.prefix.num_resume_points == 7
    assert [point in cache.prefix.resume_points() for point in oldest] == [False, True, True]
