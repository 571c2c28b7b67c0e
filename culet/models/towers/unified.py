"""The encoder-free embedders of 12B: pixels and samples become rows of the decoder with a few dense layers.

Shapes: M soft tokens of all items · V values of a soft token · D embedder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from culet.layers.layer import Layer
from culet.layers.weight.base import Projection
from culet.layers.weight.weights import Weights
from culet.media.items import MediaItem
from culet.models.towers.linear import Projector
from culet.models.towers.packing import CHANNELS, pack_images, pack_rows, pixel_values
from culet.models.towers.spec import MAX_TOKENS, UnifiedAudioSpec, UnifiedVisionSpec

_EPS = 1e-5  # of the norms with a mean


class MeanNorm(Layer):
    """(x - mean) / deviation * weight + bias, in float32, rounded once."""

    def __init__(self, name: str, size: int, weights: Weights) -> None:
        super().__init__()
        self.weight = weights.vector(f"{name}.weight", size)
        self.bias = weights.vector(f"{name}.bias", size)

    def forward(self, x_MD: Tensor) -> Tensor:
        return F.layer_norm(x_MD.float(), self.weight.shape, self.weight, self.bias, _EPS).to(x_MD.dtype)


class UnifiedVision(Layer):
    """Turns images and frames into rows of the decoder."""

    max_cost = MAX_TOKENS

    def __init__(self, spec: UnifiedVisionSpec, weights: Weights) -> None:
        super().__init__()
        self.spec, self.device = spec, weights.device
        size, num_values, embedder = spec.hidden_size, CHANNELS * spec.token_pixels**2, weights.below("vision_embedder.")
        self.pixel_norm = MeanNorm("patch_ln1", num_values, embedder)
        self.dense = embedder.matrix(Projection("patch_dense", size), num_columns=num_values)
        self.dense_bias = embedder.bias("patch_dense.bias", size)
        self.dense_norm = MeanNorm("patch_ln2", size, embedder)
        self.positions = embedder.positions("pos_embedding", spec.num_positions, 2, size, axis=1)
        self.position_norm = MeanNorm("pos_norm", size, embedder)
        self.projector = Projector("embed_vision", size, spec.out_size, spec.rms_eps, weights)
        self.values = pixel_values().to(weights.dtype).to(weights.device)

    def cost(self, image: MediaItem) -> int:
        """Return the image's share of a pass, in soft tokens."""
        return image.num_tokens

    def encode(self, images: Sequence[MediaItem]) -> list[Tensor]:
        """Return the rows [num_tokens, D] of each image."""
        packed = pack_images(images, self.spec.token_pixels, 1, self.spec.num_positions, self.device)
        x_MD = self.dense_bias.add_to(self.dense.linear(self.pixel_norm(self.values[packed.levels_TV])))
        x_MD = self.dense_norm(x_MD).add_(self.positions.embed(packed.x_T, packed.y_T))
        rows_MD: Tensor = self.projector(self.position_norm(x_MD))
        return list(rows_MD.split(packed.lengths))

    def finish(self) -> None:
        """Do nothing: no value depends on several tensors."""


class UnifiedAudio(Layer):
    """Turns samples into rows of the decoder."""

    max_cost = MAX_TOKENS

    def __init__(self, spec: UnifiedAudioSpec, weights: Weights) -> None:
        super().__init__()
        self.spec, self.device, self.dtype = spec, weights.device, weights.dtype
        self.projector = Projector("embed_audio", spec.num_samples, spec.out_size, spec.rms_eps, weights)

    def cost(self, clip: MediaItem) -> int:
        """Return the clip's share of a pass, in soft tokens."""
        return clip.num_tokens

    def encode(self, clips: Sequence[MediaItem]) -> list[Tensor]:
        """Return the rows [num_tokens, D] of each clip."""
        samples, lengths = pack_rows(clips, self.spec.num_samples, self.device)
        rows_MD: Tensor = self.projector(samples.to(self.dtype))
        return list(rows_MD.split(lengths))

    def finish(self) -> None:
        """Do nothing: no value depends on several tensors."""
