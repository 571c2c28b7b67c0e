"""Self-attention: a merged projection, norms and rope, the backend of the layer's KV group, and the output projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.kernels.types import HeadShape, Rope
from culet.layers.layer import Layer
from culet.layers.rope import plain_first, rotated_first
from culet.layers.weight.base import MatrixLayout, Projection, Split
from culet.layers.weight.weights import Weights
from culet.parallel.rank import Rank
from culet.parallel.reduce.parts import PartialSum, join_shares

MAX_E4M3 = 448.0


@dataclass(frozen=True, slots=True)
class Pass:
    """Everything that layers share in one pass over a batch (a step or its tail): the pages, and values computed once."""

    batch: ForwardBatch
    pool: Pool
    backends: Sequence[AttentionBackend]  # by KV group
    group_of: Mapping[int, int]  # KV-owning layer -> its group
    stores: Sequence[Any]  # by KV group, addresses of the new KV in the form that the kernels expect
    ropes: Sequence[Rope]  # by rope kind
    fresh: dict[int, tuple[Tensor, Tensor]]  # new K and V of layers whose KV is read by other layers


@dataclass(frozen=True)
class HeadShare:
    """The part of an attention layer's heads that a rank computes. It is a KV head and its query heads, or several of these.

    If there are more ranks than KV heads, some ranks have the same heads. Each attends to its own part of the tokens.
    """

    rank: Rank
    num_kv_heads: int  # in the pages of all ranks

    @property
    def token_shares(self) -> int:
        """The number of ranks that share the tokens of a KV head."""
        return max(1, self.rank.size // self.num_kv_heads)

    @property
    def partners(self) -> slice:
        """The ranks with the same heads, this one included."""
        first = self.rank.index - self.rank.index % self.token_shares
        return slice(first, first + self.token_shares)

    def of(self, heads: HeadShape) -> HeadShape:
        """Return the heads of this rank, given those of all ranks."""
        parts = min(self.rank.size, self.num_kv_heads)
        return replace(heads, num_heads=heads.num_heads // parts, num_kv_heads=heads.num_kv_heads // parts)


class Attention(Layer):
    """One layer's attention. Loading permutes the weights into the column order of `HeadShape`.

    `heads` are those of the whole model, and `num_kv_heads` is the number of KV heads in the pages that the layer reads. The
    attribute `heads` has those of the rank, and so must the pool and the backends of a pass.
    """

    def __init__(
        self,
        layer: int,
        kv_source: int,
        heads: HeadShape,
        num_kv_heads: int,
        hidden_size: int,
        rope_kind: int,
        weights: Weights,
    ) -> None:
        super().__init__()
        self.ops = weights.ops
        self.layer, self.kv_source, self.rope_kind = layer, kv_source, rope_kind
        self.share, self.all_reduce = HeadShare(weights.rank, num_kv_heads), weights.all_reduce
        self.heads = self.share.of(heads)
        self.is_source = False  # True if later layers read this layer's KV
        size, rotated, num_q, num_kv = heads.head_dim, heads.rotated_dims, heads.num_heads, heads.num_kv_heads
        key_order = rotated_first if heads.k_eq_v else plain_first
        unit = num_q // num_kv_heads * size  # the query heads of a KV head stay together
        projections = [Projection("q_proj", num_q * size, plain_first(size, rotated, num_q), unit=unit)]
        if num_kv:
            projections.append(Projection("k_proj", num_kv * size, key_order(size, rotated, num_kv), unit=size))
        if num_kv and not heads.k_eq_v:
            projections.append(Projection("v_proj", num_kv * size, unit=size))
        self.qkv = weights.matrix(*projections, num_columns=hidden_size, split=Split.ROWS)
        # The columns of V are the inputs of the output projection. In a K=V layer, they have the same order as the keys.
        value_order = rotated_first(size, rotated, num_q) if heads.k_eq_v else None
        out = (Projection("o_proj", hidden_size),)
        self.out = weights.matrix_of(
            MatrixLayout(out, num_q * size, Split.COLUMNS, value_order, column_unit=unit, has_shared_columns=True)
        )
        self.q_norm = weights.vector("q_norm.weight", size, order=plain_first(size, rotated))
        self.k_norm = weights.vector("k_norm.weight", size, order=key_order(size, rotated)) if num_kv else None
        self.key_scale_H: Tensor | None = None  # the factors that make keys fit e4m3, with columns plain | rotated
        self.norm_weight: Tensor
        norm_weight = torch.empty(self.heads.num_heads + self.heads.num_kv_heads, size, device=weights.device)
        self.register_buffer("norm_weight", norm_weight, persistent=False)

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.layer

    def project(self, x_TD: Tensor, shared: Pass) -> tuple[Tensor, ...]:
        """Return the queries. If the layer owns KV, also return the keys and values, and write them to pages."""
        qkv_TX, rope = self.qkv.linear_parts(x_TD), shared.ropes[self.rope_kind]
        if not self.owns_kv:
            return (self.ops.prepare_q(qkv_TX, self.norm_weight, rope, self.heads, x_TD.dtype),)
        planes, store = shared.pool.planes(self.layer), shared.stores[shared.group_of[self.layer]]
        prepared: tuple[Tensor, ...] = self.ops.prepare_qkv(
            qkv_TX, self.norm_weight, rope, planes, store, self.heads, x_TD.dtype
        )
        return prepared

    def attend(self, shared: Pass, q_TNH: Tensor, *own: Tensor) -> Tensor:
        """Return the output of all heads [T, N * H]. `own` are the new keys and values, if the layer owns KV."""
        if own and self.is_source:
            k_TGH, v_TGH = own
            shared.fresh[self.layer] = k_TGH, v_TGH
        k_TGH, v_TGH = own or shared.fresh[self.kv_source]
        return self._run(shared, q_TNH, k_TGH, v_TGH).flatten(1)

    def _run(self, shared: Pass, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run the backend. If ranks share the tokens, weight the output so that the reduction after `out` joins their parts."""
        backend = shared.backends[shared.group_of[self.kv_source]]
        if self.share.token_shares == 1:
            return backend.run(self.kv_source, shared.batch, shared.pool, q, k, v)
        assert self.all_reduce is not None
        out_TNH, lse_TN = backend.run_share(self.kv_source, shared.batch, shared.pool, q)
        return join_shares(out_TNH, lse_TN, self.all_reduce.gather(lse_TN)[self.share.partners])

    def attend_over_target(self, q_TX: Tensor, shared: Pass, dtype: torch.dtype) -> PartialSum:
        """Compute attention of a drafter's projected queries, which may be in parts, over the target's KV."""
        q = self.ops.prepare_q(q_TX, self.norm_weight, shared.ropes[self.rope_kind], self.heads, dtype)
        return self.out.linear_parts(self._run(shared, q, *shared.fresh[self.kv_source]).flatten(1))

    def finish(self, source: Attention) -> None:
        """Build one row of norm weights per query and key head. Call once, after loading.

        In a latent layer, the query weights include the key norm.
        """
        heads, rotated = self.heads, self.heads.rotated_dims
        q_weight = self.q_norm.clone()
        k_weight = None if self.k_norm is None else self.k_norm.clone()
        if heads.latent:
            assert source.k_norm is not None
            # Keys have the columns rotated | plain, and queries plain | rotated. Rope does not mix the plain columns, so for
            # them q . (w n) = (q w) . n.
            q_weight[: heads.head_dim - rotated] *= source.k_norm[rotated:]
            if k_weight is not None:
                k_weight[rotated:] = 1.0
        self.norm_weight[: heads.num_heads] = q_weight
        if k_weight is not None:
            self.norm_weight[heads.num_heads :] = k_weight

    def scale_keys(self, source: Attention) -> None:
        """Multiply keys by powers of two and divide queries by them. Call after `finish` if the source's pages are e4m3.

        Products stay exactly the same, and no key can exceed the range of e4m3. After its norm |n| <= sqrt(H), and rope moves a
        pair of columns on a circle, so |K| <= sqrt(H) * max|w| of the pair. V = n fits unscaled, and so do the columns that a
        latent shares with it.
        """
        heads, num_q, rotated = self.heads, self.heads.num_heads, self.heads.rotated_dims
        if source.key_scale_H is None:
            source.key_scale_H = source._largest_key_scale()
        scale_H = source.key_scale_H
        self.norm_weight[:num_q] /= scale_H
        if self.owns_kv:
            # The columns of keys are rotated | plain in a K=V layer and plain | rotated in other layers.
            self.norm_weight[num_q:] *= scale_H.roll(rotated) if heads.k_eq_v else scale_H

    def _largest_key_scale(self) -> Tensor:
        heads, rotated = self.heads, self.heads.rotated_dims
        assert self.k_norm is not None
        weight = self.k_norm.abs()
        if heads.k_eq_v:
            weight = weight.roll(-rotated)
        plain, turned = weight[: heads.head_dim - rotated], weight[heads.head_dim - rotated :]
        bound = torch.cat((plain, torch.maximum(*turned.chunk(2)).repeat(2))) * heads.head_dim**0.5
        scale = torch.exp2((MAX_E4M3 / bound).log2().floor().clamp(-32, 32))
        if heads.latent:
            scale[: heads.head_dim - rotated] = 1.0
        return scale
