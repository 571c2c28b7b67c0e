"""Preempted and running sequences share the cache in time slices, so that none waits for an end that is far away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from culet.cache.spec import CacheLayout
from culet.config import ScheduleConfig
from culet.scheduler import admission, fairness
from culet.scheduler.budget import MIN_STEP
from culet.scheduler.fairness import TimeSlices
from culet.scheduler.scheduler import Scheduler
from culet.scheduler.sequence import TILE, Sequence
from culet.types import Drawn, StepPlan, StepResult
from tests.engine.scheduler.drive import Drive, endless, make, make_layout, make_request

FULL = make_layout((None, 16))
FAR = 10**9  # no time slice ever ends
WIDE = make_layout((64, 4), (None, 64))  # the window takes most of the pages, as in the 31B, so the cache is full early


@dataclass
class Batch:
    """How a batch of equal requests went. Work is the number of tokens of all steps, each with at least MIN_STEP."""

    work: int
    longest_pause: int  # of an answer, in work
    num_tokens: int
    num_preemptions: int


def draw(scheduler: Scheduler, plan: StepPlan | None) -> list[str]:
    """Let each row that draws get a token. Return the requests."""
    assert plan is not None
    drawn = tuple(Drawn(slot, (5,), (), 0) for row in plan.rows for slot in row.draw_slots)
    scheduler.apply(StepResult(plan.step_id, drawn, {}))
    return [delta.request_id for delta in scheduler.deltas()]


def run_batch(num_pages: int, *, count: int = 8, prompt_len: int = 20, max_tokens: int = 300) -> Batch:
    config = ScheduleConfig(count, 512)
    scheduler = Scheduler(WIDE, num_pages, config, max_model_len=1000, prefix_caching=False)
    for number in range(count):
        scheduler.add(make_request(f"r{number}", [number, *[7] * (prompt_len - 1)], max_tokens, stop=False))
    work, pause, told_at = 0, 0, dict[str, int]()
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        work += max(plan.num_tokens, MIN_STEP)
        for name in draw(scheduler, plan):
            pause = max(pause, work - told_at.get(name, work))
            told_at[name] = work
    counters, arena = scheduler.counters, scheduler.page_allocator.arena
    assert (counters.finished, arena.num_free) == (count, arena.num_pages)
    return Batch(work, pause, counters.step_tokens, counters.preemptions)


def test_a_batch_beyond_the_cache_ends_sooner_and_pauses_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight equal requests and room for seven. Without time slices, the last one runs alone for a long time."""
    batch = run_batch(156)
    monkeypatch.setattr(fairness, "SLICE_FACTOR", FAR)
    without = run_batch(156)
    assert batch.work <= 0.8 * without.work
    assert batch.longest_pause <= 0.25 * without.longest_pause


@pytest.mark.parametrize("num_pages", [100, 130, 156])
def test_little_is_computed_again(num_pages: int) -> None:
    """Computing again what was preempted is at most a quarter of the work. It takes as long as a smallest step, or longer."""
    batch = run_batch(num_pages)
    assert batch.num_preemptions > 2
    assert 0 < batch.num_tokens - 8 * (20 + 300 - 1) <= batch.work / fairness.SLICE_FACTOR
    assert batch.num_preemptions * MIN_STEP <= batch.work / fairness.SLICE_FACTOR


def fill(drive: Drive, count: int, *, length: int = 120, priority: int = 0, name: str = "old") -> None:
    for number in range(count):
        drive.add(endless(f"{name}{number}", 20, length, priority=priority))


def running(drive: Drive) -> list[str]:
    return [seq.request.request_id for seq in drive.scheduler._running]


def test_a_new_request_waits_for_an_end() -> None:
    """Its client has seen nothing that could stop, and too few answers are running for them to pause for a newcomer."""
    drive = make(num_pages=80, seqs=3)
    fill(drive, 3)
    drive.step()
    drive.add(endless("new", 20, 5))
    for _ in range(60):
        drive.step()
    assert running(drive) == ["old0", "old1", "old2"]
    assert drive.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("num_new", [1, 2])
def test_a_few_new_requests_take_part_after_a_while(num_new: int) -> None:
    """One beside eight running answers has a turn after it has waited for four slices. Two wait for an end."""
    drive = make(num_pages=400, seqs=8)
    fill(drive, 8, length=400)
    drive.step()
    fill(drive, num_new, length=400, name="new")
    slice_steps = fairness.SLICE_FACTOR * fairness.LEAST_STEPS
    for _ in range(fairness.NEW_SLICES * slice_steps - 1):
        drive.step()
        assert "new0" not in running(drive)
    for _ in range(4):
        drive.step()
    assert ("new0" in running(drive)) == (num_new == 1)
    if num_new == 1:
        made_way = next(name for name in (f"old{number}" for number in range(8)) if name not in running(drive))
        for _ in range(slice_steps + 4):
            drive.step()
        assert made_way in running(drive)  # has its turn before the new one has ended
    drive.run()
    drive.check_end()


