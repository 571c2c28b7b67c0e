"""Rows that are planned while it is not known how many drafts of the last ones are accepted.

On a GPU captured steps find out by themselves where such rows begin. Here the same launches run one by one in the place of a
replay, or the runner looks at what was accepted itself; what comes out is always what comes out without drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from dflash_rig import Rig as DFlashRig
from draft_drive import DraftDrive
from real_steps import make_prompt, run_to_end
from test_dflash import MISTAKES, assert_like_oracle, pair, requests, told, use_fixed_steps
from test_drafting import GEMMA, MTP, draw_by_columns, greedy, make_request, often, sequences, target
from test_fixed_steps import fixed_steps, row
from test_runner import one_model

from culet.attention.batch import RowFacts
from culet.engine.memory import least_slabs
from culet.models.gemma4 import Gemma4
from culet.runner import fixed_steps as fixed_steps_module
from culet.runner.draws import FixedDraws
from culet.runner.fill import fill
from culet.runner.fixed_steps import Bucket, FixedStep, FixedSteps, table_columns
from culet.runner.runner import Runner
from culet.types import PageTable, Row, StepPlan

__all__ = ["one_model", "pair", "target"]  # fixtures


class Replay:
    """In the place of a step's graph: places the rows, and plans attention by where they turn out to begin."""

    def __init__(self, fixed: FixedSteps, step: FixedStep) -> None:
        self.fixed, self.step = fixed, step

    def replay(self) -> None:
        fixed, step = self.fixed, self.step
        fixed._place(step)
        counts = [end - begin for begin, end in pairwise(step.planned.begin_B1.tolist())]
        starts = step.places.context_B.tolist()
        facts = [RowFacts(at, count, (True,) * len(fixed.tables)) for at, count in zip(starts, counts, strict=True) if count]
        batch = replace(fixed_steps_module._cut(step.batch, len(facts), step.bucket.num_tokens), rows=tuple(facts))
        fixed.model.plan(batch, fixed.pool, fixed.backends)
        step.hidden = fixed._forward(step, batch)


def replay_by_hand(runner: Runner) -> list[int]:
    """Let a runner's steps of fixed shapes pass for captured ones; returns the numbers of open drafts of rows they served."""
    fixed = runner.fixed
    assert fixed is not None
    for bucket in fixed.buckets:
        step = fixed.step_of(bucket)
        step.graph = Replay(fixed, step)  # type: ignore[assignment]
    served: list[int] = []
    run = fixed.run

    def spy(plan: StepPlan, bucket: Bucket) -> None:
        served.extend(row.num_open for row in plan.rows)
        run(plan, bucket)

    fixed.run = spy  # type: ignore[method-assign]
    return served


def use_draws(runner: Runner) -> None:
    assert runner.fixed is not None
    assert runner.drafting is not None
    runner.draws = FixedDraws(runner.fixed, runner.drafting.fixed, draw_by_columns)


def run_open(drive: DraftDrive, *requests, **settings):
    drive.scheduler.plans_open = True
    return run_to_end(drive.scheduler, drive.runner.execute, *requests, ahead=True, **settings)


@pytest.mark.parametrize("is_told", [often, lambda place: True, lambda place: False], ids=["often", "always", "never"])
@pytest.mark.parametrize("is_fixed", [True, False])
def test_output_is_that_without_drafts(target: Gemma4, is_fixed: bool, is_told: Callable[[int], bool]) -> None:
    asked = [
        make_request(f"r{n}", make_prompt(n), replace(one, seed=n), 40 + n)
        for n, one in zip((1, 5, 33), (greedy(), GEMMA, greedy()), strict=True)
    ]
    want = DraftDrive(target, None).run(*asked)
    known = sequences(asked, want)
    drive = DraftDrive(target, MTP, known=known, is_told=is_told, max_num_seqs=3, budget=40, is_fixed=is_fixed)
    served: list[int] = []
    if is_fixed:
        use_draws(drive.runner)
        served = replay_by_hand(drive.runner)
    assert run_open(drive, *asked) == want
    assert sum(count > 0 for count in served) > 10 or not is_fixed
    accepted = drive.scheduler.counters.accepted_tokens
    assert accepted > 10 if is_told(0) else accepted < 10
    drive.check_pages()


