"""Drafting rounds: who drew what becomes a DraftBatch, the drafter proposes, and the proposals wait behind each sequence.

On a GPU a round runs in a fixed shape, as decode steps do: so many sequences, so many drafts, captured once as a CUDA graph
from the newest tokens' ids to the last proposal. What changes from round to round is copied into its buffers before.

Shapes: R sequences that drew · K proposals · S slots · L a slot's tokens, or tokens whose logits are needed · D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch, GroupBatch
from culet.cache.pool import Pool
from culet.drafters.base import DraftBatch, Drafter
from culet.kernels.dispatch import for_device
from culet.kernels.host_transfer import PackedArrays
from culet.kernels.replay import replayed
from culet.runner.fixed_steps import Captures, FixedSteps, bucket_sizes

SLOT, ROW, SOURCE, LENGTH = range(4)  # rows of a round's facts


@dataclass(frozen=True, slots=True)
class Drawer:
    """A sequence that drew in a step, before it is known how many of its drafts are accepted."""

    slot: int
    row: int  # of the step's batch: whose pages hold its KV
    source: int  # which of the tokens with logits its first draw is from
    position: int  # of its first draw


def draft_lengths(max_drafts: int) -> tuple[int, ...]:
    """Numbers of drafts that get a graph: one, about half, and all."""
    return tuple(sorted({1, (max_drafts + 1) // 2, max_drafts}))


class Drafting:
    """A drafter at work for one runner."""

    def __init__(self, drafter: Drafter, pool: Pool, tokens_SL: Tensor) -> None:
        self.drafter, self.pool, self.tokens_SL = drafter, pool, tokens_SL
        self.fixed: FixedDrafts | None = None

    def use_fixed_rounds(self, steps: FixedSteps) -> FixedDrafts:
        """From now on run rounds in fixed shapes, behind steps of fixed shapes."""
        self.fixed = FixedDrafts(self.drafter, self.pool, self.tokens_SL, steps)
        return self.fixed

    def propose(
        self, drawers: Sequence[Drawer], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None, num_drafts: int
    ) -> None:
        """Write `num_drafts` proposals behind the newest token of each drawer. Nothing here waits for the device."""
        if self.fixed is None or not self.fixed.run(drawers, batch, last_LD, accepted_R, num_drafts):
            self._run(drawers, batch, last_LD, accepted_R, num_drafts)

    def _run(
        self, drawers: Sequence[Drawer], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None, num_drafts: int
    ) -> None:
        """A round in a shape of its own."""
        staged = PackedArrays()
        staged.add("facts", _facts(drawers))
        facts_4R = staged.send(self.tokens_SL.device)["facts"]
        if accepted_R is not None:
            facts_4R[SOURCE:] += accepted_R
        row_R = facts_4R[ROW]
        groups = tuple(
            GroupBatch(one.pages_BP.index_select(0, row_R), one.first_B.index_select(0, row_R), row_R[:0])
            for one in batch.groups
        )
        hidden_RD = last_LD.index_select(0, facts_4R[SOURCE])
        propose(self.drafter, self.pool, self.tokens_SL, facts_4R, hidden_RD, groups, num_drafts)


def propose(
    drafter: Drafter,
    pool: Pool,
    tokens_SL: Tensor,
    facts_4R: Tensor,
    hidden_RD: Tensor,
    groups: tuple[GroupBatch, ...],
    num_drafts: int,
) -> Tensor:
    """The part of a round that is captured: it only launches. Proposals go behind the newest tokens; returns them, [R, K]."""
    ops, slot_R, length_R = for_device(tokens_SL.device), facts_4R[SLOT], facts_4R[LENGTH]
    newest_R = ops.newest_tokens(tokens_SL, slot_R, length_R)
    tokens_RK = drafter.propose(DraftBatch(newest_R, length_R, slot_R, hidden_RD, groups), pool, num_drafts)
    ops.keep_drafts(tokens_SL, slot_R, length_R, tokens_RK)
    return tokens_RK


def _facts(drawers: Sequence[Drawer], padding: Sequence[tuple[int, int, int, int]] = ()) -> np.ndarray:
    """int64 [4, R]."""
    facts = [(one.slot, one.row, one.source, one.position) for one in drawers]
    return np.ascontiguousarray(np.array([*facts, *padding], dtype=np.int64).reshape(-1, 4).T)


@dataclass
class _Round:
    """One fixed shape, and once captured the graph and what it leaves."""

    facts_4R: Tensor  # slots, rows of the batch, sources, lengths
    groups: tuple[GroupBatch, ...]
    num_drafts: int
    graph: torch.cuda.CUDAGraph | None = None
    made_RK: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.facts_4R.shape[1]


class FixedDrafts:
    """Rounds of fixed shapes. Their buffers are shared: rounds run one after another."""

    def __init__(self, drafter: Drafter, pool: Pool, tokens_SL: Tensor, steps: FixedSteps) -> None:
        """Rounds read the page tables where `steps` has left them, unless they are for some of its sequences alone."""
        assert pool.spare_page is not None, "rows that pad a round need the pool's spare page"
        self.drafter, self.pool, self.tokens_SL, self._spare = drafter, pool, tokens_SL, pool.spare_page
        self._steps = steps
        self._spare_slot, device = tokens_SL.shape[0] - 1, tokens_SL.device
        sizes, like_D = bucket_sizes(self._spare_slot), steps.model.embedding[0]
        self.hidden_SD = like_D.new_zeros(sizes[-1], like_D.shape[-1])
        self.firsts = [torch.zeros(sizes[-1], dtype=torch.int32, device=device) for _ in steps.tables]
        self.facts = {size: torch.zeros(4, size, dtype=torch.int64, device=device) for size in sizes}  # [4, R] by size
        lengths = draft_lengths(drafter.max_drafts)
        self._rounds = {(size, length): self._make_round(size, length) for size in sizes for length in lengths}
        self.shapes = sorted(self._rounds)  # (sequences, drafts) of every shape

    def _make_round(self, num_rows: int, num_drafts: int) -> _Round:
        facts_4R = self.facts[num_rows]
        groups = tuple(
            GroupBatch(table[:num_rows], first[:num_rows], facts_4R[SLOT][:0])
            for table, first in zip(self._steps.tables, self.firsts, strict=True)
        )
        return _Round(facts_4R, groups, num_drafts)

    def graph_of(self, shape: tuple[int, int]) -> torch.cuda.CUDAGraph | None:
        """The graph of a shape, if there is one."""
        return self._rounds[shape].graph

    @property
    def num_captured(self) -> int:
        return sum(one.graph is not None for one in self._rounds.values())

    def run(
        self, drawers: Sequence[Drawer], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None, num_drafts: int
    ) -> bool:
        """A round in the smallest shape that holds it; False where none does: after chunks with long page tables."""
        tables = self._steps.tables
        fits = all(own.pages_BP.shape[1] <= table.shape[1] for own, table in zip(batch.groups, tables, strict=True))
        shape = next((one for one in self.shapes if one[0] >= len(drawers) and one[1] >= num_drafts), None)
        if shape is None or not fits:
            return False
        self._fill(self._rounds[shape], drawers, batch, last_LD, accepted_R)
        self._launch(self._rounds[shape])
        return True

    def run_settled(self, num_rows: int, num_drafts: int) -> None:
        """A round for all sequences of a step of fixed shape, whose draws have filled its buffers (`FixedDraws`)."""
        self._launch(next(self._rounds[one] for one in self.shapes if one[0] == num_rows and one[1] >= num_drafts))

    def _launch(self, taken: _Round) -> None:
        if taken.graph is None:
            self._propose(taken)
        else:
            taken.graph.replay()

    def _fill(
        self, taken: _Round, drawers: Sequence[Drawer], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None
    ) -> None:
        staged, count, num_rows = PackedArrays(), len(drawers), taken.num_rows
        staged.add("facts", _facts(drawers, [(self._spare_slot, 0, 0, 1)] * (num_rows - count)))
        staged.send_into(taken.facts_4R.view(-1).view(torch.uint8))
        facts_4R = taken.facts_4R[:, :count]
        if accepted_R is not None:
            facts_4R[SOURCE:] += accepted_R
        torch.index_select(last_LD, 0, facts_4R[SOURCE], out=self.hidden_SD[:count])
        follows_rows = all(one.row == index for index, one in enumerate(drawers))
        self._steps.forget_tables()
        for own, table, first in zip(batch.groups, self._steps.tables, self.firsts, strict=True):
            pages_RP, first_R = own.pages_BP[:count], own.first_B[:count]
            if not follows_rows:
                pages_RP, first_R = own.pages_BP.index_select(0, facts_4R[ROW]), own.first_B.index_select(0, facts_4R[ROW])
            if pages_RP.data_ptr() != table.data_ptr():  # else they lie there since the step
                table[:count, : pages_RP.shape[1]].copy_(pages_RP)
            first[:count].copy_(first_R)
            if count < num_rows:
                # What a larger round left here belongs to somebody else.
                table[count:num_rows].fill_(self._spare)
                first[count:num_rows].zero_()

    def _propose(self, taken: _Round) -> Tensor:
        hidden_RD = self.hidden_SD[: taken.num_rows]
        with replayed():
            return propose(self.drafter, self.pool, self.tokens_SL, taken.facts_4R, hidden_RD, taken.groups, taken.num_drafts)

    @torch.inference_mode()
    def rehearse(self, shape: tuple[int, int]) -> None:
        """Run one shape on padding alone, so that its kernels are compiled."""
        self._reset(self._rounds[shape])
        self._propose(self._rounds[shape])

    @torch.inference_mode()
    def capture(self, captures: Captures, shapes: Sequence[tuple[int, int]] | None = None) -> None:
        """Capture `shapes` (default: all), the largest first."""
        for shape in sorted(shapes or self._rounds, reverse=True):
            taken = self._rounds[shape]
            self._reset(taken)
            taken.graph, taken.made_RK = captures.capture(partial(self._propose, taken))

    def _reset(self, taken: _Round) -> None:
        """As if all rows were padding."""
        taken.facts_4R.zero_()
        taken.facts_4R[SLOT] = self._spare_slot
        taken.facts_4R[LENGTH] = 1
        self._steps.forget_tables()
        for table, first in zip(self._steps.tables, self.firsts, strict=True):
            table.fill_(self._spare)
            first.zero_()
