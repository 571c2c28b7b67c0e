"""Mistakes that are easy to make in a tower. Each test fails when the code makes the mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from culet.layers.weight.base import Projection
from culet.layers.weight.weights import Weights
from culet.media.items import MediaKind
from culet.models.towers.audio import AudioTower, distance_waves
from culet.models.towers.linear import UNBOUNDED, Bounds, TowerLinear
from culet.models.towers.packing import pack_images, pixel_values
from culet.models.towers.spec import AudioSpec
from culet.models.towers.vision import VisionTower
from tests.models.bfloat16 import QuickBFloat16
from tests.models.towers import tiny_towers as tiny
from tests.models.towers.tiny_towers import towers

LEVELS = torch.arange(256, dtype=torch.uint8)
CPU = torch.device("cpu")


def vision(shape: str, *dtypes: str) -> VisionTower:
    tower = towers(shape, *dtypes).vision
    assert isinstance(tower, VisionTower)
    return tower


def audio(*dtypes: str) -> AudioTower:
    tower = towers("E4B", *dtypes).audio
    assert isinstance(tower, AudioTower)
    return tower


def fresh_vision(shape: str) -> VisionTower:
    """Return a tower that a test may change."""
    loaded = tiny.load(shape, kinds=frozenset({MediaKind.IMAGE}))
    assert loaded is not None
    assert isinstance(loaded.vision, VisionTower)
    return loaded.vision


def fresh_audio() -> AudioTower:
    """Return a tower that a test may change."""
    loaded = tiny.load("E4B", kinds=frozenset({MediaKind.AUDIO}))
    assert loaded is not None
    assert isinstance(loaded.audio, AudioTower)
    return loaded.audio


def num_different(a: Tensor, b: Tensor) -> int:
    return int((a != b).sum())


# Pixels


def test_images_are_multiplied_and_frames_divided():
    image, frame = pixel_values().chunk(2)
    assert torch.equal(image, LEVELS * (1 / 255))
    assert torch.equal(frame, LEVELS / 255.0)
    assert num_different(image, frame) == 126
    # The tower chooses by the kind of the item.
    items = [tiny.image(1, 1), tiny.image(1, 1, kind=MediaKind.VIDEO)]
    levels = pack_images(items, 16, 3, 256, CPU).levels_TV
    assert torch.equal(levels[9:], levels[:9] + 256)


@pytest.mark.parametrize("shape", ["E4B", "31B"])
def test_pixels_are_rounded_once_and_after_the_shift(shape):
    exact = 2 * (LEVELS * (1 / 255) - 0.5)
    values = vision(shape, "float32", "bfloat16").values[:256]
    assert torch.equal(values, exact.to(torch.bfloat16))
    early = 2 * ((LEVELS * (1 / 255)).to(torch.bfloat16) - 0.5)
    assert num_different(values, early) == 127


def test_pixels_of_12b_are_not_shifted():
    tower = towers("12B", "float32", "bfloat16").vision
    assert tower is not None
    assert torch.equal(tower.values[:256], (LEVELS * (1 / 255)).to(torch.bfloat16))


# Positions and patches


@pytest.mark.parametrize(("patch", "pooling"), [(16, 3), (48, 1)])
def test_patches_know_their_place(patch, pooling):
    """Each pixel tells its row, its column and its channel."""
    height, width = 96, 144
    row, column = np.mgrid[:height, :width]
    item = tiny.image_of(np.stack((row, column, np.full_like(row, 200)), -1).astype(np.uint8))
    packed = pack_images([item], patch, pooling, 256, CPU)
    pixels = packed.levels_TV.view(-1, patch, patch, 3)
    first = pixels[:, 0, 0]
    assert torch.equal(packed.y_T * patch, first[:, 0].long())
    assert torch.equal(packed.x_T * patch, first[:, 1].long())
    inside = pixels - first[:, None, None]
    assert (inside[..., 0] == torch.arange(patch)[:, None]).all()
    assert (inside[..., 1] == torch.arange(patch)).all()
    assert (pixels[..., 2] == 200).all()
    # Soft tokens read from left to right, then down, and the patches of one are together.
    token = packed.y_T // pooling * (width // patch // pooling) + packed.x_T // pooling
    assert torch.equal(token, torch.arange(6).repeat_interleave(pooling**2))


def test_columns_are_the_first_table():
    """With only the table of columns, patches of one column and equal pixels are equal, and those of one row differ."""
    tower = fresh_vision("31B")
    tower.positions.tensor[1].zero_()
    pixels = np.full((48, 96, 3), 7, dtype=np.uint8)
    seen: list[Tensor] = []
    first = tower._layers[0]
    forward = first.forward
    first.forward = lambda x, *rest: (seen.append(x.clone()), forward(x, *rest))[1]  # type: ignore[method-assign]
    tower.encode([tiny.image_of(pixels)])
    grid = torch.empty(3, 6, tower.spec.hidden_size)
    packed = pack_images([tiny.image_of(pixels)], 16, 3, 256, CPU)
    grid[packed.y_T, packed.x_T] = seen[0]
    assert torch.equal(grid[0], grid[1])
    assert torch.equal(grid[0], grid[2])
    assert num_different(grid[0, 0], grid[0, 1]) > 0


# Precision


@pytest.mark.parametrize("shape", ["E4B", "31B"])
def test_pooling_rounds_twice(shape):
    """The mean is rounded to within one ulp of transformers' mean, and then everything up to the projection once more."""
    tower, model = vision(shape, "bfloat16", "bfloat16"), tiny.oracle(shape, "bfloat16", "bfloat16").model.vision_tower
    packed = pack_images([tiny.image(4, 5)], 16, 3, 256, CPU)
    x_TD = torch.randn(180, tower.spec.hidden_size, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    positions = torch.stack((packed.x_T, packed.y_T), -1)[None]
    (mean,), _ = model.pooler._avg_pool_by_positions(x_TD[None], positions, 20)

    def after(mean: Tensor) -> Tensor:
        scaled = mean.float() * model.pooler.root_hidden_size
        if tower.spec.is_standardised:
            scaled = (scaled - model.std_bias.float()) * model.std_scale.float()
        return scaled.to(torch.bfloat16)

    found = tower.pool(x_TD)
    assert found.dtype is torch.bfloat16
    neighbours = [(mean.view(torch.int16) + step).view(torch.bfloat16) for step in (-1, 0, 1)]
    is_near = torch.stack([found == after(each) for each in neighbours])
    assert is_near.any(0).all()
    assert float(is_near[1].float().mean()) > 0.98
    # No rounding in between, or one more, is visible.
    unrounded = x_TD.float().view(20, 9, -1).mean(1)
    assert float((found == after(unrounded)).float().mean()) < 0.9
    if tower.std_bias is not None and tower.std_scale is not None:
        coarse = mean * tower.spec.hidden_size**0.5
        coarse = (coarse - tower.std_bias.to(torch.bfloat16)) * tower.std_scale.to(torch.bfloat16)
        assert float((found == coarse).float().mean()) < 0.9


@pytest.mark.parametrize("shape", ["E4B", "12B", "31B"])
def test_bfloat16_is_as_exact_as_transformers(shape):
    """Rows in bfloat16 are at most 1.2 times as far from float32 as those of transformers, on average over all media."""
    items = [tiny.image(4, 3, 1), tiny.image(2, 2, 2)]
    items += {"E4B": [tiny.clip(99, 3)], "12B": [tiny.waveform(9, 3)]}.get(shape, [])
    with QuickBFloat16():
        found = towers(shape, "bfloat16", "bfloat16").encode(items)
        others = [tiny.oracle_rows(tiny.oracle(shape, "bfloat16", "bfloat16"), item) for item in items]
    mine = theirs = 0.0
    for item, rows, other in zip(items, found, others, strict=True):
        exact = tiny.oracle_rows(tiny.oracle(shape, "bfloat16", "float32"), item)
        mine += float((rows.float() - exact).norm() / exact.norm())
        theirs += float((other.float() - exact).norm() / exact.norm())
        assert rows.dtype is torch.bfloat16
    assert mine <= 1.2 * theirs


def test_casting_a_tower_rounds_no_angle():
    tower, model = fresh_vision("31B"), tiny.oracle("31B").model.vision_tower
    before = tower.inv_freq.clone()
    tower.to(torch.bfloat16)
    assert tower.inv_freq.dtype is torch.float32
    assert torch.equal(tower.inv_freq, before)
    frequencies = next(buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    assert torch.equal(before, frequencies.flatten()[: len(before)])
    rounded = before.to(torch.bfloat16).float()
    assert float((3359 * (rounded - before)).abs().max()) > 1  # radians, at the last patch of the longest image


def test_waves_of_distances_are_rounded_last():
    spec: AudioSpec = audio().spec
    # transformers' own buffer is rounded to bfloat16 if the model is loaded in it, so take the angles of the float32 model.
    theirs = tiny.oracle("E4B").model.audio_tower.rel_pos_enc(torch.zeros(1, 1, spec.hidden_size))
    theirs = theirs.reshape(-1, spec.hidden_size).flip(0)[: spec.window]
    assert torch.equal(distance_waves(spec.window, spec.hidden_size), theirs)
    assert torch.equal(audio("bfloat16", "bfloat16").distances_WD, theirs.to(torch.bfloat16))


def test_query_scales_of_audio_are_rounded():
    attention = audio("bfloat16", "bfloat16")._layers[0].attention
    exact = torch.nn.functional.softplus(attention.per_dim_scale.float())
    assert torch.equal(attention.query_scale_H, exact.to(torch.bfloat16).float())
    assert num_different(attention.query_scale_H, exact) > 0


# Clipped linears


def clipped(bounds: list[tuple[float, float, float, float]]) -> tuple[TowerLinear, list[Tensor]]:
    """Return three projections with these bounds, and their matrices."""
    generator = torch.Generator().manual_seed(5)
    names = ("q_proj", "k_proj", "v_proj")
    linear = TowerLinear([Projection(name, 8) for name in names], 12, Weights(torch.float32, CPU), is_clipped=True)
    matrices = [torch.randn(8, 12, generator=generator) for _ in names]
    places: dict[str, Any] = linear.placements()
    for name, matrix, values in zip(names, matrices, bounds, strict=True):
        places[f"{name}.linear.weight"].fill(matrix)
        for ending, value in zip(("input_min", "input_max", "output_min", "output_max"), values, strict=True):
            places[f"{name}.{ending}"].fill(torch.tensor(value))
    linear.finish()
    return linear, matrices


@pytest.mark.parametrize(
    "bounds",
    [
        [(-1.25, 1.25, -1.5, 1.5)] * 3,
        [(-1.25, 1.25, -1.5, 1.0), (-1.25, 1.25, -2.0, 0.5), (-1.25, 1.25, 0.1, 3.0)],
        [(-1.25, 1.0, -1.5, 1.5), (-0.5, 0.5, -1.5, 1.5), (0.0, 9.0, -1.0, 1.5)],
        [(-1.25, 1.25, *UNBOUNDED)] * 3,
        [(*UNBOUNDED, -1.5, 1.5)] * 3,
        [(*UNBOUNDED, *UNBOUNDED)] * 3,
    ],
)
def test_joined_projections_keep_their_bounds(bounds):
    linear, matrices = clipped(bounds)
    x = 2 * torch.randn(7, 12, generator=torch.Generator().manual_seed(6))
    kept = x.clone()
    expected = [(x.clamp(*row[:2]) @ matrix.t()).clamp(*row[2:]) for matrix, row in zip(matrices, bounds, strict=True)]
    assert torch.allclose(linear.linear(x), torch.cat(expected, -1), atol=1e-6)
    assert torch.equal(x, kept)
    assert bool(linear.inputs) == any(Bounds(*row[:2]).is_finite for row in bounds)
    assert bool(linear.outputs) == any(Bounds(*row[2:]).is_finite for row in bounds)


@pytest.mark.parametrize("part", ["qkv", "out", "gate_up", "down"])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_every_bound_of_the_tiny_vision_tower_matters(part, side, monkeypatch):
    """So a comparison with transformers finds a bound that is dropped, anywhere in a layer."""
    tower, item = fresh_vision("E4B"), tiny.image(2, 2)
    (expected,) = tower.encode([item])
    layer = tower._layers[1]
    monkeypatch.setattr(getattr(layer, part), side, [])
    if part == "qkv" and side == "outputs":
        layer.qkv_bounds_32 = None
    assert layer.gate_bounds_32 is not None
    rows = {("gate_up", "outputs"): slice(0, 2), ("down", "inputs"): slice(2, 3)}.get((part, side), slice(0, 0))
    layer.gate_bounds_32[rows] = torch.tensor(UNBOUNDED)
    (found,) = tower.encode([item])
    assert float((found - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_every_bound_of_the_tiny_audio_tower_matters(side, monkeypatch):
    tower, item = fresh_audio(), tiny.clip(40)
    (expected,) = tower.encode([item])
    linears = {name: module for name, module in tower._layers[0].named_modules() if isinstance(module, TowerLinear)}
    assert len(linears) == 8
    for name, linear in linears.items():
        with monkeypatch.context() as patched:
            patched.setattr(linear, side, [])
            (found,) = tower.encode([item])
        assert float((found - expected).abs().max()) > 1e-3, name


# Audio


def test_a_frame_hears_twelve_frames():
    tower = fresh_audio()
    long, short = tiny.clip(97), tiny.clip(48)
    assert (tower.spec.window, long.num_tokens, short.num_tokens) == (12, 25, 12)
    expected = tower.encode([long, short])
    tower.spec = dataclasses.replace(tower.spec, window=13)
    tower.distances_WD = distance_waves(13, tower.spec.hidden_size)
    found = tower.encode([long, short])
    assert float((found[0] - expected[0]).abs().max()) > 0.01
    assert torch.allclose(found[1], expected[1], atol=1e-5)  # no frame of a short clip has a thirteenth one before it


def test_a_clip_does_not_hear_the_one_before():
    first, second = tiny.clip(40, 1), tiny.clip(40, 2)
    (alone,) = audio().encode([second])
    packed = audio().encode([first, second])[1]
    assert torch.allclose(packed, alone, atol=1e-5)


# The decoder's rows


@pytest.mark.parametrize("shape", ["E4B", "12B", "31B"])
def test_rows_are_not_scaled_like_embeddings(shape):
    """transformers puts the rows in place of embeddings as they are, and these are the rows."""
    model, item = tiny.oracle(shape), tiny.image(1, 2)
    (rows,) = towers(shape).encode([item])
    token_ids = torch.tensor([[5, 60, 60, 7]])
    inputs: list[Tensor] = []
    layer = model.model.language_model.layers[0]
    hook = layer.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    pixels, positions = tiny.processed(item, 48 if shape == "12B" else 16)
    with torch.no_grad():
        model(
            input_ids=token_ids,
            pixel_values=pixels,
            image_position_ids=positions,
            mm_token_type_ids=torch.tensor([[0, 1, 1, 0]]),
        )
    hook.remove()
    assert torch.allclose(inputs[0][0, 1:3], rows, atol=1e-5)
