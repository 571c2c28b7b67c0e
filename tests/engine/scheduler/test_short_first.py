"""On a CPU, short prompts have steps of their own before long steps. Counted in steps and rows."""

from __future__ import annotations

import pytest

from culet.scheduler.budget import BRISK_SHARE, CPU_MIN_STEP, FIRST_FACTOR, LONG_STEP, NEW_GRAMMAR_TOKENS, NUM_BRISK
from culet.types import StepPlan
from tests.engine.scheduler.drive import Drive, endless, make, make_request, prompt

NUM_HELD = 3 * LONG_STEP  # pages of the chats that `busy` returns


def busy(num_chats: int = LONG_STEP, *, num_pages: int = 400, on_cpu: bool = True, ahead: bool = False) -> Drive:
    """Return a drive in which this many chats decode."""
    drive = make(num_pages=num_pages, seqs=40, budget=256, on_cpu=on_cpu, ahead=ahead, prefix_caching=False)
    for number in range(num_chats):
        drive.add(endless(f"chat {number}", 4, 60, seed=number))
    for _ in range(3):
        drive.step()
    return drive


def sizes(plan: StepPlan | None) -> list[int]:
    """Return the number of tokens in each row of a plan."""
    return [] if plan is None else [row.num_new for row in plan.rows]


def test_a_short_prompt_does_not_share_a_long_step() -> None:
    drive = busy()
    drive.add(endless("new", 5))
    assert sizes(drive.step()) == [5]
    assert len(drive.told["new", 0].tokens) == 1
    assert sizes(drive.step()) == [1] * (LONG_STEP + 1)


def test_running_answers_have_every_second_step() -> None:
    drive = busy()
    counts = []
    for number in range(12):  # one new prompt before every step
        drive.add(endless(f"new {number}", 5, 2, seed=number))
        counts.append(len(sizes(drive.step())))
    assert counts[::2] == [1] * 6
    assert all(count > LONG_STEP for count in counts[1::2])
    assert len(drive.told["chat 0", 0].tokens) == 3 + 6


