"""The interface of attention backends. `plan.py` says, without torch, what each of them supports."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup


class AttentionBackend(Protocol):
    """Attention over the paged cache for the layers of one KV group, by the text rule or by intervals per token.

    Query token t at position p sees keys kv_lo .. kv_hi; by the text rule kv_hi = p, kv_lo = p - window + 1 (0 without a
    window). The softmax scale is 1: Gemma's norms include it. Query head j reads KV head j // (num_heads / num_kv_heads).
    """

    group: KVGroup
    num_heads: int
    is_capturable: ClassVar[bool]  # launches of decode and verify depend only on shapes: a CUDA graph is right for any lengths

    def __init__(self, group: KVGroup, num_heads: int) -> None: ...

    def plan(self, batch: ForwardBatch, pool: Pool) -> None:
        """Host work, once per batch (the step's batch, and its tail)."""

    def run(self, layer: int, batch: ForwardBatch, pool: Pool, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        """Launch the kernels; returns out_TNH.

        `layer` is the KV-owning layer whose pages are read. The new tokens' KV is already in pages, where it is stored at
        all; `k_TGH` and `v_TGH` are the fresh keys and values of the whole step in the same layer, for rows whose keys are
        not all in pages. With a latent cache they are overlapping views of one tensor, and q, k and v have its column order.
        """
