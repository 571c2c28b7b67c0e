"""Unplanned ends: cancels, deadlines, and steps or admissions that fail."""

from __future__ import annotations

import pytest

from culet.scheduler.budget import Grant
from culet.types import FinishReason
from tests.engine.scheduler.drive import endless, make


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_steps", range(12))
def test_cancel_at_any_time_tells_the_end_once(num_steps: int, ahead: bool) -> None:
    drive = make(budget=8, seqs=3, ahead=ahead)
    for name in "ab":
        drive.add(endless(name, 20, 15, n=2))
    for _ in range(num_steps):
        drive.step()
    drive.step(between=[("a", None), ("a", None), ("nobody", None), ("a", 7)])
    drive.run()
    drive.check_end()
    assert {drive.told["a", sample].finish_reason for sample in (0, 1)} == {FinishReason.CANCEL}
    assert {drive.told["b", sample].finish_reason for sample in (0, 1)} == {FinishReason.LENGTH}


def test_a_stop_string_ends_one_sample() -> None:
    drive = make()
    drive.add(endless("a", 20, 10, n=2))
    drive.step()
    drive.scheduler.cancel("a", 1, FinishReason.STOP)
    (delta,) = drive.scheduler.deltas()
    assert (delta.sample, delta.finish_reason, delta.token_ids, delta.stop_token_id) == (1, FinishReason.STOP, (), None)
    assert drive.scheduler.counters.cancelled == 0
    while drive.scheduler.has_work:
        drive.step()
    assert drive.told["a", 0].finish_reason is FinishReason.LENGTH


def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    drive = make(seqs=1)
    drive.add(endless("a", 5, 50, deadline=10.0))
    drive.add(endless("b", 5, 50, deadline=10.0, n=2))
    drive.add(endless("c", 5, 5, deadline=99.0))
    for _ in range(4):
        drive.step()
    drive.now = 10.0  # type: ignore[attr-defined]
    drive.run()
    drive.check_end()
    reasons = {key: told.finish_reason for key, told in drive.told.items()}
    assert reasons == {("a", 0): "timeout", ("b", 0): "timeout", ("b", 1): "timeout", ("c", 0): "length"}
    assert len(drive.told["a", 0].tokens) == 4
    assert drive.scheduler.counters.timed_out == 3


def test_a_deadline_of_an_ended_request_does_not_end_the_next_of_that_name() -> None:
    drive = make()
    drive.add(endless("a", 5, 1, deadline=10.0))
    drive.run()
    drive.add(endless("a", 5, 3))
    drive.now = 20.0  # type: ignore[attr-defined]
    drive.run()
    assert drive.told["a", 0].finish_reason is FinishReason.LENGTH


def test_a_failed_step_ends_everything_with_the_error() -> None:
    drive = make(seqs=1)
    drive.add(endless("a", 5, 50))
    drive.add(endless("b", 5, 50))
    drive.step()
    assert drive.scheduler.schedule() is not None
    drive.scheduler.fail("the device is gone")
    for delta in drive.scheduler.deltas():
        drive.hear(delta)
    assert not drive.scheduler.has_work
    assert {(told.finish_reason, told.error) for told in drive.told.values()} == {(FinishReason.ERROR, "the device is gone")}
    drive.check_end()


def test_an_error_while_one_is_admitted_ends_everything_too(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = make()
    drive.add(endless("a", 5, 50))
    drive.step()
    drive.add(endless("b", 5, 50))
    plan_row = drive.scheduler._plan_row

    def refuse_admissions(grant: Grant, *, may_preempt: bool) -> object:
        assert may_preempt, "nobody may come in"
        return plan_row(grant, may_preempt=may_preempt)

    monkeypatch.setattr(drive.scheduler, "_plan_row", refuse_admissions)
    with pytest.raises(AssertionError, match="nobody"):
        drive.scheduler.schedule()
    drive.scheduler.fail("nobody may come in")
    for delta in drive.scheduler.deltas():
        drive.hear(delta)
    assert {told.finish_reason for told in drive.told.values()} == {FinishReason.ERROR}
    drive.check_end()
