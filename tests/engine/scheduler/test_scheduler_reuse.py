"""What sequences share: samples of one prompt, prompts with a common prefix, and prompt log-probabilities alongside."""

from __future__ import annotations

import pytest

from culet.cache.point_tree import MIN_SHARED
from culet.cache.prefix import POINT_SLACK
from culet.scheduler import fairness
from culet.scheduler.sequence import MIN_GAIN
from culet.types import FinishReason, Request
from tests.engine.scheduler.drive import Drive, endless, first_seed, make, make_layout, make_request, prompt, row_of
from tests.engine.scheduler.fake_runner import STOP

# Samples


def test_samples_fork_from_one_prompt() -> None:
    drive = make()
    drive.add(endless("a", 21, 12, n=4))
    plan = drive.step()
    assert plan is not None
    (row,) = plan.rows
    assert row.draw_slots == (0, 1, 2, 3)
    assert [entry.slot for entry in plan.entries] == [0, 1, 2, 3]
    assert [entry.sampling.sample for entry in plan.entries] == [0, 1, 2, 3]
    assert plan.copies == ()  # the prompt's last tokens are written in this same step
    # 21 tokens: two full pages of 8 are shared, and each sample has its own third. The window from 14 on
    # likewise has two shared pages of 4 and a partial one for each sample.
    assert drive.scheduler.stats().num_held_pages == {"g0": 2 + 4, "g1": 2 + 4}
    plan = drive.step()
    assert plan is not None
    assert len(plan.copies) == 6
    assert {source for source, _ in plan.copies} == {row.tables[0].pages[-1], row.tables[1].pages[-1]}
    assert len(plan.rows) == 4
    drive.run()
    drive.check_end()
    assert drive.runner.counts["forks"] == 3
    assert len({tuple(told.tokens) for told in drive.told.values()}) == 4


def test_samples_that_cannot_fork_wait_in_the_queue() -> None:
    drive = make(seqs=2)
    drive.add(endless("a", 21, 12, n=5))
    drive.run()
    drive.check_end()
    assert drive.scheduler.counters.forks == 1


def test_samples_fork_without_a_copy_where_pages_are_full() -> None:
    drive = make()
    drive.add(endless("a", 16, 4, n=3))
    plans = [drive.step() for _ in range(3)]
    assert all(plan is not None and plan.copies == () for plan in plans)
    drive.run()
    drive.check_end()


def test_a_fork_outlives_its_parent_before_its_pages_are_copied() -> None:
    drive = make(num_pages=20)
    drive.add(endless("a", 21, 12, n=2))
    drive.step(between=[("a", 0)])
    drive.add(make_request("b", prompt(40, 1), 4, stop=False))  # takes the pages that are now free
    drive.run()
    drive.check_end()


def test_forks_that_end_before_their_copies_leave_nothing() -> None:
    drive = make()
    drive.add(endless("a", 21, 12, n=3))
    drive.step(between=[("a", None)])
    assert not drive.scheduler.has_work
    drive.check_end()


def test_a_fork_that_stops_at_once_keeps_no_page_without_content() -> None:
    seed = first_seed(21, "at once", sample=1)
    drive = make()
    drive.add(make_request("a", prompt(21), 12, seed=seed, n=2))
    drive.step()
    assert drive.told["a", 1].finish_reason is FinishReason.STOP
    drive.add(make_request("b", [*prompt(21), STOP, 5], 4))
    drive.run()
    drive.check_end()


def test_the_next_sample_computes_the_prompt_when_the_first_is_cancelled() -> None:
    drive = make(budget=8)
    drive.add(endless("a", 30, 5, n=3))
    drive.step()
    drive.scheduler.cancel("a", 0)
    drive.run()
    drive.check_end()
    assert [drive.told["a", sample].finish_reason for sample in range(3)] == ["abort", "length", "length"]


# Prefix reuse


def computed(drive: Drive, request: Request) -> int:
    """Return how many tokens the runner computes for `request` alone when it draws one token."""
    before = drive.runner.counts["tokens"]
    drive.add(request)
    drive.run()
    return drive.runner.counts["tokens"] - before


