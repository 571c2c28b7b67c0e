"""The audio tower of E2B and E4B: a conformer over mel frames, of which four become a soft token.

Clips are packed one after the other. A frame sees a few frames before it in its own clip, so attention and convolution gather
those, and nothing crosses from one clip to the next.

Shapes: T frames of all clips after subsampling · W frames that a frame sees · N heads · H head size · D tower · F mel bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from culet.layers.layer import Layer
from culet.layers.weight.base import Projection
from culet.layers.weight.weights import Weights
from culet.media.items import MediaItem
from culet.media.spec import MEL_STRIDE
from culet.models.towers.linear import Projector, TowerLinear
from culet.models.towers.packing import pack_rows
from culet.models.towers.spec import MAX_FRAMES, MEL_BINS, AudioSpec

_LONGEST_PERIOD = 10_000.0
_INVISIBLE = -1e9  # score of a frame before the clip


@dataclass(frozen=True)
class Neighbours:
    """The frames of a clip that each frame sees: itself, the one before it, and so on."""

    index_TW: Tensor  # int64
    is_seen_TW: Tensor


def look_back(position_T: Tensor, num_seen: int) -> Neighbours:
    """Return the frames that each frame sees. `position_T` is its position in its clip."""
    back_W = torch.arange(num_seen, device=position_T.device)
    is_seen_TW = position_T[:, None] >= back_W
    index_TW = torch.arange(position_T.shape[0], device=position_T.device)[:, None] - back_W
    return Neighbours(index_TW.clamp_(min=0), is_seen_TW)


class Subsampling(Layer):
    """Two convolutions that halve frames and mel bins, each with a norm over channels, and a projection."""

    def __init__(self, spec: AudioSpec, weights: Weights) -> None:
        super().__init__()
        self.eps = spec.rms_eps
        first, second = spec.channels
        self.conv_0 = weights.convolution("layer0.conv.weight", first, 1, 3, 3)
        self.norm_0 = weights.vector("layer0.norm.weight", first)
        self.conv_1 = weights.convolution("layer1.conv.weight", second, first, 3, 3)
        self.norm_1 = weights.vector("layer1.norm.weight", second)
        self.matrix = weights.matrix(
            Projection("input_proj_linear", spec.hidden_size), num_columns=MEL_BINS // MEL_STRIDE * second
        )

    def forward(self, frames: Sequence[Tensor]) -> Tensor:
        """Return [T, D] from the mel features [frames, F] of each clip.

        The padding of a clip's end is zero before both convolutions, as if more silent frames followed. So clips run alone.
        """
        subsampled = []
        for x in frames:
            x = x[None, None]
            for conv, norm in ((self.conv_0, self.norm_0), (self.conv_1, self.norm_1)):
                channels_last = conv.convolve(x, stride=2, padding=1).permute(0, 2, 3, 1)
                normed = F.layer_norm(channels_last.float(), norm.shape, norm, None, self.eps).to(x.dtype)
                x = normed.relu_().permute(0, 3, 1, 2)
            subsampled.append(x[0].permute(1, 2, 0).flatten(1))
        return self.matrix.linear(torch.cat(subsampled))


class FeedForward(Layer):
    """x + weight * norm(L2(silu(L1(norm(x)))))."""

    def __init__(self, spec: AudioSpec, weights: Weights) -> None:
        super().__init__()
        self.ops, self.eps, self.residual_weight = weights.ops, spec.rms_eps, spec.residual_weight
        size, clipped = spec.hidden_size, spec.is_clipped
        self.up = TowerLinear((Projection("ffw_layer_1", 4 * size),), size, weights, is_clipped=clipped)
        self.down = TowerLinear((Projection("ffw_layer_2", size),), 4 * size, weights, is_clipped=clipped)
        self.pre_norm = weights.vector("pre_layer_norm.weight", size)
        self.post_norm = weights.vector("post_layer_norm.weight", size)

    def forward(self, x_TD: Tensor) -> Tensor:
        hidden = F.silu(self.up.linear(self.ops.rms_norm(x_TD, self.pre_norm, self.eps)))
        out_TD = self.ops.rms_norm(self.down.linear(hidden), self.post_norm, self.eps)
        return out_TD.mul_(self.residual_weight).add_(x_TD)


class LocalAttention(Layer):
    """Attention over the last frames, with keys for how far back a frame is, and capped scores. All of it is float32."""

    def __init__(self, spec: AudioSpec, weights: Weights) -> None:
        super().__init__()
        self.spec, self.dtype = spec, weights.dtype
        size, clipped = spec.hidden_size, spec.is_clipped
        qkv = [Projection(name, size) for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv = TowerLinear(qkv, size, weights, is_clipped=clipped)
        self.out = TowerLinear((Projection("post", size),), size, weights, is_clipped=clipped)
        self.distance = weights.matrix(Projection("relative_k_proj", size), num_columns=size)
        self.per_dim_scale = weights.vector("per_dim_scale", spec.head_dim)
        self.key_scale = math.log(1 + math.e) / math.log(2)
        self.query_scale_H: Tensor
        self.register_buffer("query_scale_H", torch.empty(spec.head_dim, device=weights.device), persistent=False)

    def forward(self, x_TD: Tensor, distances_WD: Tensor, seen: Neighbours) -> Tensor:
        heads, cap = self.spec.num_heads, self.spec.logit_cap
        q_TNH, k_TNH, v_TNH = self.qkv.linear(x_TD).float().unflatten(-1, (3, heads, -1)).unbind(1)
        q_TNH = q_TNH * (self.spec.head_dim**-0.5 / math.log(2)) * self.query_scale_H
        r_WNH = self.distance.linear(distances_WD).float().unflatten(-1, (heads, -1))
        k_TWNH, v_TWNH = (k_TNH * self.key_scale)[seen.index_TW], v_TNH[seen.index_TW]
        s_TNW = torch.einsum("tnh,twnh->tnw", q_TNH, k_TWNH) + torch.einsum("tnh,wnh->tnw", q_TNH, r_WNH)
        s_TNW = s_TNW.div_(cap).tanh_().mul_(cap).masked_fill_(~seen.is_seen_TW[:, None], _INVISIBLE)
        out_TNH = torch.einsum("tnw,twnh->tnh", s_TNW.softmax(-1), v_TWNH)
        return self.out.linear(out_TNH.flatten(1).to(x_TD.dtype))

    def finish(self) -> None:
        self.qkv.finish()
        self.out.finish()
        # The network was trained with softplus rounded to its precision, although it multiplies float32 queries.
        self.query_scale_H.copy_(F.softplus(self.per_dim_scale.to(self.dtype)))


class LightConvolution(Layer):
    """x + linear(silu(norm(conv(glu(linear(norm(x))))))), with a depthwise convolution over the last frames."""

    def __init__(self, spec: AudioSpec, weights: Weights) -> None:
        super().__init__()
        self.ops, self.eps = weights.ops, spec.rms_eps
        size, clipped = spec.hidden_size, spec.is_clipped
        self.start = TowerLinear((Projection("linear_start", 2 * size),), size, weights, is_clipped=clipped)
        self.end = TowerLinear((Projection("linear_end", size),), size, weights, is_clipped=clipped)
        self.conv = weights.window_convolution("depthwise_conv1d.weight", size, spec.conv_width)
        self.pre_norm = weights.vector("pre_layer_norm.weight", size)
        self.conv_norm = weights.vector("conv_norm.weight", size)

    def forward(self, x_TD: Tensor, seen: Neighbours) -> Tensor:
        y_TD = F.glu(self.start.linear(self.ops.rms_norm(x_TD, self.pre_norm, self.eps)))
        y_TWD = y_TD[seen.index_TW].float().mul_(seen.is_seen_TW[..., None])
        # The sum lies column by column, and kernels read rows.
        y_TD = self.conv.sum_windows(y_TWD).to(x_TD.dtype).contiguous()
        return self.end.linear(F.silu(self.ops.rms_norm(y_TD, self.conv_norm, self.eps))).add_(x_TD)


class AudioLayer(Layer):
    """A layer of the conformer."""

    def __init__(self, spec: AudioSpec, weights: Weights) -> None:
        super().__init__()
        self.ops, self.eps = weights.ops, spec.rms_eps
        self.feed_forward_1 = FeedForward(spec, weights.below("feed_forward1."))
        self.attention = LocalAttention(spec, weights.below("self_attn."))
        self.convolution = LightConvolution(spec, weights.below("lconv1d."))
        self.feed_forward_2 = FeedForward(spec, weights.below("feed_forward2."))
        self.pre_attention_norm = weights.vector("norm_pre_attn.weight", spec.hidden_size)
        self.post_attention_norm = weights.vector("norm_post_attn.weight", spec.hidden_size)
        self.out_norm = weights.vector("norm_out.weight", spec.hidden_size)

    def forward(self, x_TD: Tensor, distances_WD: Tensor, heard: Neighbours, convolved: Neighbours) -> Tensor:
        ops, eps = self.ops, self.eps
        x_TD = self.feed_forward_1(x_TD)
        attended = self.attention(ops.rms_norm(x_TD, self.pre_attention_norm, eps), distances_WD, heard)
        x_TD = ops.rms_norm(attended, self.post_attention_norm, eps).add_(x_TD)
        x_TD = self.feed_forward_2(self.convolution(x_TD, convolved))
        normed_TD: Tensor = ops.rms_norm(x_TD, self.out_norm, eps)
        return normed_TD

    def finish(self) -> None:
        self.attention.finish()
        for part in (self.feed_forward_1, self.feed_forward_2):
            part.up.finish()
            part.down.finish()
        self.convolution.start.finish()
        self.convolution.end.finish()


class AudioTower(Layer):
    """Turns clips of mel features into rows of the decoder."""

    max_cost = MAX_FRAMES

    def __init__(self, spec: AudioSpec, weights: Weights) -> None:
        super().__init__()
        self.spec, self.device, self.dtype = spec, weights.device, weights.dtype
        tower = weights.below("audio_tower.")
        self.subsampling = Subsampling(spec, tower.below("subsample_conv_projection."))
        layers = [AudioLayer(spec, tower.below(f"layers.{index}.")) for index in range(spec.num_layers)]
        self.layers = nn.ModuleList(layers)
        self._layers = layers
        self.out = tower.matrix(Projection("output_proj", spec.tower_size), num_columns=spec.hidden_size)
        self.out_bias = tower.bias("output_proj.bias", spec.tower_size)
        self.projector = Projector("embed_audio", spec.tower_size, spec.out_size, spec.rms_eps, weights)
        # Not a buffer of the module, so that casting the tower cannot round the angles before their sines.
        self.distances_WD = distance_waves(spec.window, spec.hidden_size).to(weights.dtype).to(weights.device)

    def cost(self, clip: MediaItem) -> int:
        """Return the clip's share of a pass, in frames after subsampling."""
        return clip.num_tokens

    def encode(self, clips: Sequence[MediaItem]) -> list[Tensor]:
        """Return the rows [num_tokens, D] of each clip."""
        frames, lengths = pack_rows(clips, MEL_BINS, self.device)
        x_TD = self.subsampling(frames.to(self.dtype).split(lengths))
        counts = [clip.num_tokens for clip in clips]
        position_T = torch.cat([torch.arange(count) for count in counts]).to(self.device, non_blocking=True)
        heard, convolved = look_back(position_T, self.spec.window), look_back(position_T, self.spec.conv_width)
        for layer in self._layers:
            x_TD = layer(x_TD, self.distances_WD, heard, convolved)
        rows_MD: Tensor = self.projector(self.out_bias.add_to(self.out.linear(x_TD)))
        return list(rows_MD.split(counts))

    def finish(self) -> None:
        for layer in self._layers:
            layer.finish()


def distance_waves(num_distances: int, size: int) -> Tensor:
    """Return sines and cosines of distances 0, 1, ... at `size / 2` frequencies, float32 [W, D]."""
    half = size // 2
    step = math.log(_LONGEST_PERIOD) / max(half - 1, 1)
    angle = torch.arange(num_distances)[:, None] * torch.exp(torch.arange(half) * -step)
    return torch.cat((angle.sin(), angle.cos()), -1)
