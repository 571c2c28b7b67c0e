"""DFlash checkpoints: config, errors, tensors and cache."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from culet.cache.spec import plan_cache
from culet.config import DraftChoice
from culet.drafters.base import open_drafter, plan_drafter_attention
from culet.drafters.dflash.model import load_dflash
from culet.drafters.dflash.plan import DFlashPlan
from culet.drafters.dflash.spec import DFlashMask, make_config, read_dflash
from culet.errors import CheckpointError, ConfigError, UnsupportedError
from culet.hardware import find_gpu
from culet.models.checkpoint import open_checkpoint
from culet.models.spec import ModelSpec, read_spec
from culet.models.variants import VARIANTS
from culet.models.weights import load_model
from culet.testing.random_dflash import TINY, write_dflash
from culet.testing.tiny import write_checkpoint

SPECS = {name: read_spec(config) for name, config in VARIANTS.items()}


def test_published_dimensions() -> None:
    """The generated config of a target equals the published one, if there is one."""
    large = read_dflash(make_config(SPECS["31B"]), SPECS["31B"])
    assert large.taps == (1, 12, 23, 35, 46, 57)
    assert (large.num_heads, large.num_kv_heads, large.head_dim, large.mlp_width) == (64, 8, 128, 10752)
    assert large.layers == (*[DFlashMask(2048, is_causal=True)] * 4, DFlashMask(None, is_causal=False))
    assert (large.block_size, large.mask_token_id, large.rope_theta, large.final_softcap) == (16, 4, 1e6, 30.0)
    small = read_dflash(make_config(SPECS["26B-A4B"]), SPECS["26B-A4B"])
    assert small.taps == (1, 6, 11, 17, 22, 27)
    assert (small.num_heads, small.num_kv_heads, small.head_dim, small.mlp_width) == (32, 8, 128, 5632)
    shapes = dict(large.tensor_shapes())
    assert shapes["fc.weight"] == (5376, 6 * 5376)
    assert shapes["layers.4.self_attn.q_proj.weight"] == (8192, 5376)
    assert len(shapes) == 3 + 5 * 11


@pytest.mark.parametrize("name", VARIANTS)
def test_every_target_can_have_one(name: str) -> None:
    spec = open_drafter(DraftChoice("dflash", "random:"), SPECS[name])
    assert spec.max_drafts == 15
    assert spec.needs_intervals
    assert not spec.reads_target_pages
    total = sum(math.prod(shape) for _, shape in read_dflash(make_config(SPECS[name]), SPECS[name]).tensor_shapes())
    assert sum(spec.num_parameters().values()) == total


def test_random_drafters_by_name() -> None:
    spec = DFlashPlan.open(DraftChoice("dflash", "random:layers=2,block=8,seed=3"), SPECS["12B"])
    assert (len(spec.spec.layers), spec.spec.block_size, spec.max_drafts) == (2, 8, 7)
    assert spec.random is not None
    assert spec.random.seed == 3
    with pytest.raises(ConfigError, match="heads=2 is not an option, expected one of: layers=N"):
        DFlashPlan.open(DraftChoice("dflash", "random:heads=2"), SPECS["12B"])


# The cache


@pytest.mark.parametrize(("name", "page_tokens"), [("31B", 640), ("26B-A4B", 160), ("12B", 256), ("E4B", 128), ("E2B", 32)])
def test_one_group_in_the_targets_slabs(name: str, page_tokens: int) -> None:
    """A drafter leaves the target's pages unchanged. Its own pages hold as many tokens as fit in a slab, a multiple of 16."""
    spec = open_drafter(DraftChoice("dflash", "random:"), SPECS[name])
    alone = plan_cache(SPECS[name].kv_specs(2))
    layout = plan_cache([*SPECS[name].kv_specs(2), *spec.kv_specs(2)])
    assert layout.slab_bytes == alone.slab_bytes
    *others, own = layout.groups
    assert tuple(others) == alone.groups
    assert (own.name, own.window, own.ahead) == ("dflash", None, 16)
    assert own.layers == tuple(range(len(SPECS[name].layers), len(SPECS[name].layers) + 5))
    assert own.page_tokens == page_tokens
    assert 0 <= layout.waste(own) < 16 * own.bytes_per_token