@pytest.mark.parametrize("ahead", [False, True])
def test_the_same_prompt_again_computes_one_token(ahead: bool) -> None:
    for length in (21, 24, 32, 100):
        drive = make(ahead=ahead)
        assert computed(drive, endless("a", length, 1)) == length
        assert computed(drive, endless("b", length, 1, seed=5)) == 1
        assert drive.told["b", 0].num_cached == length - 1
        assert drive.told["a", 0].num_cached == 0
        drive.check_end()


def test_the_next_turn_computes_only_what_is_new() -> None:
    drive = make()
    first = make_request("a", prompt(30), 20, seed=first_seed(30, "late"))
    drive.add(first)
    drive.run()
    turn = [*prompt(30), *drive.told["a", 0].tokens]
    # The KV of the last token was not needed before, so it is computed with the new tokens.
    assert computed(drive, make_request("b", [*turn, 1, 2, 3], 1)) == 4
    assert drive.told["b", 0].num_cached == len(turn) - 1
    # The answer is omitted from the next turn, but the end of the prompt is still there.
    assert computed(drive, make_request("c", [*prompt(30), 9, 9], 1)) == 2
    drive.check_end()


def test_the_third_of_three_with_a_common_beginning_hits_the_junction() -> None:
    drive = make()
    common = prompt(43)
    assert computed(drive, make_request("a", [*common, *prompt(30, 1)], 1)) == 73
    # 43 tokens are known, but no window was kept there. The second request keeps one.
    assert computed(drive, make_request("b", [*common, *prompt(30, 2)], 1)) == 73
    assert drive.told["b", 0].num_cached == 0
    assert computed(drive, make_request("c", [*common, *prompt(30, 3)], 1)) == 30
    assert drive.told["c", 0].num_cached == 43
    drive.check_end()


def test_prompts_that_share_a_few_tokens_more_leave_a_point_for_those_that_do_not() -> None:
    drive = make(budget=128)
    common = prompt(60)
    for name in "ab":  # both go on with the same ten tokens
        assert computed(drive, make_request(name, [*common, *prompt(10, 5), *prompt(30, ord(name))], 1)) == 100
    assert computed(drive, make_request("c", [*common, *prompt(30, 3)], 1)) == 30
    assert drive.told["c", 0].num_cached == 60
    drive.check_end()


@pytest.mark.parametrize("num_common", [40, 100, 200, 500])
@pytest.mark.parametrize("budget", [64, 2000])
def test_a_prompt_within_the_window_serves_at_any_length(num_common: int, budget: int) -> None:
    """The second prompt already resumes where it parts from the first."""
    drive = make(make_layout((512, 64), (None, 256)), budget=budget)
    common = prompt(num_common)
    assert computed(drive, make_request("a", [*common, *prompt(12, 1)], 1)) == num_common + 12
    assert computed(drive, make_request("b", [*common, *prompt(30, 2)], 1)) == 30
    drive.check_end()


@pytest.mark.parametrize("budget", [512, 8192])
def test_long_prompts_with_the_pages_of_a_real_model(budget: int) -> None:
    """A window of 1024 tokens, and pages of 64 and 256. The first prompt keeps nothing where the others part from it."""
    drive = make(make_layout((1024, 64), (None, 256)), 400, budget=budget, max_model_len=8000)
    common = prompt(5000)
    for name, num_computed in (("a", 6500), ("b", 6500), ("c", 1500)):
        assert computed(drive, make_request(name, [*common, *prompt(1500, ord(name))], 1)) == num_computed
    drive.check_end()


@pytest.mark.parametrize(("budget", "num_common"), [(8192, 8200), (8192, 8193), (8192, 16_390), (2048, 4100), (4990, 5000)])
def test_prompts_that_part_right_after_a_chunk(budget: int, num_common: int) -> None:
    """Nothing is kept where a chunk ended, so the next one ends where prompts part, however short that makes it."""
    drive = make(make_layout((1024, 64), (None, 256)), 600, budget=budget, max_model_len=40_000)
    common, tail = prompt(num_common), 2000
    for name, num_computed in (("a", num_common + tail), ("b", num_common + tail), ("c", tail), ("d", tail)):
        assert computed(drive, make_request(name, [*common, *prompt(tail, ord(name))], 1)) <= num_computed + 16
    drive.check_end()


