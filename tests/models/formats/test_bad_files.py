"""Bad quantised checkpoints give a clear error before anything is allocated on the device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from culet.errors import CheckpointError, ConfigError, CuletError
from culet.models import weights as weights_module
from culet.models.quantised.config import read_quantisation
from culet.models.variants import VARIANTS
from tests.models.formats.comparing import load
from tests.models.formats.test_compressed_tensors import NVFP4, floats, integers
from tests.models.formats.test_gguf import write_gguf
from tests.models.formats.test_other_tools import write_mobile
from tests.models.formats.writing import PREFIX, compressed, ct_config, write_pair

MODULE = f"{PREFIX}layers.0.mlp.gate_proj"
PACKED, SCALE, ZERO = (f"{MODULE}.{ending}" for ending in ("weight_packed", "weight_scale", "weight_zero_point"))


@pytest.fixture(scope="module")
def int4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    args = integers(4, 32, symmetric=False)
    config = ct_config((["Linear"], args, "pack-quantized"))
    return write_pair(tmp_path_factory.mktemp("int4"), "31B", compressed(args, "pack-quantized"), config).folder


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the devices on which models are built."""
    built: list[str] = []
    gemma4 = weights_module.Gemma4

    def build(spec: Any, weights: Any, **options: Any) -> Any:
        built.append(weights.device.type)
        return gemma4(spec, weights, **options)

    monkeypatch.setattr(weights_module, "Gemma4", build)
    return built