def test_a_group_of_the_same_shape_as_the_targets_stays_apart() -> None:
    config = make_config(SPECS["E4B"], head_dim=512, num_key_value_heads=2, num_attention_heads=8)
    shape = read_dflash(config, SPECS["E4B"])
    spec = DFlashPlan("x", None, shape, len(SPECS["E4B"].layers), 3)
    layout = plan_cache([*SPECS["E4B"].kv_specs(2), *spec.kv_specs(2)])
    assert [group.name for group in layout.groups] == ["sliding", "global", "dflash"]


def test_attention_is_planned_by_its_own_needs() -> None:
    spec = open_drafter(DraftChoice("dflash", "random:"), SPECS["31B"])
    layout = plan_cache([*SPECS["31B"].kv_specs(2), *spec.kv_specs(2)])
    plan = plan_drafter_attention(spec, layout, find_gpu("h200"))
    assert [(group.need.group, group.backend) for group in plan.groups] == [("dflash", "triton")]
    assert plan.groups[0].need.head_dim == 128
    assert plan.groups[0].need.layers == (60, 61, 62, 63, 64)
    assert plan_drafter_attention(spec, layout, find_gpu("h200"), "torch_cpu").groups[0].backend == "torch_cpu"
    assert plan.groups[0].need.has_intervals
    with pytest.raises(
        ConfigError, match=r"'triton' does not support layer 60 \(dflash, head dim 128\) on cpu: needs an NVIDIA"
    ):
        plan_drafter_attention(spec, layout, find_gpu("cpu"), "triton")


