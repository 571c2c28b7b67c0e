"""The layers of an MTP drafter, a decoder that reads the target's pages and drafts one token at a time.

Shapes: R sequences · B the target's model width · D the drafter's · V vocabulary · C clusters of tokens ·
J tokens of a cluster · K chosen clusters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.drafters.mtp.spec import CentroidSpec, MTPSpec
from culet.errors import CheckpointError
from culet.kernels.types import Candidates, Rope
from culet.layers.attention import Pass
from culet.layers.layer import Layer
from culet.layers.rope import inverse_frequencies
from culet.layers.weight.base import Projection, Split
from culet.layers.weight.weights import Weights, narrowed
from culet.models.gemma4 import DecoderLayer, Gemma4
from culet.models.spec import RopeSpec

_TABLE = "model.embed_tokens"


class CentroidHead(Layer):
    """A head that scores clusters of tokens by their centroids, and then only the tokens of the best clusters.

    The table is sorted by cluster, so that the rows of a cluster are adjacent.
    """

    def __init__(self, spec: CentroidSpec, vocab_size: int, size: int, weights: Weights) -> None:
        super().__init__()
        self.ops = weights.ops
        self.spec, self.vocab_size = spec, vocab_size
        self.centroids = weights.matrix(Projection("masked_embedding.centroids", spec.count), num_columns=size)
        self.table = weights.table(_TABLE, vocab_size, size)
        if not self.table.has_clusters:
            problem = f"the drafter's {_TABLE} is quantised, but Culet reads clusters of tokens only from a plain table"
            raise CheckpointError(problem, hint="use a drafter whose embedding table is bfloat16")
        self.token_ids_CJ = weights.token_ids("masked_embedding.token_ordering", spec.count, vocab_size // spec.count)

    def candidates(self, z_RD: Tensor) -> Candidates:
        """Return the tokens of the chosen clusters, R rows of K * J, with their logits in float32."""
        chosen_RK = self.centroids.linear(z_RD).topk(self.spec.top_k, dim=-1).indices
        return self.table.cluster_candidates(z_RD, self.token_ids_CJ, chosen_RK)

    def logits(self, z_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V], with -inf for the tokens of all other clusters."""
        logits, token_ids = self.candidates(z_RD)
        assert token_ids is not None
        everything = logits.new_full((z_RD.shape[0], self.vocab_size), float("-inf"))
        return everything.scatter_(-1, token_ids, logits)

    def finish(self) -> None:
        """Sort the table by cluster. Call after loading. Until then it is in the order of token ids."""
        self.table.reorder_rows(self.token_ids_CJ.view(-1))


class PlainHead(Layer):
    """A head over the whole vocabulary."""

    def __init__(self, vocab_size: int, size: int, weights: Weights) -> None:
        super().__init__()
        self.table = weights.table(_TABLE, vocab_size, size, split=Split.ROWS)

    def narrow(self, precision: str) -> None:
        """Convert the table to a narrower format. Call once, after loading. Only the head reads the table."""
        self.table = narrowed(self.table, precision)

    def candidates(self, z_RD: Tensor) -> Candidates:
        """Return candidate tokens that include the most likely one of each row."""
        return self.table.head_candidates(z_RD, None)

    def logits(self, z_RD: Tensor) -> Tensor:
        """Return float32 logits [R, V]."""
        return self.table.head(z_RD).float()

    def finish(self) -> None:
        """Do nothing."""


