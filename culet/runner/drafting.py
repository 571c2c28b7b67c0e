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
from culet.kernels.staging import Staged
from culet.runner.graphs import Captures, bucket_sizes, table_columns

SLOT, ROW, SOURCE, LENGTH = range(4)  # rows of a round's facts


@dataclass(frozen=True, slots=True)
class Drawer:
    """A sequence that drew in a step, before it is known how many of its drafts are accepted."""

    slot: int
    row: int  # of the step's batch: whose pages hold its KV
    source: int  # which of the tokens with logits its first draw is from
    position: int  # of its first draw


@dataclass(frozen=True, slots=True)
class Proposals:
    """What a round leaves on the device."""

    tokens_RK: Tensor  # int64
    places_RK: Tensor  # int64; where they go among all slots' tokens


def draft_lengths(max_drafts: int) -> tuple[int, ...]:
    """Numbers of drafts that get a graph: one, about half, and all."""
    return tuple(sorted({1, (max_drafts + 1) // 2, max_drafts}))


class Drafting:
    """A drafter at work for one runner."""

    def __init__(self, drafter: Drafter, pool: Pool, tokens_SL: Tensor) -> None:
        self.drafter, self.pool, self.tokens_SL = drafter, pool, tokens_SL
        self.fixed: FixedDrafts | None = None

    def use_fixed_rounds(self, like_D: Tensor) -> FixedDrafts:
        """From now on run rounds in fixed shapes; `like_D` has the width, dtype and device of the target's hidden states."""
        self.fixed = FixedDrafts(self.drafter, self.pool, self.tokens_SL, like_D)
        return self.fixed

    def propose(
        self, drawers: Sequence[Drawer], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None, num_drafts: int
    ) -> None:
        """Write `num_drafts` proposals behind the newest token of each drawer. Nothing here waits for the device."""
        made = None if self.fixed is None else self.fixed.run(drawers, batch, last_LD, accepted_R, num_drafts)
        if made is None:
            made = self._run(drawers, batch, last_LD, accepted_R, num_drafts)
        tokens = self.tokens_SL.view(-1)
        tokens[made.places_RK[: len(drawers)]] = made.tokens_RK[: len(drawers)].to(tokens.dtype)

    def _run(
        self, drawers: Sequence[Drawer], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None, num_drafts: int
    ) -> Proposals:
        """A round in a shape of its own."""
        staged = Staged()
        staged.add("facts", _facts(drawers, len(drawers)))
        facts_4R = staged.send(self.tokens_SL.device)["facts"]
        if accepted_R is not None:
            facts_4R[SOURCE:] += accepted_R
        row_R = facts_4R[ROW]
        groups = tuple(
            GroupBatch(one.pages_BP.index_select(0, row_R), one.first_B.index_select(0, row_R), row_R[:0])
            for one in batch.groups
        )
        hidden_RD = last_LD.index_select(0, facts_4R[SOURCE])
        return propose(self.drafter, self.pool, self.tokens_SL, facts_4R, hidden_RD, groups, num_drafts)


def propose(
    drafter: Drafter,
    pool: Pool,
    tokens_SL: Tensor,
    facts_4R: Tensor,
    hidden_RD: Tensor,
    groups: tuple[GroupBatch, ...],
    num_drafts: int,
) -> Proposals:
    """The part of a round that is captured: it only launches."""
    slot_R, length_R = facts_4R[SLOT], facts_4R[LENGTH]
    place_R = torch.add(length_R, slot_R, alpha=tokens_SL.shape[1])
    newest_R = tokens_SL.view(-1).index_select(0, place_R).long()
    tokens_RK = drafter.propose(DraftBatch(newest_R, length_R, slot_R, hidden_RD, groups), pool, num_drafts)
    column_K = torch.arange(1, num_drafts + 1, device=place_R.device)
    return Proposals(tokens_RK, place_R[:, None] + column_K)


def _facts(drawers: Sequence[Drawer], num_rows: int) -> np.ndarray:
    """int64 [4, num_rows]; a sequence of one token pads it."""
    padding = [(0, 0, 0, 1)] * (num_rows - len(drawers))
    facts = [(one.slot, one.row, one.source, one.position) for one in drawers]
    return np.ascontiguousarray(np.array([*facts, *padding], dtype=np.int64).reshape(-1, 4).T)


@dataclass
class _Round:
    """One fixed shape, and once captured the graph and what it leaves."""

    facts_4R: Tensor  # slots, rows of the batch, sources, lengths
    groups: tuple[GroupBatch, ...]
    num_drafts: int
    graph: torch.cuda.CUDAGraph | None = None
    made: Proposals | None = None

    @property
    def num_rows(self) -> int:
        return self.facts_4R.shape[1]


class FixedDrafts:
    """Rounds of fixed shapes. Their buffers are shared: rounds run one after another."""

    def __init__(self, drafter: Drafter, pool: Pool, tokens_SL: Tensor, like_D: Tensor) -> None:
        """`like_D` has the width, dtype and device of the target's hidden states."""
        assert pool.spare_page is not None, "rows that pad a round need the pool's spare page"
        self.drafter, self.pool, self.tokens_SL, self._spare = drafter, pool, tokens_SL, pool.spare_page
        num_slots, max_len = tokens_SL.shape
        device = tokens_SL.device
        self._hidden_SD = like_D.new_zeros(num_slots, like_D.shape[-1])
        columns = [table_columns(group, max_len, drafter.max_drafts + 1) for group in pool.layout.groups]
        self._tables = [torch.full((num_slots, n), pool.spare_page, dtype=torch.int32, device=device) for n in columns]
        self._firsts = [torch.zeros(num_slots, dtype=torch.int32, device=device) for _ in columns]
        self._rounds = {
            (size, length): self._make_round(size, length)
            for size in bucket_sizes(num_slots)
            for length in draft_lengths(drafter.max_drafts)
        }

    def _make_round(self, num_rows: int, num_drafts: int) -> _Round:
        facts_4R = torch.zeros(4, num_rows, dtype=torch.int64, device=self.tokens_SL.device)
        facts_4R[LENGTH] = 1
        groups = tuple(
            GroupBatch(table[:num_rows], first[:num_rows], facts_4R[SLOT][:0])
            for table, first in zip(self._tables, self._firsts, strict=True)
        )
        return _Round(facts_4R, groups, num_drafts)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(sequences, drafts) of every shape, rising."""
        return sorted(self._rounds)

    def graph_of(self, shape: tuple[int, int]) -> torch.cuda.CUDAGraph | None:
        """The graph of a shape, if there is one."""
        return self._rounds[shape].graph

    @property
    def num_captured(self) -> int:
        return sum(one.graph is not None for one in self._rounds.values())

    def run(
        self, drawers: Sequence[Drawer], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None, num_drafts: int
    ) -> Proposals | None:
        """A round in the smallest shape that holds it; None where none does: after chunks with long page tables."""
        fits = all(own.pages_BP.shape[1] <= table.shape[1] for own, table in zip(batch.groups, self._tables, strict=True))
        shape = next((one for one in self.shapes if one[0] >= len(drawers) and one[1] >= num_drafts), None)
        if shape is None or not fits:
            return None
        taken = self._rounds[shape]
        self._fill(taken, drawers, batch, last_LD, accepted_R)
        if taken.graph is None:
            made = self._propose(taken)
        else:
            assert taken.made is not None
            taken.graph.replay()
            made = taken.made
        return Proposals(made.tokens_RK[:, :num_drafts], made.places_RK[:, :num_drafts])

    def _fill(
        self, taken: _Round, drawers: Sequence[Drawer], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None
    ) -> None:
        staged, count, num_rows = Staged(), len(drawers), taken.num_rows
        staged.add("facts", _facts(drawers, num_rows))
        staged.send_into(taken.facts_4R.view(-1).view(torch.uint8))
        facts_4R = taken.facts_4R[:, :count]
        if accepted_R is not None:
            facts_4R[SOURCE:] += accepted_R
        torch.index_select(last_LD, 0, facts_4R[SOURCE], out=self._hidden_SD[:count])
        follows_rows = all(one.row == index for index, one in enumerate(drawers))
        for own, table, first in zip(batch.groups, self._tables, self._firsts, strict=True):
            pages_RP, first_R = own.pages_BP[:count], own.first_B[:count]
            if not follows_rows:
                pages_RP, first_R = own.pages_BP.index_select(0, facts_4R[ROW]), own.first_B.index_select(0, facts_4R[ROW])
            table[:count, : pages_RP.shape[1]].copy_(pages_RP)
            first[:count].copy_(first_R)
            if count < num_rows:
                # What a larger round left here belongs to somebody else.
                table[count:num_rows].fill_(self._spare)
                first[count:num_rows].zero_()

    def _propose(self, taken: _Round) -> Proposals:
        hidden_RD = self._hidden_SD[: taken.num_rows]
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
            taken.graph, taken.made = captures.capture(partial(self._propose, taken))

    def _reset(self, taken: _Round) -> None:
        """As if all rows were padding."""
        taken.facts_4R.zero_()
        taken.facts_4R[LENGTH] = 1
        for table, first in zip(self._tables, self._firsts, strict=True):
            table.fill_(self._spare)
            first.zero_()
