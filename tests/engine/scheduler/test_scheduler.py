"""The scheduler, one guarantee at a time, on a fake runner that checks every key it would read."""

from __future__ import annotations

import subprocess
import sys
from collections import abc
from itertools import count

import pytest

from culet.errors import BadRequest, ContextTooLong, QueueFull
from culet.scheduler import fairness
from culet.scheduler.admission import pages_to_start
from culet.scheduler.budget import share_budget
from culet.scheduler.group_pages import max_held_pages, span
from culet.scheduler.sequence import Acceptance, Sequence
from culet.scheduler.step_cost import MeasuredCost, StepCost, TimedSteps
from tests.engine.scheduler.drive import LAYOUT, audit, endless, first_seed, make, make_layout, make_request, prompt, row_of
from tests.engine.scheduler.fake_runner import draw
from tests.engine.scheduler.fixed_lengths import FixedLengths

# Rejected requests


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match="prompt: got no tokens"):
        make().add(make_request("a", []))


def test_too_long_for_the_model_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        ContextTooLong, match=r"prompt of 900 tokens \+ max_tokens 101 = 1001, above max_model_len 1000"
    ) as caught:
        make(num_pages=10_000).add(endless("a", 900, 101))
    assert caught.value.hint == "lower max_tokens to 100"
    with pytest.raises(ContextTooLong) as caught:
        make(num_pages=10_000).add(endless("a", 1000, 1))
    assert "shorten the prompt" in caught.value.hint


def test_too_long_for_the_cache_is_refused_with_the_arithmetic() -> None:
    drive = make(num_pages=12)
    # 73 tokens need KV for 72: 9 pages of 8, and a window of 8 touches 3 pages of 4.
    drive.add(endless("a", 33, 40))
    with pytest.raises(ContextTooLong, match=r"needs 3 g0 \+ 10 g1 pages, but the cache has only 12") as caught:
        drive.add(endless("b", 34, 40))
    assert "lower max_tokens" in caught.value.hint
    drive.run()
    drive.check_end()


@pytest.mark.parametrize(
    "groups", [((8, 4), (None, 8)), ((None, 4),), ((1, 3), (None, 2)), ((5, 2), (7, 8), (None, 3)), ((6, 4),)]
)
@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_not_refused_ends_in_the_smallest_cache(groups: tuple[tuple[int | None, int], ...], ahead: bool) -> None:
    for length, max_tokens in ((1, 1), (1, 30), (17, 9), (30, 1), (64, 3)):
        for num_pages in count(1):
            drive = make(make_layout(*groups), num_pages, budget=64, ahead=ahead)
            try:
                drive.add(endless("a", length, max_tokens))
            except ContextTooLong:
                continue
            break
        drive.add(endless("b", length, max_tokens, seed=1))  # the same prompt; its resume point must not be in the way
        drive.run()
        drive.check_end()


def test_a_full_queue_refuses() -> None:
    """A free slot is room, too, so a burst fits as well as requests that come one by one."""
    drive = make(queue=2, seqs=2)
    for name in "abcd":
        drive.add(endless(name, 5))
    for _ in range(2):
        with pytest.raises(QueueFull, match="4 sequences are running or waiting"):
            drive.add(endless("e", 5))
        drive.step()
        assert (drive.scheduler.stats().num_running, drive.scheduler.stats().num_waiting) == (2, 2)
    drive.scheduler.cancel("a")
    drive.add(endless("e", 5))
    drive.run()


def test_a_request_id_in_use_is_refused() -> None:
    drive = make()
    drive.add(endless("a", 5))
    with pytest.raises(BadRequest, match="still running"):
        drive.add(endless("a", 6))
    drive.run()
    drive.add(endless("a", 6))


# Ends


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("max_drafts", [0, 4])
@pytest.mark.parametrize(("wanted", "reason"), [("at once", "stop"), ("late", "stop"), ("never", "length")])
def test_a_sequence_ends_at_a_stop_token_or_at_its_length(wanted: str, reason: str, max_drafts: int, ahead: bool) -> None:
    drive = make(ahead=ahead, max_drafts=max_drafts)
    drive.add(make_request("a", prompt(20), 30, seed=first_seed(20, wanted)))
    drive.run()
    drive.check_end()
    assert drive.told["a", 0].finish_reason == reason


def test_tokens_after_a_stop_in_one_result_are_dropped() -> None:
    dropped = 0
    for seed in range(60):
        drive = make(max_drafts=4)
        drive.add(make_request("a", prompt(9), 40, seed=seed))
        drive.run()  # Drive compares the tokens and the reported stop token
        drive.check_end()
        dropped += drive.scheduler.counters.dropped_tokens
    assert dropped > 0


