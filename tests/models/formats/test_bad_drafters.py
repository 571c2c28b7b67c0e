"""A bad drafter gives a clear error before the target is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from culet.bench.draft import DraftBench
from culet.config import DraftChoice, build_config
from culet.drafters.base import open_drafter
from culet.drafters.mtp.plan import MTPPlan
from culet.drafters.mtp.spec import make_config
from culet.engine.start.parts import build_parts
from culet.errors import CheckpointError, ConfigError, CuletError
from culet.models.checkpoint import open_checkpoint
from culet.models.quantised.write import quantisation_config
from culet.testing.random_dflash import TINY, write_dflash
from culet.testing.tiny import write_checkpoint
from tests.engine.drafting.test_drafting import write_assistant

METHODS = ("mtp", "dflash")
GATE = {"mtp": "model.layers.1.mlp.gate_proj", "dflash": "layers.1.mlp.gate_proj"}
NORM = {"mtp": "model.norm.weight", "dflash": "norm.weight"}
SIZE = {"mtp": "backbone_hidden_size", "dflash": "hidden_size"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("target"), "31B", dtype=torch.float32))


@pytest.fixture(scope="module")
def drafters(target: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, spec = tmp_path_factory.mktemp("drafters"), open_checkpoint(target).spec
    plan = open_drafter(DraftChoice("mtp", "random:"), spec)
    assert isinstance(plan, MTPPlan)
    return {
        "mtp": write_assistant(root / "mtp", plan.spec, make_config(spec)),
        "dflash": write_dflash(root / "dflash", spec, overrides=TINY, dtype=torch.float32),
    }


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("the target was loaded")


@pytest.fixture(autouse=True)
def no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the target is loaded."""
    for module in ("engine.start.worker", "bench.draft"):
        monkeypatch.setattr(f"culet.{module}.load_model", refuse)


def settings_with(target: str, method: str, drafter: Path | str, **choice: Any) -> dict[str, Any]:
    given = {"method": method, "model": str(drafter), **choice}
    return {"model": target, "device": "cpu", "max_model_len": 64, "max_num_seqs": 2, "speculative_config": given}


def error_of(settings: dict[str, Any]) -> CuletError:
    with pytest.raises(CuletError) as caught:
        build_parts(build_config(settings), progress=False)
    return caught.value


def change_tensors(change: Callable[[dict[str, torch.Tensor], str], Any]) -> Callable[[Path, str], None]:
    def apply(folder: Path, method: str) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors, method)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")

    return apply


def change_config(**values: Any) -> Callable[[Path, str], None]:
    def apply(folder: Path, method: str) -> None:
        file = folder / "config.json"
        # A key that is called SIZE has another name in the config of each method.
        changed = {SIZE[method] if key == "SIZE" else key: value for key, value in values.items()}
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return apply


def change_file(change: Callable[[bytes], bytes]) -> Callable[[Path, str], None]:
    def apply(folder: Path, method: str) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return apply


def quantise_gate(scale: float) -> Callable[[Path, str], None]:
    """Store one matrix in fp8, with one scale that is `scale`."""

    def replace_gate(tensors: dict[str, torch.Tensor], method: str) -> None:
        weight = tensors.pop(f"{GATE[method]}.weight")
        scales = torch.full((weight.shape[0], 1), 0.5)
        scales[3] = scale
        tensors |= {f"{GATE[method]}.weight": weight.to(torch.float8_e4m3fn), f"{GATE[method]}.weight_scale": scales}

    def apply(folder: Path, method: str) -> None:
        change_tensors(replace_gate)(folder, method)
        change_config(quantization_config=quantisation_config("fp8", []))(folder, method)

    return apply


