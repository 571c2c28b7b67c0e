"""Suffix drafting. It finds the last tokens of a sequence earlier in the same sequence and proposes what followed them.

Answers often repeat parts of their prompt: code that is edited, text that is corrected or quoted, records that are listed. The
search runs on the device over the slot's own tokens, so it sees the newest token before the host does, and is captured.

Shapes: R sequences · K drafts · S slots · L a slot's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from culet.cache.pool import Pool
from culet.cache.spec import KVGroup
from culet.drafters.base import ABSTAINED, DraftBatch, Drafter
from culet.kernels.dispatch import for_device


class SuffixDrafter:
    """Proposes only copies. Where the last tokens are new, it abstains."""

    taps: tuple[int, ...] = ()
    group = None
    pass_bytes = 0

    def __init__(self, match_lens: tuple[int, int], *, max_drafts: int) -> None:
        """Set up the drafter. `match_lens` are the fewest and the most tokens that are compared."""
        self.match_lens, self.max_drafts = match_lens, max_drafts

    def kernel_keys(self) -> list[tuple[object, ...]]:
        return [("suffix", *self.match_lens)]

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        """Do nothing, since it has no KV."""

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        drafts_RK = batch.length_R.new_full((batch.num_rows, num_drafts), ABSTAINED)
        for_device(drafts_RK.device).copy_suffix(batch.tokens_SL, batch.slot_R, batch.length_R, self.match_lens, drafts_RK)
        return drafts_RK


class BesideDrafter:
    """Proposes copies, and another drafter's proposals where the last tokens are new."""

    def __init__(self, inner: Drafter, match_lens: tuple[int, int], *, max_drafts: int) -> None:
        self.inner, self.match_lens, self.max_drafts = inner, match_lens, max_drafts
        self.taps: tuple[int, ...] = inner.taps
        self.group: KVGroup | None = inner.group

    @property
    def pass_bytes(self) -> int:
        return self.inner.pass_bytes

    def kernel_keys(self) -> list[tuple[object, ...]]:
        return [*self.inner.kernel_keys(), ("suffix", *self.match_lens)]

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        self.inner.commit(tapped, positions_T, kv_address_T, pool)

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        drafts_RK = self.inner.propose(batch, pool, min(num_drafts, self.inner.max_drafts))
        num_more = num_drafts - drafts_RK.shape[1]
        if num_more:
            drafts_RK = torch.nn.functional.pad(drafts_RK, (0, num_more), value=ABSTAINED)
        for_device(drafts_RK.device).copy_suffix(batch.tokens_SL, batch.slot_R, batch.length_R, self.match_lens, drafts_RK)
        return drafts_RK