def refused(folder: Path, target: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> CuletError:
    """Copy a checkpoint, change its tensors or its config, and return the error of loading it."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(CuletError) as caught:
        load(target)
    return caught.value


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    return args


def spoil(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[3, 1] = value
    return tensor


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], Any], str]] = {
    "a pack that is cut off": (
        lambda t, c: t.update({PACKED: t[PACKED][:, :-4]}),
        "weight_packed: [256, 12], expected",
    ),
    "rows that are cut off": (lambda t, c: t.update({PACKED: t[PACKED][:-8]}), "[248, 16], expected [256, 16]"),
    "scales of the wrong shape": (lambda t, c: t.update({SCALE: t[SCALE][:, :1]}), "weight_scale: [256, 1], expected [256, 4]"),
    "scales of the wrong type": (
        lambda t, c: t.update({SCALE: t[SCALE].to(torch.int32)}),
        "weight_scale: I32) of an",
    ),
    "a scale that is NaN": (
        lambda t, c: t.update({SCALE: spoil(t[SCALE], float("nan"))}),
        "1 tensor (" + SCALE + ") with scales",
    ),
    "a scale that is infinite": (lambda t, c: t.update({SCALE: spoil(t[SCALE], float("inf"))}), "NaN or infinite"),
    "no zero points": (lambda t, c: t.pop(ZERO), "gate_proj has no weight_zero_point"),
    "zero points of the wrong shape": (
        lambda t, c: t.update({ZERO: t[ZERO][:-1]}),
        "[31, 4], expected [32, 4]",
    ),
    "no scales": (lambda t, c: t.pop(SCALE), "1 tensor (layers.0.mlp.gate_proj.weight_scale) missing"),
    "a group that does not divide": (
        lambda t, c: weights_of(c).update(group_size=256),
        "128 columns, which groups of 256",
    ),
    # The kernels' tiles hold whole groups, and would read wrong scales.
    "a group that is no power of two": (lambda t, c: weights_of(c).update(group_size=96), "group_size 96, expected"),
    "a group of nothing": (lambda t, c: weights_of(c).update(group_size=0), "group_size 0, expected"),
    "a group that is too small": (lambda t, c: weights_of(c).update(group_size=4), "group_size 4, expected"),
    "another group": (lambda t, c: weights_of(c).update(group_size=64), "weight_scale: [256, 4], expected [256, 2]"),
    "other bits": (lambda t, c: weights_of(c).update(num_bits=3), "3-bit int weights"),
    "an order of columns": (lambda t, c: t.update({f"{MODULE}.weight_g_idx": torch.arange(128)}), "weight_g_idx) unexpected"),
    "a tensor that nobody knows": (lambda t, c: t.update({f"{MODULE}.odd": torch.ones(1)}), "gate_proj.odd) unexpected"),
    "an unknown tool": (lambda t, c: c["quantization_config"].update(quant_method="hqq"), "the format is 'hqq'"),
    "a wrong expression": (
        lambda t, c: c["quantization_config"].update(ignore=["re:("]),
        "'re:(' is not a regular expression",
    ),
    "a wrong target": (
        lambda t, c: c["quantization_config"]["config_groups"]["group_0"].update(targets=["re:["]),
        "'re:[' is not a regular expression",
    ),
    "the name of a preset": (
        lambda t, c: c["quantization_config"].update(config_groups={"W4A16": ["Linear"]}),
        "config_groups.W4A16: got list",
    ),
    "no config": (lambda t, c: c.pop("quantization_config"), "weight_packed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_bad_int4(name: str, int4_folder: Path, tmp_path: Path, devices: list[str]) -> None:
    change, message = CHANGES[name]
    error = refused(int4_folder, tmp_path / "bad", lambda tensors, config: change(tensors, config))
    assert message in error.message, error.message
    assert error.hint
    assert "cpu" not in devices


def test_a_tensor_in_two_files(int4_folder: Path, tmp_path: Path, devices: list[str]) -> None:
    """The index names one of them, but a download that mixes two versions may have either."""
    tensors = load_file(int4_folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((int4_folder / "config.json").read_bytes())
    parts = [{name: each for name, each in tensors.items() if (name < MODULE) == is_first} for is_first in (True, False)]
    names = ["a.safetensors", "b.safetensors"]
    weight_map = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    parts[0][SCALE] = 2 * tensors[SCALE]
    for file, part in zip(names, parts, strict=True):
        save_file(part, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=rf"b\.safetensors and a\.safetensors both have 1 tensor \({SCALE}\)"):
        load(tmp_path)
    assert "cpu" not in devices


def test_a_table_in_fp8_blocks(tmp_path: Path, devices: list[str]) -> None:
    args = floats("block", block_structure=[128, 128])
    folder = write_pair(
        tmp_path, "31B", compressed(args, "float-quantized"), ct_config((["Linear"], args, "float-quantized"))
    ).folder
    table = f"{PREFIX}embed_tokens"

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        rows, columns = (-(-size // 128) for size in tensors[f"{table}.weight"].shape)
        tensors[f"{table}.weight"] = tensors[f"{table}.weight"].to(torch.float8_e4m3fn)
        tensors[f"{table}.weight_scale"] = torch.ones(rows, columns)

    wrong = refused(folder, tmp_path / "bad", change)
    assert "embed_tokens: a table in fp8 blocks" in wrong.message
    assert wrong.hint
    assert "cpu" not in devices


@pytest.mark.parametrize("num_blocks", [0, 3, 5, 256])
def test_scales_of_a_mobile_table(num_blocks: int, tmp_path: Path, devices: list[str]) -> None:
    folder, _ = write_mobile(tmp_path, 0.0)
    name = f"{PREFIX}embed_tokens.embedding_scale"

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[name] = torch.ones(tensors[name].shape[0], num_blocks)

    wrong = refused(folder, tmp_path / "bad", change)
    assert f"embed_tokens.embedding_scale has {num_blocks} scales per row" in wrong.message
    assert wrong.hint
    assert "cpu" not in devices


def test_a_file_that_is_cut_off(int4_folder: Path, tmp_path: Path, devices: list[str]) -> None:
    data = (int4_folder / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((int4_folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path)
    assert devices == []


def test_bad_fp8(tmp_path: Path, devices: list[str]) -> None:
    args = floats("channel")
    config = ct_config((["Linear"], args, "float-quantized"))
    folder = write_pair(tmp_path, "31B", compressed(args, "float-quantized"), config).folder
    wrong = refused(folder, tmp_path / "a", lambda tensors, _: tensors.update({SCALE: tensors[SCALE][:9]}))
    assert "weight_scale: [9, 1], expected [256, 1]" in wrong.message
    wrong = refused(folder, tmp_path / "b", lambda _, config: weights_of(config).update(strategy="block"))
    assert "weight_scale: [256, 1], expected [2, 1]" in wrong.message
    wrong = refused(folder, tmp_path / "c", lambda _, config: weights_of(config).update(num_bits=4))
    assert "4-bit float" in wrong.message
    assert "cpu" not in devices


@pytest.mark.parametrize("value", [0.0, 1e-45, float("inf"), float("nan")])
def test_a_global_scale_that_cannot_divide(value: float, tmp_path: Path, devices: list[str]) -> None:
    config = ct_config((["Linear"], NVFP4, "nvfp4-pack-quantized"))
    folder = write_pair(tmp_path, "31B", compressed(NVFP4, "nvfp4-pack-quantized"), config).folder
    name = f"{MODULE}.weight_global_scale"
    wrong = refused(folder, tmp_path / "bad", lambda tensors, _: tensors.update({name: torch.tensor([value])}))
    assert f"1 tensor ({name}) with scales that are NaN or infinite, or 0" in wrong.message
    assert "cpu" not in devices


@pytest.mark.parametrize(
    ("described", "message", "file"),
    [
        ({"quant_method": "gptq"}, "'gptq'", "google/gemma-4-31B-it-qat-w4a16-ct"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'", "google/gemma-4-31B-it-qat-w4a16-ct"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED"}, "ModelOpt 'MIXED'", "31B"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "'marlin-24'", "31B"),
        ({"bits": 4, "group_size": 64}, "MLX", "31B"),
        ({"quant_method": "gemma", "num_bits": 3}, "3 bits", "31B"),
        ({"quant_method": "gemma", "num_bits": 4.0}, "4.0 bits", "31B"),
        ([1], "got list", "31B"),
    ],
)
def test_formats_that_are_not_read(described: Any, message: str, file: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_quantisation(VARIANTS["31B"] | {"quantization_config": described})
    assert message in caught.value.message
    assert file in (caught.value.hint or "")


def test_a_file_of_the_same_model_is_named() -> None:
    for name, config in VARIANTS.items():
        with pytest.raises(CheckpointError) as caught:
            read_quantisation(config | {"quantization_config": {"quant_method": "awq"}})
        wanted = "RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic" if name == "26B-A4B" else f"google/gemma-4-{name}-it-qat-w4a16-ct"
        assert wanted in (caught.value.hint or "")


def test_plain_weights_with_a_config_from_training(tmp_path: Path) -> None:
    """Google's QAT weights in bfloat16 carry a quantization_config without a method."""
    assert read_quantisation(VARIANTS["31B"] | {"quantization_config": {"weights": "q4_0"}}) is None


NEUTRAL: Any = {"note": "x"}
MLX: Any = {"bits": 4, "group_size": 64}
FP8: Any = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("outer", "inner", "words"),
    [
        ({"quantization_config": NEUTRAL, "quantization": MLX}, {}, ["quantization: the format is MLX"]),
        ({"quantization_config": NEUTRAL, "compression_config": {"format": "x"}}, {}, ["compression_config: ", "'x'"]),
        ({"quantization_config": NEUTRAL}, {"quantization": MLX}, ["text_config.quantization: the format is MLX"]),
        ({}, {"quantization_config": NEUTRAL, "quantization": MLX}, ["text_config.quantization: the format is MLX"]),
        ({"quantization_config": FP8, "quantization": MLX}, {}, ["quantization: the format is MLX"]),
        (
            {"quantization_config": FP8},
            {"quantization_config": {**FP8, "ignore": ["lm_head"]}},
            ["text_config.quantization_config: differs from quantization_config"],
        ),
    ],
)
def test_no_key_is_ignored(outer: Any, inner: Any, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_quantisation({**VARIANTS["31B"], **outer, "text_config": {**VARIANTS["31B"]["text_config"], **inner}})
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_key_after_one_that_says_nothing_is_read() -> None:
    inner = {**VARIANTS["31B"]["text_config"], "quantization_config": FP8}
    for outer in (NEUTRAL, FP8):  # a section may be there twice
        found = read_quantisation({**VARIANTS["31B"], "quantization_config": outer, "text_config": inner})
        assert found is not None
        assert found.method == "modelopt"


def test_only_plain_weights_can_be_quantised_at_load(int4_folder: Path) -> None:
    with pytest.raises(ConfigError, match="already quantised"):
        load(int4_folder, "fp8")


def test_a_gguf_file_with_another_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]) -> None:
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path / "cache"))
    path, _ = write_gguf(tmp_path, "31B", "Q4_0")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(path.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight", 1))
    with pytest.raises(CheckpointError) as caught:
        load(bad)
    assert "blk.0.ffn_xx.weight) unexpected" in caught.value.message
    assert "layers.0.mlp.up_proj.weight) missing" in caught.value.message
    assert "cpu" not in devices
