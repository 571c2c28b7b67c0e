"""The Gemma 4 text decoder, for E2B, E4B, 12B, 26B-A4B and 31B. The differences between them are in ModelSpec.

Shapes: T new tokens of all rows · L tokens whose logits are needed · D model · V vocabulary · P per-layer width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.kernels.captures import side_by_side
from culet.kernels.types import Candidates, HeadShape, Rope
from culet.layers.attention import Attention, Pass
from culet.layers.experts import Experts
from culet.layers.layer import Layer
from culet.layers.mlp import MLP
from culet.layers.rope import inverse_frequencies
from culet.layers.weight.base import Matrix, Projection, Split
from culet.layers.weight.weights import Weights
from culet.models.pieces import DIRECT, Pieces, TailInputs, TokenInputs
from culet.models.spec import LayerSpec, ModelSpec, RopeSpec
from culet.parallel.reduce.norms import RankNorms
from culet.parallel.reduce.parts import AllReduce, PartialSum, join_columns

LOGITS_ROWS = 256  # rows of logits that callers compute at a time, which take 256 MiB at Gemma's vocabulary
# Up to this many tokens, the kernels of the MLP and of the experts are too small to keep the memory busy alone.
SIDE_BY_SIDE_TOKENS = 128
AFTER_FINAL_NORM = -1  # the tap for the hidden state after the final norm


@dataclass(frozen=True, slots=True)
class Hidden:
    """The result of a forward pass: the last hidden states, and the residual stream at the taps."""

    last_LD: Tensor  # after the final norm, for the tokens whose logits are needed
    tapped: dict[int, Tensor]  # output of each tapped layer [T, D]; after the final norm, only for tokens with logits


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The state after some layers, for all tokens of a step."""

    x_TD: Tensor
    normed_TD: Tensor | None  # None if the last layer has run and the stream is still to be cut
    projected: Sequence[
        Tensor
    ]  # queries, keys and values of the next layer, if it owns KV and the rest of it needs only a tail
    token_ids_T: Tensor
    embedded_TD: Tensor
    shared: Pass
    tapped: dict[int, Tensor]


class Between(NamedTuple):
    """The stream between two layers, for all tokens of a step."""

    num_layers: int  # that have run
    x_TD: Tensor
    normed_TD: Tensor  # after the next layer's input norm


class PerLayerEmbedding(Layer):
    """A second, narrow embedding for every layer (E2B, E4B). It is looked up by token and mixed with the input embedding."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        super().__init__()
        self.ops = weights.ops
        self.dim, self.eps = spec.ple_dim, spec.rms_eps
        width = len(spec.layers) * spec.ple_dim
        self.table = weights.table("embed_tokens_per_layer", spec.ple_vocab_size, width, scale=spec.ple_dim**0.5)
        self.projection = weights.matrix(Projection("per_layer_model_projection", width), num_columns=spec.hidden_size)
        self.norm = weights.vector("per_layer_projection_norm.weight", spec.ple_dim)
        self.context_scale = spec.hidden_size**-0.5

    def forward(self, token_ids_T: Tensor, x_TD: Tensor, layers: slice) -> Tensor:
        """Return the inputs of `layers`, [T, layers, P]. `x_TD` is the decoder's input embeddings."""
        columns = slice(layers.start * self.dim, layers.stop * self.dim)
        embedded = self.table.embed_columns(token_ids_T, columns)
        context = self.projection.linear_rows(x_TD, columns)
        return self.ops.ple_combine(context, embedded, self.norm, self.context_scale, self.eps)


