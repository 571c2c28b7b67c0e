"""The vision tower of E2B, E4B, 26B-A4B and 31B: an encoder over patches, pooled to soft tokens.

Shapes: T patches of all images · M soft tokens of all images · D tower · H head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from culet.kernels.types import Rope
from culet.layers.layer import Layer
from culet.layers.rope import inverse_frequencies
from culet.layers.weight.base import Projection
from culet.layers.weight.weights import Weights
from culet.media.items import MediaItem
from culet.models.towers.graphs import PassGraphs
from culet.models.towers.linear import UNBOUNDED, Projector, TowerLinear
from culet.models.towers.packing import CHANNELS, PackedImages, pack_images, pixel_values
from culet.models.towers.spec import MAX_PATCHES, VisionSpec


def axes_together(head_dim: int, num_heads: int = 1) -> Tensor:
    """Return the order of head dims that makes rope on two axes an ordinary one, with pairs (i, i + head_dim / 2).

    In a checkpoint, the first half of a head turns by x and the second by y, each with pairs of its own.
    """
    first_x, second_x, first_y, second_y = torch.arange(head_dim).chunk(4)
    order = torch.cat((first_x, first_y, second_x, second_y))
    return (order + head_dim * torch.arange(num_heads)[:, None]).flatten()


class VisionLayer(Layer):
    """Attention over the patches of an image, and a gated MLP. Both are normed before and after."""

    def __init__(self, spec: VisionSpec, weights: Weights) -> None:
        super().__init__()
        self.ops, self.eps, self.num_heads = weights.ops, spec.rms_eps, spec.num_heads
        size, queries = spec.hidden_size, spec.num_heads * spec.head_dim
        order = axes_together(spec.head_dim, spec.num_heads)
        clipped, attention, mlp = spec.is_clipped, weights.below("self_attn."), weights.below("mlp.")
        q, k = (Projection(name, queries, order, spec.head_dim) for name in ("q_proj", "k_proj"))
        self.qkv = TowerLinear((q, k, Projection("v_proj", queries)), size, attention, is_clipped=clipped)
        self.out = TowerLinear((Projection("o_proj", size),), queries, attention, is_clipped=clipped)
        gate, up = Projection("gate_proj", spec.width), Projection("up_proj", spec.width)
        self.gate_up = TowerLinear((gate, up), size, mlp, is_clipped=clipped)
        self.down = TowerLinear((Projection("down_proj", size),), spec.width, mlp, is_clipped=clipped)
        head_order = axes_together(spec.head_dim)
        self.q_norm = attention.vector("q_norm.weight", spec.head_dim, order=head_order)
        self.k_norm = attention.vector("k_norm.weight", spec.head_dim, order=head_order)
        self.input_norm = weights.vector("input_layernorm.weight", size)
        self.post_attention_norm = weights.vector("post_attention_layernorm.weight", size)
        self.pre_mlp_norm = weights.vector("pre_feedforward_layernorm.weight", size)
        self.post_mlp_norm = weights.vector("post_feedforward_layernorm.weight", size)
        self.norm_weight: Tensor
        norm_weight = torch.empty(2, spec.head_dim, device=weights.device)
        self.register_buffer("norm_weight", norm_weight, persistent=False)
        # Bounds that kernels clamp to, known after loading: of q, k and v, and of gate, up and the input of down.
        self.qkv_bounds_32: Tensor | None = None
        self.gate_bounds_32: Tensor | None = None

    def forward(
        self, x_TD: Tensor, normed_TD: Tensor, next_norm_D: Tensor | None, rope: Rope, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the stream after this layer, as is and normed with `next_norm_D`, with which the next layer starts."""
        ops, eps = self.ops, self.eps
        qkv_TX = self.qkv.products(normed_TD)
        q, k, v = ops.patch_qkv(qkv_TX, self.norm_weight, rope, self.num_heads, eps, self.qkv_bounds_32)
        attended = self.out.linear(ops.patch_attention(q, k, v, lengths).flatten(1))
        x_TD, normed = ops.residual_norm(x_TD, attended, self.post_attention_norm, None, self.pre_mlp_norm, eps)
        return ops.residual_norm(x_TD, self._mlp(normed), self.post_mlp_norm, None, next_norm_D, eps)

    def _mlp(self, x_TD: Tensor) -> Tensor:
        if self.gate_bounds_32 is None:
            return self.down.linear(self.gate_up.matrix.gated_linear(x_TD))
        gated = self.ops.clipped_gelu_mul(self.gate_up.products(x_TD), self.gate_bounds_32)
        return self.down.linear(gated, is_clamped=True)

    def finish(self) -> None:
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            linear.finish()
        self.norm_weight.copy_(torch.stack((self.q_norm, self.k_norm)))
        device = self.norm_weight.device
        if self.qkv.outputs:
            self.qkv_bounds_32 = torch.tensor(self.qkv.outputs, device=device)
        if self.gate_up.inputs or self.gate_up.outputs or self.down.inputs:
            rows = (self.gate_up.outputs or [UNBOUNDED] * 2) + (self.down.inputs or [UNBOUNDED])
            self.gate_bounds_32 = torch.tensor(rows, device=device)


