"""Open rows are planned before it is known how many drafts of the previous rows are accepted.

On a GPU, captured steps find out on the device where such rows begin. Here the same launches run one by one instead of as a
replay, or the runner waits and closes the rows. The output is always the same as without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from culet.attention.batch import RowFacts
from culet.engine.memory import least_slabs
from culet.models.gemma4 import Gemma4
from culet.runner.fill import fill
from culet.runner.fixed import steps as steps_module
from culet.runner.fixed.page_tables import table_columns
from culet.runner.fixed.steps import Bucket, FixedStep, FixedSteps
from culet.runner.runner import Runner
from culet.types import PageTable, Row
from tests.engine.drafting.dflash_rig import Rig as DFlashRig
from tests.engine.drafting.draft_drive import CpuCaptures, DraftDrive, use_fixed_draws
from tests.engine.drafting.test_dflash import MISTAKES, assert_like_oracle, pair, requests, told, use_fixed_shapes
from tests.engine.drafting.test_dflash import SHAPES as PAIRS
from tests.engine.drafting.test_drafting import GEMMA, MTP, greedy, make_request, often, sequences, target
from tests.engine.drafting.test_drafting import SHAPES as TARGETS
from tests.engine.runner.real_steps import make_prompt, run_to_end
from tests.engine.runner.test_fixed_steps import fixed_steps, row
from tests.engine.runner.test_runner import one_model
from tests.matrix import matrix

__all__ = ["one_model", "pair", "target"]  # fixtures


class Replay:
    """A stand-in for a step's graph. It lays out the rows and plans attention from their actual starts."""

    def __init__(self, fixed: FixedSteps, step: FixedStep) -> None:
        self.fixed, self.step = fixed, step

    def replay(self) -> None:
        fixed, step = self.fixed, self.step
        fixed._lay_out(step)
        counts = [end - begin for begin, end in pairwise(step.planned.begin_B1.tolist())]
        starts, is_stored = step.layout.context_B.tolist(), (True,) * len(step.batch.groups)
        facts = [RowFacts(start, count, is_stored) for start, count in zip(starts, counts, strict=True) if count]
        batch = replace(steps_module.cut_batch(step.batch, len(facts), step.bucket.num_tokens), rows=tuple(facts))
        fixed.target.plan(batch)
        step.hidden = fixed._forward(step, batch)


def replay_by_hand(runner: Runner) -> list[int]:
    """Let a runner replay its fixed shapes as if they were captured.

    Return a list that collects the open drafts of each row.
    """
    assert runner.fixed is not None
    fixed = runner.fixed.steps
    captures: Any = CpuCaptures()
    for bucket in fixed.buckets:
        step = fixed.rehearse((), bucket)
        step.graph = Replay(fixed, step)  # type: ignore[assignment]
    runner.fixed.capture_draws(captures)
    for part in (runner.fixed.rounds, runner.fixed.deferred):
        if part is not None:
            part.capture(captures)
    assert runner.fixed.draws is not None
    assert runner.fixed.rounds is not None
    assert runner.fixed.num_captured >= len(fixed.buckets) + 2 * len(runner.fixed.draws.buckets) + len(
        runner.fixed.rounds.shapes
    )
    served: list[int] = []
    run = fixed.run

    def spy(rows: Sequence[Row], bucket: Bucket) -> FixedStep:
        served.extend(row.num_open for row in rows)
        return run(rows, bucket)

    fixed.run = spy  # type: ignore[method-assign]
    return served


def run_open(drive: DraftDrive, *requests, **settings):
    drive.scheduler.plans_open = True
    return run_to_end(drive.scheduler, drive.runner.execute, *requests, ahead=True, **settings)


@matrix(
    {
        "target": TARGETS,
        "is_told": {"often": often, "always": lambda place: True, "never": lambda place: False},
        "is_fixed": [True, False],
    },
    fixtures=["target"],
)
def test_output_is_that_without_drafts(target: Gemma4, is_fixed: bool, is_told: Callable[[int], bool]) -> None:
    asked = [
        make_request(f"r{n}", make_prompt(n), replace(sampling, seed=n), 40 + n)
        for n, sampling in zip((1, 5, 33), (greedy(), GEMMA, greedy()), strict=True)
    ]
    want = DraftDrive(target, None).run(*asked)
    known = sequences(asked, want)
    drive = DraftDrive(target, MTP, known=known, is_told=is_told, max_num_seqs=3, budget=40, is_fixed=is_fixed)
    served: list[int] = []
    if is_fixed:
        use_fixed_draws(drive.runner)
        served = replay_by_hand(drive.runner)
    assert run_open(drive, *asked) == want
    assert sum(count > 0 for count in served) > 10 or not is_fixed
    accepted = drive.scheduler.counters.accepted_tokens
    assert accepted > 10 if is_told(0) else accepted < 10
    drive.check_pages()


