"""Plans that repeat the one before are those that would have been planned without that."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from drive import Drive, endless, make, make_layout, make_request, prompt

from culet.scheduler import scheduler
from culet.scheduler.draft_length import DraftPolicy, Pace, StepCost
from culet.types import GrammarSpec, Row

LAYOUT = make_layout((24, 16), (None, 32), (None, 16, 3))
Move = Callable[[Drive], None]


class Phases:
    """In the place of a policy: drafts for some steps, then none for some more."""

    def __init__(self, drafting: int = 4, resting: int = 29) -> None:
        self.drafting, self.cycle, self.num_steps = drafting, drafting + resting, 0.0

    @property
    def _at(self) -> float:
        return round(self.num_steps, 6) % self.cycle

    def wanted(self, pace: Pace, num_seqs: int) -> int:
        count = 2 if int(self._at) < self.drafting else 0
        self.num_steps += 1 / num_seqs
        return count

    def see(self, paces: list[Pace]) -> None:
        pass

    def num_resting(self, paces: list[Pace]) -> int:
        return int(self.cycle - self._at) if self._at >= self.drafting else 0

    def rest(self) -> None:
        self.num_steps += 1

    def note(self, pace: Pace, num_drafts: int, num_accepted: int) -> None:
        pass

    def took(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        pass


def moves_of(seed: int) -> dict[int, list[Move]]:
    """What happens before which step: requests come, some with a deadline, and some are cancelled."""
    chance = random.Random(seed)
    moves: dict[int, list[Move]] = {}
    for number in range(14):
        kind = chance.random()
        deadline = float(chance.randint(30, 300)) if kind < 0.2 else None
        tokens, length = prompt(chance.randint(1, 50)), chance.randint(20, 120)
        settings = {"seed": number, "stop": kind > 0.5, "n": 1 + (kind > 0.9), "deadline": deadline}
        request = make_request(f"r{number}", tokens, length, **settings)  # type: ignore[arg-type]
        at = chance.randint(0, 250)
        moves.setdefault(at, []).append(lambda drive, one=request: drive.add(one))
        if chance.random() < 0.3:
            gone = at + chance.randint(1, 60)
            moves.setdefault(gone, []).append(lambda drive, one=request: drive.scheduler.cancel(one.request_id))
    return moves


def rows_of(drive: Drive, moves: dict[int, list[Move]], policy: Phases | None) -> list[tuple[Row, ...]]:
    """The rows of every plan."""
    drive.scheduler.policy = policy
    found = []
    for number in range(1000):
        drive.now = float(number)  # type: ignore[attr-defined]
        for move in moves.get(number, []):
            move(drive)
        plan = drive.step()
        found.append(() if plan is None else plan.rows)
        if number > 400 and not drive.scheduler.has_work:
            break
    assert not drive.scheduler.has_work
    return found


@pytest.mark.parametrize("num_pages", [400, 40])
@pytest.mark.parametrize("has_policy", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_stretch_is_what_would_be_planned(ahead: bool, has_policy: bool, num_pages: int, monkeypatch) -> None:
    num_repeated = 0
    for seed in range(4):
        found = []
        for has_stretches in (True, False):
            monkeypatch.undo()
            if not has_stretches:
                monkeypatch.setattr(scheduler.Stretch, "after", lambda *_: None)
            drive = make(LAYOUT, num_pages, seqs=4, ahead=ahead, max_drafts=2 if has_policy else 0)
            found.append((rows_of(drive, moves_of(seed), Phases() if has_policy else None), drive.told))
            num_repeated += drive.runner.counts["repeated"]
            assert has_stretches or not drive.runner.counts["repeated"]
        assert found[0] == found[1]
    assert num_repeated > 100


def test_who_comes_or_goes_ends_a_stretch() -> None:
    drive = make(LAYOUT, ahead=True)
    drive.add(endless("a", 5, 60))
    drive.add(endless("b", 7, 60))
    plans = [drive.step() for _ in range(6)]
    assert plans[-1] is not None
    assert plans[-1].num_later > 0
    drive.add(endless("c", 3, 60))
    plan = drive.step()
    assert plan is not None
    assert len(plan.rows) == 3
    while not (plan := drive.step()).num_later:  # type: ignore[union-attr]
        pass
    drive.scheduler.cancel("b")
    plan = drive.step()
    assert plan is not None
    assert len(plan.rows) == 2
    assert plan.num_later == 0


def test_a_grammar_sees_every_token() -> None:
    """With one, a sequence is planned again only when its last token is known, so nothing repeats while a step is in flight."""
    drive = make(LAYOUT, ahead=True)
    drive.add(replace(endless("bound", 5, 20), grammar=GrammarSpec("regex", "a*")))
    plans = []
    while drive.scheduler.has_work:
        plans.append(drive.step())
        assert all(one.draws_in_flight <= 1 for one in drive.scheduler._running)
    assert sum(plan is None for plan in plans) >= 19  # between any two tokens


def test_pages_that_go_back_end_a_stretch() -> None:
    """Rows of later steps must not name a page that is somebody else's by then."""
    drive = make(LAYOUT)
    drive.scheduler.plans_open = True
    drive.add(endless("a", 5, 60))
    while not (plan := drive.step()).num_later:  # type: ignore[union-attr]
        pass
    (one,) = drive.scheduler._running
    pages, page_allocator = one.groups[1], drive.scheduler.page_allocator
    pages.reset(pages.first, [*pages.pages, *page_allocator.take(1)])  # as an open row with refused drafts leaves one
    num_free = page_allocator.available
    drive.step()
    assert page_allocator.available == num_free + 1
    plan = drive.step()
    assert plan is not None
    assert plan.num_later == 0


def test_resting_together_is_as_being_asked_each() -> None:
    """A policy decides the same, whether it is asked for each sequence or for all at once how long they rest."""
    cost = StepCost(1e9, 0, 0, 0, 1e9, 2e8, False, 1e12, 1e14, wait_s=1e-4)
    asked, told = DraftPolicy(cost, (1, 2, 3)), DraftPolicy(cost, (1, 2, 3))
    paces = [Pace() for _ in range(3)], [Pace() for _ in range(3)]
    left = num_rested = num_drafted = 0
    for _ in range(6000):
        asked.see(paces[0])
        wanted = [asked.wanted(pace, 3) for pace in paces[0]]
        if left:
            left, num_rested = left - 1, num_rested + 1
            told.rest()
            assert wanted == [0, 0, 0]
        else:
            told.see(paces[1])
            assert wanted == [told.wanted(pace, 3) for pace in paces[1]]
            left = 0 if any(wanted) else told.num_resting(paces[1])
        for policy, own in zip((asked, told), paces, strict=True):
            for pace, count in zip(own, wanted, strict=True):
                if count:
                    policy.note(pace, count, 0)
            policy.took(3, max(wanted), 1e-3 * (1 + max(wanted)))
        num_drafted += any(wanted)
    assert num_rested > 4000
    assert num_drafted > 10