@pytest.mark.parametrize("num_others", [1, 40])
def test_a_sequence_is_computed_again_in_pieces_that_fill_tiles(num_others: int) -> None:
    """With the tokens of the running sequences, which take hardly less time alone."""
    drive = make(num_pages=4000, seqs=1 + num_others, budget=2048, prefix_caching=False)
    fill(drive, num_others, length=600)
    drive.add(endless("back", 300, 600))
    for _ in range(20):
        drive.step()
    slot = next(seq.slot for seq in drive.scheduler._running if seq.request.request_id == "back")
    preempt(drive, "back")
    sizes: list[int] = []
    while not sizes or sizes[-1] > 1:
        plan = drive.step()
        assert plan is not None
        sizes += [row.num_new for row in plan.rows if row.slot == slot]
    pieces = sizes[1:-2]  # the first one starts with the sequence, and the last one has what is left
    assert len(pieces) >= 2
    assert {(piece + num_others) % TILE for piece in pieces} == {0}
    assert fairness.AGAIN_TOKENS <= min(pieces) <= max(pieces) < fairness.AGAIN_TOKENS + TILE


def steps_of(layout: CacheLayout, num_pages: int, count: int, prompt_len: int, max_tokens: int) -> Iterator[int]:
    """Run equal requests in steps that are planned ahead, as on a GPU. Yield the number of steps after each."""
    config = ScheduleConfig(count, 2048, max_step_ms=0)
    scheduler = Scheduler(layout, num_pages, config, max_model_len=3000, prefix_caching=False)
    for number in range(count):
        scheduler.add(make_request(f"r{number}", [number, *[7] * (prompt_len - 1)], max_tokens, stop=False))
    plans: list[StepPlan] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is not None:
            plans.append(plan)
        if plan is None or len(plans) == 2:
            draw(scheduler, plans.pop(0))
        yield scheduler.counters.steps


