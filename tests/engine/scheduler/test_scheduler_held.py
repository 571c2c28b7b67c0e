"""Requests that are held back while their grammar is compiled, and sequences with a grammar under look-ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from culet.errors import QueueFull
from culet.types import Drawn, FinishReason, GrammarSpec, StepResult
from tests.engine.scheduler.drive import Told, make, make_request, prompt

GRAMMAR = GrammarSpec("regex", "a+")


def test_a_held_request_waits_and_keeps_its_place() -> None:
    drive = make(seqs=2)
    scheduler = drive.scheduler
    first, second = make_request("first", prompt(5), n=2), make_request("second", prompt(7))
    scheduler.add(first, held=True)
    drive.requests["first"] = first
    drive.told |= {("first", 0): Told(), ("first", 1): Told()}
    assert scheduler.has_work
    assert scheduler.schedule() is None
    drive.add(second)
    assert drive.step() is not None, "others go on meanwhile"
    scheduler.release("first")
    scheduler.release("first")  # one call is enough
    drive.run()
    drive.check_end()


def test_held_requests_count_in_the_queue_and_can_be_cancelled() -> None:
    drive = make(queue=1, seqs=1)
    scheduler = drive.scheduler
    for name in ("a", "b"):
        scheduler.add(make_request(name, prompt(4), n=2), held=True)
    with pytest.raises(QueueFull):
        scheduler.add(make_request("c", prompt(4)), held=True)
    scheduler.cancel("a")
    scheduler.cancel("b", 0)  # its other sample is still wanted
    assert [(delta.request_id, delta.sample, delta.finish_reason) for delta in scheduler.deltas()] == [
        ("a", 0, FinishReason.CANCEL),
        ("a", 1, FinishReason.CANCEL),
        ("b", 0, FinishReason.CANCEL),
    ]
    assert scheduler.schedule() is None
    scheduler.release("a")
    scheduler.release("b")
    plan = scheduler.schedule()
    assert plan is not None
    assert len(plan.rows) == 1


def test_the_time_in_the_queue_is_told_once() -> None:
    drive = make(seqs=1)
    scheduler, drive.now = drive.scheduler, 10.0  # type: ignore[attr-defined]
    scheduler.add(make_request("a", prompt(4), 2, stop=False))
    scheduler.add(make_request("b", prompt(4, 1), 2, stop=False))
    told: dict[str, list[float]] = {"a": [], "b": []}
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        drive.now += 3.0  # type: ignore[attr-defined]
        scheduler.apply(StepResult(plan.step_id, tuple(Drawn(slot, (7,)) for row in plan.rows for slot in row.draw_slots)))
        for delta in scheduler.deltas():
            told[delta.request_id].append(delta.queue_s)
    assert told == {"a": [0.0, 0.0], "b": [6.0, 0.0]}


def test_a_row_with_a_grammar_is_not_planned_ahead_of_its_token() -> None:
    scheduler = make().scheduler
    scheduler.add(replace(make_request("bound", prompt(4), stop=False), grammar=GRAMMAR))
    scheduler.add(make_request("free", prompt(4, 1), stop=False))
    first = scheduler.schedule()
    assert first is not None
    bound, free = (row.slot for row in first.rows)
    assert {entry.slot: entry.grammar for entry in first.entries} == {bound: GRAMMAR, free: None}
    second = scheduler.schedule()
    assert second is not None
    assert [row.slot for row in second.rows] == [free]
    scheduler.apply(StepResult(first.step_id, (Drawn(bound, (7,)), Drawn(free, (7,)))))
    third = scheduler.schedule()
    assert third is not None
    assert {row.slot for row in third.rows} == {bound, free}


def test_a_fault_ends_one_sequence() -> None:
    scheduler = make().scheduler
    scheduler.add(replace(make_request("bound", prompt(4), stop=False), grammar=GRAMMAR))
    scheduler.add(make_request("free", prompt(4, 1), stop=False))
    plan = scheduler.schedule()
    assert plan is not None
    bound, free = (row.slot for row in plan.rows)
    scheduler.apply(StepResult(plan.step_id, (Drawn(bound, (7,), fault="no way"), Drawn(free, (7,)))))
    told = {delta.request_id: (delta.token_ids, delta.finish_reason, delta.error) for delta in scheduler.deltas()}
    assert told == {"bound": ((), FinishReason.ERROR, "no way"), "free": ((7,), None, "")}
    scheduler.cancel("free")
    stats = scheduler.stats()
    assert stats.num_running == 0
    assert stats.num_free_pages + stats.num_resume_point_pages == stats.num_pages
