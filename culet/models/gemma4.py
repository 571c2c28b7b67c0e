"""The Gemma 4 text decoder: one file for E2B, E4B, 12B, 26B-A4B and 31B. What differs between them is in ModelSpec.

Shapes: T new tokens of all rows · L tokens whose logits are needed · D model · V vocabulary · P per-layer width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.kernels.dispatch import for_device
from culet.kernels.types import HeadShape
from culet.layers.attention import Attention, Pass
from culet.layers.experts import Experts
from culet.layers.linear import Layer, Linear, Placement, empty_vector
from culet.layers.mlp import MLP
from culet.layers.rope import inverse_frequencies
from culet.models.spec import LayerSpec, ModelSpec, RopeSpec

AFTER_FINAL_NORM = -1  # the tap that names the hidden state after the final norm


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a forward pass leaves: the last hidden states, and the residual stream where it was tapped."""

    last_LD: Tensor  # after the final norm, for the tokens whose logits are needed
    tapped: dict[int, Tensor]  # by layer: its output [T, D]; after the final norm, that of the tokens with logits


def _rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as `dtype` holds it."""
    return float(torch.tensor(value, dtype=dtype))


class PerLayerEmbedding(Layer):
    """A second, narrow embedding for every layer (E2B, E4B): looked up by token, mixed with the first embedding."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = for_device(device)
        self.dim, self.eps = spec.ple_dim, spec.rms_eps
        width = len(spec.layers) * spec.ple_dim
        self.table = nn.Parameter(torch.empty(spec.ple_vocab_size, width, dtype=dtype, device=device), requires_grad=False)
        self.projection = Linear(width, spec.hidden_size, dtype=dtype, device=device)
        self.norm = empty_vector(spec.ple_dim, device=device)
        self.table_scale = _rounded(spec.ple_dim**0.5, dtype)
        self.context_scale = spec.hidden_size**-0.5

    def forward(self, token_ids_T: Tensor, x_TD: Tensor, layers: slice) -> Tensor:
        """Inputs of `layers`, [T, layers, P]; `x_TD` are the decoder's input embeddings."""
        columns = slice(layers.start * self.dim, layers.stop * self.dim)
        embedded = self.ops.embed(token_ids_T, self.table[:, columns], self.table_scale)
        context = self.ops.linear(x_TD, self.projection.weight[columns])
        return self.ops.ple_combine(context, embedded, self.norm, self.context_scale, self.eps)

    def placements(self) -> Iterator[tuple[str, Placement]]:
        yield "embed_tokens_per_layer.weight", Placement(self.table)
        yield "per_layer_model_projection.weight", Placement(self.projection.weight)
        yield "per_layer_projection_norm.weight", Placement(self.norm)


