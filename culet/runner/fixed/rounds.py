"""Draft rounds in fixed shapes. A shape is a number of sequences and a number of drafts.

On a GPU, each shape is captured once as a CUDA graph, from the newest tokens' ids to the last proposal. The inputs that change
from round to round are copied to its buffers first.

Shapes: R sequences that drew · K proposals · S slots · L a slot's tokens, or tokens whose logits are needed · D model ·
X draws of a step, then accepted drafts of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch, GroupBatch
from culet.cache.pool import Pool
from culet.drafters.base import Drafter
from culet.kernels.captures import Captures
from culet.kernels.dispatch import for_device
from culet.kernels.host_transfer import PackedArrays
from culet.kernels.replay import replayed
from culet.runner.draft_round import LENGTH, ROW, SLOT, SOURCE, draft_lengths, propose, round_facts
from culet.runner.draw_plan import DrawGroup
from culet.runner.fixed.page_tables import DeviceTables
from culet.runner.fixed.steps import Bucket, FixedStep, bucket_sizes


@dataclass
class FixedRound:
    """One fixed shape, and its graph and proposals once it is captured."""

    facts_4R: Tensor
    groups: tuple[GroupBatch, ...]
    num_drafts: int
    graph: torch.cuda.CUDAGraph | None = None
    proposed_RK: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.facts_4R.shape[1]


class FixedRounds:
    """Runs rounds in fixed shapes. Rounds run one after another, so they share buffers."""

    def __init__(
        self,
        drafter: Drafter,
        pool: Pool,
        tokens_SL: Tensor,
        tables: DeviceTables,
        *,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the buffers. Rounds read `tables`, the page tables of fixed-shape steps, and overwrite them if necessary."""
        self.drafter, self.pool, self.tokens_SL, self.tables = drafter, pool, tokens_SL, tables
        self._spare_slot, device = tokens_SL.shape[0] - 1, tokens_SL.device
        self._ops = for_device(device)
        sizes, lengths = bucket_sizes(self._spare_slot), draft_lengths(drafter.max_drafts)
        self.hidden_SD = torch.zeros(sizes[-1], hidden_size, dtype=dtype, device=device)
        self._firsts = [torch.zeros(sizes[-1], dtype=torch.int32, device=device) for _ in tables.groups]
        self._facts = {size: torch.zeros(4, size, dtype=torch.int64, device=device) for size in sizes}  # [4, R] by size
        self._rounds = {(size, length): self._make_round(size, length) for size in sizes for length in lengths}
        self.shapes = sorted(self._rounds)  # (sequences, drafts)
        self._starts: dict[Bucket, torch.cuda.CUDAGraph] = {}  # graphs of `_start_after`

    def __getitem__(self, shape: tuple[int, int]) -> FixedRound:
        return self._rounds[shape]

    def run(
        self, groups: Sequence[DrawGroup], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None, num_drafts: int
    ) -> bool:
        """Do what `DraftRounds.run` does, in the smallest shape that fits. Return False if none does (tables are too wide)."""
        widths = zip(batch.groups, self.tables.columns, strict=True)
        shape = next((shape for shape in self.shapes if shape[0] >= len(groups) and shape[1] >= num_drafts), None)
        if shape is None or any(group.pages_BP.shape[1] > width for group, width in widths):
            return False
        self._start(self._rounds[shape], groups, batch, last_LD, accepted_R)
        self._replay(self._rounds[shape])
        return True

    def run_after(self, step: FixedStep, out_X: Tensor, num_drafts: int) -> None:
        """Run a round for all sequences of a fixed-shape step, whose draws are `out_X` (`FixedDraws`).

        A sequence that wants fewer proposals than others gets just as many. The surplus is not verified, and the next draw
        overwrites it.
        """
        start, num_rows = self._starts.get(step.bucket), step.bucket.num_rows
        if start is None:
            self._start_after(step, out_X)
        else:
            start.replay()
        self._replay(next(self._rounds[shape] for shape in self.shapes if shape[0] == num_rows and shape[1] >= num_drafts))

    @torch.inference_mode()
    def rehearse(self, shape: tuple[int, int]) -> None:
        """Run one shape with only padding, so that its kernels are compiled."""
        self._reset(self._rounds[shape])
        self._propose(self._rounds[shape])

    @torch.inference_mode()
    def rehearse_start(self, step: FixedStep, out_X: Tensor) -> None:
        self._start_after(step, out_X)

    @torch.inference_mode()
    def capture(self, captures: Captures, shapes: Sequence[tuple[int, int]] | None = None) -> None:
        """Capture `shapes` (default: all), the largest first."""
        for shape in sorted(shapes or self._rounds, reverse=True):
            fixed = self._rounds[shape]
            self._reset(fixed)
            fixed.graph, fixed.proposed_RK = captures.capture(partial(self._propose, fixed))

    @torch.inference_mode()
    def capture_start(self, captures: Captures, step: FixedStep, out_X: Tensor) -> None:
        """Capture the start of rounds after `step`. The step and its draws must already be captured."""
        self._starts[step.bucket], _ = captures.capture(partial(self._start_after, step, out_X))

    @property
    def num_captured(self) -> int:
        return sum(fixed.graph is not None for fixed in self._rounds.values()) + len(self._starts)

    def _start(
        self, fixed: FixedRound, groups: Sequence[DrawGroup], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None
    ) -> None:
        """Fill a round's buffers for some sequences of a step."""
        count, num_rows = len(groups), fixed.num_rows
        staged = PackedArrays()
        staged.add("facts", round_facts(groups, [(self._spare_slot, 0, 0, 1)] * (num_rows - count)))
        staged.send_into(fixed.facts_4R.view(-1).view(torch.uint8))
        facts_4R = fixed.facts_4R[:, :count]
        if accepted_R is not None:
            facts_4R[SOURCE:] += accepted_R
        torch.index_select(last_LD, 0, facts_4R[SOURCE], out=self.hidden_SD[:count])
        # If there is one sequence for each row of the batch, in order, nothing needs to be gathered.
        row_R = None if all(group.row == index for index, group in enumerate(groups)) else facts_4R[ROW]
        self.tables.copy(batch.groups, row_R, count, num_rows)
        for group, first in zip(batch.groups, self._firsts, strict=True):
            first[:count].copy_(group.first_B[:count] if row_R is None else group.first_B.index_select(0, row_R))
            first[count:num_rows].zero_()

    def _start_after(self, step: FixedStep, out_X: Tensor) -> None:
        """Fill a round's buffers for all sequences of a step. This is captured, so it only launches kernels."""
        assert step.hidden is not None, "no step has run in this bucket"
        num_rows, next_tokens, width = step.bucket.num_rows, step.next_tokens, self.tokens_SL.shape[1]
        into = self._facts[num_rows], self.hidden_SD[:num_rows]
        begin_B1, last_TD = step.batch.row_begin_B1, step.hidden.last_LD
        self._ops.begin_round(out_X, begin_B1, next_tokens.places_R, next_tokens.positions_R, width, last_TD, into)
        for group, first in zip(step.batch.groups, self._firsts, strict=True):
            first[:num_rows].copy_(group.first_B[:num_rows])

    def _replay(self, fixed: FixedRound) -> None:
        if fixed.graph is None:
            self._propose(fixed)
        else:
            fixed.graph.replay()

    def _propose(self, fixed: FixedRound) -> Tensor:
        """Make the proposals of a round. This is captured, so it only launches kernels."""
        hidden_RD = self.hidden_SD[: fixed.num_rows]
        with replayed():
            return propose(self.drafter, self.pool, self.tokens_SL, fixed.facts_4R, hidden_RD, fixed.groups, fixed.num_drafts)

    def _make_round(self, num_rows: int, num_drafts: int) -> FixedRound:
        facts_4R = self._facts[num_rows]
        groups = tuple(
            GroupBatch(table[:num_rows], first[:num_rows], facts_4R[SLOT][:0])
            for table, first in zip(self.tables.groups, self._firsts, strict=True)
        )
        return FixedRound(facts_4R, groups, num_drafts)

    def _reset(self, fixed: FixedRound) -> None:
        """Fill a round's buffers as if all rows were padding."""
        fixed.facts_4R.zero_()
        fixed.facts_4R[SLOT] = self._spare_slot
        fixed.facts_4R[LENGTH] = 1
        self.tables.clear()
        for first in self._firsts:
            first.zero_()
