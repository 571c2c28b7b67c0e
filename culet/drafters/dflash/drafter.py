"""DFlash drafting. One pass over a block of masks reads context keys and values of the tokens that the target has computed.

A block is the newest token, which has no KV yet, and masks at the positions after it. Its keys and values are written after
the context, into pages that the scheduler keeps ready there (`KVSpec.ahead`). So attention reads every key from pages and
depends only on shapes. These keys and values have no meaning after the pass, since `commit` writes the context of those
positions before the next block.

Shapes: R sequences · K tokens of a block · T = R * K · D model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch, GroupBatch, RowFacts
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup
from culet.drafters.base import DraftBatch
from culet.drafters.dflash.model import DFlashModel
from culet.drafters.dflash.spec import DFlashMask
from culet.kernels.types import BlockShape
from culet.models.gemma4 import LOGITS_ROWS


@dataclass(frozen=True, slots=True)
class _Kind:
    """A mask that some layers share, and their backend."""

    mask: DFlashMask
    backend: AttentionBackend

    def visible_from(self, intervals: Iterator[Tensor]) -> Tensor | None:
        """Return the next of `intervals`, or None for the text rule. Each mask that is not causal has an interval."""
        return None if self.mask.is_causal else next(intervals)


class DFlashDrafter:
    """A DFlash model and its target."""

    def __init__(self, model: DFlashModel, backend: AttentionBackend, *, max_drafts: int) -> None:
        """Set up the drafter. `backend` is the one planned for its group."""
        self.model, self.taps, self.max_drafts = model, model.spec.taps, max_drafts
        self.group: KVGroup = backend.group
        kinds = {mask: _kind(mask, backend) for mask in dict.fromkeys(model.spec.layers)}
        self._kinds = list(kinds.values())
        self._kind_of = [self._kinds.index(kinds[mask]) for mask in model.spec.layers]  # by layer
        windows = tuple(kind.mask.window for kind in self._kinds if not kind.mask.is_causal)
        spec = model.spec
        self._shape = BlockShape(spec.block_size, spec.mask_token_id, self.group.page_tokens, None, windows)

    @property
    def pass_bytes(self) -> int:
        return self.model.num_bytes + self.model.head_bytes

    def kernel_keys(self) -> list[tuple[object, ...]]:
        return self.model.kernel_keys()

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        """Write context keys and values. Those of a token depend on no other token, so they can be written at any time."""
        self.model.commit(tapped, positions_T, kv_address_T, pool)

    def propose(self, batch: DraftBatch, pool: Pool, num_drafts: int) -> Tensor:
        """Return the most likely token at each of the first `num_drafts` masks of every block, int64 [R, num_drafts]."""
        hidden_RKD = self.block_states(batch, pool).unflatten(0, (batch.num_rows, -1))
        drafts_RK = torch.empty(batch.num_rows, num_drafts, dtype=torch.int64, device=batch.newest_R.device)
        at_a_time = max(1, LOGITS_ROWS // num_drafts)
        for wanted_RKD, best_RK in zip(
            hidden_RKD[:, 1 : num_drafts + 1].split(at_a_time), drafts_RK.split(at_a_time), strict=True
        ):
            self.model.ops.pick_best(self.model.candidates(wanted_RKD), best_RK.view(-1))
        return drafts_RK

    def block_states(self, batch: DraftBatch, pool: Pool) -> Tensor:
        """Return the hidden states [T, D] of all blocks, row after row."""
        model, own = self.model, batch.groups[self.group.index]
        shape = self._shape._replace(spare_page=pool.spare_page)
        tables = own.pages_BP, own.first_B
        start = model.begin_blocks(batch.newest_R, batch.length_R, tables, shape)
        blocks = ForwardBatch(
            token_ids_T=start.ids_T,
            positions_T=start.positions_T,
            row_begin_B1=start.row_begin_R1,
            context_B=start.context_R,
            logits_index_L=start.kv_address_T[:0],
            # Only the device knows where a row starts. With all keys in pages and few queries, no backend asks.
            rows=(RowFacts(0, shape.size, (True,)),) * batch.num_rows,
            groups=(),
            tail=None,
        )
        intervals = iter(start.visible)
        masked = [
            replace(blocks, groups=(GroupBatch(own.pages_BP, own.first_B, start.kv_address_T, kind.visible_from(intervals)),))
            for kind in self._kinds
        ]
        batches = [masked[index] for index in self._kind_of]
        backends = [self._kinds[index].backend for index in self._kind_of]
        return model(batches, backends, pool, start)


def _kind(mask: DFlashMask, planned: AttentionBackend) -> _Kind:
    """Build a backend of the planned class for the layers with this mask. Its batches have only one group, hence index 0."""
    group = planned.group
    specs = tuple(replace(spec, window=mask.window) for spec in group.specs)
    return _Kind(mask, type(planned)(replace(group, index=0, specs=specs), planned.num_heads))
