"""Weights by part compared with the published models, and what fits compared with the arena's bounds."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from culet.cache.spec import plan_cache
from culet.errors import CheckpointError
from culet.models.sizes import (
    Room,
    pages_of_sequence,
    slabs_of_sequence,
    text_weights,
    tower_weights,
    working_bytes,
)
from culet.models.spec import ModelSpec, read_spec
from culet.models.variants import VARIANTS

# Parameters by part. The last line is the total bytes of the published checkpoint's tensors.
PUBLISHED: dict[str, dict[str, int]] = {
    "E2B": {
        "token embedding": 402_653_184,
        "per-layer embeddings": 2_348_810_240,
        "per-layer projections": 41_341_696,
        "attention": 278_412_288,
        "dense MLP": 1_557_135_360,
        "norms": 216_576,
        "payload": 10_246_357_958,
    },
    "E4B": {
        "token embedding": 671_088_640,
        "per-layer embeddings": 2_818_572_288,
        "per-layer projections": 82_683_136,
        "attention": 587_222_272,
        "dense MLP": 3_303_014_400,
        "norms": 432_640,
        "payload": 15_992_314_836,
    },
    "12B": {
        "token embedding": 1_006_632_960,
        "attention": 2_406_510_592,
        "dense MLP": 8_493_465_600,
        "norms": 741_120,
        "payload": 23_919_460_448,
    },
    "26B-A4B": {
        "token embedding": 738_197_504,
        "attention": 1_110_197_760,
        "dense MLP": 535_265_280,
        "routed experts": 22_837_985_280,
        "router": 10_901_760,
        "norms": 594_176,
        "payload": 51_611_872_412,
    },
    "31B": {
        "token embedding": 1_409_286_144,
        "attention": 8_477_772_800,
        "dense MLP": 20_808_990_720,
        "norms": 1_295_616,
        "payload": 62_546_177_752,
    },
}


def unused_kv_weights(spec: ModelSpec) -> int:
    """Count the weights k, v and k_norm stored for layers that read another layer's KV. These are never loaded."""
    return sum(
        (1 if layer.k_eq_v else 2) * spec.hidden_size * layer.num_kv_heads * layer.head_dim + layer.head_dim
        for layer in spec.layers
        if not layer.owns_kv
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_by_part(name):
    spec = read_spec(VARIANTS[name])
    parts = text_weights(spec)
    expected = dict(PUBLISHED[name])
    payload = expected.pop("payload")
    assert parts == expected | {"layer scalars": len(spec.layers)}
    total = sum(parts.values()) + sum(tower_weights(VARIANTS[name]).values()) + unused_kv_weights(spec)
    assert 2 * total == payload


def test_towers():
    def towers(name: str) -> dict[str, int]:
        return tower_weights(VARIANTS[name])

    clips = 16 * 7 * 4, 12 * 10 * 4  # bounds of the clipped linears, which are not parameters
    assert towers("E2B") == {"vision": 167_364_608 + 1_179_648 + clips[0], "audio": 304_824_608 + 2_359_296 + clips[1]}
    assert towers("E4B") == {"vision": 167_364_608 + 1_966_080 + clips[0], "audio": 304_824_608 + 3_932_160 + clips[1]}
    assert towers("12B") == {"vision": 49_922_304, "audio": 2_457_600}
    assert towers("26B-A4B") == {"vision": 569_548_080 + 3_244_032 + 2 * 1152}
    assert towers("31B") == {"vision": 569_548_080 + 6_193_152 + 2 * 1152}
    assert tower_weights(VARIANTS["31B"]["text_config"]) == {}


def test_tower_sections_may_omit_defaults():
    config = copy.deepcopy(VARIANTS["E2B"])
    config["audio_config"] = {"model_type": "gemma4_audio"}
    assert tower_weights(config)["audio"] == tower_weights(VARIANTS["E2B"])["audio"]


@pytest.mark.parametrize(
    "bad", [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"hidden_size": 2.5}, {"subsampling_conv_channels": [1]}, [1]]
)
def test_tower_section_that_makes_no_sense(bad):
    config = copy.deepcopy(VARIANTS["E2B"]) | {"audio_config": bad}
    with pytest.raises(CheckpointError, match="audio_config"):
        tower_weights(config)


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_match_transformers(name):
    import torch
    import transformers

    values: dict[str, Any] = copy.deepcopy(VARIANTS[name])
    is_unified = values.pop("model_type") == "gemma4_unified"
    values.pop("architectures")
    config = (transformers.Gemma4UnifiedConfig if is_unified else transformers.Gemma4Config)(**values)
    kind = transformers.Gemma4UnifiedForConditionalGeneration if is_unified else transformers.Gemma4ForConditionalGeneration
    with torch.device("meta"):
        model = kind(config)
    named = {
        **dict(model.named_parameters()),
        **{key: value for key, value in model.named_buffers() if key.endswith("layer_scalar")},
    }
    text = sum(value.numel() for key, value in named.items() if "language_model." in key)
    assert text == sum(text_weights(read_spec(VARIANTS[name])).values())


# What fits


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("latent", [True, False])
def test_pages_are_bounded_as_the_scheduler_bounds_them(name, latent):
    from culet.scheduler.group_pages import max_held_pages

    layout = plan_cache(read_spec(VARIANTS[name]).kv_specs(2, latent=latent))
    for group in layout.groups:
        bound = max_held_pages(group, 1, 1)
        for length in (1, 15, 16, 17, 500, 1024, 2000, 8192, 100_000):
            expected = group.pages_for(length) if bound is None else min(group.pages_for(length), bound)
            assert pages_of_sequence(group, length) == expected


def test_a_window_may_need_one_more_page():
    layout = plan_cache(read_spec(VARIANTS["31B"]).kv_specs(2))
    sliding, full = layout.groups
    assert (sliding.page_tokens, full.page_tokens) == (16, 256)
    assert pages_of_sequence(sliding, 1024) == 64
    assert pages_of_sequence(sliding, 1025) == 65
    assert pages_of_sequence(sliding, 200_000) == 65
    assert pages_of_sequence(full, 8000) == 32
    assert slabs_of_sequence(layout, 8000) == 97


def test_room():
    layout = plan_cache(read_spec(VARIANTS["31B"]).kv_specs(2))
    room = Room(layout, layout.slab_bytes * 200 + 5)
    assert room.num_slabs == 200
    assert room.sequences(8000) == 2
    assert slabs_of_sequence(layout, room.longest(10**6)) <= 200 < slabs_of_sequence(layout, room.longest(10**6) + 1)
    assert room.longest(1000) == 1000
    assert Room(layout, -5).num_slabs == 0
    assert Room(layout, -5).sequences(1) == Room(layout, -5).longest(1000) == 0


def test_working_memory_grows_with_the_step():
    spec = read_spec(VARIANTS["31B"])
    small, large = (working_bytes(spec, 2, num_tokens=tokens, num_seqs=8) for tokens in (1024, 8192))
    per_token = 4 * 5376 + 4 * 32 * 512  # residuals, and queries, keys, values and output of a global layer
    assert large - small == 7168 * per_token * 2
    widened = working_bytes(spec, 2, num_tokens=1024, num_seqs=8, is_widened=True)
    assert widened - small == 2 * 21504 * 5376 * 2  # gate and up of a layer