class MTPModel(Layer):
    """A decoder that reads the target's pages and writes none. Weights are allocated unfilled, like the target's."""

    def __init__(self, spec: MTPSpec, weights: Weights, *, latent: bool) -> None:
        super().__init__()
        decoder = spec.decoder
        self.spec, self.device = spec, weights.device
        self.ops, self.eps = weights.ops, decoder.rms_eps
        size = decoder.hidden_size
        self.pre_projection = weights.matrix(Projection("pre_projection", size), num_columns=2 * spec.backbone_size)
        self.post_projection = weights.matrix(Projection("post_projection", spec.backbone_size), num_columns=size)
        kinds: dict[tuple[RopeSpec, int], int] = {}
        self._layers = [
            DecoderLayer(
                decoder,
                layer,
                kinds.setdefault((layer.rope, layer.head_dim), len(kinds)),
                weights=weights.below(f"model.layers.{index}."),
                latent=latent,
            )
            for index, layer in enumerate(decoder.layers)
        ]
        self.layers = nn.ModuleList(self._layers)
        self.inv_freqs = [
            inverse_frequencies(rope.theta, dim, rope.rotated_dims, rope.factor, weights.device) for rope, dim in kinds
        ]
        self.norm = weights.vector("model.norm.weight", size)
        self.head: CentroidHead | PlainHead
        if spec.centroids is not None:
            self.head = CentroidHead(spec.centroids, decoder.vocab_size, size, weights)
        else:
            self.head = PlainHead(decoder.vocab_size, size, weights)

    def begin(self, batch: ForwardBatch, pool: Pool, backends: Mapping[int, AttentionBackend], ropes: Sequence[Rope]) -> Pass:
        """Return what all drafts of a draft round share. They have the same position and see the same keys."""
        groups = pool.layout.groups
        # Every key is in pages, so there are no fresh keys.
        nothing = torch.empty(0, device=self.device)
        return Pass(
            batch=batch,
            pool=pool,
            backends=_by_group(backends, len(groups)),
            group_of={layer: group.index for group in groups for layer in group.layers},
            stores=[None] * len(groups),
            ropes=ropes,
            fresh={layer.kv_source: (nothing, nothing) for layer in self.spec.decoder.layers},
        )

    def forward(self, x_RD: Tensor, shared: Pass) -> Tensor:
        """Return the state that `head` and `next_hidden` read, [R, D].

        `x_RD` is `pre_projection` of two vectors side by side: the target's scaled embedding of the newest token, and a hidden
        state. That state is the target's after its final norm, or `next_hidden` of the last draft.
        """
        ops, eps, first = self.ops, self.eps, self._layers[0]
        # No layer has experts or KV of its own, so each norm has one reader and is fused with it.
        x, q = first.attention.qkv.residual_norm_linear(x_RD, None, (None, first.input_norm), eps)
        for layer, after in zip(self._layers, [*self._layers[1:], None], strict=True):
            attended = layer.attention.attend_over_target(q, shared, x.dtype)
            norms = layer.post_attention_norm, layer.pre_mlp_norm
            x, opened = layer.mlp.gate_up.residual_norm_linear(x, attended, norms, eps, gate="gelu")
            added, weight = layer.mlp.down.linear_parts(opened), layer.post_mlp_norm
            if after is None:
                normed: Tensor = ops.residual_norm(x, added, weight, layer.scalar, self.norm, eps)[1]
            else:
                x, q = after.attention.qkv.residual_norm_linear(x, added, (weight, after.input_norm), eps, layer.scalar)
        return normed

    def next_hidden(self, z_RD: Tensor) -> Tensor:
        """Return the hidden state that the next draft starts from, [R, B]."""
        return self.post_projection.linear(z_RD)

    def finish(self) -> None:
        """Do the work after loading that needs no target."""
        self.head.finish()

    def narrow_head(self, precision: str) -> None:
        """Convert the head to a narrower format. Call once, after loading."""
        assert isinstance(self.head, PlainHead), "only a plain head can be narrowed"
        self.head.narrow(precision)

    def bind(self, target: Gemma4) -> None:
        """Fold the factors that the target's cached keys lack into the queries. Call once, after `finish`."""
        for layer in self._layers:
            source = target.attention_of(layer.attention.kv_source)
            layer.attention.finish(source)
            if source.key_scale_H is not None:
                layer.attention.scale_keys(source)


def _by_group(backends: Mapping[int, AttentionBackend], num_groups: int) -> Sequence[AttentionBackend]:
    """Return `backends` as a sequence over all KV groups. Groups that no layer here reads get any of the backends."""
    some = next(iter(backends.values()))
    return [backends.get(index, some) for index in range(num_groups)]
