"""`read_spec`: the five models in every form of config.json, compared with transformers, and every error."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from culet.cache.spec import plan_cache
from culet.errors import CheckpointError
from culet.models.spec import ModelSpec, read_spec
from culet.models.variants import VARIANTS

NAMES = list(VARIANTS)


def variant(name: str, **text: Any) -> dict[str, Any]:
    config = copy.deepcopy(VARIANTS[name])
    config["text_config"].update(text)
    return config


def without(name: str, *keys: str) -> dict[str, Any]:
    config = copy.deepcopy(VARIANTS[name])
    for key in keys:
        del config["text_config"][key]
    return config


def transformers_config(name: str) -> Any:
    import transformers

    config = copy.deepcopy(VARIANTS[name])
    kind = transformers.Gemma4UnifiedConfig if config["model_type"] == "gemma4_unified" else transformers.Gemma4Config
    for key in ("architectures", "model_type", "eos_token_id"):
        config.pop(key)
    return kind(**config)


# Dimensions of the published models


@pytest.mark.parametrize(
    ("name", "num_layers", "globals_at", "heads", "kv_heads", "window", "source"),
    [
        ("E2B", 35, range(4, 35, 5), 8, (1, 1), 512, (13, 14)),
        ("E4B", 42, range(5, 42, 6), 8, (2, 2), 512, (22, 23)),
        ("12B", 48, range(5, 48, 6), 16, (8, 1), 1024, None),
        ("26B-A4B", 30, range(5, 30, 6), 16, (8, 2), 1024, None),
        ("31B", 60, range(5, 60, 6), 32, (16, 4), 1024, None),
    ],
)
def test_layers_of_the_published_models(name, num_layers, globals_at, heads, kv_heads, window, source):
    spec = read_spec(VARIANTS[name])
    assert len(spec.layers) == num_layers
    assert [layer.index for layer in spec.layers if layer.is_global] == list(globals_at)
    for layer in spec.layers:
        assert layer.num_heads == heads
        assert layer.num_kv_heads == kv_heads[layer.is_global]
        assert layer.head_dim == (512 if layer.is_global else 256)
        assert layer.window == (None if layer.is_global else window)
        assert layer.k_eq_v == (layer.is_global and name in ("12B", "26B-A4B", "31B"))
        assert layer.rope.rotated_dims == (128 if layer.is_global else 256)
        assert layer.rope.theta == (1e6 if layer.is_global else 1e4)
        if not layer.owns_kv:
            assert layer.kv_source == source[layer.is_global]


def test_what_only_one_variant_has():
    e2b, e4b, unified, moe, dense = (read_spec(VARIANTS[name]) for name in NAMES)
    assert [layer.mlp_width for layer in e2b.layers] == [6144] * 15 + [12288] * 20
    assert {layer.mlp_width for layer in e4b.layers} == {10240}
    assert (e2b.num_kv_shared, e4b.num_kv_shared, dense.num_kv_shared) == (20, 18, 0)
    assert (e2b.ple_dim, e4b.ple_dim, unified.ple_dim, moe.ple_dim) == (256, 256, 0, 0)
    assert (moe.moe.num_experts, moe.moe.top_k, moe.moe.width) == (128, 8, 704)
    assert e2b.moe is unified.moe is dense.moe is None
    attention = [spec.image_attention for spec in (e2b, e4b, unified, moe, dense)]
    assert attention == ["causal", "causal", "all", "sliding", "sliding"]
    assert all(spec.final_softcap == 30.0 and spec.has_towers for spec in (e2b, unified, moe, dense))
    assert unified.architecture == "Gemma4UnifiedForConditionalGeneration"
    assert dense.eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    ("name", "sliding", "plain", "latent"),
    [
        ("E2B", 12_288, 6_144, 6_144),
        ("E4B", 40_960, 16_384, 16_384),
        ("12B", 327_680, 16_384, 10_240),
        ("26B-A4B", 204_800, 20_480, 12_800),
        ("31B", 819_200, 81_920, 51_200),
    ],
)
def test_cache_bytes_per_token(name, sliding, plain, latent):
    spec = read_spec(VARIANTS[name])
    for keeps_latent, expected in ((False, plain), (True, latent)):
        groups = plan_cache(spec.kv_specs(2, latent=keeps_latent)).groups
        assert [(group.name, group.bytes_per_token) for group in groups] == [("sliding", sliding), ("global", expected)]


def test_readers_are_owners_and_the_layers_that_share_their_kv():
    spec = read_spec(VARIANTS["E2B"])
    groups = plan_cache(spec.kv_specs(2)).groups
    sliding, full = (spec.readers(group.layers) for group in groups)
    assert len(sliding) == 28
    assert full == tuple(range(4, 35, 5))
    assert sorted(sliding + full) == list(range(35))


# Compared with transformers


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_of_the_file_agree(name, tmp_path: Path):
    transformers_config(name).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in written["text_config"]
    assert "global_head_dim" not in written["text_config"]
    old, new = read_spec(VARIANTS[name]), read_spec(written)
    assert new.layers == old.layers
    assert (new.moe, new.ple_dim, new.ple_vocab_size, new.image_attention) == (
        old.moe,
        old.ple_dim,
        old.ple_vocab_size,
        old.image_attention,
    )
    assert (new.hidden_size, new.max_position, new.rms_eps, new.final_softcap) == (
        old.hidden_size,
        old.max_position,
        old.rms_eps,
        old.final_softcap,
    )
    assert new.has_towers


@pytest.mark.parametrize("name", NAMES)
def test_text_only_config_has_the_same_layers(name, tmp_path: Path):
    transformers_config(name).text_config.save_pretrained(tmp_path)
    spec = read_spec(json.loads((tmp_path / "config.json").read_text()))
    assert spec.layers == read_spec(VARIANTS[name]).layers
    assert not spec.has_towers
    assert spec.architecture.endswith("ForCausalLM")


def small_model(spec_changes: dict[str, Any], unified: bool = False) -> tuple[Any, ModelSpec]:
    """Return a transformers model on the meta device and our spec of the config that it writes."""
    import torch
    import transformers

    base = {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4}
    base |= {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "vocab_size_per_layer_input": 128,
    }
    base |= {"hidden_size_per_layer_input": 0} | spec_changes
    if unified:
        for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
            base.pop(key)
        config = transformers.Gemma4UnifiedTextConfig(**base)
        kind = transformers.Gemma4UnifiedForCausalLM
    else:
        config = transformers.Gemma4TextConfig(**base)
        kind = transformers.Gemma4ForCausalLM
    with torch.device("meta"):
        model = kind(config)
    return model, read_spec(json.loads(config.to_json_string()))


@pytest.mark.parametrize(
    ("changes", "unified"),
    [
        ({"num_kv_shared_layers": 6, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16}, False),
        ({"num_kv_shared_layers": 3, "num_hidden_layers": 11}, False),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 1}, True),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 4, "global_head_dim": 16}, False),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}, False),
        ({"num_global_key_value_heads": 1}, False),  # ignored: K and V are two projections
        ({"layer_types": ["sliding_attention"] * 11 + ["full_attention"], "num_kv_shared_layers": 0}, False),
        ({"layer_types": None, "num_hidden_layers": 7}, True),
    ],
)
def test_layers_match_transformers(changes, unified):
    model, spec = small_model(changes, unified)
    assert len(model.model.layers) == len(spec.layers)
    sources: dict[str, int] = {}
    for ours, theirs in zip(spec.layers, model.model.layers, strict=True):
        attention = theirs.self_attn
        assert ours.head_dim == attention.head_dim
        assert ours.window == attention.sliding_window
        assert ours.num_heads // ours.num_kv_heads == attention.num_key_value_groups
        assert ours.owns_kv == (not attention.is_kv_shared_layer)
        assert ours.mlp_width == theirs.mlp.intermediate_size
        if ours.owns_kv:
            assert attention.k_proj.out_features == ours.num_kv_heads * ours.head_dim
            assert ours.k_eq_v == (attention.v_proj is None)
            if attention.store_full_length_kv:
                sources[attention.layer_type] = ours.index
        else:
            assert ours.kv_source == sources[attention.layer_type]
        assert (spec.moe is not None) == hasattr(theirs, "experts")


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_rope_matches_transformers(share, factor):
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    full = {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": share, "factor": factor}
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
    config = Gemma4TextConfig(num_hidden_layers=6, head_dim=32, global_head_dim=64, rope_parameters=rope)
    theirs = Gemma4TextRotaryEmbedding(config)
    for layer in read_spec(json.loads(config.to_json_string())).layers:
        kind = "full_attention" if layer.is_global else "sliding_attention"
        expected = getattr(theirs, f"{kind}_inv_freq").tolist()
        ours = [0.0] * (layer.head_dim // 2)
        for pair in range(layer.rope.rotated_dims // 2):
            ours[pair] = layer.rope.theta ** (-2 * pair / layer.head_dim) / layer.rope.factor
        assert ours == pytest.approx(expected, rel=1e-5)


# Optional keys


def test_defaults_are_those_of_the_family():
    base = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4}
    base |= {"num_key_value_heads": 2, "head_dim": 16}
    plain = read_spec({"model_type": "gemma4_text", **base})
    unified = read_spec({"model_type": "gemma4_unified_text", **base})
    assert [layer.is_global for layer in plain.layers] == [False] * 5 + [True, False, True]  # every sixth layer, and the last
    assert (plain.layers[0].window, unified.layers[0].window) == (512, 1024)
    assert (plain.max_position, unified.max_position) == (131_072, 262_144)
    assert (plain.ple_dim, unified.ple_dim) == (256, 0)
    assert (plain.image_attention, unified.image_attention) == ("causal", "all")
    assert plain.layers[5].head_dim == 512
    assert plain.layers[5].rope.rotated_dims == 128
    assert plain.final_softcap is None
    assert plain.eos_token_ids == (1,)


def test_last_layer_is_global_whatever_the_file_says():
    types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 54
    spec = read_spec(variant("31B", layer_types=types))
    assert [layer.index for layer in spec.layers if layer.is_global] == [5, 59]


def test_outer_stop_tokens_win():
    assert read_spec(VARIANTS["31B"]).eos_token_ids == (1, 106)
    config = copy.deepcopy(VARIANTS["31B"])
    del config["eos_token_id"]
    assert read_spec(config).eos_token_ids == (1,)
    config["text_config"]["eos_token_id"] = [1, 50]
    assert read_spec(config).eos_token_ids == (1, 50)


def test_towers_may_be_null():
    config = VARIANTS["31B"] | {"vision_config": None}
    assert not read_spec(config).has_towers


# Errors


def per_layer(**layers: Any) -> dict[str, Any]:
    config = without("31B", "global_head_dim", "num_global_key_value_heads")
    config["text_config"]["per_layer_config"] = {
        **{str(index): {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)},
        **{key.removeprefix("_"): value for key, value in layers.items()},
    }
    return config


ROPE = VARIANTS["31B"]["text_config"]["rope_parameters"]


def rope(kind: str, **changes: Any) -> dict[str, Any]:
    return variant("31B", rope_parameters=ROPE | {kind: ROPE[kind] | changes})


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        ({"model_type": "llama"}, "model_type", "'llama'"),
        ({}, "model_type", "missing"),
        ({"model_type": "gemma3"}, "model_type", "'gemma3'"),
        ({"model_type": ["gemma4"]}, "model_type", "expected one of"),
        ({"model_type": "gemma4_assistant"}, "model_type", "drafter"),
        ({"model_type": "gemma4"}, "text_config", "missing"),
        (VARIANTS["31B"] | {"text_config": [1]}, "text_config", "expected an object"),
        (VARIANTS["31B"] | {"architectures": ["Gemma4Model"]}, "architectures", "Gemma4ForConditionalGeneration"),
        (VARIANTS["31B"] | {"tie_word_embeddings": False}, "tie_word_embeddings", "expected True"),
        (
            VARIANTS["31B"] | {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config",
            "gemma-4-31B-it-qat-w4a16-ct",
        ),
        (VARIANTS["31B"] | {"quantization": {"bits": 4, "group_size": 64}}, "quantization", "MLX"),
        (
            VARIANTS["E4B"] | {"vision_config": {"quantization_config": {"quant_method": "gguf"}}},
            "vision_config.quantization_config",
            "towers with plain weights",
        ),
        (
            VARIANTS["E4B"] | {"audio_config": {"quantization": {"bits": 4}}},
            "audio_config.quantization",
            "MLX",
        ),
        (VARIANTS["E4B"] | {"compression_config": {"format": "x"}}, "compression_config", "compressed-tensors 'x'"),
        (VARIANTS["31B"] | {"eos_token_id": "x"}, "eos_token_id", "'x'"),
        (variant("31B", model_type="gemma4_unified_text"), "text_config.model_type", "'gemma4_text'"),
        (without("31B", "hidden_size"), "text_config.hidden_size", "missing"),
        (variant("31B", hidden_size=None), "text_config.hidden_size", "null"),
        (variant("31B", hidden_size="5376"), "text_config.hidden_size", "'5376'"),
        (variant("31B", hidden_size=5376.0), "text_config.hidden_size", "5376.0"),
        (variant("31B", hidden_size=True), "text_config.hidden_size", "True"),
        (variant("31B", num_hidden_layers=59), "text_config.layer_types", "60 entries, but num_hidden_layers is 59"),
        (variant("31B", num_hidden_layers=10**9, layer_types=None), "text_config.num_hidden_layers", "at most 1000"),
        (variant("31B", num_hidden_layers=0), "text_config.num_hidden_layers", "at least 1"),
        (variant("31B", layer_types="full"), "text_config.layer_types", "expected a list"),
        (variant("31B", layer_types=["chunked"] * 60), "text_config.layer_types[0]", "'chunked'"),
        (variant("31B", sliding_window=0), "text_config.sliding_window", "at least 1"),
        (variant("31B", attention_bias=True), "text_config.attention_bias", "expected False"),
        (variant("31B", hidden_activation="silu"), "text_config.hidden_activation", "gelu_pytorch_tanh"),
        (variant("31B", attn_logit_softcapping=50.0), "text_config.attn_logit_softcapping", "50.0"),
        (variant("31B", tie_word_embeddings=False), "text_config.tie_word_embeddings", "expected True"),
        (variant("31B", num_key_value_heads=5), "text_config.num_key_value_heads", "does not divide"),
        (variant("31B", num_global_key_value_heads=3), "text_config.num_key_value_heads", "layer 5 has 3"),
        (variant("31B", head_dim=255), "text_config.head_dim", "even"),
        (variant("31B", num_kv_shared_layers=60), "text_config.num_kv_shared_layers", "no earlier layer"),
        (variant("31B", num_kv_shared_layers=55), "text_config.num_kv_shared_layers", "layer 5 (full_attention)"),
        (variant("31B", num_kv_shared_layers=61), "text_config.num_kv_shared_layers", "no earlier layer"),
        (variant("31B", num_kv_shared_layers=-1), "text_config.num_kv_shared_layers", "at least 0"),
        (variant("31B", use_bidirectional_attention="all"), "text_config.use_bidirectional_attention", "'all'"),
        (variant("31B", attention_k_eq_v="yes"), "text_config.attention_k_eq_v", "true or false"),
        (variant("31B", rms_norm_eps=math.nan), "text_config.rms_norm_eps", "nan"),
        (variant("31B", final_logit_softcapping=0), "text_config.final_logit_softcapping", "above 0"),
        (variant("26B-A4B", num_experts=None), "text_config.num_experts", "null"),
        (variant("26B-A4B", top_k_experts=129), "text_config.top_k_experts", "more than num_experts 128"),
        (variant("12B", enable_moe_block=True), "text_config.enable_moe_block", "no routed experts"),
        (variant("12B", hidden_size_per_layer_input=256), "text_config.hidden_size_per_layer_input", "no per-layer"),
        (variant("E2B", vocab_size_per_layer_input=1000), "text_config.vocab_size_per_layer_input", "less than vocab_size"),
        (rope("full_attention", rope_type="yarn"), "rope_parameters.full_attention.rope_type", "'yarn'"),
        (rope("full_attention", rope_theta=None), "rope_parameters.full_attention.rope_theta", "null"),
        (rope("full_attention", partial_rotary_factor=1.5), "full_attention.partial_rotary_factor", "at most 1"),
        (rope("full_attention", partial_rotary_factor=0.001), "full_attention.partial_rotary_factor", "none of the 512"),
        (rope("sliding_attention", partial_rotary_factor=0.5), "sliding_attention.partial_rotary_factor", "rotates every dim"),
        (rope("sliding_attention", factor=8.0), "sliding_attention.factor", "without scaling"),
        (variant("31B", rope_parameters={"rope_type": "default"}), "text_config.rope_parameters.sliding_attention", "missing"),
        (variant("31B", rope_parameters=None, rope_theta=1e6), "text_config.rope_theta", "rope_parameters is missing"),
        (variant("31B", rope_scaling={"factor": 8}), "text_config.rope_scaling", "got a dict, expected no value"),
        (per_layer(_60={"head_dim": 512}), "per_layer_config.60", "from 0 to 59"),
        (per_layer(_x={"head_dim": 512}), "per_layer_config.x", "is not a layer"),
        (per_layer(_11={"head_dim": 128}), "per_layer_config", "layer 11 differs from layer 5"),
        (per_layer(_11={"sliding_window": 7}), "per_layer_config.11.sliding_window", "cannot differ between layers"),
        (per_layer(_11=5), "per_layer_config.11", "expected an object"),
        (per_layer() | {"text_config": per_layer()["text_config"] | {"global_head_dim": 256}}, "global_head_dim", "says 512"),
        ([1, 2], "config.json", "expected an object"),
    ],
)
def test_refusal_names_the_key(config, key, words):
    with pytest.raises(CheckpointError) as caught:
        read_spec(config)
    assert key in caught.value.message
    assert words in str(caught.value)
    assert "\n" not in caught.value.message


def test_handwritten_per_layer_form_equals_the_old_one():
    assert read_spec(per_layer()).layers == read_spec(VARIANTS["31B"]).layers
    padded = per_layer()
    padded["text_config"]["per_layer_config"] = {
        key.zfill(2): value for key, value in padded["text_config"]["per_layer_config"].items()
    }
    assert read_spec(padded).layers == read_spec(VARIANTS["31B"]).layers


def test_empty_per_layer_config_means_equal_layers():
    config = without("31B", "global_head_dim", "num_global_key_value_heads")
    config["text_config"]["per_layer_config"] = {}
    assert {(layer.head_dim, layer.num_kv_heads) for layer in read_spec(config).layers} == {(256, 16)}


@pytest.mark.parametrize("name", ["E2B", "12B", "26B-A4B"])
def test_no_value_of_any_key_escapes_as_another_error(name):
    """Each key with each odd value gives a spec or a CheckpointError, never a TypeError or KeyError."""
    odd = [None, True, False, 0, -1, 1, 3, 2.5, math.inf, math.nan, "", "x", [], [None], [[]], {}, {"a": 1}, {"0": {}}, 10**30]
    refusals = []
    for section in ("", "text_config", "rope"):
        for key in [*_section(VARIANTS[name], section), "per_layer_config", "rope_scaling", "quantization_config"]:
            for value in odd:
                config = copy.deepcopy(VARIANTS[name])
                _section(config, section)[key] = value
                try:
                    read_spec(config)
                except CheckpointError as error:
                    refusals.append(error.message)
    assert len(refusals) > 300
    assert not any("\n" in message for message in refusals)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    if name == "rope":
        return config["text_config"]["rope_parameters"]["full_attention"]
    return config[name] if name else config
