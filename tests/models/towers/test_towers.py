"""Rows of the decoder compared with transformers', in float32, for every kind of checkpoint, alone and packed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from culet.engine.start.sample_media import heaviest_images, sample_media
from culet.errors import BadRequest, CheckpointError, InternalError
from culet.kernels.dispatch import eager_kernels
from culet.kernels.eager.towers import patch_attention
from culet.media.items import MediaItem, MediaKind
from culet.models.checkpoint import open_checkpoint
from culet.models.towers import load_towers
from culet.models.towers.spec import VisionSpec, read_towers
from culet.models.variants import VARIANTS
from tests.models.towers import tiny_towers as tiny
from tests.models.towers.tiny_towers import towers

TOLERANCE = 1e-5
MIXED: dict[str, list[MediaItem]] = {
    "E4B": [tiny.image(2, 3), tiny.clip(70), tiny.image(1, 1, 1), tiny.image(2, 3, 2, MediaKind.VIDEO), tiny.clip(9, 1)],
    "12B": [tiny.waveform(3), tiny.image(2, 3), tiny.image(3, 2, 1), tiny.waveform(1, 1), tiny.image(2, 3, 2, MediaKind.VIDEO)],
    "31B": [tiny.image(2, 3), tiny.image(4, 1, 1, MediaKind.VIDEO), tiny.image(2, 3, 2), tiny.image(1, 2, 3)],
}
MIXED["26B-A4B"] = MIXED["31B"][:2]


def difference(shape: str, items: list[MediaItem]) -> float:
    """Return the largest difference from transformers, relative to the size of its rows."""
    found = towers(shape).encode(items)
    worst = 0.0
    for item, rows in zip(items, found, strict=True):
        expected = tiny.oracle_rows(tiny.oracle(shape), item)
        assert rows.shape == expected.shape == (item.num_tokens, tiny.HIDDEN)
        worst = max(worst, float((rows - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("shape", tiny.SHAPES)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 2)])
@pytest.mark.parametrize("kind", [MediaKind.IMAGE, MediaKind.VIDEO])
def test_one_image(shape, size, kind):
    assert difference(shape, [tiny.image(*size, kind=kind)]) < TOLERANCE


@pytest.mark.parametrize("num_frames", [1, 3, 4, 5, 48, 49, 99, 131])
def test_one_clip(num_frames):
    assert difference("E4B", [tiny.clip(num_frames)]) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 25])
def test_one_waveform(num_tokens):
    assert difference("12B", [tiny.waveform(num_tokens)]) < TOLERANCE


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_the_heaviest_images_fit_the_positions(shape):
    """The start measures memory with them. A tower with few positions must not fail there."""
    spec = towers(shape).specs.vision
    few = dataclasses.replace(spec, num_positions=4)
    tokens = 4 if shape == "12B" else 1  # on a side. Other towers have three patches on a side of a soft token.
    assert [image.num_tokens for image in heaviest_images(few)] == [tokens**2] * 2
    assert [image.num_tokens for image in heaviest_images(dataclasses.replace(spec, num_positions=1120))] == [1089] * 2
    rows = towers(shape).encode(heaviest_images(few))
    assert [len(each) for each in rows] == [tokens**2] * 2
    assert heaviest_images(None) == []


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_the_towers_read_the_media_of_a_rehearsal(shape):
    """Media of each kind come with many tokens and with one, because the two use different kernels."""
    specs = towers(shape).specs
    vision = dataclasses.replace(specs.vision, num_positions=6)  # the images of a whole tower take long on a CPU
    batches = list(sample_media(dataclasses.replace(specs, vision=vision)))
    for items in batches:
        assert [len(rows) for rows in towers(shape).encode(items)] == [item.num_tokens for item in items]
    counts = [sum(item.num_tokens for item in items) for items in batches]
    assert len(counts) == (4 if specs.audio is not None else 2)
    assert all(many > 1 == single for many, single in zip(counts[::2], counts[1::2], strict=True))


def test_silence_gives_rows_of_zeros():
    silence = dataclasses.replace(tiny.waveform(2), data=bytes(2 * 640 * 4))
    (rows,) = towers("12B").encode([silence])
    assert not rows.any()


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_packed_media(shape):
    """Images of different sizes, frames and clips in one call, each as if it were alone."""
    assert difference(shape, MIXED[shape]) < TOLERANCE
    together = towers(shape).encode(MIXED[shape])
    for item, rows in zip(MIXED[shape], together, strict=True):
        (alone,) = towers(shape).encode([item])
        assert torch.allclose(rows, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", ["E4B", "12B"])
def test_media_in_several_passes(shape, monkeypatch):
    """A pass holds a bounded number of patches and frames. Rows come back in the order of the items."""
    expected = towers(shape).encode(MIXED[shape])
    passes = []
    for tower in (towers(shape).vision, towers(shape).audio):
        assert tower is not None
        monkeypatch.setattr(type(tower), "max_cost", 1)

        def counted(items, encode=tower.encode):
            passes.append(len(items))
            return encode(items)

        monkeypatch.setitem(tower.__dict__, "encode", counted)
    found = towers(shape).encode(MIXED[shape])
    assert passes == [1] * len(MIXED[shape])
    assert all(torch.allclose(mine, theirs, atol=1e-5) for mine, theirs in zip(found, expected, strict=True))
    assert towers(shape).encode([]) == []


def test_attention_stays_inside_an_image():
    """Compared with a dense mask in float64."""
    lengths = [9, 9, 18, 9]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(sum(lengths), 3, 24, generator=generator) for _ in range(3))
    image_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = torch.einsum("tnh,snh->nts", q.double(), k.double())
    scores.masked_fill_(image_T[:, None] != image_T, -torch.inf)
    expected = torch.einsum("nts,snh->tnh", scores.softmax(-1), v.double()).float()
    assert torch.allclose(patch_attention(q, k, v, lengths), expected, atol=1e-5)
    assert torch.allclose(patch_attention(q[:18], k[:18], v[:18], [9, 9]), expected[:18], atol=1e-5)


# Loading


@pytest.mark.parametrize(
    ("kinds", "parts"),
    [
        ({MediaKind.IMAGE}, {"vision"}),
        ({MediaKind.VIDEO}, {"vision"}),
        ({MediaKind.AUDIO}, {"audio"}),
        (set(MediaKind), {"vision", "audio"}),
    ],
)
@pytest.mark.parametrize("shape", ["E4B", "12B"])
def test_only_wanted_towers_are_allocated(shape, kinds, parts):
    loaded = tiny.load(shape, kinds=frozenset(kinds))
    assert loaded is not None
    specs = read_towers(open_checkpoint(str(tiny.checkpoint_folder(shape))).config)
    sizes = {"vision": specs.vision, "audio": specs.audio}
    assert sum(parameter.numel() for parameter in loaded.parameters()) == sum(
        spec.num_weights for name, spec in sizes.items() if name in parts and spec is not None
    )
    if "audio" not in parts:
        with pytest.raises(InternalError, match="audio: no tower is loaded"):
            loaded.encode([tiny.clip(5)])


def test_no_towers():
    assert tiny.load("E4B", kinds=frozenset()) is None
    assert tiny.load("31B", kinds=frozenset({MediaKind.AUDIO})) is None


def test_tensors_are_checked(tmp_path: Path):
    shutil.copytree(tiny.checkpoint_folder("E4B"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = "model.vision_tower.encoder.layers.1.mlp.up_proj.input_max"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="missing") as caught:
        tiny.load_folder(tmp_path)
    assert missing in str(caught.value)
    assert tiny.load_folder(tmp_path, kinds=frozenset({MediaKind.AUDIO})) is not None


@pytest.mark.parametrize("name", ["E2B", "E4B", "12B", "26B-A4B", "31B"])
def test_names_and_sizes_of_published_checkpoints(name):
    """On the meta device, the towers have as many weights as the published ones, under the names that transformers uses."""
    from culet.layers.weight.weights import Weights
    from culet.models.towers.towers import Towers

    specs = read_towers(VARIANTS[name])
    places = Towers(specs, Weights(torch.float32, torch.device("meta"))).placements()
    assert sum(int(np.prod(place.shape)) for place in places.values()) == sum(specs.num_weights.values())
    shape = {"E2B": "E4B"}.get(name, name)
    layers = {".".join("N" if part.isdecimal() else part for part in stored.split(".")) for stored in places}
    stored = load_file(tiny.checkpoint_folder(shape) / "model.safetensors")
    expected = {
        ".".join("N" if part.isdecimal() else part for part in key.split(".")) for key in stored if "language" not in key
    }
    assert layers == expected


# Bad input


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (96, 145, 3)},
        {"num_tokens": 5},
        {"shape": (96, 144), "data": bytes(96 * 144)},
        {"data": b"short"},
        {"shape": (0, 144, 3), "data": b"", "num_tokens": 0},
    ],
)
@pytest.mark.parametrize("shape", ["31B", "12B"])
def test_images_that_do_not_fit(shape, changes):
    with pytest.raises(InternalError, match="image: got"):
        towers(shape).encode([dataclasses.replace(tiny.image(2, 3), **changes)])


def test_an_image_longer_than_the_positions():
    with pytest.raises(BadRequest, match="258 patches long, but the model has positions for 256"):
        towers("31B").encode([tiny.image(1, 86)])


# Config


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision_config", {"hidden_activation": "relu"}, "vision_config.hidden_activation: got 'relu'"),
        ("vision_config", {"num_key_value_heads": 3}, "vision_config.num_key_value_heads: got 3"),
        ("vision_config", {"head_dim": 66}, "vision_config.head_dim: got 66"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type: got 'yarn'"),
        ("vision_config", {"patch_size": 1 << 20}, "vision_config.patch_size"),
        ("vision_config", {"use_clipped_linears": "yes"}, "expected true or false"),
        ("audio_config", {"attention_context_right": 2}, "audio_config.attention_context_right: got 2"),
        ("audio_config", {"num_attention_heads": 7}, "does not divide hidden_size"),
        ("audio_config", {"subsampling_conv_channels": [128, True]}, "expected two whole numbers"),
    ],
)
def test_configs_that_no_model_has(part, changes, message):
    config = json.loads(json.dumps(VARIANTS["E4B"]))
    config[part] |= changes
    with pytest.raises(CheckpointError) as caught:
        read_towers(config)
    assert message in str(caught.value)


def test_old_and_new_configs_say_the_same():
    old = json.loads(json.dumps(VARIANTS["31B"]))
    old["vision_config"] |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "default_output_length": 280}
    new = json.loads(json.dumps(VARIANTS["31B"]))
    new["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": 100.0}
    assert read_towers(old) == read_towers(new) == read_towers(VARIANTS["31B"])
    assert isinstance(read_towers(new).vision, VisionSpec)


# Random weights


def test_random_towers_depend_only_on_the_seed():
    draws = [
        load_towers(open_checkpoint(f"random:{tiny.checkpoint_folder('E4B')},seed={seed}"), **tiny.ON_CPU) for seed in (1, 1, 2)
    ]
    rows = [drawn.encode([tiny.image(2, 2), tiny.clip(20)]) for drawn in draws if drawn is not None]
    assert all(torch.isfinite(each).all() and each.abs().max() > 0 for pair in rows for each in pair)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(rows[0], rows[1], strict=True))
    assert not torch.equal(rows[0][0], rows[2][0])


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_kernels_get_rows_whose_values_are_adjacent(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU read rows. The eager twins read any layout, so they would not notice."""
    kernels = eager_kernels()
    num_calls = 0

    def checked(op: Any) -> Any:
        def run(x_TD: torch.Tensor, *rest: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            assert x_TD.stride(-1) == 1, f"{op.__name__}: {x_TD.stride()}"
            return op(x_TD, *rest)

        return run

    for name in ("rms_norm", "residual_norm", "patch_qkv", "clipped_gelu_mul"):
        monkeypatch.setattr(kernels, name, checked(getattr(kernels, name)))
    items = [tiny.image(2, 3), *{"E4B": [tiny.clip(70)], "12B": [tiny.waveform(3)]}.get(shape, [])]
    tiny.towers(shape).encode(items)
    assert num_calls
