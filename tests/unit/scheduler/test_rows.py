"""What is counted and learned from rows: proposals, tokens that are left, and the times of steps."""

from __future__ import annotations

import pytest

from culet.config import ScheduleConfig
from culet.scheduler.budget import make_step_budget
from culet.scheduler.rows import PlannedRow, PlannedStep, StepTimer, decode_shape, num_wanted
from culet.scheduler.sequence import Sequence
from culet.types import Drawn, Row, StepResult
from tests.engine.scheduler.drive import LAYOUT, endless
from tests.engine.scheduler.fixed_lengths import FixedLengths


def sequence(max_tokens: int = 20) -> Sequence:
    return Sequence(endless("a", 8, max_tokens), 0, 0, LAYOUT, is_cached=False)


def planned(num_drafts: int, num_wanted: int, num_new: int | None = None) -> PlannedRow:
    """Plan a row that verifies drafts and asks for proposals, or a chunk of a prompt with `num_new` tokens."""
    count, seq = num_drafts + 1, sequence()
    row = Row(0, 8, num_new or count, count, (), (), num_drafts=num_drafts, num_wanted=num_wanted, draw_slots=(0,))
    return PlannedRow(row, seq, [seq])


@pytest.mark.parametrize(("max_tokens", "count"), [(20, 8), (10, 8), (9, 7), (3, 1), (2, 0), (1, 0)])
def test_the_last_two_tokens_need_no_proposal(max_tokens: int, count: int) -> None:
    assert num_wanted(sequence(max_tokens), 8, None, 1) == count


def test_drafts_in_flight_count_as_drawn() -> None:
    seq = sequence(20)
    seq.num_open, seq.draws_in_flight = 3, 1
    assert seq.num_left == 16
    assert num_wanted(seq, 100, None, 1) == 14


def test_only_steps_that_decode_with_as_many_drafts_as_they_ask_for_have_a_shape() -> None:
    assert decode_shape([planned(0, 0), planned(0, 0)]) == (2, 0, 0)
    assert decode_shape([planned(3, 3), planned(2, 2), planned(0, 0)]) == (3, 2, 3)
    assert decode_shape([planned(3, 0), planned(3, 0)]) is None
    assert decode_shape([planned(0, 3)]) is None
    assert decode_shape([planned(0, 0), planned(0, 0, num_new=5)]) is None


class Listener(FixedLengths):
    """A policy that notes what it is told about times."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int, int, float]] = []

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        self.told.append((num_seqs, num_drafting, num_drafts, seconds))


def test_a_step_says_nothing_if_it_made_fewer_proposals_than_it_was_asked_for() -> None:
    now, policy = 0.0, Listener()
    timer, budget = StepTimer(lambda: now), make_step_budget(ScheduleConfig(8, 64), on_cpu=True)

    def end(number: int, num_proposed: int) -> None:
        nonlocal now
        now += 0.5
        step = PlannedStep(number, [planned(3, 3)], planned_at=now - 0.5)
        timer.ended(step, StepResult(number, (Drawn(0, (5,), (), num_proposed),)), budget, policy)

    end(0, 3)
    assert policy.told == []  # nothing to compare it with
    end(1, 3)
    assert policy.told == [(1, 1, 3, 0.5)]
    end(2, 0)
    end(3, 3)  # follows a step of another kind
    assert policy.told == [(1, 1, 3, 0.5)]
    end(4, 3)
    assert policy.told == [(1, 1, 3, 0.5)] * 2
