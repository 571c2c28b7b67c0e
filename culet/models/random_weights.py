"""Random weights drawn where they are used: a model of any size for measurements, with no checkpoint and in about a second."""

from __future__ import annotations

import zlib

import torch

from culet.models.gemma4 import Gemma4
from culet.models.spec import ModelSpec

WEIGHT_STD = 0.02
# Norms, the layer scalar and the scales of router and experts: 1, so that the stream neither dies out nor grows beyond bounds.
_ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "scale", "layer_scalar")


def draw_model(spec: ModelSpec, seed: int, *, dtype: torch.dtype, device: torch.device, latent: bool = True) -> Gemma4:
    """A Gemma4 on `device` whose matrices are N(0, 0.02), so that different tokens pick different experts.

    Each tensor depends on its name, its shape, the seed and the kind of device alone. So a model with fewer layers, in another
    precision or with another cache has the same weights, up to the rounding to bfloat16 that all of them go through.
    """
    device = torch.device(device)
    model = Gemma4(spec, dtype=dtype, device=device, latent=latent)
    generator = torch.Generator(device=device)
    for name, place in model.placements().items():
        if name.endswith(_ONES):
            place.target.fill_(1.0)
            continue
        generator.manual_seed(((seed << 32) + zlib.crc32(name.encode())) % (1 << 63))
        value = torch.empty(place.target.shape, dtype=torch.bfloat16, device=device)
        place.fill(value.normal_(0.0, WEIGHT_STD, generator=generator))
    model.finish()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the largest draw is gone; the cache's size is taken from what is free
    return model