def test_only_prompts_count_as_looked_up() -> None:
    """Requests that have nothing in common find nothing, even if they start again or have several samples."""
    drive = make(num_pages=40)
    for number in range(10):
        drive.add(make_request(str(number), prompt(20, number), 30, stop=False, n=2 if number == 3 else 1))
    drive.run()
    counters = drive.scheduler.counters
    assert counters.preemptions > 0
    assert counters.restart_hits > 0
    assert (counters.prefix_queries, counters.prefix_query_tokens, counters.prefix_hit_tokens) == (10, 200, 0)
    drive.check_end()


def test_a_few_common_tokens_are_not_worth_a_copy() -> None:
    drive = make(make_layout((64, 4), (None, 8)))
    less, enough = prompt(MIN_SHARED - 1), prompt(MIN_SHARED, 1)
    assert computed(drive, make_request("a", [*less, 41, 42], 1)) == MIN_SHARED + 1
    assert computed(drive, make_request("b", [*less, 43, 44], 1)) == MIN_SHARED + 1
    assert computed(drive, make_request("c", [*less, 41, 42, 43], 1)) == 1  # the end of a prompt is
    assert computed(drive, make_request("d", [*enough, 41, 42], 1)) == MIN_SHARED + 2
    assert computed(drive, make_request("e", [*enough, 43, 44], 1)) == 2
    drive.check_end()


def test_a_hit_shares_full_pages_and_copies_the_others() -> None:
    drive = make()
    drive.add(endless("a", 21, 30))
    drive.step()
    drive.add(make_request("b", [*prompt(21), 1, 2, 3], 30, stop=False))  # while the first one runs
    plan = drive.step()
    assert plan is not None
    assert len(plan.copies) == 2
    mine, theirs = row_of(plan, 1), row_of(plan, 0)
    assert mine.start == 21
    assert mine.tables[1].pages[:2] == theirs.tables[1].pages[:2]
    assert mine.tables[1].pages[2] != theirs.tables[1].pages[2]
    drive.run()
    drive.check_end()


def test_resume_points_give_way_to_sequences() -> None:
    drive = make(num_pages=16)
    for number in range(6):
        drive.add(make_request(str(number), prompt(40, number), 6, stop=False))
        drive.run()
    assert drive.scheduler.stats().num_resume_points > 0
    assert drive.scheduler.counters.preemptions == 0
    drive.check_end()


def test_without_prefix_caching_nothing_is_kept() -> None:
    drive = make(prefix_caching=False)
    assert computed(drive, endless("a", 30, 1)) == computed(drive, endless("b", 30, 1)) == 30
    assert drive.scheduler.stats().num_free_pages == 200


def test_a_hit_that_does_not_fit_beside_its_resume_point_starts_from_nothing() -> None:
    drive = make(make_layout((None, 4)), num_pages=2)
    assert computed(drive, endless("a", 6, 1)) == 6
    assert computed(drive, endless("b", 6, 1)) == 6  # the resume point holds both pages, and there is no third to copy into
    drive.check_end()


def test_a_hit_that_leaves_no_page_for_the_next_token_starts_from_nothing() -> None:
    """The copy of a partial page takes the last page while its source is held, and another group needs one too."""
    drive = make(make_layout((None, 8), (None, 4)), num_pages=3 + 6)
    drive.add(make_request("a", prompt(20), 1, stop=False))  # leaves a point on 3 + 5 pages
    drive.run()
    drive.add(make_request("b", prompt(21), 4, stop=False))
    plan = drive.step()
    assert plan is not None
    assert plan.rows[0].start == 0
    drive.run()
    drive.check_end()
    assert drive.scheduler.counters.prefix_hits == 0