class DecoderLayer(Layer):
    """Attention, MLP (with experts beside it in MoE models), per-layer embedding, and the scalar on the whole stream."""

    def __init__(
        self, spec: ModelSpec, layer: LayerSpec, rope_kind: int, *, dtype: torch.dtype, device: torch.device, latent: bool
    ) -> None:
        super().__init__()
        self.ops = for_device(device)
        self.eps, size = spec.rms_eps, spec.hidden_size
        heads = HeadShape(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads if layer.owns_kv else 0,
            head_dim=layer.head_dim,
            rotated_dims=layer.rope.rotated_dims,
            k_eq_v=layer.k_eq_v,
            latent=latent and layer.k_eq_v,
            eps=spec.rms_eps,
        )
        self.attention = Attention(layer.index, layer.kv_source, heads, size, rope_kind, dtype=dtype, device=device)
        self.mlp = MLP(size, layer.mlp_width, dtype=dtype, device=device)
        self.input_norm = empty_vector(size, device=device)
        self.post_attention_norm = empty_vector(size, device=device)
        self.pre_mlp_norm = empty_vector(size, device=device)
        self.post_mlp_norm = empty_vector(size, device=device)
        self.scalar = empty_vector(1, device=device)
        self.experts: Experts | None = None
        if spec.moe is not None:
            self.experts = Experts(
                size, spec.moe.num_experts, spec.moe.top_k, spec.moe.width, eps=spec.rms_eps, dtype=dtype, device=device
            )
            self.pre_experts_norm = empty_vector(size, device=device)
            self.post_dense_norm = empty_vector(size, device=device)
            self.post_experts_norm = empty_vector(size, device=device)
        self.has_ple = spec.ple_dim > 0
        if self.has_ple:
            self.ple_gate = Linear(spec.ple_dim, size, dtype=dtype, device=device)
            self.ple_projection = Linear(size, spec.ple_dim, dtype=dtype, device=device)
            self.post_ple_norm = empty_vector(size, device=device)

    def forward(
        self,
        x_TD: Tensor,
        normed_TD: Tensor,
        ple_TP: Tensor | None,
        next_norm_D: Tensor | None,
        shared: Pass,
        whole: Pass | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after this layer, and `next_norm_D` of it.

        `normed_TD` is the stream under this layer's input norm: each layer ends with the norm that the next begins with,
        so that one kernel does both. With `whole` it has all tokens of that pass, whose KV is written, and the rest of the
        layer is for the tokens of `shared`, its tail, alone.
        """
        ops, eps = self.ops, self.eps
        attended = self.attention(normed_TD, shared, whole)
        if not x_TD.shape[0]:
            return x_TD, None
        if self.experts is not None:
            pre_norms = self.pre_mlp_norm, self.pre_experts_norm
            x_TD, normed, for_experts = ops.residual_norm_two(x_TD, attended, self.post_attention_norm, *pre_norms, eps)
            weights = self.post_dense_norm, self.post_experts_norm, self.post_mlp_norm
            dense, routed = self.mlp(normed), self.experts(x_TD, for_experts)
            return ops.residual_norm_joint(x_TD, dense, routed, weights, self.scalar, next_norm_D, eps)
        x_TD, normed = ops.residual_norm(x_TD, attended, self.post_attention_norm, None, self.pre_mlp_norm, eps)
        out = self.mlp(normed)
        if ple_TP is None:
            return ops.residual_norm(x_TD, out, self.post_mlp_norm, self.scalar, next_norm_D, eps)
        x_TD, _ = ops.residual_norm(x_TD, out, self.post_mlp_norm, None, None, eps)
        extra = self.ple_projection.parts(ops.linear_gelu_times(x_TD, self.ple_gate.weight, ple_TP))
        return ops.residual_norm(x_TD, extra, self.post_ple_norm, self.scalar, next_norm_D, eps)

    def placements(self, prefix: str) -> Iterator[tuple[str, Placement]]:
        yield f"{prefix}input_layernorm.weight", Placement(self.input_norm)
        yield f"{prefix}post_attention_layernorm.weight", Placement(self.post_attention_norm)
        yield f"{prefix}pre_feedforward_layernorm.weight", Placement(self.pre_mlp_norm)
        yield f"{prefix}post_feedforward_layernorm.weight", Placement(self.post_mlp_norm)
        yield f"{prefix}layer_scalar", Placement(self.scalar)
        yield from self.attention.placements(f"{prefix}self_attn.")
        yield from self.mlp.placements(f"{prefix}mlp.")
        if self.experts is not None:
            yield from self.experts.placements(prefix)
            yield f"{prefix}pre_feedforward_layernorm_2.weight", Placement(self.pre_experts_norm)
            yield f"{prefix}post_feedforward_layernorm_1.weight", Placement(self.post_dense_norm)
            yield f"{prefix}post_feedforward_layernorm_2.weight", Placement(self.post_experts_norm)
        if self.has_ple:
            yield f"{prefix}per_layer_input_gate.weight", Placement(self.ple_gate.weight)
            yield f"{prefix}per_layer_projection.weight", Placement(self.ple_projection.weight)
            yield f"{prefix}post_per_layer_input_norm.weight", Placement(self.post_ple_norm)


class Gemma4(Layer):
    """The decoder over a paged cache. Parameters are allocated unfilled: `models/weights.py` fills and finishes them."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, latent: bool = True) -> None:
        super().__init__()
        device = torch.device(device)
        self.spec, self.dtype, self.device, self.latent = spec, dtype, device, latent
        self.ops = for_device(device)
        self.embedding = nn.Parameter(
            torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        # Rounded to the weights' precision first, as the model was trained: 39.25 for sqrt(1536) in bf16.
        self.embed_scale = _rounded(spec.hidden_size**0.5, dtype)
        kinds: dict[tuple[RopeSpec, int], int] = {}
        layers = []
        for layer in spec.layers:
            kind = kinds.setdefault((layer.rope, layer.head_dim), len(kinds))
            layers.append(DecoderLayer(spec, layer, kind, dtype=dtype, device=device, latent=latent))
        self.layers = nn.ModuleList(layers)
        self._layers = layers  # the same, typed and quicker to walk
        self._rehearsed: frozenset[int] | None = None  # the layers that run, where not all do
        for layer in spec.layers:
            if not layer.owns_kv:
                layers[layer.kv_source].attention.is_source = True
        # Outside the module's buffers, so that no cast of the model can round them.
        self.inv_freqs = [inverse_frequencies(rope.theta, size, rope.rotated_dims, rope.factor, device) for rope, size in kinds]
        self.norm = empty_vector(spec.hidden_size, device=device)
        self.ple = PerLayerEmbedding(spec, dtype=dtype, device=device) if spec.ple_dim else None
        # From here on every layer reads KV that exists already, so only the tokens whose logits are needed go on.
        self.num_kv_layers = next((i for i in range(len(layers)) if all(not s.owns_kv for s in spec.layers[i:])), len(layers))

    def plan(self, batch: ForwardBatch, pool: Pool, backends: Sequence[AttentionBackend]) -> None:
        """Host work of all backends for a step; before `forward`, and outside of a captured graph."""
        for backend in backends:
            backend.plan(batch, pool)
            if batch.tail is not None and batch.tail.num_tokens:
                backend.plan(batch.tail, pool)

    def forward(
        self, batch: ForwardBatch, pool: Pool, backends: Sequence[AttentionBackend], taps: tuple[int, ...] = ()
    ) -> Hidden:
        """Run a step: write the new tokens' KV, return the hidden states that logits are made of.

        From the last layer that owns KV on, only the tail's tokens go on, once that layer's KV is written; but not before
        the last tapped layer: a drafter needs the stream of every token.
        """
        ops, spec, eps = self.ops, self.spec, self.spec.rms_eps
        num_layers = len(spec.layers)
        tail = batch.tail
        first_short = max(self.num_kv_layers - 1, max(taps, default=AFTER_FINAL_NORM) + 1) if tail is not None else num_layers
        x = embedded = ops.embed(batch.token_ids_T, self.embedding, self.embed_scale)
        shared, whole = self._pass(batch, pool, backends), None
        ple = self._per_layer(batch.token_ids_T, embedded, slice(0, first_short))
        normed = ops.rms_norm(x, self._layers[0].input_norm, eps)
        tapped: dict[int, Tensor] = {}
        first = 0  # layer of the first column of `ple`
        for index, layer in enumerate(self._layers):
            if index == first_short:
                assert tail is not None
                x = x[batch.logits_index_L]
                if index < self.num_kv_layers:
                    whole = shared
                else:
                    normed = normed[batch.logits_index_L]
                shared = self._pass(tail, pool, backends, shared)
                ple = self._per_layer(tail.token_ids_T, embedded[batch.logits_index_L], slice(index, num_layers))
                first = index
            is_run = self._rehearsed is None or index in self._rehearsed
            if is_run and (x.shape[0] or whole is not None):
                is_last = index + 1 == num_layers
                # After the last layer a long prompt is cut to the tokens that count before it is normed, not after.
                needs_cut = is_last and x.shape[0] != batch.logits_index_L.shape[0]
                next_norm = None if needs_cut else self.norm if is_last else self._layers[index + 1].input_norm
                x, normed = layer(x, normed, None if ple is None else ple[:, index - first], next_norm, shared, whole)
                whole = None
            if index in taps:
                tapped[index] = x
        if normed is None:
            normed = ops.rms_norm(x[batch.logits_index_L], self.norm, eps)
        if AFTER_FINAL_NORM in taps:
            tapped[AFTER_FINAL_NORM] = normed
        return Hidden(normed, tapped)

    @contextmanager
    def one_of_each_kind(self, taps: Collection[int] = ()) -> Iterator[None]:
        """Within, `forward` runs few layers, which together call all that a step calls. What it returns has no meaning.

        Given the layers that are tapped, they also take as much memory at a time as all would: layers hand theirs on.
        """
        kinds: dict[object, list[int]] = {}
        for index, layer in enumerate(self._layers):
            one = layer.attention
            kind = one.heads, one.owns_kv, one.is_source, one.rope_kind, layer.mlp.width
            kinds.setdefault(kind, []).append(index)
        # A layer whose input is kept anyway, like the first one's embeddings or a tapped stream, takes less memory than
        # others: so two of a kind, and the layer before a tapped one.
        chosen = {index for indices in kinds.values() for index in indices[:2]}
        chosen |= {self.num_kv_layers - 1, len(self._layers) - 1}
        chosen |= {index for tap in taps for index in (tap - 1, tap) if index >= 0}
        self._rehearsed = frozenset(chosen | {self._layers[index].attention.kv_source for index in chosen})
        try:
            yield
        finally:
            self._rehearsed = None

    def attention_of(self, layer: int) -> Attention:
        """The attention of one layer, for drafters that read its pages."""
        return self._layers[layer].attention

    def logits(self, last_LD: Tensor) -> Tensor:
        """Logits [L, V], float32 and softcapped; the head is the embedding table."""
        return self.ops.capped_head(last_LD, self.embedding, self.spec.final_softcap)

    def placements(self) -> dict[str, Placement]:
        """Every tensor of a checkpoint that has a place here, by its name below the decoder's prefix."""
        found = {"embed_tokens.weight": Placement(self.embedding), "norm.weight": Placement(self.norm)}
        for index, layer in enumerate(self._layers):
            found.update(layer.placements(f"layers.{index}."))
        if self.ple is not None:
            found.update(self.ple.placements())
        return found

    def finish(self) -> None:
        """After loading: work out what is made of several tensors."""
        for layer in self._layers:
            layer.attention.finish(self._layers[layer.attention.kv_source].attention)
            if layer.experts is not None:
                layer.experts.finish()

    def scale_keys(self, owners: Collection[int]) -> None:
        """Once, after loading: fit the keys of the layers `owners`, whose pages are e4m3, into its range."""
        for layer in self._layers:
            if layer.attention.kv_source in owners:
                layer.attention.scale_keys(self._layers[layer.attention.kv_source].attention)

    def _pass(self, batch: ForwardBatch, pool: Pool, backends: Sequence[AttentionBackend], before: Pass | None = None) -> Pass:
        """What the layers of a pass share; after `before` (the whole step) for its tail, which stores nothing."""
        groups = pool.layout.groups
        if before is None:
            stores = [self.ops.stores(batch.groups[g.index].kv_address_T, g.page_tokens) for g in groups]
        else:
            stores = [None] * len(groups)
        return Pass(
            batch=batch,
            pool=pool,
            backends=backends,
            group_of={layer: group.index for group in groups for layer in group.layers},
            stores=stores,
            ropes=[self.ops.rope(batch.positions_T, inv_freq) for inv_freq in self.inv_freqs],
            fresh={} if before is None else before.fresh,
        )

    def _per_layer(self, token_ids_T: Tensor, embedded_TD: Tensor, layers: slice) -> Tensor | None:
        return None if self.ple is None else self.ple(token_ids_T, embedded_TD, layers)
