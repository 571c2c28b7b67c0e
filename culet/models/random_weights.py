"""Draw random weights on the device that uses them. This makes a model of any size for measurements in about a second."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from culet.layers.weight.placement import Placement
from culet.layers.weight.weights import Weights
from culet.models.gemma4 import Gemma4
from culet.models.random_checkpoint import RandomDraw
from culet.models.spec import ModelSpec
from culet.parallel.progress import mark_progress

WEIGHT_STD = 0.02
NARROW_BOUND = 1e-3
# Norms, layer scalars, and the scales of router and experts are 1, so that the stream neither vanishes nor explodes.
_ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "scale", "layer_scalar")
_TOWER_ONES = ("norm_pre_attn.weight", "norm_post_attn.weight", "norm_out.weight", "_ln1.weight", "_ln2.weight")
# A clipped linear of a tower has bounds on both sides. These leave most values as they are.
_BOUNDS = {"_min": -16.0, "_max": 16.0}
_CALM_ROUTING = 4.0  # standard deviation of the router's logits, which gives the last chosen expert little weight


def draw_model(spec: ModelSpec, draw: RandomDraw, weights: Weights, *, latent: bool = True) -> Gemma4:
    """Make a Gemma4 from `weights` with random matrices and norms of 1. Its format may quantise what is drawn.

    `normal` draws N(0, 0.02), so that different tokens pick different experts. `narrow` is uniform within 1e-3. `uniform` draws
    norms and scalars that way too, like engines that fill every tensor alike. Its stream soon vanishes, and products with zeros
    take less power, so long prompts are faster than with any real model. Use it only to compare with such results.

    With all norms 1, attention scores have a standard deviation of 16 or more. Attention is then nearly a maximum and routing
    nearly uniform, and both turn a rounding error into another answer. `calm` is `normal` with norms like those of a trained
    model. Use it to compare answers.

    Each tensor depends only on its name, its shape, the draw and the type of device. So a model with fewer layers, another
    precision or another cache has the same weights up to rounding.
    """
    model = Gemma4(spec, weights, latent=latent)
    fill_randomly(model.placements(), draw, weights.device)
    model.finish()
    if weights.device.type == "cuda":
        torch.cuda.empty_cache()  # frees the memory of the largest draw for the KV cache, which gets what is free
    return model


def fill_randomly(placements: Mapping[str, Placement], draw: RandomDraw, device: torch.device) -> None:
    """Draw the tensors of a model, a drafter or towers."""
    generator = torch.Generator(device=device)
    for name, placement in placements.items():
        mark_progress()
        if name[-4:] in _BOUNDS:
            placement.fill(torch.full(placement.shape, _BOUNDS[name[-4:]], device=device))
            continue
        if name.endswith(_ONES + _TOWER_ONES) and draw.kind != "uniform":
            scale = _scale(name, placement.shape[0]) if draw.kind == "calm" else 1.0
            placement.fill(torch.full(placement.shape, scale, device=device))
            continue
        generator.manual_seed(zlib.crc32(f"{draw.seed} {name}".encode()))  # a CPU generator takes 32 bits
        value = placement.empty(device)
        if not value.is_floating_point():  # an order of tokens
            placement.fill(torch.randperm(value.numel(), generator=generator, device=device))
        elif draw.kind in ("narrow", "uniform"):
            placement.fill(value.uniform_(-NARROW_BOUND, NARROW_BOUND, generator=generator))
        else:
            placement.fill(value.normal_(0.0, WEIGHT_STD, generator=generator))


def _scale(name: str, size: int) -> float:
    """Return the value of a norm or scale in a calm model."""
    if name.endswith("q_norm.weight"):
        return float(size**-0.5)
    return _CALM_ROUTING / WEIGHT_STD if name.endswith("router.scale") else 1.0
