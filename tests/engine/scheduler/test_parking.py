"""Preempted sequences keep their KV in host memory. The fake runner checks every key that is read from pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from culet.scheduler import scheduler as scheduler_module
from culet.scheduler.sequence import MIN_PARKED, Sequence
from culet.types import FinishReason, StepPlan
from tests.engine.scheduler.drive import Drive, endless, make, make_layout, make_request, prompt

WIDE = make_layout((16, 4), (None, 8))
PROMPT_LEN = MIN_PARKED + 6


def make_full(
    num_seqs: int = 4, *, num_host_pages: int = 200, spare: int = 3, ahead: bool = False, prefix_caching: bool = True
) -> Drive:
    """Make a scheduler that can start `num_seqs` sequences of PROMPT_LEN tokens, but has few pages for them to grow."""
    each = -(-PROMPT_LEN // 8) + 1 + 6
    return make(
        WIDE,
        num_seqs * each + spare,
        seqs=num_seqs,
        budget=512,
        ahead=ahead,
        prefix_caching=prefix_caching,
        num_host_pages=num_host_pages,
    )


def fill(drive: Drive, num_seqs: int = 4, max_tokens: int = 60) -> None:
    for number in range(num_seqs):
        drive.add(make_request(f"r{number}", prompt(PROMPT_LEN, number), max_tokens, stop=False))


def parked(drive: Drive) -> list[Sequence]:
    return [seq for seq in drive.scheduler._waiting if seq.parked]


def step_until_parked(drive: Drive) -> StepPlan:
    """Return the plan that saves pages."""
    for _ in range(200):
        plan = drive.step()
        if plan is not None and plan.saves:
            assert parked(drive)
            return plan
    raise AssertionError("nothing was parked")


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_is_computed_again(ahead: bool, prefix_caching: bool) -> None:
    drive = make_full(ahead=ahead, prefix_caching=prefix_caching)
    fill(drive)
    drive.run()
    drive.check_end()
    counters = drive.scheduler.counters
    assert counters.parked == counters.restored == counters.preemptions > 1
    assert counters.step_tokens == 4 * (PROMPT_LEN + 60 - 1) + counters.dropped_tokens
    assert counters.restart_hits == 0


def test_without_host_pages_much_is() -> None:
    drive = make_full(num_host_pages=0, prefix_caching=False)
    fill(drive)
    drive.run()
    drive.check_end()
    counters = drive.scheduler.counters
    assert counters.parked == counters.restored == 0
    assert counters.step_tokens >= 4 * (PROMPT_LEN + 60 - 1) + counters.preemptions * PROMPT_LEN > 4 * (PROMPT_LEN + 60)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_restart_has_one_token(ahead: bool) -> None:
    """It loads the pages of its window and of all its tokens, and then computes the last token that it drew."""
    drive = make_full(ahead=ahead)
    fill(drive)
    saving = step_until_parked(drive)
    assert not saving.loads
    (seq,) = parked(drive)
    num_computed = seq.num_computed
    plans = [drive.step() for _ in range(60)]
    loading = next(plan for plan in plans if plan is not None and plan.loads)
    (entry,) = loading.entries
    (row,) = (row for row in loading.rows if row.slot == entry.slot)
    assert (row.start, row.num_new) == (num_computed, 1)
    assert len(entry.token_ids) == num_computed + 1
    num_pages = -(-num_computed // 8) + -(-num_computed // 4) - (num_computed - 15) // 4
    assert len(loading.loads) == num_pages
    assert {page for _, page in loading.loads} <= {page for table in row.tables for page in table.pages}
    drive.run()
    drive.check_end()


def test_few_host_pages() -> None:
    """Sequences without room in host memory are computed again."""
    drive = make_full(num_host_pages=20, spare=0)
    fill(drive, max_tokens=100)
    drive.run()
    drive.check_end()
    counters = drive.scheduler.counters
    assert 0 < counters.parked == counters.restored < counters.preemptions


def test_short_sequences_are_not_parked() -> None:
    drive = make(WIDE, 40, seqs=4, num_host_pages=100)
    for number in range(4):
        drive.add(endless(f"r{number}", 10, MIN_PARKED - 10))
    drive.run()
    drive.check_end()
    assert drive.scheduler.counters.preemptions > 0
    assert drive.scheduler.counters.parked == 0


@pytest.mark.parametrize("reason", [FinishReason.CANCEL, FinishReason.TIMEOUT])
def test_the_end_of_a_parked_sequence(reason: FinishReason) -> None:
    drive = make_full()
    fill(drive)
    step_until_parked(drive)
    host = drive.scheduler.page_allocator.host
    (seq,) = parked(drive)
    drive.scheduler.cancel(seq.request.request_id, reason=reason)
    assert host.num_free == host.num_pages
    drive.run()
    drive.check_end()
    assert drive.told[seq.request.request_id, 0].finish_reason is reason


def test_a_cancel_before_the_pages_are_saved() -> None:
    """The sequence ends between its preemption and the next plan, so nothing is saved."""
    drive = make_full()
    fill(drive)
    drive.step()
    scheduler = drive.scheduler
    last = scheduler._running[-1]
    assert last.park(scheduler.page_allocator)
    scheduler._preempt(last)
    scheduler.cancel(last.request.request_id)
    plan = drive.step()
    assert plan is not None
    assert not plan.saves
    drive.run()
    drive.check_end()


def test_a_failed_step_forgets_what_is_parked() -> None:
    """Nobody knows whether the pages were saved."""
    drive = make_full()
    fill(drive)
    step_until_parked(drive)
    (seq,) = parked(drive)
    num_tokens = drive.scheduler.counters.step_tokens
    assert drive.scheduler.schedule() is not None
    drive.scheduler.fail_steps("out of memory")
    assert not parked(drive)
    host = drive.scheduler.page_allocator.host
    assert (host.num_free, seq.num_computed) == (host.num_pages, 0)
    drive.runner._last_step += 1
    for delta in drive.scheduler.deltas():
        drive.hear(delta)
    drive.run()
    assert drive.told[seq.request.request_id, 0].finish_reason is FinishReason.LENGTH
    assert drive.scheduler.counters.step_tokens - num_tokens >= PROMPT_LEN
    drive.check_end()


def test_running_sequences_are_not_parked_by_a_failed_step() -> None:
    drive = make_full(ahead=True, spare=200)
    fill(drive)
    for _ in range(3):
        drive.step()
    drive.scheduler.fail_steps("out of memory")
    assert drive.scheduler.counters.parked == 0
    assert not parked(drive)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_sequence_in_its_prompt(prefix_caching: bool) -> None:
    """It goes on with the rest of its prompt."""
    drive = make(WIDE, 200, seqs=2, budget=100, num_host_pages=100, prefix_caching=prefix_caching)
    drive.add(endless("long", 250))
    drive.step()
    scheduler = drive.scheduler
    (seq,) = scheduler._running
    assert (seq.num_computed, seq.is_prefilled) == (100, False)
    assert seq.park(scheduler.page_allocator)
    scheduler._preempt(seq)
    assert seq.num_computed == 100
    plan = drive.step()
    assert plan is not None
    assert plan.saves
    assert plan.loads
    assert plan.rows[0].start == 100
    drive.run()
    drive.check_end()
    assert scheduler.counters.step_tokens == 250 + 20 - 1


def test_where_the_window_is_stored() -> None:
    """A long chunk stores only its end. Resume points of a sequence that was parked say so, too."""
    drive = make(WIDE, 200, seqs=2, budget=100, num_host_pages=100)
    drive.add(endless("long", 250))
    drive.step()
    scheduler = drive.scheduler
    (seq,) = scheduler._running
    stored_from = [pages.stored_from for pages in seq.groups]
    assert stored_from[0] > 50
    assert seq.park(scheduler.page_allocator)
    scheduler._preempt(seq)
    assert seq.return_to_pages(scheduler.page_allocator)
    assert [pages.stored_from for pages in seq.groups] == stored_from


@pytest.mark.parametrize("num_tokens", range(4))
def test_a_row_in_flight_that_draws_nothing(num_tokens: int) -> None:
    """Its draw needed a mask. The sequence was parked in the meantime, and computes its last token again."""
    drive = make(WIDE, 100, seqs=2, num_host_pages=100, budget=128)
    drive.add(endless("one", PROMPT_LEN))
    for _ in range(1 + num_tokens):  # so that the last token falls anywhere in a page
        drive.step()
    scheduler = drive.scheduler
    (seq,) = scheduler._running
    plan = scheduler.schedule()
    assert plan is not None
    result = drive.runner.execute(plan)
    assert seq.park(scheduler.page_allocator)
    scheduler._preempt(seq)
    assert seq.num_computed == len(seq.tokens)
    scheduler.apply(replace(result, drawn=tuple(draw._replace(token_ids=(), logprobs=()) for draw in result.drawn)))
    assert seq.num_computed == len(seq.tokens) - 1
    again = drive.step()
    assert again is not None
    assert (again.rows[0].start, again.rows[0].num_new) == (len(seq.tokens) - 2, 1)
    drive.run()
    drive.check_end()


@pytest.mark.parametrize("ahead", [False, True])
def test_samples_that_share_pages(ahead: bool) -> None:
    """Each is saved with its own copy of the shared pages."""
    drive = make_full(ahead=ahead, spare=-8)
    drive.add(make_request("many", prompt(PROMPT_LEN), 60, n=4, stop=False))
    drive.run()
    drive.check_end()
    counters = drive.scheduler.counters
    assert counters.parked == counters.restored > 0


def test_pages_that_await_a_copy_are_not_parked() -> None:
    """A sample forks in the middle of a page, whose copy is made by the next plan."""
    drive = make_full()
    drive.add(make_request("many", prompt(PROMPT_LEN), 60, n=2, stop=False))
    drive.step()
    scheduler = drive.scheduler
    first, second = scheduler._running
    assert not second.park(scheduler.page_allocator)
    assert first.park(scheduler.page_allocator)
    scheduler._preempt(first)
    drive.run()
    drive.check_end()


def test_an_urgent_request_takes_the_pages() -> None:
    """The least urgent sequence is parked, and goes on when the urgent one has ended."""
    drive = make_full(2, spare=1)
    drive.add(make_request("urgent", prompt(PROMPT_LEN, 1), 60, stop=False))
    drive.add(make_request("later", prompt(PROMPT_LEN, 2), 60, stop=False, priority=1))
    step_until_parked(drive)
    (seq,) = parked(drive)
    assert seq.request.request_id == "later"
    drive.run()
    drive.check_end()
    counters = drive.scheduler.counters
    assert counters.step_tokens == 2 * (PROMPT_LEN + 60 - 1)


def test_a_parked_sequence_keeps_no_resume_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that makes way after its time slice does so only if it is not parked."""
    kept: list[int] = []
    monkeypatch.setattr(scheduler_module, "keep_point", lambda seq, length, allocator: kept.append(seq.finish_reason is None))
    counts = {}
    for num_host_pages in (0, 400):
        drive = make_full(spare=6, num_host_pages=num_host_pages)
        fill(drive, max_tokens=400)
        drive.run()
        drive.check_end()
        assert drive.scheduler.counters.preemptions > 4  # more than the lack of pages alone would cause
        counts[num_host_pages] = sum(kept)
        kept.clear()
    assert counts[0] > 0 == counts[400]


def test_steps_with_transfers_teach_nothing_about_time() -> None:
    drive = make_full(num_host_pages=200)
    fill(drive)
    while True:
        plan = drive.scheduler.schedule()
        assert plan is not None
        (step,) = drive.scheduler._in_flight
        assert step.is_timed != bool(plan.saves or plan.loads)
        drive.scheduler.apply(drive.runner.execute(plan))
        drive.scheduler.deltas()
        if plan.loads:
            break


def test_a_sequence_that_needs_nearly_the_whole_cache_gets_its_turns() -> None:
    """Who makes way for it takes no more pages, so those that it would have drawn next are not reserved."""
    drive = make(make_layout((None, 16)), 114, seqs=4, budget=512, prefix_caching=False, max_model_len=9000, num_host_pages=400)
    drive.add(endless("long", 800, 1000))
    drive.add(endless("short", 100, 1690))
    pause, longest, length = 0, 0, 0
    while drive.scheduler.has_work:
        drive.step()
        grown = len(drive.told["long", 0].tokens) if ("long", 0) in drive.told else 0
        pause = 0 if grown > length or grown == 1000 else pause + 1
        longest, length = max(longest, pause), grown
    assert drive.scheduler.counters.restored > 10
    assert longest < 100
