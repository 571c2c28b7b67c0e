"""A runner in another process: the same plans give the same results, and its failures are errors here."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from culet.errors import ConfigError, InternalError, WorkerDied
from culet.frames import LENGTH_BYTES, frame
from culet.runner.worker import ProcessWorker, RunStep, Worker, command_decoder
from culet.testing.tiny import write_checkpoint
from culet.types import Entry, GrammarSpec, PageTable, Request, Row, StepPlan, StepResult
from tests import forking
from tests.engine.drafting.draft_drive import greedy, make_request, sequences
from tests.engine.runner.real_steps import make_prompt, run_to_end
from tests.engine.runner.worker_rig import build, make_drive

BUILDER = "tests.engine.runner.worker_rig:build"
GREEDY = greedy()
GEMMA = replace(GREEDY, temperature=1.0, top_k=64, top_p=0.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model"), "31B", dtype=torch.float32))


@pytest.fixture(scope="module")
def worker(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessWorker]:
    """A worker without a drafter, for tests that do not break it. It starts where some modules must not be imported."""
    here = tmp_path_factory.mktemp("here")
    for name in ("culet", "msgspec", "torch", "queue"):
        (here / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setattr(forking, "forker", None)  # a fork would have imported them before
        worker = ProcessWorker(BUILDER, folder=folder, num_drafts=0)
    yield worker
    worker.close()


def asked() -> list[Request]:
    """Return requests with chunked prefill, forks, prefix hits, answer and prompt log-probabilities, penalties and biases."""
    scored = replace(GEMMA, logprobs=2, prompt_logprobs=1, seed=2**64 - 3)
    biased = replace(GEMMA, repetition_penalty=1.3, logit_bias=((7, 2.5), (8, -math.inf)))
    return [
        make_request("long", make_prompt(90), GREEDY, 24),
        make_request("same", make_prompt(90), replace(GREEDY, logprobs=0), 12),
        make_request("scored", make_prompt(20), scored, 16),
        make_request("biased", make_prompt(7), biased, 20),
        make_request("forks", make_prompt(33), GEMMA, 10, n=3),
    ]


def recorded(folder: str, known: dict[int, list[int]] | None, num_drafts: int) -> tuple[list[StepPlan], list[StepResult], Any]:
    """Return the plans of the requests and the results of a runner in this process."""
    drive = make_drive(folder, known, num_drafts, budget=40, max_num_seqs=6)
    plans: list[StepPlan] = []
    results: list[StepResult] = []

    def execute(plan: StepPlan) -> StepResult:
        plans.append(plan)
        results.append(drive.runner.execute(plan))
        return results[-1]

    out = {}
    for requests in (asked()[:1], asked()[1:]):
        out |= run_to_end(drive.scheduler, execute, *requests)
    return plans, results, out


@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_same_results(folder: str, num_drafts: int) -> None:
    _, _, out = recorded(folder, None, 0)
    known = sequences(asked(), out) if num_drafts else None
    plans, want, again = recorded(folder, known, num_drafts)
    assert again == out
    rows = [row for plan in plans for row in plan.rows]
    assert any(plan.copies for plan in plans)
    assert any(len(row.draw_slots) > 1 for row in rows)
    assert any(row.is_prompt_logprobs for row in rows)
    assert any(plan.entries and plan.rows[-1].start > 0 for plan in plans)  # a prefix hit
    assert any(row.num_drafts for row in rows) == bool(num_drafts)
    worker = ProcessWorker(
        BUILDER, folder=folder, known=known, num_drafts=num_drafts, budget=40, max_num_seqs=6, has_grammars=False
    )
    try:
        steps: Worker = worker
        assert [steps.launch(plan).result() for plan in plans] == want
        seconds = steps.device_seconds()
        assert (seconds["verify"] > 0) == (seconds["draft"] > 0) == bool(num_drafts)
    finally:
        worker.close()
    worker.close()  # a second time does nothing
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pids[0], 0)


def entering(step_id: int, slot: int = 0, length: int = 9, grammar: GrammarSpec | None = None) -> StepPlan:
    """Return a plan in which a sequence takes a slot and draws its first token. Every slot has its own pages."""
    entry = Entry(slot, tuple(make_prompt(length)), length, GREEDY, grammar)
    return StepPlan(step_id, (entry,), (), (row(slot, 0, length),))


def row(slot: int, start: int, num_new: int = 1) -> Row:
    pages = tuple(range(20 * slot, 20 * slot + 4))
    tables = (PageTable(0, pages), PageTable(0, tuple(page + 10 for page in pages)))
    return Row(slot, start, num_new, 1, tables, (start, start), draw_slots=(slot,))


def going_on(step_id: int, slot: int, start: int) -> StepPlan:
    return StepPlan(step_id, (), (), (row(slot, start),))


def test_steps_are_launched_ahead(folder: str, worker: ProcessWorker) -> None:
    """Two plans are launched before the first result. The second does not need the first one's token."""
    plans = [entering(0), going_on(1, 0, 9), going_on(2, 0, 10), going_on(3, 0, 11)]
    runner = make_drive(folder, num_drafts=0).runner
    want = [runner.execute(plan) for plan in plans]
    steps = [worker.launch(plan) for plan in plans[:2]]
    first = steps[0].result()
    steps += [worker.launch(plan) for plan in plans[2:]]
    assert steps[3].result() == want[3]  # in any order
    assert [first, steps[1].result(), steps[2].result()] == want[:3]


