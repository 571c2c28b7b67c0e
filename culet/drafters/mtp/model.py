"""The Gemma 4 assistant: a decoder that reads the target's pages and drafts one token at a time.

Shapes: R sequences · B the target's model width · D the assistant's · V vocabulary · C clusters of tokens ·
J tokens of a cluster · K clusters that are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from culet.attention.base import AttentionBackend
from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.drafters.mtp.spec import AssistantSpec, CentroidSpec
from culet.kernels.dispatch import for_device
from culet.kernels.types import Candidates, Rope
from culet.layers.attention import Pass
from culet.layers.linear import Layer, Linear, Placement, empty_vector
from culet.layers.rope import inverse_frequencies
from culet.models.gemma4 import DecoderLayer
from culet.models.spec import RopeSpec

if TYPE_CHECKING:
    from culet.models.gemma4 import Gemma4

_FP8_ROWS = 16384  # of a table that are made e4m3 at a time


class CentroidHead(Layer):
    """Scores clusters of tokens by their centroids, then only the tokens of the best ones.

    The table is kept in the order of the clusters, so that the rows of a cluster lie together.
    """

    def __init__(self, spec: CentroidSpec, vocab_size: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = for_device(device)
        self.spec, self.vocab_size = spec, vocab_size
        self.centroids = Linear(spec.count, size, dtype=dtype, device=device)
        self.table = nn.Parameter(torch.empty(vocab_size, size, dtype=dtype, device=device), requires_grad=False)
        # A vocabulary of 262,144 needs more than 16 bits.
        self.token_ids_CJ: Tensor
        ordering = torch.empty(spec.count, vocab_size // spec.count, dtype=torch.int64, device=device)
        self.register_buffer("token_ids_CJ", ordering, persistent=False)

    def candidates(self, z_RD: Tensor) -> Candidates:
        """The tokens that are looked at, R rows of K * J, with their logits, float32."""
        chosen_RK = self.centroids(z_RD).topk(self.spec.top_k, dim=-1).indices
        found: Candidates = self.ops.cluster_candidates(z_RD, self.table, self.token_ids_CJ, chosen_RK)
        return found

    def logits(self, z_RD: Tensor) -> Tensor:
        """Logits [R, V], float32; -inf for the tokens that are not looked at."""
        logits, token_ids = self.candidates(z_RD)
        assert token_ids is not None
        everything = logits.new_full((z_RD.shape[0], self.vocab_size), float("-inf"))
        return everything.scatter_(-1, token_ids, logits)

    def placements(self) -> dict[str, Placement]:
        return {
            "model.embed_tokens.weight": Placement(self.table),
            "masked_embedding.centroids.weight": Placement(self.centroids.weight),
            "masked_embedding.token_ordering": Placement(self.token_ids_CJ.view(-1)),
        }

    def finish(self) -> None:
        """After loading, when the table is still in the order of token ids."""
        self.table.copy_(self.table[self.token_ids_CJ.view(-1)])


class PlainHead(Layer):
    """A head over the whole vocabulary. Nothing else reads its table, so an e4m3 copy may take its place."""

    def __init__(self, vocab_size: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = for_device(device)
        self.table = nn.Parameter(torch.empty(vocab_size, size, dtype=dtype, device=device), requires_grad=False)
        self.scale_V: Tensor | None
        self.register_buffer("scale_V", None, persistent=False)  # of an e4m3 table

    def to_fp8(self) -> None:
        """From now on keep the table in e4m3, each row scaled to its range: half the bytes to read for a draft."""
        scale_V1 = (self.table.abs().amax(dim=1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
        self.register_buffer("scale_V", scale_V1.flatten(), persistent=False)
        narrow = torch.empty(self.table.shape, dtype=torch.float8_e4m3fn, device=self.table.device)
        for part in range(0, self.table.shape[0], _FP8_ROWS):
            rows = slice(part, part + _FP8_ROWS)
            narrow[rows] = (self.table[rows].float() / scale_V1[rows]).to(narrow.dtype)
        self.table = nn.Parameter(narrow, requires_grad=False)

    def candidates(self, z_RD: Tensor) -> Candidates:
        """Tokens among which the most likely one is."""
        found: Candidates = self.ops.head_candidates(z_RD, self.table, self.scale_V, None)
        return found

    def logits(self, z_RD: Tensor) -> Tensor:
        """Logits [R, V], float32."""
        if self.scale_V is not None:
            return z_RD.float() @ self.table.float().t() * self.scale_V
        return self.ops.head(z_RD, self.table).float()

    def placements(self) -> dict[str, Placement]:
        return {"model.embed_tokens.weight": Placement(self.table)}

    def finish(self) -> None:
        """Nothing is made of several tensors here."""


class Assistant(Layer):
    """Drafts over the target's pages; it writes none. Parameters are allocated unfilled, as the target's."""

    def __init__(self, spec: AssistantSpec, *, dtype: torch.dtype, device: torch.device, latent: bool) -> None:
        super().__init__()
        device = torch.device(device)
        decoder = spec.decoder
        self.spec, self.dtype, self.device = spec, dtype, device
        self.ops, self.eps = for_device(device), decoder.rms_eps
        size = decoder.hidden_size
        self.pre_projection = Linear(size, 2 * spec.backbone_size, dtype=dtype, device=device)
        self.post_projection = Linear(spec.backbone_size, size, dtype=dtype, device=device)
        kinds: dict[tuple[RopeSpec, int], int] = {}
        self._layers = [
            DecoderLayer(
                decoder,
                layer,
                kinds.setdefault((layer.rope, layer.head_dim), len(kinds)),
                dtype=dtype,
                device=device,
                latent=latent,
            )
            for layer in decoder.layers
        ]
        self.layers = nn.ModuleList(self._layers)
        self.inv_freqs = [inverse_frequencies(rope.theta, dim, rope.rotated_dims, rope.factor, device) for rope, dim in kinds]
        self.norm = empty_vector(size, device=device)
        self.head: CentroidHead | PlainHead
        if spec.centroids is not None:
            self.head = CentroidHead(spec.centroids, decoder.vocab_size, size, dtype=dtype, device=device)
        else:
            self.head = PlainHead(decoder.vocab_size, size, dtype=dtype, device=device)

    def begin(self, batch: ForwardBatch, pool: Pool, backends: Mapping[int, AttentionBackend], ropes: Sequence[Rope]) -> Pass:
        """What all drafts of a round share: they stand at one position and see the same keys."""
        groups = pool.layout.groups
        # Every key is in pages: nothing is fresh.
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
        """The state that `head` and `next_hidden` read, [R, D].

        `x_RD` is `pre_projection` of the newest token in the target's scaled embedding, beside the target's hidden state after
        its final norm, or what `next_hidden` made of the last draft (`embed_linear`).
        """
        ops, eps, first = self.ops, self.eps, self._layers[0]
        # No layer has experts or KV of its own, so each norm has one reader, and goes with it.
        x, q = ops.residual_norm_linear(x_RD, None, (None, first.input_norm), None, eps, first.attention.qkv.weight)
        for layer, after in zip(self._layers, [*self._layers[1:], None], strict=True):
            attended, norms = layer.attention.attend(q, shared, x.dtype), (layer.post_attention_norm, layer.pre_mlp_norm)
            x, opened = ops.residual_norm_linear(x, attended, norms, None, eps, layer.mlp.gate_up.weight, "gelu")
            added, weight = layer.mlp.down.parts(opened), layer.post_mlp_norm
            if after is None:
                x, normed = ops.residual_norm(x, added, weight, layer.scalar, self.norm, eps)
            else:
                norms = (weight, after.input_norm)
                x, q = ops.residual_norm_linear(x, added, norms, layer.scalar, eps, after.attention.qkv.weight)
        return normed

    def next_hidden(self, z_RD: Tensor) -> Tensor:
        """The hidden state that the draft after this one starts from, [R, B]."""
        return self.post_projection(z_RD)

    def placements(self) -> dict[str, Placement]:
        """Every tensor of a checkpoint that has a place here, by its name there."""
        found = {
            "pre_projection.weight": Placement(self.pre_projection.weight),
            "post_projection.weight": Placement(self.post_projection.weight),
            "model.norm.weight": Placement(self.norm),
        }
        for index, layer in enumerate(self._layers):
            found.update(layer.placements(f"model.layers.{index}."))
        return found | self.head.placements()

    def finish(self) -> None:
        """After loading: what needs no target."""
        self.head.finish()

    def head_to_fp8(self) -> None:
        """Once, after loading: an e4m3 copy of the head in its place."""
        assert isinstance(self.head, PlainHead), "a head of clusters reads few of its rows"
        self.head.to_fp8()

    def bind(self, target: Gemma4) -> None:
        """After `finish`, once: fold into the queries what the target's pages leave out of their keys."""
        for layer in self._layers:
            source = target.attention_of(layer.attention.kv_source)
            layer.attention.finish(source)
            if source.key_scale_H is not None:
                layer.attention.scale_keys(source)


def _by_group(backends: Mapping[int, AttentionBackend], num_groups: int) -> Sequence[AttentionBackend]:
    """`backends` as a sequence over all KV groups; those that no layer here reads hold any of them."""
    some = next(iter(backends.values()))
    return [backends.get(index, some) for index in range(num_groups)]
