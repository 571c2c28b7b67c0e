"""Draft rounds, in which the drafter proposes tokens. They wait after each sequence's newest token for the next step.

`fixed/rounds.py` runs the same rounds in fixed shapes.

Shapes: R sequences that drew · K proposals · S slots · L a slot's tokens, or tokens whose logits are needed · D model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from culet.attention.batch import ForwardBatch, GroupBatch
from culet.cache.pool import Pool
from culet.drafters.base import DraftBatch, Drafter
from culet.kernels.dispatch import for_device
from culet.kernels.host_transfer import PackedArrays
from culet.runner.draw_plan import DrawGroup

SLOT, ROW, SOURCE, LENGTH = range(4)  # lines of a round's facts (ROW and SOURCE as in DrawGroup, LENGTH in tokens with KV)


def draft_lengths(max_drafts: int) -> tuple[int, ...]:
    """Return the numbers of drafts that get a graph, which are one, about half, and all."""
    return tuple(sorted({1, (max_drafts + 1) // 2, max_drafts}))


class DraftRounds:
    """Runs rounds in their own shape."""

    def __init__(self, drafter: Drafter, pool: Pool, tokens_SL: Tensor) -> None:
        self.drafter, self.pool, self.tokens_SL = drafter, pool, tokens_SL

    def run(
        self, groups: Sequence[DrawGroup], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None, num_drafts: int
    ) -> Tensor:
        """Write `num_drafts` proposals after the newest token of each group's slot and return them, [R, K].

        Do not wait for the device.
        """
        staged = PackedArrays()
        staged.add("facts", round_facts(groups))
        facts_4R = staged.send(self.tokens_SL.device)["facts"]
        if accepted_R is not None:
            facts_4R[SOURCE:] += accepted_R
        row_R = facts_4R[ROW]
        kv_groups = tuple(
            GroupBatch(group.pages_BP.index_select(0, row_R), group.first_B.index_select(0, row_R), row_R[:0])
            for group in batch.groups
        )
        hidden_RD = last_LD.index_select(0, facts_4R[SOURCE])
        return propose(self.drafter, self.pool, self.tokens_SL, facts_4R, hidden_RD, kv_groups, num_drafts)


def propose(
    drafter: Drafter,
    pool: Pool,
    tokens_SL: Tensor,
    facts_4R: Tensor,
    hidden_RD: Tensor,
    groups: tuple[GroupBatch, ...],
    num_drafts: int,
) -> Tensor:
    """Write proposals to the slots and return them, [R, K]. This part of a round is captured, so it only launches kernels."""
    ops, slot_R, length_R = for_device(tokens_SL.device), facts_4R[SLOT], facts_4R[LENGTH]
    newest_R = ops.newest_tokens(tokens_SL, slot_R, length_R)
    tokens_RK = drafter.propose(DraftBatch(newest_R, length_R, slot_R, hidden_RD, groups, tokens_SL), pool, num_drafts)
    ops.keep_drafts(tokens_SL, slot_R, length_R, tokens_RK)
    return tokens_RK


def round_facts(groups: Sequence[DrawGroup], padding: Sequence[tuple[int, int, int, int]] = ()) -> np.ndarray:
    """Return the facts of a round as if no draft were accepted, int64 [4, R]."""
    facts = [(group.slot, group.row, group.source, group.position) for group in groups]
    return np.ascontiguousarray(np.array([*facts, *padding], dtype=np.int64).reshape(-1, 4).T)
