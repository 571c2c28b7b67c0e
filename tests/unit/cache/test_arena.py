"""The arena: every page is either free or held, whoever holds it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from culet.cache.arena import Arena
from culet.errors import OutOfPages

NUM_PAGES = 12


def test_every_page_is_given_once() -> None:
    arena = Arena(5)
    assert sorted(arena.take(2) + arena.take(3)) == [0, 1, 2, 3, 4]
    assert arena.num_free == 0


def test_taking_more_than_there_is_takes_nothing() -> None:
    arena = Arena(3)
    arena.take(1)
    with pytest.raises(OutOfPages, match="asked for 3 pages, but only 2 of 3 are free"):
        arena.take(3)
    assert arena.num_free == 2


def test_a_shared_page_is_free_when_the_last_holder_lets_go() -> None:
    arena = Arena(2)
    pages = arena.take(1)
    arena.share(pages)
    arena.give_back(pages)
    assert arena.num_free == 1
    arena.give_back(pages)
    assert arena.num_free == 2


def test_freeing_twice_is_an_assertion() -> None:
    arena = Arena(2)
    pages = arena.take(1)
    arena.give_back(pages)
    with pytest.raises(AssertionError, match="no sequence holds it"):
        arena.give_back(pages)


@pytest.mark.parametrize("hold", [Arena.share, Arena.keep])
def test_holding_a_free_page_is_an_assertion(hold) -> None:
    arena = Arena(2)
    with pytest.raises(AssertionError, match="is free and cannot be"):
        hold(arena, [1])


def test_sequences_and_resume_points_cannot_free_each_others_references() -> None:
    arena = Arena(2)
    pages = arena.take(1)
    with pytest.raises(AssertionError, match="no resume point keeps it"):
        arena.drop(pages)
    arena.keep(pages)
    arena.give_back(pages)
    with pytest.raises(AssertionError, match="no sequence holds it"):
        arena.give_back(pages)


def test_what_only_resume_points_hold_is_reclaimable() -> None:
    arena = Arena(2)
    pages = arena.take(1)
    arena.keep(pages)
    arena.keep(pages)
    assert (arena.num_free, arena.num_reclaimable) == (1, 0)
    arena.give_back(pages)
    assert (arena.num_free, arena.num_reclaimable) == (1, 1)
    assert not arena.is_last_open(pages[0])
    arena.cover(pages)
    assert arena.is_last_open(pages[0])
    arena.drop(pages)
    assert arena.is_bare(pages[0])
    assert arena.drain_bare() == {pages[0]}
    arena.uncover(pages)
    assert not arena.is_bare(pages[0])
    arena.share(pages)
    assert arena.num_reclaimable == 0
    arena.give_back(pages)
    arena.drop(pages)
    assert (arena.num_free, arena.num_reclaimable) == (2, 0)


class ArenaWalk(RuleBasedStateMachine):
    """Moves in any order, compared with plain counts."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NUM_PAGES)
        self.held: Counter[int] = Counter()
        self.kept: Counter[int] = Counter()

    def _pick(self, data: st.DataObject, pages: Counter[int]) -> int:
        return data.draw(st.sampled_from(sorted(page for page, count in pages.items() if count)))

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        num_free = NUM_PAGES - len({page for page in range(NUM_PAGES) if self.held[page] or self.kept[page]})
        if count > num_free:
            with pytest.raises(OutOfPages):
                self.arena.take(count)
            return
        pages = self.arena.take(count)
        assert not any(self.held[page] or self.kept[page] for page in pages)
        self.held.update(pages)

    @precondition(lambda self: self.held.total() or self.kept.total())
    @rule(data=st.data(), keep=st.booleans())
    def hold_again(self, data: st.DataObject, keep: bool) -> None:
        page = self._pick(data, self.held + self.kept)
        (self.arena.keep if keep else self.arena.share)([page])
        (self.kept if keep else self.held)[page] += 1

    @precondition(lambda self: self.held.total())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        page = self._pick(data, self.held)
        self.arena.give_back([page])
        self.held[page] -= 1

    @precondition(lambda self: self.kept.total())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page = self._pick(data, self.kept)
        self.arena.drop([page])
        self.kept[page] -= 1

    @invariant()
    def counts_agree(self) -> None:
        for page in range(NUM_PAGES):
            assert self.arena.num_references(page) == (self.held[page], self.kept[page])
            assert self.arena.is_free(page) == (not self.held[page] and not self.kept[page])
        assert self.arena.num_free == sum(self.arena.is_free(page) for page in range(NUM_PAGES))
        assert self.arena.num_reclaimable == sum(bool(self.kept[page] and not self.held[page]) for page in range(NUM_PAGES))


ArenaWalk.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None, derandomize=True)
TestArenaWalk = ArenaWalk.TestCase
