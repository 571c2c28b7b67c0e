"""The layers of a DFlash drafter, a small decoder that guesses a block of masked tokens from the target's hidden states.

It has its own KV. The keys and values of a **context** token (one whose target KV exists) are projected from its feature. The
feature is the target's residual stream at a few layers, concatenated and passed through `fc` and a norm. Context keys and
values depend on no other token, so they are written once and never change. A **block** is the newest token and the masks after
it. Its own keys and values are those of ordinary self-attention, and are used only in that pass.

Shapes: T tokens · D model · X several projections or taps side by side · V vocabulary · L tokens whose logits are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.drafters.dflash.spec import DFlashSpec
from culet.kernels.types import BlockShape, BlockStart, Candidates, HeadShape, Rope
from culet.layers.layer import Layer
from culet.layers.rope import inverse_frequencies
from culet.layers.weight.base import ContextRows, Projection
from culet.layers.weight.weights import Weights
from culet.models.gemma4 import Gemma4
from culet.models.random_checkpoint import RandomDraw
from culet.models.random_weights import fill_randomly
from culet.models.weights import check_weights, choose_rounding, load_weights

COMMIT_TOKENS = 1024  # features computed at a time (for the 31B, the joined taps of 1024 tokens take 66 MiB)
_IGNORED = ("embed_tokens.weight", "lm_head.weight")  # some tools store them, but the target's are used


@dataclass(frozen=True, slots=True)
class BlockPass:
    """The inputs that all layers share in one pass over blocks."""

    batches: Sequence[ForwardBatch]  # the blocks with each layer's mask, by layer
    backends: Sequence[AttentionBackend]  # by layer
    pool: Pool
    store: Any  # addresses of the blocks' keys and values, as the kernels expect them
    rope: Rope


class DFlashLayer(Layer):
    """Attention and MLP. Each has a norm before it and is added to the stream."""

    def __init__(self, spec: DFlashSpec, layer: int, weights: Weights) -> None:
        """Allocate the layer. `layer` is its number in the pool, where the target's layers come first."""
        super().__init__()
        self.ops, self.layer, self.eps = weights.ops, layer, spec.rms_eps
        size, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = weights.below("self_attn."), weights.below("mlp.")
        self.heads = HeadShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotated_dims=spec.head_dim,
            k_eq_v=False,
            latent=False,
            eps=spec.rms_eps,
            norm_v=False,
        )
        self.kv_heads = replace(self.heads, num_heads=0)  # for the context, which has no queries
        self.qkv = attention.matrix(
            Projection("q_proj", queries), Projection("k_proj", keys), Projection("v_proj", keys), num_columns=size
        )
        self.out = attention.matrix(Projection("o_proj", size), num_columns=queries)
        gate, up = Projection("gate_proj", spec.mlp_width), Projection("up_proj", spec.mlp_width)
        self.gate_up = mlp.matrix(gate, up, num_columns=size)
        self.down = mlp.matrix(Projection("down_proj", size), num_columns=spec.mlp_width)
        self.q_norm = attention.vector("q_norm.weight", spec.head_dim)
        self.k_norm = attention.vector("k_norm.weight", spec.head_dim)
        self.input_norm = weights.vector("input_layernorm.weight", size)
        self.post_attention_norm = weights.vector("post_attention_layernorm.weight", size)
        self.norm_weight: Tensor
        norm_weight = torch.empty(spec.num_heads + spec.num_kv_heads, spec.head_dim, device=weights.device)
        self.register_buffer("norm_weight", norm_weight, persistent=False)

    def context(self, pool: Pool) -> ContextRows:
        """Return the weights that project context keys and values from normed features, and the planes that take them."""
        first = self.heads.num_heads
        return ContextRows(self.qkv, first * self.heads.head_dim, self.norm_weight[first:], pool.planes(self.layer))

    def forward(self, x_TD: Tensor, qkv_TX: Tensor, index: int, shared: BlockPass) -> tuple[Tensor, Tensor]:
        """Return the stream before the MLP's output is added, and that output. `qkv_TX` is projected from the normed stream."""
        ops, planes = self.ops, shared.pool.planes(self.layer)
        q, k, v = ops.prepare_qkv(qkv_TX, self.norm_weight, shared.rope, planes, shared.store, self.heads, x_TD.dtype)
        attended = shared.backends[index].run(self.layer, shared.batches[index], shared.pool, q, k, v)
        added, norms = self.out.linear_parts(attended.flatten(1)), (None, self.post_attention_norm)
        x_TD, opened = self.gate_up.residual_norm_linear(x_TD, added, norms, self.eps, gate="silu")
        return x_TD, self.down.linear_parts(opened)

    def finish(self) -> None:
        """Build one row of norm weights per head. Call after loading. Queries include the softmax scale, attention does not."""
        self.norm_weight[: self.heads.num_heads] = self.q_norm * self.heads.head_dim**-0.5
        self.norm_weight[self.heads.num_heads :] = self.k_norm


