"""Which running sequence makes way for another one, decided among sequences whose slices are known."""

from __future__ import annotations

from itertools import count

import pytest

from culet.scheduler.admission import lacking_pages
from culet.scheduler.budget import MIN_STEP
from culet.scheduler.fairness import LEAST_STEPS, SLICE_FACTOR, FairQueue, TimeSlices
from culet.scheduler.sequence import Sequence
from tests.engine.scheduler.drive import endless, make, make_layout, make_request

LAYOUT = make_layout((None, 16))
SLICE = SLICE_FACTOR * LEAST_STEPS * MIN_STEP  # of a short sequence


class Turns:
    """Running and waiting sequences with answers of the same length. Each running one holds one page."""

    def __init__(self) -> None:
        self._slices, self._queue = TimeSlices(MIN_STEP), FairQueue()
        self._running: list[Sequence] = []
        self._numbers = count()

    def run(self, name: str, *, tenant: str = "", priority: int = 0, preempted: bool = False, num_missing: int = 0) -> None:
        """Start a sequence and let all run for two slices. So the first one that starts has run longest.

        It has computed all but `num_missing` of the tokens that it started with, and has drawn one if none is missing.
        """
        seq = self._make(name, tenant, priority)
        seq.was_preempted, seq.slot = preempted, seq.arrival
        seq.prefill_end = len(seq.tokens)
        seq.num_computed = seq.prefill_end - num_missing
        seq.tokens += [] if num_missing else [7]
        seq.groups[0].reset(0, [seq.arrival])
        self._slices.start(seq)
        self._queue.begin(seq)
        self._running.append(seq)
        self._slices.count_step(2 * SLICE, len(self._running))

    def wait(self, *, tenant: str = "", priority: int = 0) -> None:
        """Queue a sequence that was preempted, and let the others run for two slices."""
        seq = self._make("waiting", tenant, priority)
        self._slices.start(seq)
        self._slices.stop(seq)
        self._queue.push(seq)
        self._slices.count_step(2 * SLICE, len(self._running))

    def make_way(self, *, lacking: int = 0, missing: int = 0) -> list[str]:
        """Return who makes way if running ones lack so many pages, and the waiting one so many to start."""
        names: list[str] = []
        for seq in self._slices.making_way(
            self._queue,
            self._running,
            lambda _, leaving: missing - len(names) - len(leaving),
            lambda: lacking - len(names),
        ):
            names.append(seq.request.request_id)
            seq.slot = None
            self._running.remove(seq)
            self._queue.end(seq)
            self._slices.stop(seq)
            self._queue.push(seq)
        return names

    def _make(self, name: str, tenant: str, priority: int) -> Sequence:
        request = make_request(name, [7] * 20, 400, stop=False, tenant=tenant, priority=priority)
        return Sequence(request, 0, next(self._numbers), LAYOUT, is_cached=False)


def test_the_one_that_has_run_longest_makes_way() -> None:
    turns = Turns()
    for name in ("first", "second", "third"):
        turns.run(name)
    turns.wait()
    assert turns.make_way(missing=0) == []
    assert turns.make_way(missing=1) == ["first"]
    assert turns.make_way(missing=1) == []  # until the next slice


@pytest.mark.parametrize("num_missing", [0, 1, 10])
def test_a_prompt_in_progress_does_not_make_way(num_missing: int) -> None:
    """However little of it is missing. Otherwise it would be computed for nothing."""
    turns = Turns()
    turns.run("prompt", num_missing=num_missing)
    turns.wait()
    assert turns.make_way(missing=1) == ([] if num_missing else ["prompt"])


def test_nobody_makes_way_for_another_tenant() -> None:
    turns = Turns()
    turns.run("other", tenant="b")
    turns.run("own", tenant="a")
    turns.wait(tenant="a")
    assert turns.make_way(missing=1) == ["own"]


def test_the_more_urgent_does_not_make_way() -> None:
    turns = Turns()
    turns.run("urgent", priority=-1)
    turns.run("equal")
    turns.run("less urgent", priority=1)
    turns.wait()
    assert turns.make_way(missing=2) == ["equal", "less urgent"]


@pytest.mark.parametrize(("preempted", "made_way"), [(True, ["first", "second"]), (False, [])])
def test_who_makes_way_if_running_ones_lack_pages(preempted: bool, made_way: list[str]) -> None:
    """As many as it takes, if the youngest would otherwise lose its pages again. Else it loses them for the first time."""
    turns = Turns()
    for name in ("first", "second", "third"):
        turns.run(name)
    turns.run("youngest", preempted=preempted)
    turns.wait()
    assert turns.make_way(lacking=2) == made_way


def test_one_makes_way_for_the_next_although_running_ones_lack_pages() -> None:
    """Its pages may be enough for those that lack some, so that the youngest keeps its own."""
    turns = Turns()
    turns.run("first")
    turns.run("youngest")
    turns.wait()
    assert turns.make_way(lacking=1, missing=1) == ["first"]


def test_tenants_with_more_running_sequences_lack_pages_first() -> None:
    """The second of one tenant would lose its pages, before the only one of another, although that is younger."""
    turns = Turns()
    turns.run("a0", tenant="a")
    turns.run("a1", tenant="a", preempted=True)
    turns.run("b0", tenant="b")
    turns.wait(tenant="b")
    assert turns.make_way(lacking=1) == ["a0"]


def test_prompts_in_progress_lack_no_pages() -> None:
    """They get pages in pieces, and were promised them. Sequences that decode need a page each at the end of theirs."""
    drive = make(make_layout((None, 5)), seqs=2, budget=16, prefix_caching=False)
    drive.add(endless("decodes", 15, 40))
    drive.step()
    drive.step()
    drive.add(endless("prompt", 100, 40))
    drive.step()  # 15 of its tokens
    decoding, prompt = drive.scheduler._running
    assert decoding.num_computed == 17
    assert not prompt.is_prefilled
    assert (prompt.num_computed, prompt.unchanged_until) == (15, 15)
    assert lacking_pages([decoding, prompt], 0) == 0
    while decoding.num_computed < 20:
        drive.step()
    assert lacking_pages([decoding], 0) == 1
    assert lacking_pages([decoding], 3) == -2


def test_pages_behind_the_window_are_not_lacking() -> None:
    """A sequence that only gives a page back needs none, and one that takes a page afterwards needs no other."""
    drive = make(make_layout((8, 4)), seqs=2, budget=16, prefix_caching=False, ahead=True)
    for name in ("a", "b"):
        drive.add(endless(name, 3, 40))
    lacking = []
    while len(lacking) < 8:
        drive.step()
        running = drive.scheduler._running
        if running and all(seq.num_computed >= 16 for seq in running):
            assert len({seq.num_computed for seq in running}) == 1
            lacking.append(lacking_pages(running, 0))
    assert sorted(set(lacking)) == [0, 2]
    assert lacking.count(2) == 2  # once in four tokens, where each takes a page