def test_a_step_that_is_dropped(worker: ProcessWorker) -> None:
    """If one result is never read, later results are not mixed up."""
    worker.launch(entering(0))
    assert worker.launch(going_on(1, 0, 9)).result().step_id == 1


def test_a_step_that_fails(worker: ProcessWorker) -> None:
    """The error names the cause, and later steps run."""
    bad, good = worker.launch(going_on(0, 5, 9)), worker.launch(entering(1))
    with pytest.raises(InternalError, match="AssertionError: slot 5 is in use, but no sequence has entered it"):
        bad.result()
    assert good.result().drawn[0].slot == 0


def test_grammars(folder: str, worker: ProcessWorker) -> None:
    """Grammars are compiled and enforced in the worker's process."""
    spec = GrammarSpec("regex", "(ab|cd){3}")
    runner = build(folder=folder, num_drafts=0)
    written = b""
    for step_id in range(6):
        plan = going_on(step_id, 1, 8 + step_id) if step_id else entering(0, 1, grammar=spec)
        result = in_time(lambda plan: worker.launch(plan).result(), plan)
        assert result == in_time(runner.execute, plan)
        written += bytes(token_id - 2 for token_id in result.drawn[0].token_ids)
    assert written in {(a + b + c).encode() for a in ("ab", "cd") for b in ("ab", "cd") for c in ("ab", "cd")}


def in_time(execute: Callable[[StepPlan], StepResult], plan: StepPlan) -> StepResult:
    """Run the plan of a bound sequence. While its mask is late, as on a busy machine, draw again as the scheduler does."""
    plan = replace(plan, rows=tuple(row._replace(is_bound=True) for row in plan.rows))
    for _ in range(1000):
        result = execute(plan)
        if result.drawn[0].token_ids:
            return result
        (row,) = plan.rows
        plan = replace(plan, entries=(), rows=(row._replace(start=row.start + row.num_new - 1, num_new=1),))
    raise AssertionError(f"no mask in 1000 steps: {result}")


def test_a_runner_without_grammars_refuses_them(folder: str) -> None:
    with pytest.raises(InternalError, match="built without grammars"):
        make_drive(folder, num_drafts=0).runner.execute(entering(0, grammar=GrammarSpec("regex", "a")))


@pytest.mark.parametrize("when", ["before a step", "during a step"])
def test_a_process_that_dies(folder: str, when: str) -> None:
    worker = ProcessWorker(BUILDER, folder=folder, num_drafts=0)
    worker.launch(entering(0)).result()
    if when == "before a step":
        os.kill(worker.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="exit code -9"):
            worker.launch(going_on(1, 0, 9)).result()
    else:
        os.kill(worker.pids[0], signal.SIGSTOP)  # so that it cannot have answered
        step = worker.launch(going_on(1, 0, 9))
        os.kill(worker.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="exit code -9"):
            step.result()
    with pytest.raises(WorkerDied):
        worker.launch(going_on(2, 0, 10))
    worker.close()


def test_a_builder_that_refuses() -> None:
    with pytest.raises(ConfigError, match="got 7") as caught:
        ProcessWorker("tests.engine.runner.bad_builders:refuse", number=7)
    assert caught.value.hint == "take another number"
    with pytest.raises(InternalError, match="KeyError: 'no such thing'"):
        ProcessWorker("tests.engine.runner.bad_builders:fail")
    with pytest.raises(InternalError, match="ModuleNotFoundError: No module named 'nowhere'"):
        ProcessWorker("nowhere:build")


def test_nothing_is_imported_from_the_current_folder(worker: ProcessWorker) -> None:
    assert (Path(f"/proc/{worker.pids[0]}/cwd").readlink() / "torch.py").is_file()
    assert worker.launch(entering(0)).result().step_id == 0


def test_a_plan_travels_unchanged() -> None:
    sampling = replace(GREEDY, seed=2**64 - 1, logit_bias=((3, -math.inf), (4, 1.5)), logprobs=3)
    grammar = GrammarSpec("json_schema", '{"type": "object"}', after_thought=True)
    entry = Entry(3, (1, 2, 262143), 2, sampling, grammar)
    verify = Row(3, 40, 4, 4, (PageTable(1, (7, 0, 9)), PageTable(0, ())), (40, 41), 3, 2, (3,), False, 2)
    plan = StepPlan(2**40, (entry,), ((5, 6), (7, 8)), (verify, verify._replace(is_prompt_logprobs=True, draw_slots=())))
    command = command_decoder.decode(frame(RunStep(plan))[LENGTH_BYTES:])
    assert isinstance(command, RunStep)
    assert command.plan == plan
    assert isinstance(command.plan.rows[0], Row)
    assert isinstance(command.plan.rows[0].tables[0], PageTable)