@pytest.mark.parametrize("is_tight", [True, False], ids=["preemption", "prefix hits"])
def test_pages_in_flight(target: Gemma4, is_tight: bool) -> None:
    """With preemption or prefix hits, and with cancels, while drafts are open."""
    asked = [make_request(f"r{index}", make_prompt((8 if is_tight else 40) + index), greedy(), 60) for index in range(4)]
    want = DraftDrive(target, None).run(*asked)
    known = sequences(asked, want)
    num_slabs = least_slabs(DraftDrive(target, None).layout, 80) + 2 if is_tight else 300
    drive = DraftDrive(target, MTP, known=known, is_told=often, num_slabs=num_slabs, prefix_caching=True, is_fixed=True)
    use_draws(drive.runner)
    served = replay_by_hand(drive.runner)
    again = [replace(one, request_id=f"{one.request_id} again") for one in asked]
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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_drafter_with_pages_of_its_own(pair, mistake, monkeypatch):
    """Every block is the oracle's: its context is in place wherever the row began."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    ones = requests(60)
    expected = DFlashRig(pair, drafts=False).run(*ones)
    rig = DFlashRig(pair, told=told(ones, expected), is_wrong=MISTAKES[mistake], has_spare=True, ahead=True)
    use_fixed_steps(rig, has_draws=True)
    served = replay_by_hand(rig.runner)
    rig.scheduler.plans_open = True
    assert rig.run(*ones) == expected
    assert sum(count > 0 for count in served) > 5
    assert_like_oracle(pair, rig.rounds, at_least=12)
    rig.check_pages()


def placed(fixed: FixedSteps, plan: StepPlan) -> FixedStep:
    """The step of a plan, its rows placed."""
    bucket = fixed.find(plan.rows)
    assert bucket is not None
    step = fixed.step_of(bucket)
    fixed._fill(plan, step)
    fixed._place(step)
    return step


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_tokens_stand_where_fill_says(one_model, num_rows: int, num_drafts: int, monkeypatch) -> None:
    """Steps of the same sequences, one after another, against batches that are filled on the host when all is known."""
    fixed = fixed_steps(one_model, query_counts=(1, 4))
    fixed.tokens_SL.copy_(torch.randint(0, 600, fixed.tokens_SL.shape))
    layout, num_sent = fixed.pool.layout, []
    stage = fixed._stage
    monkeypatch.setattr(fixed, "_stage", lambda *given, **rest: (num_sent.append(1), stage(*given, **rest))[1])
    columns = [table_columns(group, 400, 7) for group in layout.groups]
    tables = [tuple(PageTable(0, tuple(range(40 * slot, 40 * slot + n))) for n in columns) for slot in range(8)]
    most = min(group.page_tokens * count for group, count in zip(layout.groups, columns, strict=True)) - 8
    starts, is_open, step_id = [4 + 3 * slot for slot in range(num_rows)], False, 0
    lows = list(starts)  # where rows begin as far as the plan knows
    while max(starts) + num_drafts < most:
        real: list[Row] = []
        rows: list[Row] = []
        for slot, (start, low) in enumerate(zip(starts, lows, strict=True)):
            # A row may also have fewer drafts than another.
            count = num_drafts - (slot % 2 if num_drafts else 0)
            facts = {"num_new": 1 + count, "num_logits": 1 + count, "num_drafts": count, "tables": tables[slot]}
            real.append(row(slot, start, **facts, store_from=(start, start)))
            rows.append(row(slot, low, **facts, store_from=(low, low), num_open=count if is_open else 0))
        step = placed(fixed, StepPlan(step_id, (), (), tuple(rows)))
        wanted = fill(StepPlan(0, (), (), tuple(real)), layout, fixed.tokens_SL, torch.device("cpu"))
        num_tokens = wanted.positions_T.shape[0]
        assert torch.equal(step.batch.token_ids_T[:num_tokens], wanted.token_ids_T)
        assert torch.equal(step.batch.positions_T[:num_tokens], wanted.positions_T)
        assert torch.equal(step.batch.context_B[:num_rows], wanted.context_B)
        assert torch.equal(step.batch.row_begin_B1[: num_rows + 1], wanted.row_begin_B1)
        assert torch.equal(step.following.positions_R[:num_tokens], wanted.positions_T.int() + 1)
        for mine, other in zip(step.batch.groups, wanted.groups, strict=True):
            assert torch.equal(mine.kv_address_T[:num_tokens], other.kv_address_T)
            assert (mine.kv_address_T[num_tokens:] == -1).all()
            assert torch.equal(mine.first_B[:num_rows], other.first_B)
        accepted = [int(torch.randint(0, one.num_drafts + 1, ())) for one in real]
        fixed.accepted_S[:num_rows] = torch.tensor(accepted)
        lows = [start + 1 for start in starts]
        starts = [start + 1 + count for start, count in zip(starts, accepted, strict=True)]
        is_open, step_id = num_drafts > 0, step_id + 1
    assert step_id > 5
    # The first step is sent; with drafts the first open one too; then the device goes on by itself.
    assert len(num_sent) == (2 if num_drafts else 1)
    # Not after another step, nor where rows begin elsewhere or are in other pages.
    for changes in ({"step_id": step_id + 1}, {"slot": 7}, {"start": lows[0] + 9}, {"tables": tables[6]}):
        before = len(num_sent)
        rows = [rows[0]._replace(start=lows[0]) if index == 0 else one for index, one in enumerate(rows)]
        fact = {key: value for key, value in changes.items() if key != "step_id"}
        placed(fixed, StepPlan(changes.get("step_id", step_id), (), (), (rows[0]._replace(**fact), *rows[1:])))
        assert len(num_sent) == before + 1
