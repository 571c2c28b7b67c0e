"""Self-attention: one merged projection, norms and rope, the backend of the layer's KV group, the output projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.kernels.dispatch import for_device
from culet.kernels.types import HeadShape, Rope
from culet.layers.linear import Layer, Linear, Placement, empty_vector
from culet.layers.rope import all_heads, plain_columns, rotated_columns

MAX_E4M3 = 448.0


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers of one pass over a batch read: the step's batch or its tail, pages, and what was worked out once."""

    batch: ForwardBatch
    pool: Pool
    backends: Sequence[AttentionBackend]  # by KV group
    group_of: Mapping[int, int]  # KV-owning layer -> its group
    stores: Sequence[Any]  # by KV group: where new KV goes, in the kernels' own form
    ropes: Sequence[Rope]  # by rope kind
    fresh: dict[int, tuple[Tensor, Tensor]]  # new K and V of layers whose KV other layers read


class Attention(Layer):
    """One layer's attention. Weights are permuted at load to the column order that `HeadShape` states."""

    def __init__(
        self,
        layer: int,
        kv_source: int,
        heads: HeadShape,
        hidden_size: int,
        rope_kind: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ops = for_device(device)
        self.layer, self.kv_source, self.heads, self.rope_kind = layer, kv_source, heads, rope_kind
        self.is_source = False  # set where later layers read this one's KV
        size, num_kv = heads.head_dim, heads.num_kv_heads
        projected = heads.num_heads + num_kv * (1 if heads.k_eq_v else 2)
        self.qkv = Linear(projected * size, hidden_size, dtype=dtype, device=device)
        self.out = Linear(hidden_size, heads.num_heads * size, dtype=dtype, device=device)
        self.q_norm = empty_vector(size, device=device)
        self.k_norm = empty_vector(size, device=device) if num_kv else None
        self.key_scale_H: Tensor | None = None  # columns nope | rot; what keys are multiplied by to fit e4m3
        self.norm_weight: Tensor
        self.register_buffer("norm_weight", torch.empty(heads.num_heads + num_kv, size, device=device), persistent=False)

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.layer

    def forward(self, x_TD: Tensor, shared: Pass, whole: Pass | None = None) -> Tensor:
        """Attention of the tokens of `shared`, maybe as parts (`Linear.parts`).

        With `whole`, `x_TD` has all tokens of that pass, whose tail is `shared`.
        """
        pool, group = shared.pool, shared.group_of[self.kv_source]
        every = shared if whole is None else whole
        qkv_TX, turn = self.qkv.parts(x_TD), every.ropes[self.rope_kind]
        if self.owns_kv:
            planes = pool.planes(self.layer)
            q, k, v = self.ops.prepare_qkv(qkv_TX, self.norm_weight, turn, planes, every.stores[group], self.heads, x_TD.dtype)
            if self.is_source:
                shared.fresh[self.layer] = k, v
        else:
            q = self.ops.prepare_q(qkv_TX, self.norm_weight, turn, self.heads, x_TD.dtype)
            k, v = shared.fresh[self.kv_source]
        if whole is not None:
            q = q[whole.batch.logits_index_L]
        if not q.shape[0]:
            return x_TD[:0]
        out_TNH = shared.backends[group].run(self.kv_source, shared.batch, pool, q, k, v)
        return self.out.parts(out_TNH.flatten(1))

    def attend(self, q_TX: Tensor, shared: Pass, dtype: torch.dtype) -> Tensor:
        """Attention of queries whose projection is there, over another layer's KV; both maybe as parts (`Linear.parts`)."""
        q = self.ops.prepare_q(q_TX, self.norm_weight, shared.ropes[self.rope_kind], self.heads, dtype)
        backend = shared.backends[shared.group_of[self.kv_source]]
        out_TNH = backend.run(self.kv_source, shared.batch, shared.pool, q, *shared.fresh[self.kv_source])
        return self.out.parts(out_TNH.flatten(1))

    def placements(self, prefix: str) -> Iterator[tuple[str, Placement]]:
        heads = self.heads
        size, num_q, num_kv = heads.head_dim, heads.num_heads, heads.num_kv_heads
        rot, nope = rotated_columns(size, heads.rotated_dims), plain_columns(size, heads.rotated_dims)
        nope_rot, rot_nope = torch.cat((nope, rot)), torch.cat((rot, nope))
        k_order = rot_nope if heads.k_eq_v else nope_rot
        q_end, k_end = num_q * size, (num_q + num_kv) * size
        yield f"{prefix}q_proj.weight", self.qkv.rows(0, q_end, all_heads(nope_rot, num_q, size))
        yield f"{prefix}q_norm.weight", Placement(self.q_norm, nope_rot)
        if self.k_norm is not None:
            yield f"{prefix}k_proj.weight", self.qkv.rows(q_end, k_end, all_heads(k_order, num_kv, size))
            yield f"{prefix}k_norm.weight", Placement(self.k_norm, k_order)
            if not heads.k_eq_v:
                yield f"{prefix}v_proj.weight", self.qkv.rows(k_end, k_end + num_kv * size)
        # V's columns are the output projection's input: a K=V layer has them in the order of its keys' projection.
        out_order = all_heads(rot_nope, num_q, size) if heads.k_eq_v else None
        yield f"{prefix}o_proj.weight", Placement(self.out.weight, out_order, dim=1)

    def finish(self, source: Attention) -> None:
        """After loading: one row of norm weights per query and key head, with the key norm folded into latent queries."""
        heads, rotated = self.heads, self.heads.rotated_dims
        q_weight = self.q_norm.clone()
        k_weight = None if self.k_norm is None else self.k_norm.clone()
        if heads.latent:
            assert source.k_norm is not None
            # Keys' columns are rot | nope, queries' nope | rot. Where rope does not mix columns, q . (w n) = (q w) . n.
            q_weight[: heads.head_dim - rotated] *= source.k_norm[rotated:]
            if k_weight is not None:
                k_weight[rotated:] = 1.0
        self.norm_weight[: heads.num_heads] = q_weight
        if k_weight is not None:
            self.norm_weight[heads.num_heads :] = k_weight

    def scale_keys(self, source: Attention) -> None:
        """After `finish`, where the source's pages are e4m3: keys grow by powers of two, queries shrink by the same.

        No product changes by a bit, and no key can leave e4m3's range: after its norm |n| <= sqrt(H), rope turns a pair of
        columns within their circle, so |K| <= sqrt(H) * max|w| of the pair. V = n, and what a latent shares with it, fits as
        it is.
        """
        heads, num_q, rotated = self.heads, self.heads.num_heads, self.heads.rotated_dims
        if source.key_scale_H is None:
            source.key_scale_H = source._largest_key_scale()
        scale_H = source.key_scale_H
        self.norm_weight[:num_q] /= scale_H
        if self.owns_kv:
            # Keys' columns are rot | nope in a K=V layer, nope | rot in others.
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
