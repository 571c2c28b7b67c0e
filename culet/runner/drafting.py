"""Drafting rounds: who drew what becomes a DraftBatch, the drafter proposes, and the proposals wait behind each sequence.

Shapes: R sequences that drew · K proposals · S slots · L a slot's tokens, or tokens whose logits are needed · D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch, GroupBatch
from culet.cache.pool import Pool
from culet.drafters.base import DraftBatch, Drafter
from culet.kernels.staging import on_device


@dataclass(frozen=True, slots=True)
class Drawer:
    """A sequence that drew in a step, before it is known how many of its drafts are accepted."""

    slot: int
    row: int  # of the step's batch: whose pages hold its KV
    source: int  # which of the tokens with logits its first draw is from
    position: int  # of its first draw


class Drafting:
    """A drafter at work for one runner."""

    def __init__(self, drafter: Drafter, pool: Pool, tokens_SL: Tensor) -> None:
        self.drafter, self.pool, self.tokens_SL = drafter, pool, tokens_SL

    def propose(
        self, drawers: Sequence[Drawer], batch: ForwardBatch, last_LD: Tensor, accepted_R: Tensor | None, num_drafts: int
    ) -> None:
        """Write `num_drafts` proposals behind the newest token of each drawer. Nothing here waits for the device."""
        facts = [(one.slot, one.row, one.source, one.position) for one in drawers]
        slot_R, row_R, source_R, length_R = on_device(facts, self.tokens_SL.device).T.contiguous()
        if accepted_R is not None:
            source_R, length_R = source_R + accepted_R, length_R + accepted_R
        place_R = slot_R * self.tokens_SL.shape[1] + length_R
        tokens = self.tokens_SL.view(-1)
        draft = DraftBatch(
            newest_R=tokens.index_select(0, place_R).long(),
            length_R=length_R,
            slot_R=slot_R,
            hidden_RD=last_LD.index_select(0, source_R),
            groups=tuple(
                GroupBatch(one.pages_BP.index_select(0, row_R), one.first_B.index_select(0, row_R), slot_R[:0])
                for one in batch.groups
            ),
        )
        proposed_RK = self.drafter.propose(draft, self.pool, num_drafts)
        column_K = torch.arange(1, num_drafts + 1, device=place_R.device)
        tokens[place_R[:, None] + column_K] = proposed_RK.to(tokens.dtype)