def test_rejected_drafts_are_rolled_back_and_their_pages_given_back() -> None:
    drive = make(make_layout((4, 1), (None, 1)), max_drafts=4)
    drive.add(endless("a", 5, 60))
    for _ in range(20):
        drive.step()
        (seq,) = drive.scheduler._running
        assert [len(pages.held) for pages in seq.groups] == [3, seq.num_computed]
        assert seq.num_computed == len(seq.tokens) - 1
    assert drive.scheduler.counters.rolled_back_tokens > 0
    assert drive.runner.counts["verifies"] > 5
    drive.run()
    drive.check_end()


def test_no_more_drafts_are_verified_than_tokens_are_left() -> None:
    drive = make(max_drafts=4)
    drive.add(endless("a", 5, 7))
    rows = []
    while drive.scheduler.has_work:
        plan = drive.step()
        assert plan is not None
        rows += plan.rows
    assert any(row.num_drafts for row in rows)
    assert all(row.start + row.num_new <= 5 + 7 - 1 for row in rows)


# Continuous batching


def test_a_long_prompt_shares_its_steps_with_decode() -> None:
    drive = make(budget=16)
    drive.add(endless("a", 4, 40))
    drive.step()
    drive.add(make_request("b", prompt(60, 1), 5, stop=False))
    chunks = []
    for _ in range(4):
        plan = drive.step()
        assert plan is not None
        assert plan.num_tokens == 16
        assert row_of(plan, 0).num_new == 1
        chunks.append(row_of(plan, 1))
    assert [(row.start, row.num_new, row.num_logits) for row in chunks] == [(0, 15, 0), (15, 15, 0), (30, 15, 0), (45, 15, 1)]
    drive.run()
    drive.check_end()


def test_neither_decode_nor_prefill_nor_drafts_starve() -> None:
    layout = make_layout((None, 4))

    def sequence(number: int, length: int, num_proposed: int = 0) -> Sequence:
        seq = Sequence(endless(str(number), length), 0, number, layout, is_cached=False)
        seq.num_proposed = num_proposed
        return seq

    decodes = [sequence(number, 1, num_proposed=9) for number in range(4)]
    prefills = [sequence(number, 100) for number in range(4, 6)]
    grants = share_budget([*prefills, *decodes], 24)
    # 4 for decode. Drafts get at most half of the other 20.
    assert [(grant.num_new, grant.num_drafts) for grant in grants] == [(10, 0), (10, 9), (2, 1), (1, 0), (1, 0)]
    assert [grant.num_new for grant in share_budget([*decodes, *prefills], 5)] == [1, 1, 1, 1, 1]
    assert [grant.num_new for grant in share_budget(decodes, 24)] == [10, 10, 3, 1]
    # A prompt that wants 3 of the other 23 tokens leaves 20 to drafts.
    grants = share_budget([sequence(6, 3), *decodes[:1], sequence(7, 1, num_proposed=18)], 24)
    assert [(grant.num_new, grant.num_drafts) for grant in grants] == [(3, 0), (10, 9), (11, 10)]


def test_a_sequence_starts_only_with_the_pages_that_its_drafter_writes_ahead() -> None:
    layout = make_layout((None, 4, 10))
    seq = Sequence(endless("a", 8, 20), 0, 0, layout, is_cached=False)
    assert pages_to_start(seq, 100) == 5  # for 8 tokens and 10 ahead of them
    assert pages_to_start(Sequence(endless("b", 8, 20), 0, 0, make_layout((None, 4)), is_cached=False), 100) == 3


def test_a_sequence_starts_only_with_the_pages_of_every_group() -> None:
    seq = Sequence(endless("a", 8, 20), 0, 0, make_layout((None, 2), (8, 4), (None, 4)), is_cached=False)
    assert pages_to_start(seq, 100) == 5 + 3 + 3
    seq.groups[0].reset(0, [1, 2])
    seq.groups[2].reset(0, [3])
    assert pages_to_start(seq, 100) == 3 + 3 + 2  # without those that it holds


def test_no_more_run_than_the_budget_has_tokens() -> None:
    drive = make(budget=3, seqs=8)
    for number in range(6):
        drive.add(endless(str(number), 1, 10))
    for _ in range(5):
        plan = drive.step()
        assert plan is not None
        assert len(plan.rows) == 3
    drive.run()
    drive.check_end()