BAD: dict[str, tuple[Callable[[Path, str], Any], str]] = {
    "no config": (lambda folder, _: (folder / "config.json").unlink(), "has no config.json"),
    "no weights": (lambda folder, _: (folder / "model.safetensors").unlink(), "the folder has no weights"),
    "another size": (change_config(SIZE=96), "got 96, but the target"),
    "an unknown format": (change_config(quantization_config={"quant_method": "zip"}), "zip"),
    "a file that is cut off": (change_file(lambda data: data[:-100]), "cannot be read"),
    "a header that is cut off": (change_file(lambda data: data[:50]), "cannot be read"),
    "a header of a false size": (change_file(lambda data: (1 << 40).to_bytes(8, "little") + data[8:]), "cannot be read"),
    "a header that is not JSON": (change_file(lambda data: data[:8] + b"x" + data[9:]), "cannot be read"),
    "a missing tensor": (change_tensors(lambda t, m: t.pop(NORM[m])), "norm.weight) missing"),
    "a tensor too many": (change_tensors(lambda t, m: t.update(extra=torch.ones(1))), "1 tensor (extra) unexpected"),
    "a tensor of another shape": (
        change_tensors(lambda t, m: t.update({NORM[m]: t[NORM[m]][:-1]})),
        "norm.weight: [63], expected [64]",
    ),
    "a tensor of another type": (change_tensors(lambda t, m: t.update({NORM[m]: t[NORM[m]].long()})), "norm.weight: I64"),
    "a scale that is NaN": (quantise_gate(float("nan")), "gate_proj.weight_scale) with scales that are NaN"),
    "a scale that is infinite": (quantise_gate(float("inf")), "gate_proj.weight_scale) with scales that are NaN or infinite"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_drafter_is_refused_before_the_target_is_loaded(
    target: str, drafters: dict[str, Path], method: str, name: str, tmp_path: Path
) -> None:
    spoil, words = BAD[name]
    folder = shutil.copytree(drafters[method], tmp_path / "bad")
    spoil(folder, method)
    error = error_of(settings_with(target, method, folder))
    assert isinstance(error, CheckpointError)
    assert words in error.message
    assert str(folder) in error.message
    assert error.hint or name in ("another size", "an unknown format")


@pytest.mark.parametrize(
    ("method", "choice"),
    [("mtp", {}), ("mtp", {"suffix": True}), ("mtp", {"head_dtype": "fp8"}), ("dflash", {}), ("dflash", {"suffix": True})],
)
def test_a_good_drafter_is_not(target: str, drafters: dict[str, Path], method: str, choice: dict[str, Any]) -> None:
    """With a good drafter, the target is loaded next. A file with the config alone has no weights."""
    settings = settings_with(target, method, drafters[method], **choice)
    with pytest.raises(AssertionError, match="the target was loaded"):
        build_parts(build_config(settings), progress=False)
    alone = settings_with(target, method, drafters[method] / "config.json", **choice)
    assert "is a file, expected a checkpoint folder" in error_of(alone).message


@pytest.mark.parametrize("method", METHODS)
def test_another_drafter_is_refused(target: str, drafters: dict[str, Path], method: str, tmp_path: Path) -> None:
    other = drafters[METHODS[1 - METHODS.index(method)]]
    for folder in (other, target):
        assert f"drafter {folder}" in error_of(settings_with(target, method, folder)).message
    assert "no such folder" in error_of(settings_with(target, method, tmp_path / "missing")).message


def test_settings_that_do_not_go_with_the_files(
    target: str, drafters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in METHODS:
        folder = shutil.copytree(drafters[method], tmp_path / method)
        quantise_gate(1.0)(folder, method)
        error = error_of(settings_with(target, method, folder, quantization="fp8"))
        assert "quantization: got fp8, but the weights of" in error.message

    def has_no_e4m3(device: torch.device) -> None:
        raise ConfigError(f"no fp8 on {device}")

    monkeypatch.setattr("culet.layers.weight.e4m3.check_device", has_no_e4m3)
    error = error_of(settings_with(target, "mtp", drafters["mtp"], head_dtype="fp8"))
    assert error.message == "speculative-config: head_dtype: no fp8 on cpu"  # not on meta, where the model is checked


def quantise_table(folder: Path) -> None:
    """Store the table in fp8."""

    def replace_table(tensors: dict[str, torch.Tensor], _: str) -> None:
        weight = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = weight.to(torch.float8_e4m3fn)
        tensors["model.embed_tokens.weight_scale"] = torch.ones(weight.shape[0], 1)

    change_tensors(replace_table)(folder, "mtp")
    config = quantisation_config("fp8", [])
    config |= {"ignore": []}
    config["config_groups"]["group_0"]["targets"] = ["re:.*embed_tokens"]
    change_config(quantization_config=config)(folder, "mtp")


def test_a_quantised_table_has_no_fp8_head(target: str, drafters: dict[str, Path], tmp_path: Path) -> None:
    """`head_dtype` rounds a plain table."""
    folder = shutil.copytree(drafters["mtp"], tmp_path / "fp8")
    quantise_table(folder)
    error = error_of(settings_with(target, "mtp", folder, head_dtype="fp8"))
    assert error.message == "speculative-config: head_dtype: got fp8, but the checkpoint's table is already quantised"
    assert error.hint == "omit head_dtype"


def test_a_quantised_table_has_no_clusters(tmp_path: Path) -> None:
    """The drafters of E2B and E4B sort their table by cluster, and score some of its rows."""
    target = str(write_checkpoint(tmp_path / "target", "E4B", dtype=torch.float32))
    spec = open_checkpoint(target).spec
    plan = open_drafter(DraftChoice("mtp", "random:"), spec)
    assert isinstance(plan, MTPPlan)
    assert plan.spec.centroids is not None
    folder = write_assistant(tmp_path / "fp8", plan.spec, make_config(spec))
    quantise_table(folder)
    for choice in ({}, {"suffix": True}):
        error = error_of(settings_with(target, "mtp", folder, **choice))
        assert isinstance(error, CheckpointError)
        assert "the drafter's model.embed_tokens is quantised" in error.message


def test_a_benchmark_checks_first_too(target: str, drafters: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(drafters["mtp"], tmp_path / "bad")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the folder has no weights"):
        DraftBench(build_config(settings_with(target, "mtp", folder)), max_num_seqs=1)
