"""Checkpoints written by compressed-tensors: every value is read bit by bit, and the logits are those of the plain twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from culet.errors import CheckpointError
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
from tests.models.formats.comparing import assert_same_model, assert_same_values, load
from tests.models.formats.writing import compressed, ct_config, write_pair


def integers(bits: int, group: int = 0, symmetric: bool = True) -> dict[str, Any]:
    strategy: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "int4 in groups of 32": (integers(4, 32), "pack-quantized"),
    "int4 in groups of 64": (integers(4, 64), "pack-quantized"),
    "int4 in groups of 128": (integers(4, 128), "pack-quantized"),
    "int4 per channel": (integers(4), "pack-quantized"),
    "int4 with zero points": (integers(4, 32, symmetric=False), "pack-quantized"),
    "int4 with zero points in groups of 128": (integers(4, 128, symmetric=False), "pack-quantized"),
    "int8 per channel": (integers(8), "pack-quantized"),
    "int8 in groups of 128": (integers(8, 128), "pack-quantized"),
    "int8 not packed": (integers(8), "int-quantized"),
    "fp8 per channel": (floats("channel"), "float-quantized"),
    "fp8 per tensor": (floats("tensor"), "float-quantized"),
    "fp8 in blocks": (floats("block", block_structure=[128, 128]), "float-quantized"),
    "nvfp4": (NVFP4, "nvfp4-pack-quantized"),
}
# The others are slow: each case of one shape is run, and each shape once.
QUICK = {("int4 in groups of 32", "31B"), ("int4 with zero points in groups of 128", "31B"), ("nvfp4", "26B-A4B")}
QUICK |= {("fp8 in blocks", "31B"), ("int8 per channel", "E2B")}


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        pytest.param(case, shape, marks=[] if (case, shape) in QUICK else pytest.mark.slow)
        for case in CASES
        for shape in ("E2B", "31B", "26B-A4B")
    ],
)
def test_values_and_logits(case: str, shape: str, tmp_path: Path) -> None:
    weights, form = CASES[case]
    pair = write_pair(tmp_path, shape, compressed(weights, form), ct_config((["Linear"], weights, form)))
    assert assert_same_model(pair.folder, pair.twin) >= 4 * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["int4 by group", "int4 by row", "int8 by row"])
def test_stored_scales_keep_their_precision(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """bfloat16 activations do not round them, except for float32 scales of groups."""
    weights = {"int4 by group": integers(4, 32), "int4 by row": integers(4), "int8 by row": integers(8)}[case]
    folder = write_pair(
        tmp_path, "31B", compressed(weights, "pack-quantized"), ct_config((["Linear"], weights, "pack-quantized"))
    ).folder
    file, name = folder / "model.safetensors", "model.language_model.layers.0.mlp.down_proj"
    tensors = load_file(file)
    noise = torch.Generator().manual_seed(1)
    scales = {each: tensors[each].float() for each in tensors if each.endswith("weight_scale")}
    scales = {each: (value * (1 + torch.rand(value.shape, generator=noise) / 100)).to(dtype) for each, value in scales.items()}
    save_file(tensors | scales, file)
    checkpoint = open_checkpoint(str(folder))
    model = load_model(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"), progress=False)
    held = model._layers[0].mlp.down.tensors.held.scale
    stored = scales[f"{name}.weight_scale"].view(held.shape)
    is_rounded = case == "int4 by group" and dtype == torch.float32
    assert torch.equal(held.float(), stored.bfloat16().float() if is_rounded else stored.float())


def test_groups_and_ignore_lists(tmp_path: Path) -> None:
    """Projections of one merged matrix may differ. Names, classes and expressions select them."""
    int4, int8 = integers(4, 32), integers(8)
    forms = {"v_proj": compressed(int8, "pack-quantized"), "down_proj": None, "k_proj": None}
    by_default = compressed(int4, "pack-quantized")
    plain = "model.language_model.layers.1.mlp.gate_proj"

    def quantise(module: str, weight: Any) -> Any:
        form = forms.get(module.rpartition(".")[2], by_default)
        return None if form is None or module == plain else form(module, weight)

    config = ct_config(
        (["re:.*v_proj$"], int8, "pack-quantized"),
        (["Linear"], int4, "pack-quantized"),
        ignore=("lm_head", "re:.*down_proj", "re:.*k_proj$", plain),
    )
    pair = write_pair(tmp_path, "E2B", quantise, config)
    assert_same_model(pair.folder, pair.twin)
    model = load(pair.folder)
    layer = model._layers[1]
    assert {type(part).__name__ for part in layer.mlp.gate_up._parts} == {"PlainMatrix", "QuantisedMatrix"}
    assert [part.__class__.__name__ for part in layer.attention.qkv._parts] == [
        "QuantisedMatrix",
        "PlainMatrix",
        "QuantisedMatrix",
    ]
    assert type(layer.mlp.down).__name__ == "PlainMatrix"
    assert type(model._layers[0].mlp.gate_up).__name__ == "QuantisedMatrix"


@pytest.mark.parametrize("target", ["re:.*gate_proj$", "model.language_model.layers.1.mlp.gate_proj"])
def test_the_most_exact_target_counts(target: str, tmp_path: Path) -> None:
    """Names come before expressions and expressions before classes, whatever the order of the groups."""
    int4, int8 = integers(4, 32), integers(8)
    by_class, by_target = compressed(int4, "pack-quantized"), compressed(int8, "pack-quantized")

    def quantise(module: str, weight: Any) -> Any:
        is_target = module == target or (target.startswith("re:") and module.endswith("gate_proj"))
        return (by_target if is_target else by_class)(module, weight)

    config = ct_config((["Linear"], int4, "pack-quantized"), ([target], int8, "pack-quantized"))
    pair = write_pair(tmp_path, "31B", quantise, config)
    assert assert_same_values(load(pair.folder), load(pair.twin)) >= 4 * 6


def test_early_nvfp4_files(tmp_path: Path) -> None:
    """They have another name for the experts, and files with fp4 activations have scales for those."""
    config = ct_config((["Linear"], NVFP4, "nvfp4-pack-quantized"))
    pair = write_pair(tmp_path, "26B-A4B", compressed(NVFP4, "nvfp4-pack-quantized"), config)
    file = pair.folder / "model.safetensors"
    stored = {name.replace(".experts.", ".moe.experts."): tensor for name, tensor in load_file(file).items()}
    modules = [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    save_file(stored | {f"{module}.input_global_scale": torch.ones(1) for module in modules}, file)
    assert assert_same_values(load(pair.folder), load(pair.twin)) >= 4 * 6


def test_down_matrices_of_experts_may_differ(tmp_path: Path) -> None:
    int4, int8 = integers(4, 32), integers(8)
    by_default, down = compressed(int4, "pack-quantized"), compressed(int8, "pack-quantized")
    config = ct_config((["re:.*experts.*down_proj"], int8, "pack-quantized"), (["Linear"], int4, "pack-quantized"))
    pair = write_pair(
        tmp_path,
        "26B-A4B",
        lambda module, weight: (down if "experts" in module and "down_proj" in module else by_default)(module, weight),
        config,
    )
    assert assert_same_model(pair.folder, pair.twin) >= 4 * 6


@pytest.mark.parametrize(
    ("plain", "message"),
    [("down_proj", "only some matrices are quantised"), ("experts.3.", "gate_proj of expert 3 has another format")],
)
def test_experts_that_differ(plain: str, message: str, tmp_path: Path) -> None:
    int4 = integers(4, 32)
    quantise = compressed(int4, "pack-quantized")
    pair = write_pair(
        tmp_path,
        "26B-A4B",
        lambda module, weight: None if "experts" in module and plain in module else quantise(module, weight),
        ct_config((["Linear"], int4, "pack-quantized"), ignore=("lm_head", f"re:.*experts.*{plain}")),
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        load(pair.folder)
    assert "RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic" in caught.value.hint


def test_experts_may_stay_plain(tmp_path: Path) -> None:
    """Files that leave the experts alone still store each by itself."""
    int4 = integers(4, 32)
    quantise = compressed(int4, "pack-quantized")
    config = ct_config((["Linear"], int4, "pack-quantized"), ignore=("lm_head", "re:.*experts.*"))
    pair = write_pair(
        tmp_path, "26B-A4B", lambda module, weight: None if "experts" in module else quantise(module, weight), config
    )
    assert_same_model(pair.folder, pair.twin)
    assert type(load(pair.folder)._layers[0].experts.stack).__name__ == "PerExpertPlain"