# Errors


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures: got"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type: the drafter is in the format of the speculators"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization: the format is MLX"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: the format is 'awq'"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias: got True"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling: got"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters.rope_type: got 'yarn'"),
        ({"hidden_size": 4096}, "hidden_size: got 4096, but the target has 5376"),
        ({"vocab_size": 1000}, "vocab_size: got 1000, but"),
        ({"num_target_layers": 30}, "num_target_layers: got 30, but"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: got 7, which does not divide"),
        ({"head_dim": 127}, "head_dim: got 127"),
        ({"num_hidden_layers": 4}, "layer_types: got"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: got 1000000"),
        ({"layer_types": ["full_attention"] * 4 + ["linear_attention"]}, "layer_types: got"),
        ({"sliding_window": None}, "sliding_window: got null"),
        ({"sliding_window": 8}, "sliding_window: got 8, which is less than the 16 tokens"),
        ({"block_size": 1}, "block_size: got 1"),
        ({"block_size": None}, "block_size: got null"),
        ({"dflash_config": None}, "target_layer_ids: got None"),
        ({"dflash_config": []}, "dflash_config: got list"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id: the key is missing"),
        ({"dflash_config": {"target_layer_ids": [], "mask_token_id": 4}}, r"dflash_config.target_layer_ids: got \[\]"),
        ({"dflash_config": {"target_layer_ids": [60], "mask_token_id": 4}}, "got 60, but the target's layers are 0 to 59"),
        ({"dflash_config": {"target_layer_ids": [-1], "mask_token_id": 4}}, "got -1, but the target's layers"),
        ({"dflash_config": {"target_layer_ids": [True], "mask_token_id": 4}}, "got True, but the target's layers"),
        ({"dflash_config": {"target_layer_ids": [3, 3], "mask_token_id": 4}}, "lists a layer twice"),
        ({"dflash_config": {"target_layer_ids": [3], "mask_token_id": 10**6}}, "mask_token_id: got 1000000"),
        ({"dflash_config": {"target_layer_ids": [3], "mask_token_id": 4, "is_causal": 1}}, "is_causal: got 1"),
        ({"intermediate_size": "many"}, "intermediate_size: got 'many'"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping: got -1"),
    ],
)
def test_bad_configs(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config(SPECS["31B"]) | changes))
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_drafter(DraftChoice("dflash", str(tmp_path)), SPECS["31B"])
    assert caught.value.message.startswith(f"drafter {tmp_path}: config.json: ")
    assert "\n" not in caught.value.message


def test_an_assistant_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    with pytest.raises(CheckpointError) as caught:
        open_drafter(DraftChoice("dflash", str(tmp_path)), SPECS["31B"])
    assert '"method": "mtp"' in caught.value.hint


def test_spellings() -> None:
    """Keys at either level, rope under either name, layers without kinds, and an explicit mask rule are all accepted."""
    config = make_config(SPECS["31B"])
    expected = read_dflash(config, SPECS["31B"])
    flat = {key: value for key, value in config.items() if key not in ("dflash_config", "rope_theta")} | config["dflash_config"]
    assert read_dflash(flat | {"rope_parameters": {"rope_theta": 1e6}}, SPECS["31B"]) == expected
    full = read_dflash(config | {"layer_types": None}, SPECS["31B"])
    assert full.layers == (DFlashMask(None, is_causal=False),) * 5
    own = config["dflash_config"] | {"is_causal": True}
    assert all(layer.is_causal for layer in read_dflash(config | {"dflash_config": own}, SPECS["31B"]).layers)


def test_too_many_drafts() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens: got 9, but blocks of 8 tokens hold at most 7 drafts"):
        open_drafter(DraftChoice("dflash", "random:block=8", num_speculative_tokens=9), SPECS["31B"])
    assert open_drafter(DraftChoice("dflash", "random:block=8", num_speculative_tokens=3), SPECS["31B"]).max_drafts == 3
    with pytest.raises(UnsupportedError, match="its blocks have 32 tokens, but attention supports at most 16"):
        open_drafter(DraftChoice("dflash", "random:block=32"), SPECS["31B"])


# Weights


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    folder = write_checkpoint(tmp_path_factory.mktemp("target"), "31B", dtype=torch.float32)
    return folder, open_checkpoint(str(folder)).spec


@pytest.fixture
def drafter(tiny: tuple[Path, ModelSpec], tmp_path: Path) -> Path:
    return write_dflash(tmp_path / "drafter", tiny[1], overrides=TINY)


def load(tiny: tuple[Path, ModelSpec], folder: Path):
    model = load_model(open_checkpoint(str(tiny[0])), dtype=torch.float32, device=torch.device("cpu"), progress=False)
    spec = DFlashPlan.open(DraftChoice("dflash", str(folder)), tiny[1])
    return load_dflash(folder, spec.spec, model, progress=False)


def rewrite(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_weights_are_where_they_belong(tiny, drafter) -> None:
    model, stored = load(tiny, drafter), load_file(drafter / "model.safetensors")
    assert set(model.placements()) == set(stored)
    for name, place in model.placements().items():
        assert torch.equal(place.target, stored[name].float()), name
    assert sum(weight.numel() for weight in model.parameters()) == sum(tensor.numel() for tensor in stored.values())


def test_other_names(tiny, drafter) -> None:
    """Published files may add a prefix to all tensors, or contain copies of the target's own tensors."""
    expected = load_file(drafter / "model.safetensors")

    def change(tensors) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)
        tensors["model.embed_tokens.weight"] = torch.zeros(3, 3)
        tensors["lm_head.weight"] = torch.zeros(3, 3)

    rewrite(drafter, change)
    model = load(tiny, drafter)
    assert torch.equal(model.placements()["fc.weight"].target, expected["fc.weight"].float())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop("fc.weight"), r"1 tensor \(fc.weight\) missing"),
        (lambda tensors: tensors.pop("layers.1.self_attn.k_norm.weight"), r"\(layers.1.self_attn.k_norm.weight\) missing"),
        (
            lambda tensors: tensors.update({"layers.3.mlp.up_proj.weight": torch.zeros(2, 2)}),
            r"layers.3.mlp.up_proj.*unexpected",
        ),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 64)}), r"fc.weight: \[64, 64\], expected \[64, \d+\]"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(64, dtype=torch.int64)}), "norm.weight: I64"),
    ],
)
def test_tensors_that_do_not_fit(tiny, drafter, change, problem: str) -> None:
    rewrite(drafter, change)
    with pytest.raises(CheckpointError, match=problem) as caught:
        load(tiny, drafter)
    assert caught.value.message.startswith(str(drafter))


def test_a_folder_that_cannot_be_written(tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_dflash(tmp_path / "file", tiny[1], overrides=TINY)