# Resume points


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [21, 24, 33, 64, 150])
@pytest.mark.parametrize("trail", [1, 4, 7, 15])
def test_a_prompt_that_parts_at_a_resume_point_computes_only_what_follows(length: int, trail: int, ahead: bool) -> None:
    """A chat's next turn lacks the end of the previous prompt. Pages hold 4 and 8 tokens, and chunks up to 64."""
    drive = make(ahead=ahead)
    point = length - trail
    assert computed(drive, make_request("a", prompt(length), 1, stop=False, resume_lengths=(point,))) == length
    num_steps = drive.scheduler.counters.steps
    assert num_steps == -(-length // 64)  # no extra step
    assert computed(drive, make_request("b", [*prompt(point), 41, 42, 43], 1)) == 3
    assert drive.told["b", 0].num_cached == point
    # A prompt that ends at the point itself recomputes only its last token.
    assert computed(drive, make_request("c", prompt(point), 1)) == 1
    assert computed(drive, endless("d", length, 1)) == 1
    drive.check_end()


def test_without_resume_lengths_that_prompt_starts_from_nothing() -> None:
    drive = make()
    assert computed(drive, endless("a", 33, 1)) == 33
    assert computed(drive, make_request("b", [*prompt(26), 41, 42, 43], 1)) == 29
    drive.check_end()


def test_ten_turns_that_leave_out_the_end_of_each_prompt() -> None:
    drive, history, reusable = make(budget=32), prompt(40), 0
    for turn in range(10):
        asked = [*history, *prompt(9, turn), 7, 7, 7, 7, 7]
        point = len(asked) - 4
        drive.add(make_request(str(turn), asked, 12, stop=False, resume_lengths=(point,)))
        drive.run()
        assert drive.told[str(turn), 0].num_cached == reusable
        reusable, history = point, [*asked[:point], *drive.told[str(turn), 0].tokens]
    drive.check_end()


def test_a_chunk_ends_at_a_resume_point_far_from_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("culet.scheduler.sequence.MAX_TRAIL", 30)
    monkeypatch.setattr("culet.scheduler.rows.MAX_TRAIL", 30)
    drive = make(budget=512, num_pages=400)
    drive.add(make_request("a", prompt(300), 1, stop=False, resume_lengths=(100, 280, 290)))
    sizes = []
    while drive.scheduler.has_work:
        plan = drive.step()
        sizes += [(row.start, row.num_new, row.store_from[0]) for row in plan.rows] if plan else []
    # The window is 8. The first chunk stores what token 68 sees, and the second stores what token 248 sees.
    assert sizes == [(0, 100, 100 - 7 - POINT_SLACK), (100, 200, 280 - 7 - POINT_SLACK)]
    for number, point in enumerate((100, 280, 290)):
        assert computed(drive, make_request(str(number), [*prompt(point), 41, 42], 1)) == 2
    drive.check_end()


def test_a_resume_point_that_saves_little_makes_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("culet.scheduler.sequence.MAX_TRAIL", 30)
    monkeypatch.setattr("culet.scheduler.rows.MAX_TRAIL", 30)
    drive = make(budget=512, num_pages=400)
    drive.add(make_request("a", prompt(300), 1, stop=False, resume_lengths=(1, MIN_GAIN, MIN_GAIN + 1)))
    plan = drive.step()
    assert row_of(plan, 0).num_new == MIN_GAIN + 1  # one chunk keeps all three, since the first two are so close
    drive.run()
    drive.add(make_request("b", prompt(300, 1), 1, stop=False, resume_lengths=(1, MIN_GAIN)))
    plan = drive.step()
    assert (row_of(plan, 0).num_new, row_of(plan, 0).store_from) == (300, (292, 0))
    drive.run()
    drive.check_end()


def test_a_chunk_that_ends_soon_after_a_resume_point_is_not_cut() -> None:
    """The budget ends the chunk close enough to the point, although the prompt's end is far."""
    drive = make(budget=64, num_pages=400)
    drive.add(make_request("a", prompt(300), 1, stop=False, resume_lengths=(40,)))
    plan = drive.step()
    assert row_of(plan, 0).num_new == 64
    drive.run()
    assert computed(drive, make_request("b", [*prompt(40), 41, 42], 1)) == 2
    drive.check_end()


def test_a_chunk_border_at_any_place_around_a_resume_point() -> None:
    for budget in range(1, 24):
        drive = make(budget=budget)
        assert computed(drive, make_request("a", prompt(23), 1, stop=False, resume_lengths=(17, 20))) == 23
        assert computed(drive, make_request("b", [*prompt(20), 41, 42], 1)) == 2
        assert computed(drive, make_request("c", [*prompt(17), 41, 42], 1)) == 2
        drive.check_end()


def test_a_resume_point_waits_for_no_page() -> None:
    """If pages are scarce, the row is planned without the resume point, and nothing else changes."""
    planned = {}
    for num_pages, points in ((13, ()), (13, (30,)), (30, (30,))):
        drive = make(make_layout((4, 1), (None, 8)), num_pages)  # 5 pages for the prompt, 4 for its window, 9 for the point
        drive.add(make_request("a", prompt(38), 2, stop=False, resume_lengths=points))
        planned[num_pages, points] = row_of(drive.step(), 0)
        drive.run()
        drive.check_end()
    assert planned[13, ()] == planned[13, (30,)]
    assert planned[13, ()].store_from == (34, 0)
    assert planned[30, (30,)].store_from == (26, 0)


def test_a_resume_point_beside_samples_and_drafts() -> None:
    for max_drafts in (0, 4):
        drive = make(make_layout((8, 4), (None, 8), (None, 6, 5)), max_drafts=max_drafts)
        drive.add(make_request("a", prompt(45), 14, n=3, stop=False, resume_lengths=(38,)))
        drive.run()
        assert computed(drive, make_request("b", [*prompt(38), 41, 42], 1)) == 2
        drive.check_end()


def test_the_resume_point_of_a_preempted_prompt_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "SLICE_FACTOR", 10**9)  # so that it is computed again last
    drive = make(make_layout((8, 4), (None, 4)), num_pages=40, budget=16)
    drive.add(endless("a", 4, 120))
    drive.step()
    drive.add(make_request("b", prompt(40, 1), 60, stop=False, resume_lengths=(34,)))
    drive.run()
    assert drive.scheduler.counters.preemptions > 0
    assert computed(drive, make_request("c", [*prompt(34, 1), 41, 42], 1)) == 2
    drive.check_end()