@matrix({"target": TARGETS, "is_tight": {"preemption": True, "prefix hits": False}}, fixtures=["target"])
def test_pages_in_flight(target: Gemma4, is_tight: bool) -> None:
    """Run with preemption or prefix hits, and with cancels, while drafts are open."""
    asked = [make_request(f"r{index}", make_prompt((8 if is_tight else 40) + index), greedy(), 40) for index in range(4)]
    want = DraftDrive(target, None).run(*asked)
    known = sequences(asked, want)
    num_slabs = least_slabs(DraftDrive(target, None).layout, 60) + 2 if is_tight else 300
    drive = DraftDrive(target, MTP, known=known, is_told=often, num_slabs=num_slabs, prefix_caching=True, is_fixed=True)
    use_fixed_draws(drive.runner)
    served = replay_by_hand(drive.runner)
    again = [replace(request, request_id=f"{request.request_id} again") for request in asked]
    for several in (asked, again):
        got = run_open(drive, *several, cancel_at={15: several[-1].request_id})
        for (name, sample), tokens in got.items():
            said = want[name.removesuffix(" again"), sample]
            assert tokens == (said[: len(tokens)] if name.startswith("r3") else said)
    counters = drive.scheduler.counters
    assert counters.cancelled >= 1
    assert (counters.preemptions if is_tight else counters.prefix_hits) >= 1
    assert sum(count > 0 for count in served) > 10
    drive.check_pages()


@matrix({"mistake": list(MISTAKES), "pair": PAIRS}, fixtures=["pair"])
def test_a_drafter_with_pages_of_its_own(pair, mistake, monkeypatch):
    """Every block matches the oracle, so the drafter's context is in place wherever the row began."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    asked = requests(40)
    expected = DFlashRig(pair, drafts=False).run(*asked)
    rig = DFlashRig(pair, told=told(asked, expected), is_wrong=MISTAKES[mistake], has_spare=True, ahead=True)
    use_fixed_shapes(rig, has_draws=True)
    served = replay_by_hand(rig.runner)
    rig.scheduler.plans_open = True
    assert rig.run(*asked) == expected
    assert sum(count > 0 for count in served) > 5
    assert_like_oracle(pair, rig.rounds, at_least=12)
    rig.check_pages()


def laid_out(fixed: FixedSteps, rows: Sequence[Row]) -> FixedStep:
    """Return the step of these rows, with its tokens laid out."""
    bucket = fixed.find(rows)
    assert bucket is not None
    step = fixed[bucket]
    fixed._send(rows, step)
    fixed._lay_out(step)
    return step


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_tokens_stand_where_fill_says(one_model, num_rows: int, num_drafts: int) -> None:
    """Compare successive steps of the same sequences with batches that are filled on the host once everything is known."""
    fixed = fixed_steps(one_model, query_counts=(1, 4))
    fixed.tokens_SL.copy_(torch.randint(0, 600, fixed.tokens_SL.shape))
    layout = fixed.target.pool.layout
    columns = [table_columns(group, 400, 7) for group in layout.groups]
    tables = [tuple(PageTable(0, tuple(range(40 * slot, 40 * slot + n))) for n in columns) for slot in range(8)]
    most = min(group.page_tokens * count for group, count in zip(layout.groups, columns, strict=True)) - 8
    starts, is_open, num_steps = [4 + 3 * slot for slot in range(num_rows)], False, 0
    lowest = list(starts)  # where rows begin according to the plan
    while max(starts) + num_drafts < most:
        closed: list[Row] = []
        rows: list[Row] = []
        for slot, (start, low) in enumerate(zip(starts, lowest, strict=True)):
            # Rows may have different numbers of drafts.
            count = num_drafts - (slot % 2 if num_drafts else 0)
            facts = {"num_new": 1 + count, "num_logits": 1 + count, "num_drafts": count, "tables": tables[slot]}
            rows.append(row(slot, low, **facts, store_from=(low, low), num_open=count if is_open else 0))
            closed.append(rows[-1].close(start - low))
            assert (closed[-1].start, closed[-1].store_from, closed[-1].num_open) == (start, (start, start), 0)
        step = laid_out(fixed, rows)
        wanted = fill(closed, layout, fixed.tokens_SL, fixed.target.placeholder_P)
        num_tokens = wanted.positions_T.shape[0]
        assert torch.equal(step.batch.token_ids_T[:num_tokens], wanted.token_ids_T)
        assert torch.equal(step.batch.positions_T[:num_tokens], wanted.positions_T)
        assert torch.equal(step.batch.context_B[:num_rows], wanted.context_B)
        assert torch.equal(step.batch.row_begin_B1[: num_rows + 1], wanted.row_begin_B1)
        assert torch.equal(step.next_tokens.positions_R[:num_tokens], wanted.positions_T.int() + 1)
        for ours, theirs in zip(step.batch.groups, wanted.groups, strict=True):
            assert torch.equal(ours.kv_address_T[:num_tokens], theirs.kv_address_T)
            assert (ours.kv_address_T[num_tokens:] == -1).all()
            assert torch.equal(ours.first_B[:num_rows], theirs.first_B)
        accepted = [int(torch.randint(0, each.num_drafts + 1, ())) for each in closed]
        fixed.accepted_S[:num_rows] = torch.tensor(accepted)
        lowest = [start + 1 for start in starts]
        starts = [start + 1 + count for start, count in zip(starts, accepted, strict=True)]
        is_open, num_steps = num_drafts > 0, num_steps + 1
    assert num_steps > 5
