"""On a CPU, short prompts have steps of their own before long steps. Counted in steps and rows."""

from __future__ import annotations

from culet.scheduler.budget import LONG_STEP
from culet.types import StepPlan
from tests.engine.scheduler.drive import Drive, endless, make, make_request, prompt


def busy(num_chats: int = LONG_STEP, *, num_pages: int = 400, short_first: bool = True, ahead: bool = False) -> Drive:
    """Return a drive in which this many chats decode."""
    drive = make(num_pages=num_pages, seqs=40, budget=256, short_first=short_first, ahead=ahead, prefix_caching=False)
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


def test_nobody_overtakes_a_longer_prompt() -> None:
    drive = busy()
    drive.add(make_request("long", prompt(40, salt=9), 8))
    drive.add(endless("new", 5))
    assert sorted(sizes(drive.step())) == [1] * LONG_STEP + [5, 40]


def test_steps_with_few_rows_are_shared() -> None:
    drive = busy(LONG_STEP - 1)
    drive.add(endless("new", 2))
    assert len(sizes(drive.step())) == LONG_STEP


def test_other_devices_share_every_step() -> None:
    drive = busy(short_first=False)
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