def test_a_resume_point_that_is_named_again_is_not_the_next_to_be_evicted() -> None:
    drive = make()
    chat = make_request("a", prompt(40), 1, stop=False, resume_lengths=(20,))
    assert computed(drive, chat) == 40
    assert computed(drive, make_request("other", prompt(40, 1), 1)) == 40
    # Tool results continue the same turn, and the next turn will branch off at the beginning of this one.
    assert computed(drive, make_request("b", [*prompt(40), 41], 1, resume_lengths=(20,))) == 1
    prefix = drive.scheduler.page_allocator.prefix
    assert prefix is not None
    assert prefix.resume_points()[0].length == 40
    assert [point.length for point in prefix.resume_points()[-3:]].count(20) == 1


def test_a_beginning_in_use_stays_while_other_prompts_fill_the_cache() -> None:
    """Every fourth prompt begins the same. The others leave several points on the same pages, which must not outlive it."""
    drive = make(make_layout((64, 16), (None, 32)), num_pages=60, budget=600)
    hits = []
    for number in range(12):
        before = drive.scheduler.counters.prefix_hit_tokens
        drive.add(make_request(f"hot {number}", [*prompt(200), 1000 + number, *prompt(20, number)], 4, stop=False))
        drive.run()
        hits.append(drive.scheduler.counters.prefix_hit_tokens - before)
        for other in range(3):
            drive.add(make_request(f"cold {number} {other}", prompt(180, 100 + 3 * number + other), 4, stop=False))
            drive.run()
    drive.check_end()
    assert min(hits[2:]) >= 200


# Log-probabilities of the prompt


@pytest.mark.parametrize("ahead", [False, True])
def test_prompt_logprobs_come_in_chunks_and_complete(ahead: bool) -> None:
    drive = make(budget=600, num_pages=400, ahead=ahead)
    drive.add(endless("a", 600, 3))
    drive.run()
    drive.add(make_request("b", prompt(600), 3, stop=False, prompt_logprobs=0, n=2))
    sizes = []
    while drive.scheduler.has_work:
        plan = drive.step()
        for row in plan.rows if plan else ():
            if row.is_prompt_logprobs:
                sizes.append(row.num_new)
                assert row.num_logits == row.num_new
                assert row.store_from == (row.start, row.start)
    assert sizes == [256, 256, 88]
    assert drive.told["b", 0].num_cached == 0
    assert len(drive.told["b", 0].scores) == 599  # Drive compares them
    assert drive.told["b", 1].scores == []
    drive.check_end()


def test_prompt_logprobs_are_not_told_twice_after_a_preemption() -> None:
    drive = make(make_layout((None, 4)), num_pages=40, budget=16)
    drive.add(endless("a", 4, 120))
    drive.step()
    drive.add(make_request("b", prompt(60), 60, stop=False, prompt_logprobs=0))
    drive.run()
    assert drive.scheduler.counters.preemptions > 0
    assert len(drive.told["b", 0].scores) == 59
    drive.check_end()
