"""The interface of attention backends. `plan.py` lists what each backend supports and does not import torch."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup


class AttentionBackend(Protocol):
    """Attention over the paged cache for the layers of one KV group.

    A query token at position p sees the keys kv_lo .. kv_hi. They come from the text rule or from one interval per token. The
    text rule sets kv_hi = p and kv_lo = p - window + 1 (0 without a window). The softmax scale is 1 because Gemma's norms
    include it. Query head j reads KV head j // (num_heads / num_kv_heads).
    """

    group: KVGroup
    num_heads: int
    is_capturable: ClassVar[bool]  # decode and verify launches depend only on shapes, so a CUDA graph fits any lengths

    def __init__(self, group: KVGroup, num_heads: int) -> None: ...

    def plan(self, batch: ForwardBatch, pool: Pool) -> None:
        """Do the host work for a batch. Called once for the step's batch and once for its tail."""

    def run(self, layer: int, batch: ForwardBatch, pool: Pool, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        """Launch the kernels and return out_TNH.

        `layer` is the KV-owning layer whose pages are read. If the new tokens' KV is stored at all, it is already in pages.
        `k_TGH` and `v_TGH` are the fresh keys and values of the whole step in the same layer. Rows whose keys are not all in
        pages read them. With a latent cache they are overlapping views of one tensor, and q, k and v have its column order.
        """

    def run_share(self, layer: int, batch: ForwardBatch, pool: Pool, q_TNH: Tensor) -> tuple[Tensor, Tensor]:
        """Return out_TNH and the log of the sum of exponentials of the scores, float32 [T, N], for the keys of this rank.

        For a group whose tokens several ranks share (`own_share`). All keys are in pages. A query that sees no key of this
        rank has zeros and -inf.
        """