class VisionTower(Layer):
    """Turns images and frames into rows of the decoder."""

    def __init__(self, spec: VisionSpec, weights: Weights) -> None:
        super().__init__()
        self.spec, self.ops, self.device = spec, weights.ops, weights.device
        size, tower = spec.hidden_size, weights.below("vision_tower.")
        embedder = tower.below("patch_embedder.")
        self.input = embedder.matrix(Projection("input_proj", size), num_columns=CHANNELS * spec.patch_size**2)
        self.positions = embedder.positions("position_embedding_table", 2, spec.num_positions, size, axis=0)
        layers = [VisionLayer(spec, tower.below(f"encoder.layers.{index}.")) for index in range(spec.num_layers)]
        self.layers = nn.ModuleList(layers)
        self._layers = layers
        self.std_bias = tower.vector("std_bias", size) if spec.is_standardised else None
        self.std_scale = tower.vector("std_scale", size) if spec.is_standardised else None
        self.projector = Projector("embed_vision", size, spec.out_size, spec.rms_eps, weights)
        half = spec.head_dim // 2
        # These are not buffers of the module, so that casting the tower cannot round them.
        self.inv_freq = inverse_frequencies(spec.rope_theta, half, half, 1.0, weights.device)
        # The network was trained on 2 (x - 0.5), rounded once.
        self.values = (2 * (pixel_values() - 0.5)).to(weights.dtype).to(weights.device)
        self._graphs = PassGraphs(weights.device) if weights.device.type == "cuda" else None

    max_cost = MAX_PATCHES

    def cost(self, image: MediaItem) -> int:
        """Return the image's share of a pass, in patches."""
        return image.num_tokens * self.spec.pooling**2

    def encode(self, images: Sequence[MediaItem]) -> list[Tensor]:
        """Return the rows [num_tokens, D] of each image."""
        spec = self.spec
        packed = pack_images(images, spec.patch_size, spec.pooling, spec.num_positions, self.device)
        rows_MD = self.run_pass(packed) if self._graphs is None else self._graphs.run(packed, self.run_pass)
        return list(rows_MD.split([item.num_tokens for item in images]))

    def run_pass(self, packed: PackedImages) -> Tensor:
        """Return the rows [M, D] of packed images."""
        patches_TV = self.values[packed.levels_TV]
        x_TD = self.input.linear(patches_TV).add_(self.positions.embed(packed.x_T, packed.y_T))
        rope = self.rope(packed.x_T, packed.y_T)
        normed: Tensor | None = self.ops.rms_norm(x_TD, self._layers[0].input_norm, self.spec.rms_eps)
        for index, layer in enumerate(self._layers):
            next_norm = self._layers[index + 1].input_norm if index + 1 < len(self._layers) else None
            x_TD, normed = layer(x_TD, normed, next_norm, rope, packed.lengths)
        rows_MD: Tensor = self.projector(self.pool(x_TD))
        return rows_MD

    def rope(self, x_T: Tensor, y_T: Tensor) -> Rope:
        """Return the rotation of each patch: the first half of the pairs by its column, the second by its row."""
        angle = torch.cat((x_T.float()[:, None] * self.inv_freq, y_T.float()[:, None] * self.inv_freq), -1)
        cos, sin = angle.cos(), angle.sin()
        return Rope(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])

    def pool(self, x_TD: Tensor) -> Tensor:
        """Return the mean of the patches of each soft token, scaled and standardised [M, D].

        The mean is rounded to the activations' precision. What follows is float32, and is rounded once more at its end.
        """
        spec = self.spec
        mean_MD = x_TD.float().view(-1, spec.pooling**2, spec.hidden_size).mul(1.0 / spec.pooling**2).sum(1).to(x_TD.dtype)
        scaled_MD = mean_MD.float() * spec.hidden_size**0.5
        if self.std_bias is not None and self.std_scale is not None:
            scaled_MD = scaled_MD.sub_(self.std_bias).mul_(self.std_scale)
        return scaled_MD.to(x_TD.dtype)

    def finish(self) -> None:
        for layer in self._layers:
            layer.finish()