def test_priority_goes_before_arrival() -> None:
    drive = make(seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        drive.add(endless(name, 5, 3, priority=priority))
    ended = []
    while drive.scheduler.has_work:
        drive.step()
        ended += [name for (name, _), told in drive.told.items() if told.finish_reason and name not in ended]
    assert ended == ["b", "d", "a", "c"]


# Pages


@pytest.mark.parametrize(("tokens", "page", "pages"), [(0, 4, 0), (1, 4, 1), (2, 4, 2), (5, 4, 2), (6, 4, 3), (3, 1, 3)])
def test_span_is_the_worst_alignment(tokens: int, page: int, pages: int) -> None:
    assert span(tokens, page) == pages
    assert pages == max(len({(begin + i) // page for i in range(tokens)}) for begin in range(page))


@pytest.mark.parametrize(("num_new", "bound"), [(0, 3), (1, 3), (8, 5), (9, 6), (1000, 6)])
def test_the_bound_of_a_window(num_new: int, bound: int) -> None:
    """A window of 8 in pages of 4 needs 7 tokens of context, and the last 8 of any longer chunk after a hole."""
    assert max_held_pages(LAYOUT.groups[0], num_new, 1) == bound
    assert max_held_pages(LAYOUT.groups[1], num_new, 1) is None


def test_a_chunk_longer_than_the_window_takes_no_pages_for_what_it_skips() -> None:
    drive = make(budget=50)
    drive.add(endless("a", 150))
    num_held = []
    for expected in (0, 50, 100):
        plan = drive.scheduler.schedule()
        row = row_of(plan, 0)
        end = row.start + row.num_new
        assert (row.start, row.num_new) == (expected, 50)
        assert row.store_from == (end - 8, row.start)
        table = row.tables[0]
        num_held.append(drive.scheduler.stats().num_held_pages["g0"])
        if row.start:  # from the window before the chunk to its end, with placeholders between
            assert (table.first, table.first + len(table.pages)) == ((row.start - 7) // 4, -(-end // 4))
            skipped = range(-(-row.start // 4), (end - 8) // 4)
            assert [table.pages[page - table.first] for page in skipped] == [0] * len(skipped)
        else:
            assert table.first == (end - 8) // 4
        assert plan is not None
        drive.scheduler.apply(drive.runner.execute(plan))
        audit(drive.scheduler)
        assert drive.scheduler.stats().num_held_pages["g0"] <= 3
    assert max(num_held) <= 6
    drive.run()
    drive.check_end()


def test_pages_behind_the_window_go_back_at_once() -> None:
    drive = make(prefix_caching=False)
    drive.add(endless("a", 3, 60))
    while drive.scheduler.has_work:
        drive.step()
        for seq in drive.scheduler._running:
            first = max(0, seq.num_computed - 7) // 4
            assert seq.groups[0].first == first
            assert len(seq.groups[0].held) == -(-seq.num_computed // 4) - first
    drive.check_end()


# Preemption


def test_the_youngest_is_preempted_and_draws_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "SLICE_FACTOR", 10**9)  # it waits until another one ends
    drive = make(make_layout((None, 4)), num_pages=12, seqs=4)
    for name in "abc":
        drive.add(endless(name, 8, 24))
    lost: list[int] = []
    original = drive.scheduler._preempt

    def preempt(seq: Sequence) -> None:
        lost.append(seq.arrival)
        assert seq is drive.scheduler._running[-1]
        original(seq)

    drive.scheduler._preempt = preempt  # type: ignore[method-assign]
    ended = []
    while drive.scheduler.has_work:
        drive.step()
        ended += [name for (name, _), told in drive.told.items() if told.finish_reason and name not in ended]
    assert set(lost) == {1, 2}
    assert lost[0] == 2
    assert ended == ["a", "b", "c"]
    drive.check_end()


def test_admission_leaves_room_to_grow() -> None:
    """Admission leaves a page per group beyond the prompt, and all pages reserved for a prompt that is still being computed."""
    drive = make(make_layout((None, 4)), num_pages=9, budget=8)
    drive.add(endless("a", 20, 5))  # 5 pages + 1
    drive.add(make_request("b", prompt(12, 1), 5, stop=False))  # 3 pages + 1, together one more than there are
    drive.add(make_request("c", prompt(4, 2), 4, stop=False))  # would fit, but b comes first
    entries = []
    for _ in range(3):
        plan = drive.step()
        assert plan is not None
        entries.append([entry.prompt_len for entry in plan.entries])
    assert entries == [[20], [], [12]]  # once the first prompt is computed, its growth may preempt b
    drive.run()
    drive.check_end()


@pytest.fixture
def short_trail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks end at resume lengths, unless the rest of the chunk is very short."""
    for module in ("sequence", "rows"):
        monkeypatch.setattr(f"culet.scheduler.{module}.MAX_TRAIL", 4)


@pytest.mark.usefixtures("short_trail")
def test_sequences_that_start_together_are_not_promised_the_same_pages() -> None:
    """If a prompt's first chunk ends early, pages for the rest are reserved before the next prompt starts in the same step."""
    drive = make(make_layout((None, 4)), num_pages=40, budget=128)
    drive.add(make_request("a", prompt(100), 2, stop=False, resume_lengths=(40,)))  # 25 pages + 1, of which it takes 10
    drive.add(make_request("b", prompt(60, 1), 2, stop=False))  # 15 + 1; 16 of the other 30 are reserved for a
    plan = drive.step()
    assert plan is not None
    assert [entry.prompt_len for entry in plan.entries] == [100]
    drive.run()
    assert drive.scheduler.counters.preemptions == 0
    drive.check_end()


@pytest.mark.usefixtures("short_trail")
def test_pages_promised_in_an_earlier_step_stay_promised() -> None:
    drive = make(make_layout((None, 4)), num_pages=60, budget=64)
    drive.add(make_request("a", prompt(200), 2, stop=False, resume_lengths=(40, 90)))  # 50 pages + 1
    drive.step()
    drive.add(make_request("b", prompt(40, 1), 2, stop=False))  # 10 + 1
    plan = drive.step()
    assert plan is not None
    assert [row.num_new for row in plan.rows] == [50]  # tokens are left, but 28 of the other 37 pages are reserved for a
    drive.run()
    assert drive.scheduler.counters.preemptions == 0
    drive.check_end()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_sequence_may_end_by_the_result_in_flight(ahead: bool) -> None:
    for seed in range(40):
        drive = make(make_layout((None, 2)), num_pages=11, ahead=ahead)
        drive.add(endless("a", 4, 18))
        drive.add(make_request("b", prompt(4, 1), 12, seed=seed))
        drive.run()
        drive.check_end()


# Look-ahead


def test_one_step_is_planned_on_a_token_that_is_not_there_yet() -> None:
    drive = make()
    drive.add(endless("a", 5, 10))
    scheduler = drive.scheduler
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert (row_of(second, 0).start, row_of(second, 0).num_new) == (5, 1)
    with pytest.raises(AssertionError, match="two plans"):
        scheduler.schedule()
    results = [drive.runner.execute(plan) for plan in (first, second)]
    for result in results:
        scheduler.apply(result)
    assert len([token for delta in scheduler.deltas() for token in delta.token_ids]) == 2


def test_results_are_applied_in_order() -> None:
    drive = make()
    drive.add(endless("a", 5, 10))
    results = [drive.runner.execute(plan) for plan in (drive.scheduler.schedule(), drive.scheduler.schedule()) if plan]
    with pytest.raises(AssertionError, match="result of step 1, expected that of step 0"):
        drive.scheduler.apply(results[1])


def test_a_token_planned_beyond_a_stop_is_dropped() -> None:
    drive = make(ahead=True)
    drive.add(make_request("a", prompt(20), 30, seed=first_seed(20, "late")))
    drive.add(endless("b", 20, 40))
    drive.run()
    assert drive.scheduler.counters.dropped_tokens == 1
    drive.check_end()


def test_nothing_is_planned_beyond_the_last_token() -> None:
    drive = make(ahead=True)
    drive.add(endless("a", 20, 1))
    drive.add(endless("b", 20, 7))
    drive.run()
    assert drive.scheduler.counters.dropped_tokens == 0
    drive.check_end()


def test_a_sequence_with_drafts_is_not_planned_ahead() -> None:
    drive = make(max_drafts=3)
    drive.add(endless("a", 5, 20))
    assert drive.scheduler.schedule() is not None
    assert drive.scheduler.schedule() is None


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_look_ahead_takes_as_many_tokens_as_without(max_drafts: int) -> None:
    """The pipeline never runs dry. Without drafts, n tokens take n steps, and no step is spent on an ended sequence."""
    drive = make(ahead=True, max_drafts=max_drafts)
    drive.add(endless("a", 5, 30))
    drive.run()
    if not max_drafts:
        assert drive.scheduler.counters.steps == 30
    drive.check_end()


# Statistics and the fake runner


def test_stats_tell_how_things_stand() -> None:
    drive = make(seqs=2)
    for name in "abc":
        drive.add(endless(name, 20, 10))
    drive.step()
    stats = drive.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages) == (2, 1, 200)
    assert stats.num_held_pages == {"g0": 4, "g1": 6}
    assert stats.num_free_pages == 200 - 10
    assert stats.num_tokens == 3 * 20 + 2  # with one drawn token for each running sequence
    assert stats.counters.steps == 1
    drive.run()
    assert stats.counters.steps == 1  # a snapshot
    stats = drive.scheduler.stats()
    assert stats.num_free_pages + stats.num_resume_point_pages == 200
    assert stats.num_tokens == 0
    assert stats.counters.prefix_queries == 3


def test_draws_depend_on_seed_and_sample() -> None:
    """Check the fake runner itself. Otherwise equal outputs would prove nothing."""
    drawn = {draw(1234, make_request("a", [1], seed=seed).sampling_of(sample)) for seed in range(10) for sample in range(4)}
    assert len(drawn) > 10


def test_the_scheduler_imports_without_torch() -> None:
    code = "import sys, culet.scheduler.scheduler; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class FirstDrafts(FixedLengths):
    """Wants drafts for the first sequence only, and records the reported times."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Acceptance | None = None
        self.times: list[tuple[int, int, int, float]] = []

    def length(self, state: Acceptance, num_seqs: int) -> int:
        assert num_seqs > 0
        self.first = self.first or state
        return 2 if state is self.first else 0

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        self.times.append((num_seqs, num_drafting, num_drafts, seconds))


def test_who_waits_for_drafts_is_waited_for() -> None:
    """If the others were planned ahead without it, they would then run in separate steps, each as long as a joint one."""
    drive = make(ahead=True, max_drafts=2)
    drive.scheduler.policy = policy = FirstDrafts()
    for name in ("a", "b", "c"):
        drive.add(endless(name, 5, 30))
    sizes = []
    for number in range(200):
        drive.now = 0.5 * number  # type: ignore[attr-defined]
        plan = drive.step()
        sizes += [] if plan is None else [len(plan.rows)]
        if not drive.scheduler.has_work:
            break
    assert sizes[:12] == [3] * 12
    assert 3 in {num_seqs for num_seqs, *_ in policy.times}
    assert all(seconds > 0 for *_, seconds in policy.times)


class CountedLengths(FixedLengths):
    """Records how many sequences are said to draft together."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def length(self, state: Acceptance, num_seqs: int) -> int:
        self.sizes.append(num_seqs)
        return self.num_drafts


def test_those_who_start_together_are_counted_together() -> None:
    """A round of several sequences costs more than one of a single sequence, so the first must know about the others."""
    drive = make(max_drafts=2, seqs=4)
    drive.scheduler.policy = policy = CountedLengths()
    for number in range(6):
        drive.add(endless(str(number), 5, 30))
    drive.step()
    assert policy.sizes == [4] * 4


class TimedLengths(FixedLengths):
    """Drafts all the time, except in steps that are run to time them."""

    def __init__(self, cost: MeasuredCost) -> None:
        super().__init__(2)
        self.cost, self.steps = cost, TimedSteps()

    def plan(self, batch: abc.Sequence[Acceptance]) -> None:
        if batch:
            self.steps.count(len(batch))
            timed = self.steps.next(2, is_confirmed=False)
            self.num_drafts = 2 if timed is None else timed

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        self.cost.took(num_seqs, num_drafting, num_drafts, seconds)


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_enough_steps_are_timed_to_compare_rounds_with_plain_steps(num_seqs: int) -> None:
    """Even if every other step has drafts. All steps take as long here, so rounds turn out to cost nothing."""
    drive = make(max_drafts=2, num_pages=200)
    cost = MeasuredCost(StepCost(1.0, 0.0, 1, 1, 1.0, 1.0, drafts_at_once=False, bytes_per_s=1.0, flops_per_s=1.0, wait_s=1.0))
    before = cost.overhead(num_seqs, num_seqs, 2)
    drive.scheduler.policy, drive.runner.proposes_all = TimedLengths(cost), True
    for number in range(num_seqs):
        drive.add(endless(str(number), 5, 120))
    for number in range(60):
        drive.now = 0.5 * number  # type: ignore[attr-defined]
        drive.step()
    assert cost.overhead(num_seqs, num_seqs, 2) < 0.6 * before