class DecoderLayer(Layer):
    """Attention, an MLP (with experts next to it in MoE models), a per-layer embedding, and a scalar on the whole stream."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, rope_kind: int, *, weights: Weights, latent: bool) -> None:
        super().__init__()
        self.ops = weights.ops
        self.rank_norms: RankNorms | None = None  # those after attention, MLP and experts, if they add up the ranks' terms
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
        attention = weights.below("self_attn.")
        self.attention = Attention(layer.index, layer.kv_source, heads, layer.num_kv_heads, size, rope_kind, attention)
        self.mlp = MLP(size, layer.mlp_width, weights.below("mlp."))
        self.input_norm = weights.vector("input_layernorm.weight", size)
        self.post_attention_norm = weights.vector("post_attention_layernorm.weight", size)
        self.pre_mlp_norm = weights.vector("pre_feedforward_layernorm.weight", size)
        self.post_mlp_norm = weights.vector("post_feedforward_layernorm.weight", size)
        self.scalar = weights.vector("layer_scalar", 1)
        self.experts: Experts | None = None
        if spec.moe is not None:
            moe = spec.moe
            self.experts = Experts(size, moe.num_experts, moe.top_k, moe.width, eps=spec.rms_eps, weights=weights)
            self.pre_experts_norm = weights.vector("pre_feedforward_layernorm_2.weight", size)
            self.post_dense_norm = weights.vector("post_feedforward_layernorm_1.weight", size)
            self.post_experts_norm = weights.vector("post_feedforward_layernorm_2.weight", size)
        if spec.ple_dim:
            self.ple_gate = weights.matrix(Projection("per_layer_input_gate", spec.ple_dim), num_columns=size)
            self.ple_projection = weights.matrix(Projection("per_layer_projection", size), num_columns=spec.ple_dim)
            self.post_ple_norm = weights.vector("post_per_layer_input_norm.weight", size)

    def fuse_sums(self, all_reduce: AllReduce) -> None:
        """Leave the sums over ranks to the norms, which can add the terms of few tokens themselves."""
        weights = [self.attention.out, self.mlp.down, *([] if self.experts is None else [self.experts.stack])]
        if all(weight.can_leave_sum for weight in weights):
            for weight in weights:
                weight.leave_sum()
            self.rank_norms = RankNorms(self.ops, all_reduce)

    def forward(
        self, x_TD: Tensor, normed_TD: Tensor, ple_TP: Tensor | None, next_norm_D: Tensor | None, shared: Pass, pieces: Pieces
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after this layer, as is and normed with `next_norm_D`.

        `normed_TD` is the stream after this layer's input norm. Each layer ends with the norm that the next one starts with, so
        that one kernel does both.
        """
        projected = pieces.run(self.attention.project, normed_TD, shared)
        heads_TX = self.attention.attend(shared, *map(pieces.cut, projected))
        return pieces.run(self.finish, x_TD, pieces.pad(heads_TX), ple_TP, next_norm_D)

    def finish(
        self, x_TD: Tensor, heads_TX: Tensor, ple_TP: Tensor | None, next_norm_D: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer after its attention heads.

        Every branch (attention, MLP, experts, per-layer embedding) ends in a PartialSum that the following norm adds up.
        """
        norms, eps = self.rank_norms or self.ops, self.eps
        attended = self.attention.out.linear_parts(heads_TX)
        if self.experts is not None:
            pre_norms = self.pre_mlp_norm, self.pre_experts_norm
            x_TD, normed, for_experts = norms.residual_norm_two(x_TD, attended, self.post_attention_norm, *pre_norms, eps)
            weights = self.post_dense_norm, self.post_experts_norm, self.post_mlp_norm
            routed, dense = self._both_mlps(partial(self.experts, x_TD, for_experts), partial(self.mlp, normed), x_TD)
            return norms.residual_norm_joint(x_TD, dense, routed, weights, self.scalar, next_norm_D, eps)
        x_TD, normed = norms.residual_norm(x_TD, attended, self.post_attention_norm, None, self.pre_mlp_norm, eps)
        out = self.mlp(normed)
        if ple_TP is None:
            return norms.residual_norm(x_TD, out, self.post_mlp_norm, self.scalar, next_norm_D, eps)
        x_TD, _ = norms.residual_norm(x_TD, out, self.post_mlp_norm, None, None, eps)
        extra = self.ple_projection.linear_parts(self.ple_gate.linear_gelu_times(x_TD, ple_TP))
        # Every rank has the whole per-layer projection.
        return self.ops.residual_norm(x_TD, extra, self.post_ple_norm, self.scalar, next_norm_D, eps)

    def _both_mlps(
        self, routed: Callable[[], PartialSum], dense: Callable[[], PartialSum], x_TD: Tensor
    ) -> tuple[PartialSum, PartialSum]:
        """Run the experts and the dense MLP, side by side if that is faster and neither exchanges anything with other ranks."""
        if x_TD.shape[0] <= SIDE_BY_SIDE_TOKENS and self.attention.all_reduce is None:
            return side_by_side(routed, dense, x_TD.device)
        return routed(), dense()


class Gemma4(Layer):
    """The decoder over a paged cache. Its weights are allocated but not filled. `models/weights.py` fills and finishes them."""

    def __init__(self, spec: ModelSpec, weights: Weights, *, latent: bool = True) -> None:
        super().__init__()
        self.spec, self.dtype, self.device, self.latent = spec, weights.dtype, weights.device, latent
        self.ops, self.rank, self.all_reduce = weights.ops, weights.rank, weights.all_reduce
        # The table is also the head, unless the checkpoint quantises them differently.
        self.embedding = weights.table(
            "embed_tokens", spec.vocab_size, spec.hidden_size, scale=spec.hidden_size**0.5, split=Split.ROWS
        )
        self.head: Matrix | None = None
        if spec.has_head:
            head = Projection("lm_head", spec.vocab_size)
            self.head = weights.matrix(head, num_columns=spec.hidden_size, split=Split.ROWS)
        kinds: dict[tuple[RopeSpec, int], int] = {}
        layers = []
        for layer in spec.layers:
            kind = kinds.setdefault((layer.rope, layer.head_dim), len(kinds))
            layers.append(DecoderLayer(spec, layer, kind, weights=weights.below(f"layers.{layer.index}."), latent=latent))
        self.layers = nn.ModuleList(layers)
        self._layers = layers  # the same layers, typed and faster to iterate over
        if weights.all_reduce is not None:
            for decoder_layer in layers:
                decoder_layer.fuse_sums(weights.all_reduce)
        self._rehearsed: frozenset[int] | None = None  # the layers that run; None means all
        for layer in spec.layers:
            if not layer.owns_kv:
                layers[layer.kv_source].attention.is_source = True
        # These are not buffers of the module, so that casting the model cannot round them.
        self.inv_freqs = [
            inverse_frequencies(rope.theta, size, rope.rotated_dims, rope.factor, weights.device) for rope, size in kinds
        ]
        self.norm = weights.vector("norm.weight", spec.hidden_size)
        self.ple = PerLayerEmbedding(spec, weights) if spec.ple_dim else None
        # From this layer on, every layer reads existing KV, so only tokens whose logits are needed continue.
        self.num_kv_layers = next((i for i in range(len(layers)) if all(not s.owns_kv for s in spec.layers[i:])), len(layers))

    def plan(self, batch: ForwardBatch, pool: Pool, backends: Sequence[AttentionBackend]) -> None:
        """Do the backends' host work for a step. Call this before `forward` and outside a captured graph."""
        for backend in backends:
            backend.plan(batch, pool)
            if batch.tail is not None and batch.tail.num_tokens:
                backend.plan(batch.tail, pool)

    def forward(
        self,
        batch: ForwardBatch,
        pool: Pool,
        backends: Sequence[AttentionBackend],
        taps: tuple[int, ...] = (),
        pieces: Pieces = DIRECT,
        between: Between | None = None,
    ) -> Hidden:
        """Run a step. Write the KV of the new tokens and return the hidden states from which logits are computed.

        Once the last layer that owns KV has written it, only the tokens of the tail continue. If layers have already run for
        all tokens, the step goes on from `between`.
        """
        num_layers, index_L = len(self._layers), batch.logits_index_L
        num_whole = num_layers if batch.tail is None else self.num_whole_layers(taps)
        stream = self.forward_whole(batch, pool, backends, taps, num_whole, pieces, between)
        normed = stream.normed_TD
        if num_whole < num_layers:
            layers = partial(self.forward_tail, pool, backends, num_whole)
            normed = pieces.run_tail(layers, *self._tail_of(batch, stream))
        elif normed is None:  # cut the stream before the final norm, not after
            normed = self.ops.rms_norm(stream.x_TD[index_L], self.norm, self.spec.rms_eps)
        if AFTER_FINAL_NORM in taps:
            stream.tapped[AFTER_FINAL_NORM] = normed
        return Hidden(normed, stream.tapped)

    def num_whole_layers(self, taps: tuple[int, ...]) -> int:
        """Return how many layers run for all tokens of a step that has a tail.

        They include all tapped layers, because a drafter needs the stream of every token.
        """
        return max(self.num_kv_layers - 1, max(taps, default=AFTER_FINAL_NORM) + 1)

    def forward_whole(
        self,
        batch: ForwardBatch,
        pool: Pool,
        backends: Sequence[AttentionBackend],
        taps: tuple[int, ...],
        num_layers: int,
        pieces: Pieces,
        between: Between | None = None,
    ) -> ResidualStream:
        """Run the first `num_layers` layers for all tokens of a step, or those of them after `between`."""
        inputs, rows = pieces.inputs(batch), batch.input_rows
        embedded = pieces.run(self.embedding.embed, inputs.token_ids_U)
        if rows is not None:
            embedded.index_copy_(0, rows.index_M, rows.rows_MD)
        normed, ple, stores, ropes = pieces.run(self._begin, inputs, embedded, num_layers, pool)
        shared = self._pass(batch, pool, backends, stores, ropes, {})
        x, first, tapped = embedded, 0, {}
        if between is not None:
            first = between.num_layers
            x, normed = pieces.skip(2 * first, (between.x_TD, between.normed_TD))  # a layer is two pieces
        for index, layer in enumerate(self._layers[first:num_layers], first):
            if self._is_run(index) and x.shape[0]:
                is_cut = index + 1 == len(self._layers) and batch.tail is not None
                next_norm = None if is_cut else self._next_norm(index)
                x, normed = layer(x, normed, None if ple is None else ple[:, index], next_norm, shared, pieces)
            if index in taps:
                tapped[index] = pieces.keep(x)
        projected: Sequence[Tensor] = ()
        if num_layers == self.num_whole_layers(taps) < self.num_kv_layers:  # the tail's layers follow
            projected = [pieces.cut(part) for part in pieces.run(self._layers[num_layers].attention.project, normed, shared)]
        normed = None if normed is None else pieces.cut(normed)
        token_ids_T = pieces.cut(inputs.token_ids_U)
        return ResidualStream(pieces.cut(x), normed, projected, token_ids_T, pieces.cut(embedded), shared, tapped)

    def _tail_of(self, batch: ForwardBatch, stream: ResidualStream) -> tuple[TailInputs, ForwardBatch]:
        """Return the tail of a step, and the stream at its tokens."""
        tail, index_L = batch.tail, batch.logits_index_L
        first_TX = stream.projected[0] if stream.projected else stream.normed_TD
        assert tail is not None, "a step without a tail has no shorter layers"
        assert first_TX is not None, "no layer is left"
        if batch.input_rows is not None:
            tail = replace(tail, token_ids_T=stream.token_ids_T[index_L])
        return TailInputs(stream.x_TD[index_L], stream.embedded_TD[index_L], first_TX[index_L]), tail

    def forward_tail(
        self, pool: Pool, backends: Sequence[AttentionBackend], num_whole: int, inputs: TailInputs, tail: ForwardBatch
    ) -> Tensor:
        """Run the layers from `num_whole` on for the tail of a step. Return the stream after the final norm.

        Pages hold all keys and values that the tail sees.
        """
        x = inputs.x_LD
        if not x.shape[0]:
            return x
        ropes = [self.ops.rope(tail.positions_T, inv_freq) for inv_freq in self.inv_freqs]
        fresh = dict.fromkeys(range(self.num_kv_layers), (x[:0], x[:0]))
        shared = self._pass(tail, pool, backends, [None] * len(pool.layout.groups), ropes, fresh)
        ple = self._per_layer(tail.token_ids_T, inputs.embedded_LD, slice(num_whole, len(self._layers)))
        normed: Tensor | None = inputs.first_LX
        for index, layer in enumerate(self._layers[num_whole:], num_whole):
            ple_LP, next_norm = None if ple is None else ple[:, index - num_whole], self._next_norm(index)
            if index < self.num_kv_layers:
                x, normed = layer.finish(x, layer.attention.attend(shared, inputs.first_LX), ple_LP, next_norm)
            elif self._is_run(index):
                x, normed = layer(x, normed, ple_LP, next_norm, shared, DIRECT)
        assert normed is not None, "the last layer ends with the final norm"
        return normed

    def _is_run(self, index: int) -> bool:
        return self._rehearsed is None or index in self._rehearsed

    def _next_norm(self, index: int) -> Tensor:
        """Return the weights of the norm after a layer."""
        return self.norm if index + 1 == len(self._layers) else self._layers[index + 1].input_norm

    @contextmanager
    def one_of_each_kind(self, taps: Collection[int] = ()) -> Iterator[None]:
        """Make `forward` run only a few layers that together launch every kernel of a step. Its result is meaningless.

        If `taps` lists the tapped layers, the peak memory equals that of all layers, because each layer frees what it used.
        With several ranks, no rank waits for the others.
        """
        kinds: dict[object, list[int]] = {}
        for index, layer in enumerate(self._layers):
            attention = layer.attention
            kind = attention.heads, attention.owns_kv, attention.is_source, attention.rope_kind, tuple(layer.kernel_keys())
            kinds.setdefault(kind, []).append(index)
        # A layer needs less memory than others if its input is kept anyway, as embeddings and tapped streams are. So run two
        # layers of each kind, and the layer before each tapped one.
        chosen = {index for indices in kinds.values() for index in indices[:2]}
        chosen |= {self.num_kv_layers - 1, len(self._layers) - 1}
        chosen |= {index for tap in taps for index in (tap - 1, tap) if index >= 0}
        self._rehearsed = frozenset(chosen | {self._layers[index].attention.kv_source for index in chosen})
        try:
            with nullcontext() if self.all_reduce is None else self.all_reduce.alone():
                yield
        finally:
            self._rehearsed = None

    def step_bytes(self) -> tuple[int, int]:
        """Return the bytes of the weights that every step reads, and of all routed experts, of which a step reads some."""
        experts = sum(layer.experts.stack.num_bytes for layer in self._layers if layer.experts is not None)
        per_layer_table = 0 if self.ple is None else self.ple.table.num_bytes  # a token reads only one row
        return self.num_bytes - experts - per_layer_table, experts

    def attention_of(self, layer: int) -> Attention:
        """Return the attention of one layer, for drafters that read its pages."""
        return self._layers[layer].attention

    def logits(self, last_LD: Tensor) -> Tensor:
        """Return the softcapped float32 logits [L, V]."""
        return self.capped_head(last_LD, self.spec.final_softcap)

    def capped_head(self, x_LD: Tensor, cap: float | None) -> Tensor:
        """Return cap * tanh(logits / cap) in float32. With None, the logits are not capped."""
        if self.head is None:
            return self.embedding.capped_head(x_LD, cap)
        logits_LV: Tensor = self.ops.softcap(self.head.linear(x_LD), cap)
        rows = self.head.layout.rows(self.head.layout.projections[0], self.rank)
        return join_columns(logits_LV, rows, self.spec.vocab_size, self.all_reduce)

    def head_candidates(self, x_RD: Tensor, cap: float | None) -> Candidates:
        """Return candidates that include the most likely token of each row. The rows may be [R, K, D]."""
        if self.head is None:
            return self.embedding.head_candidates(x_RD, cap)
        found: Candidates = self.ops.peaks(self.capped_head(x_RD.flatten(0, -2), cap))
        return found

    @property
    def head_bytes(self) -> int:
        """The bytes of the weights that logits read."""
        return self.embedding.num_bytes if self.head is None else self.head.num_bytes

    def finish(self) -> None:
        """Compute the values that depend on several tensors. Call once, after loading."""
        for layer in self._layers:
            layer.attention.finish(self._layers[layer.attention.kv_source].attention)
            if layer.experts is not None:
                layer.experts.finish()

    def scale_keys(self, owners: Collection[int]) -> None:
        """Scale the keys of the layers `owners`, whose pages are e4m3, into the range of e4m3. Call once, after loading."""
        for layer in self._layers:
            if layer.attention.kv_source in owners:
                layer.attention.scale_keys(self._layers[layer.attention.kv_source].attention)

    def _begin(
        self, inputs: TokenInputs, embedded_UD: Tensor, num_layers: int, pool: Pool
    ) -> tuple[Tensor, Tensor | None, Sequence[Any], Sequence[Rope]]:
        """Return the normed embeddings, and what the layers share: per-layer embeddings, addresses of KV, and rope."""
        normed: Tensor = self.ops.rms_norm(embedded_UD, self._layers[0].input_norm, self.spec.rms_eps)
        ple = self._per_layer(inputs.token_ids_U, embedded_UD, slice(0, num_layers))
        groups = zip(inputs.kv_addresses, pool.layout.groups, strict=True)
        stores = [self.ops.stores(address_U, group.stored_tokens) for address_U, group in groups]
        return normed, ple, stores, [self.ops.rope(inputs.positions_U, inv_freq) for inv_freq in self.inv_freqs]

    def _pass(
        self,
        batch: ForwardBatch,
        pool: Pool,
        backends: Sequence[AttentionBackend],
        stores: Sequence[Any],
        ropes: Sequence[Rope],
        fresh: dict[int, tuple[Tensor, Tensor]],
    ) -> Pass:
        groups = {layer: group.index for group in pool.layout.groups for layer in group.layers}
        return Pass(batch, pool, backends, group_of=groups, stores=stores, ropes=ropes, fresh=fresh)

    def _per_layer(self, token_ids_T: Tensor, embedded_TD: Tensor, layers: slice) -> Tensor | None:
        return None if self.ple is None else self.ple(token_ids_T, embedded_TD, layers)