class DFlashModel(Layer):
    """The drafter's decoder, with the embedding and head of the target. Weights are allocated unfilled."""

    def __init__(self, spec: DFlashSpec, first_layer: int, weights: Weights) -> None:
        """Allocate the model. `first_layer` is the number of its first layer in the pool."""
        super().__init__()
        size = spec.hidden_size
        self.spec, self.ops = spec, weights.ops
        self.target: tuple[Gemma4, ...] = ()  # see `bind`
        self.fc = weights.matrix(Projection("fc", size), num_columns=len(spec.taps) * size)
        self.hidden_norm = weights.vector("hidden_norm.weight", size)
        self.norm = weights.vector("norm.weight", size)
        self._layers = [
            DFlashLayer(spec, first_layer + index, weights.below(f"layers.{index}.")) for index in range(len(spec.layers))
        ]
        self.layers = nn.ModuleList(self._layers)
        # Not a buffer of the module, so that no cast of the model can round it.
        self.inv_freq = inverse_frequencies(spec.rope_theta, spec.head_dim, spec.head_dim, 1.0, weights.device)

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        """Write the keys and values of context tokens for all layers to `kv_address_T` (-1 means nowhere)."""
        layers, first = [layer.context(pool) for layer in self._layers], self._layers[0]
        for begin in range(0, positions_T.shape[0], COMMIT_TOKENS):
            part = slice(begin, begin + COMMIT_TOKENS)
            feature_TX = self._side_by_side([tapped[tap][part] for tap in self.spec.taps])
            angles = positions_T[part], self.inv_freq
            feature_TD, address_T = self.fc.linear(feature_TX), kv_address_T[part]
            first.qkv.store_context(feature_TD, self.hidden_norm, angles, address_T, layers, first.kv_heads)

    def _side_by_side(self, taps: Sequence[Tensor]) -> Tensor:
        """Return taps [T, D] as [T, X]. Taps that are already side by side in memory are not copied."""
        size, first = taps[0].shape[1], taps[0]
        is_joined = first.stride() == (len(taps) * size, 1)
        for index, tap in enumerate(taps):
            is_joined &= tap.stride() == first.stride() and tap.data_ptr() == first.data_ptr() + index * size * first.itemsize
        if is_joined:
            return first.as_strided((first.shape[0], len(taps) * size), first.stride())
        joined: Tensor = self.ops.join_taps(taps)
        return joined

    def begin_blocks(self, newest_R: Tensor, length_R: Tensor, tables: tuple[Tensor, Tensor], shape: BlockShape) -> BlockStart:
        """Start a pass over blocks. Return the embeddings of the newest tokens and of masks, and their positions."""
        return self.target[0].embedding.begin_blocks(newest_R, length_R, tables, shape, self.inv_freq)

    def forward(
        self, batches: Sequence[ForwardBatch], backends: Sequence[AttentionBackend], pool: Pool, start: BlockStart
    ) -> Tensor:
        """Return hidden states [T, D] of blocks after the final norm. `batches` hold the same tokens with each layer's mask.

        The blocks' own keys and values are written after the context, so that attention finds all keys in pages.
        """
        x, eps = start.x_TD, self.spec.rms_eps
        group = pool.layout.group_of(self._layers[0].layer)
        shared = BlockPass(batches, backends, pool, self.ops.stores(start.kv_address_T, group.page_tokens), start.rope)
        added = None
        for index, layer in enumerate(self._layers):
            # Each norm has one reader and is fused with it.
            x, qkv = layer.qkv.residual_norm_linear(x, added, (None, layer.input_norm), eps)
            x, added = layer(x, qkv, index, shared)
        assert added is not None, "a drafter needs at least one layer"
        normed: Tensor = self.ops.residual_norm(x, added, None, None, self.norm, eps)[1]
        return normed

    @property
    def head_bytes(self) -> int:
        """The bytes of the head, which is the target's."""
        return self.target[0].head_bytes

    def candidates(self, last_LD: Tensor) -> Candidates:
        """Return candidate tokens that include the most likely one of each row. The rows may be [R, K, D]."""
        return self.target[0].head_candidates(last_LD, self.spec.final_softcap)

    def logits(self, last_LD: Tensor) -> Tensor:
        """Return softcapped float32 logits [L, V]. The head is the target's."""
        return self.target[0].capped_head(last_LD, self.spec.final_softcap)

    def finish(self) -> None:
        """Compute the values that depend on several tensors. Call after loading."""
        for layer in self._layers:
            layer.finish()

    def bind(self, target: Gemma4) -> None:
        """Use the embedding and head of `target`. It is in a tuple, so that its weights are not counted as the drafter's."""
        self.target = (target,)


def check_dflash(folder: Path, spec: DFlashSpec, first_layer: int, weights: Weights, *, quantization: str = "auto") -> None:
    """Raise if `load_dflash` would reject the files. The target is made from `weights`."""
    check_weights(folder, partial(DFlashModel, spec, first_layer), _match_names, _weights(weights), quantization=quantization)


def load_dflash(
    folder: Path, spec: DFlashSpec, target: Gemma4, *, quantization: str = "auto", progress: bool = True
) -> DFlashModel:
    """Load the drafter in `folder` to the target's device, in its precision."""
    build = partial(DFlashModel, spec, len(target.spec.layers))
    model = load_weights(folder, build, _match_names, _weights(target), quantization=quantization, progress=progress)
    model.bind(target)
    return model


def _weights(target: Gemma4 | Weights) -> Weights:
    """Return the drafter's weights. Every rank holds all of them."""
    return Weights(target.dtype, target.device)


def draw_dflash(spec: DFlashSpec, target: Gemma4, draw: RandomDraw, *, quantization: str = "auto") -> DFlashModel:
    """Return a drafter with random weights, for measurements."""
    model = DFlashModel(spec, len(target.spec.layers), choose_rounding(_weights(target), quantization))
    fill_randomly(model.placements(), draw, target.device)
    model.finish()
    model.bind(target)
    return model


def _match_names(stored: Iterable[str]) -> dict[str, str]:
    """Map placement names to stored names. Some tools put all tensors below `model.`."""
    chosen: dict[str, str] = {}
    for name in stored:
        local = name.removeprefix("model.")
        if local not in _IGNORED:
            chosen[name if local in chosen else local] = name
    return chosen
