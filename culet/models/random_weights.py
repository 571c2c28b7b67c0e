"""Random weights drawn where they are used: a model of any size for measurements, with no checkpoint and in about a second."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from culet.layers.linear import Placement
from culet.models.checkpoint import RandomDraw
from culet.models.gemma4 import Gemma4
from culet.models.spec import ModelSpec

WEIGHT_STD = 0.02
NARROW_BOUND = 1e-3
# Norms, the layer scalar and the scales of router and experts: 1, so that the stream neither dies out nor grows beyond bounds.
_ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "scale", "layer_scalar")
_CALM_ROUTING = 4.0  # standard deviation of the router's logits: the last expert chosen then weighs little


def draw_model(spec: ModelSpec, draw: RandomDraw, *, dtype: torch.dtype, device: torch.device, latent: bool = True) -> Gemma4:
    """A Gemma4 on `device` with random matrices and norms of 1.

    `normal` draws N(0, 0.02), so that different tokens pick different experts; `narrow` is uniform within 1e-3. `uniform` draws
    norms and scalars so too, as engines do that fill every tensor alike: the stream soon dies out, and products with zeros take
    less power, so long prompts are quicker than any real model's. It is for comparing with what was measured so.

    Each tensor depends on its name, its shape, the draw and the kind of device alone. So a model with fewer layers, in another
    precision or with another cache has the same weights, up to the rounding to bfloat16 that all of them go through.

    With all norms 1 scores of keys have a standard deviation of 16 and more: attention is all but a maximum, routing all but
    even, and both turn a rounding error into another answer. `calm` is `normal` with norms that have the temper of a trained
    model's: it is for comparing answers.
    """
    device = torch.device(device)
    model = Gemma4(spec, dtype=dtype, device=device, latent=latent)
    fill_randomly(model.placements(), draw, device)
    model.finish()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the largest draw is gone; the cache's size is taken from what is free
    return model


def fill_randomly(places: Mapping[str, Placement], draw: RandomDraw, device: torch.device) -> None:
    """Draw a model's, or a drafter's, tensors."""
    generator = torch.Generator(device=device)
    for name, place in places.items():
        if name.endswith(_ONES) and draw.kind != "uniform":
            place.target.fill_(_scale(name, place.target.shape[0]) if draw.kind == "calm" else 1.0)
            continue
        generator.manual_seed(zlib.crc32(f"{draw.seed} {name}".encode()))  # a CPU's generator takes 32 bits
        if not place.target.is_floating_point():  # an order of tokens
            place.fill(torch.randperm(place.target.numel(), generator=generator, device=device))
            continue
        value = torch.empty(place.target.shape, dtype=torch.bfloat16, device=device)
        if draw.kind in ("narrow", "uniform"):
            place.fill(value.uniform_(-NARROW_BOUND, NARROW_BOUND, generator=generator))
        else:
            place.fill(value.normal_(0.0, WEIGHT_STD, generator=generator))


def _scale(name: str, size: int) -> float:
    """A calm model's value for one of its norms or scales."""
    if name.endswith("q_norm.weight"):
        return float(size**-0.5)
    return _CALM_ROUTING / WEIGHT_STD if name.endswith("router.scale") else 1.0
