"""The DFlash drafter: a small decoder that guesses a block of masked tokens from the target's hidden states in one pass.

It keeps KV of its own. Keys and values of a **context** token (one whose target KV exists) are projected from its feature:
the target's residual stream at a few layers, concatenated, through `fc` and a norm. They depend on no other token, so they
are written once and never change. A **block** is the newest token and masks after it; its own keys and values are those of
ordinary self-attention, and count only within the pass.

Shapes: T tokens · D model · X several projections or taps side by side · V vocabulary · L tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.drafters.dflash.spec import DFlashModelSpec
from culet.kernels.dispatch import for_device
from culet.kernels.types import BlockStart, Candidates, ContextLayer, HeadShape, Rope
from culet.layers.linear import Layer, Linear, Placement, empty_vector
from culet.layers.rope import inverse_frequencies
from culet.models.checkpoint import RandomDraw
from culet.models.gemma4 import Gemma4
from culet.models.random_weights import fill_randomly
from culet.models.weights import load_weights

COMMIT_TOKENS = 1024  # features computed at a time: the taps of 1024 tokens of the 31B take 66 MiB side by side
_IGNORED = ("embed_tokens.weight", "lm_head.weight")  # stored by some tools; the target's are used


@dataclass(frozen=True, slots=True)
class BlockPass:
    """What all layers of one pass over blocks read."""

    batches: Sequence[ForwardBatch]  # by layer: the blocks under that layer's mask
    backends: Sequence[AttentionBackend]  # by layer
    pool: Pool
    store: Any  # where the blocks' keys and values go, in the kernels' own form
    turn: Rope


class DFlashLayerModule(Layer):
    """Attention and MLP, each behind its norm, each added to the stream."""

    def __init__(self, spec: DFlashModelSpec, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """`layer` is its number in the pool: the target's layers come first."""
        super().__init__()
        self.ops, self.layer, self.eps = for_device(device), layer, spec.rms_eps
        size, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
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
        self.kv_heads = replace(self.heads, num_heads=0)  # of the context, which asks nothing
        self.qkv = Linear(queries + 2 * keys, size, dtype=dtype, device=device)
        self.out = Linear(size, queries, dtype=dtype, device=device)
        self.gate_up = Linear(2 * spec.mlp_width, size, dtype=dtype, device=device)
        self.down = Linear(size, spec.mlp_width, dtype=dtype, device=device)
        self.q_norm, self.k_norm = (empty_vector(spec.head_dim, device=device) for _ in range(2))
        self.input_norm, self.post_attention_norm = (empty_vector(size, device=device) for _ in range(2))
        self.norm_weight: Tensor
        weights = torch.empty(spec.num_heads + spec.num_kv_heads, spec.head_dim, device=device)
        self.register_buffer("norm_weight", weights, persistent=False)

    def context(self, pool: Pool) -> ContextLayer:
        """What the context's keys and values are projected by, from the feature itself under its norm, and where they go."""
        first = self.heads.num_heads
        return ContextLayer(self.qkv.weight[first * self.heads.head_dim :], self.norm_weight[first:], pool.planes(self.layer))

    def forward(self, x_TD: Tensor, qkv_TX: Tensor, index: int, shared: BlockPass) -> tuple[Tensor, Tensor]:
        """The stream before the MLP's output is added, and that output; `qkv_TX` is the projection of the normed stream."""
        ops, planes = self.ops, shared.pool.planes(self.layer)
        q, k, v = ops.prepare_qkv(qkv_TX, self.norm_weight, shared.turn, planes, shared.store, self.heads, x_TD.dtype)
        attended = shared.backends[index].run(self.layer, shared.batches[index], shared.pool, q, k, v)
        added, norms = self.out.parts(attended.flatten(1)), (None, self.post_attention_norm)
        x_TD, opened = ops.residual_norm_linear(x_TD, added, norms, None, self.eps, self.gate_up.weight, "silu")
        return x_TD, self.down.parts(opened)

    def placements(self, prefix: str) -> Iterator[tuple[str, Placement]]:
        heads, width = self.heads, self.down.weight.shape[1]
        q_end, k_end = heads.num_heads * heads.head_dim, (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        yield f"{prefix}input_layernorm.weight", Placement(self.input_norm)
        yield f"{prefix}post_attention_layernorm.weight", Placement(self.post_attention_norm)
        yield f"{prefix}self_attn.q_proj.weight", self.qkv.rows(0, q_end)
        yield f"{prefix}self_attn.k_proj.weight", self.qkv.rows(q_end, k_end)
        yield f"{prefix}self_attn.v_proj.weight", self.qkv.rows(k_end, self.qkv.weight.shape[0])
        yield f"{prefix}self_attn.o_proj.weight", Placement(self.out.weight)
        yield f"{prefix}self_attn.q_norm.weight", Placement(self.q_norm)
        yield f"{prefix}self_attn.k_norm.weight", Placement(self.k_norm)
        yield f"{prefix}mlp.gate_proj.weight", self.gate_up.rows(0, width)
        yield f"{prefix}mlp.up_proj.weight", self.gate_up.rows(width, 2 * width)
        yield f"{prefix}mlp.down_proj.weight", Placement(self.down.weight)

    def finish(self) -> None:
        """After loading: one row of norm weights per head. Queries carry the softmax scale, which our attention has not."""
        self.norm_weight[: self.heads.num_heads] = self.q_norm * self.heads.head_dim**-0.5
        self.norm_weight[self.heads.num_heads :] = self.k_norm


class DFlashModel(Layer):
    """The drafter's decoder. Embedding and head are the target's; parameters are allocated unfilled."""

    def __init__(self, spec: DFlashModelSpec, target: Gemma4, *, device: torch.device) -> None:
        """`device` is the target's, or meta to learn the shapes alone."""
        super().__init__()
        dtype, first = target.dtype, len(target.spec.layers)
        self.spec, self.ops = spec, for_device(device)
        self.target = (target,)  # in a tuple, so that its weights are not counted as the drafter's
        self.fc = Linear(spec.hidden_size, len(spec.taps) * spec.hidden_size, dtype=dtype, device=device)
        self.hidden_norm, self.norm = (empty_vector(spec.hidden_size, device=device) for _ in range(2))
        layers = [DFlashLayerModule(spec, first + index, dtype=dtype, device=device) for index in range(len(spec.layers))]
        self.layers = nn.ModuleList(layers)
        self._layers = layers  # the same, typed
        # Outside the module's buffers, so that no cast of the model can round it.
        self.inv_freq = inverse_frequencies(spec.rope_theta, spec.head_dim, spec.head_dim, 1.0, device)

    @property
    def embedding(self) -> tuple[Tensor, float]:
        """The target's table, and the scale of its rows."""
        return self.target[0].embedding, self.target[0].embed_scale

    def commit(self, tapped: Mapping[int, Tensor], positions_T: Tensor, kv_address_T: Tensor, pool: Pool) -> None:
        """Write keys and values of context tokens, for all layers, to the slots of `kv_address_T` (-1: nowhere)."""
        layers, heads = [layer.context(pool) for layer in self._layers], self._layers[0].kv_heads
        for begin in range(0, positions_T.shape[0], COMMIT_TOKENS):
            part = slice(begin, begin + COMMIT_TOKENS)
            feature_TX = self._side_by_side([tapped[tap][part] for tap in self.spec.taps])
            angles = positions_T[part], self.inv_freq
            self.ops.store_context(self.fc(feature_TX), self.hidden_norm, angles, kv_address_T[part], layers, heads)

    def _side_by_side(self, taps: Sequence[Tensor]) -> Tensor:
        """Taps [T, D] as [T, X]; what lies so already is not copied."""
        size, whole = taps[0].shape[1], taps[0]
        lies_so = whole.stride() == (len(taps) * size, 1)
        for index, tap in enumerate(taps):
            lies_so &= tap.stride() == whole.stride() and tap.data_ptr() == whole.data_ptr() + index * size * whole.itemsize
        if lies_so:
            return whole.as_strided((whole.shape[0], len(taps) * size), whole.stride())
        joined: Tensor = self.ops.join_taps(taps)
        return joined

    def forward(
        self, batches: Sequence[ForwardBatch], backends: Sequence[AttentionBackend], pool: Pool, start: BlockStart
    ) -> Tensor:
        """Hidden states [T, D] of blocks after the final norm; `batches` hold the same tokens under each layer's mask.

        The blocks' own keys and values are written behind the context: attention finds all keys in pages.
        """
        x, eps = start.x_TD, self.spec.rms_eps
        group = pool.layout.group_of(self._layers[0].layer)
        shared = BlockPass(batches, backends, pool, self.ops.stores(start.kv_address_T, group.page_tokens), start.turn)
        added = None
        for index, layer in enumerate(self._layers):
            # Each norm has one reader, and goes with it.
            x, qkv = self.ops.residual_norm_linear(x, added, (None, layer.input_norm), None, eps, layer.qkv.weight)
            x, added = layer(x, qkv, index, shared)
        assert added is not None, "a drafter has layers"
        normed: Tensor = self.ops.residual_norm(x, added, None, None, self.norm, eps)[1]
        return normed

    def candidates(self, last_LD: Tensor) -> Candidates:
        """Tokens among which the most likely one of each row is; the rows may be [R, K, D]."""
        found: Candidates = self.ops.head_candidates(last_LD, self.target[0].embedding, None, self.spec.final_softcap)
        return found

    def logits(self, last_LD: Tensor) -> Tensor:
        """Logits [L, V], float32 and softcapped; the head is the target's embedding table."""
        return self.ops.capped_head(last_LD, self.target[0].embedding, self.spec.final_softcap)

    def placements(self) -> dict[str, Placement]:
        """Every tensor of a checkpoint, by its name."""
        found = {"fc.weight": Placement(self.fc.weight), "hidden_norm.weight": Placement(self.hidden_norm)}
        found["norm.weight"] = Placement(self.norm)
        for index, layer in enumerate(self._layers):
            found.update(layer.placements(f"layers.{index}."))
        return found

    def finish(self) -> None:
        """After loading: work out what is made of several tensors."""
        for layer in self._layers:
            layer.finish()


def load_dflash(folder: Path, spec: DFlashModelSpec, target: Gemma4, *, progress: bool = True) -> DFlashModel:
    """The drafter in `folder`, on the target's device and in its precision."""

    def build(device: torch.device) -> DFlashModel:
        return DFlashModel(spec, target, device=device)

    return load_weights(folder, build, _match_names, device=target.device, progress=progress)


def draw_dflash(spec: DFlashModelSpec, target: Gemma4, draw: RandomDraw) -> DFlashModel:
    """A drafter whose weights are drawn on the target's device: for measurements."""
    model = DFlashModel(spec, target, device=target.device)
    fill_randomly(model.placements(), draw, target.device)
    model.finish()
    return model


def _match_names(stored: Iterable[str]) -> dict[str, str]:
    """Name of the place -> stored name; some tools put all tensors below `model.`."""
    chosen: dict[str, str] = {}
    for name in stored:
        local = name.removeprefix("model.")
        if local not in _IGNORED:
            chosen[name if local in chosen else local] = name
    return chosen