@pytest.mark.parametrize(
    ("count", "prompt_len", "max_tokens", "room"),
    [
        (2, 1000, 1000, 3000),
        (2, 1500, 1500, 4500),
        (3, 1000, 1000, 4500),
        (3, 1000, 1000, 4000),
    ],
)
def test_few_sequences_do_not_keep_computing_each_other_again(
    count: int, prompt_len: int, max_tokens: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take turns, in hardly more steps than without time slices."""
    *_, num_steps = steps_of(FULL, room // 16, count, prompt_len, max_tokens)
    monkeypatch.setattr(fairness, "SLICE_FACTOR", FAR)
    *_, without = steps_of(FULL, room // 16, count, prompt_len, max_tokens)
    assert num_steps <= 1.1 * without


def test_a_slice_begins_when_its_sequence_is_back() -> None:
    """Beside answers that never make way, two long ones take turns. Each draws tokens for a whole slice."""
    config = ScheduleConfig(8, 2048, max_step_ms=0)
    scheduler = Scheduler(FULL, 10_000, config, max_model_len=9000, prefix_caching=False)
    for number in range(7):
        scheduler.add(make_request(f"urgent{number}", [number], 1500, stop=False, priority=-1))
    for number in range(2):
        scheduler.add(make_request(f"long{number}", [number] * 2000, 1500, stop=False))
    turns: list[tuple[str, int]] = []  # who drew, and how many tokens in a row
    for _ in range(1200):
        for name in draw(scheduler, scheduler.schedule()):
            if name.startswith("long"):
                turns = [*turns[:-1], (name, turns[-1][1] + 1)] if turns and turns[-1][0] == name else [*turns, (name, 1)]
    assert len(turns) > 4
    least = fairness.SLICE_FACTOR * 2000 // MIN_STEP
    assert all(count >= least for _, count in turns[2:-1])  # a new one begins before its prompt


@pytest.mark.parametrize("length", [95, 96, 97, 159])
def test_a_sequence_is_back_when_it_draws(length: int) -> None:
    """Not one token before, where a piece may end. Otherwise it might make way before it has drawn anything."""
    drive = make(FULL, 100, seqs=2, budget=128, prefix_caching=False)
    fill(drive, 1, length=400)
    drive.add(endless("back", length - 3, 400))
    while len(drive.told["back", 0].tokens) < 3:
        drive.step()
    slices, seq = drive.scheduler._slices, drive.scheduler._running[-1]
    preempt(drive, "back")
    drive.step()
    started_at, lefts = seq.started_at, set[int]()
    while seq.num_output == 3:
        lefts.add(length - seq.num_computed)
        assert seq in slices._returning
        assert seq.started_at == started_at
        drive.step()
    assert (1 in lefts) == (length in (96, 159))  # pieces of 95 and 63 tokens
    assert not slices._returning
    assert seq.started_at == slices._work


def test_sequences_come_back_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is computed again, no other makes way for the next, because both would hold pages without an answer."""
    making_way = TimeSlices._instead_of_waiting
    made_way: list[Sequence] = []

    def note(slices: TimeSlices, head: Sequence, running: list[Sequence], num_missing: Any) -> list[Sequence]:
        assert all(seq.is_prefilled for seq in running if seq.was_preempted)
        chosen = making_way(slices, head, running, num_missing)
        made_way.extend(chosen)
        return chosen

    monkeypatch.setattr(TimeSlices, "_instead_of_waiting", note)
    list(steps_of(WIDE, 190, 8, 200, 400))
    assert len(made_way) > 3


@pytest.mark.parametrize("num_pages", [276, 285])
def test_a_sequence_that_came_back_keeps_its_pages(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When running sequences need more pages, one whose slice is over makes way. The youngest one would start over and over."""
    stop, preempted = TimeSlices.stop, Counter[bool]()

    def note(slices: TimeSlices, seq: Sequence) -> None:
        preempted[seq.was_preempted and not seq.is_prefilled] += 1
        stop(slices, seq)

    monkeypatch.setattr(TimeSlices, "stop", note)
    layout = make_layout((256, 16), (None, 256))
    *_, num_steps = steps_of(layout, num_pages, 16, 200, 300)
    assert preempted[False] > 10
    assert not preempted[True]
    monkeypatch.setattr(admission, "lacking_pages", lambda running, available: 0)
    *_, before = steps_of(layout, num_pages, 16, 200, 300)
    assert preempted[True] > 10
    assert num_steps <= 0.75 * before


def preempt(drive: Drive, name: str) -> None:
    scheduler = drive.scheduler
    scheduler._preempt(next(seq for seq in scheduler._running if seq.request.request_id == name))


def test_whoever_makes_way_goes_on_before_new_requests() -> None:
    drive = make(num_pages=80, seqs=2)
    fill(drive, 2, length=200)
    for _ in range(20):
        drive.step()
    preempt(drive, "old1")
    drive.add(endless("urgent", 20, 80, priority=-1))  # takes the free slot
    drive.add(endless("new", 20, 5))
    seen: list[list[str]] = []
    while drive.scheduler.has_work:
        drive.step()
        seen += [now for now in [running(drive)] if seen[-1:] != [now]]
    assert seen[0] == ["urgent", "old0"]
    assert seen[1] == ["urgent", "old1"]  # which was preempted first, takes the place of old0
    assert ["urgent", "old0"] in seen[2:]
    assert next(index for index, now in enumerate(seen) if "new" in now) > next(
        index for index, now in enumerate(seen) if "urgent" not in now
    )
    drive.check_end()


def test_whoever_makes_way_keeps_what_it_has_computed() -> None:
    """If nobody needs its pages, it computes only its last token again."""
    drive = make(num_pages=400, seqs=2)
    fill(drive, 2, length=200)
    for _ in range(20):
        drive.step()
    first = drive.scheduler._running[0]
    preempt(drive, "old1")
    drive.add(endless("urgent", 20, 200, priority=-1))  # takes the free slot
    while first.is_running:
        num_tokens = len(first.tokens)
        drive.step()
    assert num_tokens > 40
    while not first.is_running:
        drive.step()
    assert first.num_resumed == num_tokens - 1


def test_nobody_makes_way_for_a_less_urgent_sequence() -> None:
    drive = make(num_pages=80, seqs=2)
    fill(drive, 1, priority=1, name="low")
    fill(drive, 1, name="high")
    for _ in range(20):
        drive.step()
    preempt(drive, "low0")
    drive.add(endless("top", 20, 120, priority=-1))
    for _ in range(60):
        drive.step()
        assert running(drive) == ["top", "high0"]
    assert drive.scheduler.counters.preemptions == 1


def test_a_sequence_that_ends_soon_stays() -> None:
    """It frees its place by itself sooner than a time slice takes."""
    drive = make(num_pages=80, seqs=1)
    drive.add(endless("first", 20, 120))
    for _ in range(20):
        drive.step()
    preempt(drive, "first")
    drive.add(endless("second", 20, 15, priority=-1))
    drive.step()
    assert running(drive) == ["second"]
    next(iter(drive.scheduler._running)).request = endless("second", 20, 15)  # now of the same priority
    while "first" not in running(drive):
        drive.step()
    assert len(drive.told["second", 0].tokens) == 15
    assert drive.scheduler.counters.preemptions == 1
