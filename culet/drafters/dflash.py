"""DFlash at work: context keys and values of what the target has computed, and one pass over a block of masks a round.

A block is the newest token, which has no KV yet, and masks at the positions after it. Its keys and values are written behind
the context, into pages that the scheduler keeps ready there (`KVSpec.ahead`), so that attention reads every key from pages and
depends on shapes alone. They mean nothing afterwards: `commit` writes the context of the same positions before the next block.

Shapes: R sequences · K tokens of a block · T = R * K · D model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup
from culet.drafters.base import DraftBatch
from culet.models.dflash import DFlashModel
from culet.models.dflash_spec import DFlashLayer

LOGITS_ROWS = 256  # logits computed at a time: 256 MiB at Gemma's vocabulary


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers with one mask, and the backend that serves them."""

    mask: DFlashLayer
    backend: AttentionBackend


class DFlashDrafter:
    """A DFlash model beside its target."""

    def __init__(self, model: DFlashModel, backend: AttentionBackend, *, max_drafts: int) -> None:
        """`backend` is the one that was planned for the drafter's group."""
        self.model, self.taps, self.max_drafts = model, model.spec.taps, max_drafts
        self.group: KVGroup = backend.group
        kinds = {mask: _kind(mask, backend) for mask in dict.fromkeys(model.spec.layers)}
        self._kinds = list(kinds.values())
        self._kind_of = [self._kinds.index(kinds[mask]) for mask in model.spec.layers]  # by layer

    def weight_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(weight.shape) for weight in self.model.parameters()]

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, slot_T: Tensor, pool: Pool) -> None:
        """Write context keys and values. They depend on no other token, so it matters not when."""
        self.model.commit(tapped, positions_T, slot_T, pool)

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        """The likeliest token at each of the first `num_drafts` masks of every block: int64 [R, num_drafts]."""
        hidden_RKD = self.block_states(batch, pool).unflatten(0, (batch.num_rows, -1))
        wanted_LD = hidden_RKD[:, 1 : num_drafts + 1].flatten(0, 1)
        parts = [self.model.logits(part).argmax(-1) for part in wanted_LD.split(LOGITS_ROWS)]
        return torch.cat(parts).view(batch.num_rows, num_drafts)

    def block_states(self, batch: DraftBatch, pool: Pool) -> Tensor:
        """Hidden states [T, D] of all blocks, whose tokens follow each other row by row."""
        size, device = self.model.spec.block_size, batch.length_R.device
        position_RK = batch.length_R[:, None] + torch.arange(size, device=device)
        ids_RK = torch.full_like(position_RK, self.model.spec.mask_token_id)
        ids_RK[:, 0] = batch.newest_R
        own = batch.groups[self.group.index]
        slot_T = self._slots(own, position_RK, pool)
        blocks = ForwardBatch(
            token_ids_T=ids_RK.flatten(),
            positions_T=position_RK.flatten(),
            row_begin_B1=torch.arange(0, slot_T.shape[0] + 1, size, dtype=torch.int32, device=device),
            context_B=batch.length_R.int(),
            logits_index_L=slot_T[:0],
            # Where a row starts is known on the device alone; with all keys in pages and few queries no backend asks.
            rows=(RowFacts(0, size, (True,)),) * batch.num_rows,
            groups=(),
            tail=None,
        )
        masked = [
            replace(blocks, groups=(GroupBatch(own.pages_BP, own.first_B, slot_T, _visible(kind.mask, position_RK)),))
            for kind in self._kinds
        ]
        batches = [masked[index] for index in self._kind_of]
        backends = [self._kinds[index].backend for index in self._kind_of]
        return self.model(batches, backends, pool, slot_T)

    def _slots(self, own: GroupBatch, position_RK: Tensor, pool: Pool) -> Tensor:
        """Where each token of the blocks is written, [T]; nowhere (-1) for rows that only pad the batch."""
        size = self.group.page_tokens
        column_RK = (position_RK - own.first_B[:, None]) // size
        page_RK = own.pages_BP.gather(1, column_RK.clamp(max=own.pages_BP.shape[1] - 1)).long()
        slot_RK = page_RK * size + position_RK % size
        if pool.spare_page is not None:
            slot_RK = torch.where(page_RK == pool.spare_page, -1, slot_RK)
        return slot_RK.flatten()


def _kind(mask: DFlashLayer, planned: AttentionBackend) -> _Kind:
    """A backend of the planned class for the layers with one window. Its batches have one group alone, hence index 0."""
    group = planned.group
    specs = tuple(replace(spec, window=mask.window) for spec in group.specs)
    return _Kind(mask, type(planned)(replace(group, index=0, specs=specs), planned.num_heads))


def _visible(mask: DFlashLayer, position_RK: Tensor) -> Tensor | None:
    """First and last key that each token of the blocks sees, int32 [2, T]; None for causal layers: that is the text rule."""
    if mask.is_causal:
        return None
    last_RK = position_RK[:, -1:].expand_as(position_RK)
    first_RK = torch.zeros_like(position_RK) if mask.window is None else (position_RK - mask.window + 1).clamp(min=0)
    return torch.stack((first_RK.flatten(), last_RK.flatten())).int()