def test_a_longer_prompt_shares_the_step() -> None:
    """It would delay the others by more than half of their step, and its chunk ends no prompt."""
    drive = busy()
    drive.add(endless("new", LONG_STEP // 2 + 1))
    assert len(sizes(drive.step())) == LONG_STEP + 1


def test_a_short_prompt_overtakes_a_longer_one() -> None:
    drive = busy()
    drive.add(make_request("long", prompt(40, salt=9), 8))
    drive.add(endless("new", 5))
    assert sizes(drive.step()) == [5]
    assert max(sizes(drive.step())) > 5  # its first chunk is in the next step


def test_several_samples_do_not_overtake() -> None:
    """They would take the slots that the overtaken prompt needs."""
    drive = busy()
    drive.add(make_request("long", prompt(40, salt=9), 8))
    drive.add(endless("new", 5, n=20))
    assert len(sizes(drive.step())) > LONG_STEP
    assert any(seq.request.request_id == "long" for seq in drive.scheduler._running)


def test_drafts_leave_room_for_a_waiting_prompt() -> None:
    drive = make(num_pages=400, seqs=40, budget=256, on_cpu=True, max_drafts=3, prefix_caching=False)
    for number in range(12):
        drive.add(endless(f"chat {number}", 20, 200, seed=number))
    for _ in range(6):
        drive.step()
    drive.scheduler.step_budget._num_tokens = 16.0  # as slow steps make it
    drive.add(endless("new", 100))
    drive.step()
    assert any(seq.request.request_id == "new" for seq in drive.scheduler._running)


def test_a_better_priority_is_not_overtaken() -> None:
    drive = busy()
    drive.add(make_request("long", prompt(40, salt=9), 8, priority=-1))
    drive.add(endless("new", 5))
    assert sorted(sizes(drive.step())) == [1] * LONG_STEP + [5, 40]


def test_the_last_slot_is_left_to_the_next_in_order() -> None:
    """However many short prompts come, a longer one starts."""
    drive = busy(39)
    drive.add(make_request("long", prompt(60, salt=9), 8))
    drive.add(endless("new", 5))
    assert max(sizes(drive.step())) > 5


def test_the_next_in_order_keeps_its_pages() -> None:
    """A short prompt does not overtake if the longer one would then lack pages to start."""
    drive = busy(num_pages=NUM_HELD + 12)  # the longer prompt needs all that is left
    drive.add(endless("long", 40))
    drive.add(endless("new", 5))
    assert 40 in sizes(drive.step())


@pytest.mark.parametrize(("num_left", "goes_first"), [(80, False), (81, True)])
def test_a_short_prompt_leaves_pages_to_all_before_it(num_left: int, goes_first: bool) -> None:
    """The running answers may need 4 each, the longer prompt needs 12, and the short one 5."""
    drive = busy(num_pages=NUM_HELD + num_left)
    drive.add(endless("long", 40))
    drive.add(endless("new", 5))
    assert (sizes(drive.step()) == [5]) == goes_first


def test_a_new_grammar_does_not_go_first() -> None:
    drive = busy()
    drive.scheduler.add(endless("new", 5), held=True)
    drive.scheduler.release("new", has_new_grammar=True)
    plan = drive.scheduler.schedule()
    assert len(sizes(plan)) == LONG_STEP + 1


def test_rows_with_new_grammars_make_a_step_long() -> None:
    drive = busy(LONG_STEP // NEW_GRAMMAR_TOKENS)
    for seq in drive.scheduler._running:
        seq.has_new_grammar = True
    drive.add(endless("new", 5))
    assert sizes(drive.step()) == [5]


def test_chunks_are_shorter_after_a_short_prompt() -> None:
    """The next short prompt does not wait for a long chunk. If none comes for a while, chunks are long again."""
    drive = busy()
    drive.add(endless("long", 200))
    assert max(sizes(drive.step())) == CPU_MIN_STEP * FIRST_FACTOR - LONG_STEP
    drive.add(endless("new", 5, 2))
    assert sizes(drive.step()) == [5]
    # At least half of the minimum is for the prompt, however many answers are running.
    assert max(sizes(drive.step())) == max(int(BRISK_SHARE * CPU_MIN_STEP * FIRST_FACTOR) - LONG_STEP - 1, CPU_MIN_STEP // 2)
    for _ in range(NUM_BRISK):
        drive.step()
    drive.add(endless("late", 100, seed=9))
    assert max(sizes(drive.step())) == CPU_MIN_STEP * FIRST_FACTOR - LONG_STEP - 1


def test_steps_with_few_rows_are_shared() -> None:
    drive = busy(LONG_STEP - 1)
    drive.add(endless("new", 2))
    assert len(sizes(drive.step())) == LONG_STEP


def test_other_devices_share_every_step() -> None:
    drive = busy(on_cpu=False)
    drive.add(endless("new", 5))
    assert len(sizes(drive.step())) == LONG_STEP + 1


def test_prompts_of_several_tenants_keep_their_own_rules() -> None:
    drive = busy()
    drive.add(endless("new", 5, tenant="b"))
    assert len(sizes(drive.step())) > 1


def test_running_answers_keep_their_pages() -> None:
    """A prompt that goes first never takes pages that a running answer needs next, so nobody is preempted for it."""
    for num_pages in range(60, 140, 4):
        drive = busy(num_pages=num_pages)
        before = drive.scheduler.counters.preemptions
        if before:
            continue
        drive.add(endless("new", 5, 2))
        plan = drive.step()
        if sizes(plan) == [5]:
            drive.step()
            assert drive.scheduler.counters.preemptions == before


def test_answers_are_the_same_as_alone() -> None:
    for ahead in (False, True):
        drive = busy(24, ahead=ahead)
        for number in range(10):
            drive.add(make_request(f"new {number}", prompt(3 + number, salt=number), 8, seed=number))
            drive.step()
        drive.run()
        drive.check_end()
