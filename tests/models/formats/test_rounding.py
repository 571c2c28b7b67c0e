"""Quantising at load, and `culet quantize`: both give the same values, and transformers reads the files too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from culet.cli.main import run as run_culet
from culet.layers.weight.quantised.matrices import QuantisedMatrix
from culet.testing.tiny import write_checkpoint
from tests.docs.blocks import ROOT, blocks
from tests.models.formats.comparing import PROMPT, dequantised, load, logits_of
from tests.models.formats.writing import SHAPES


def plain_folder(root: Path, shape: str) -> Path:
    return write_checkpoint(root / "plain", shape, overrides=SHAPES[shape])


def write(folder: Path, out: Path, precision: str) -> Path:
    assert run_culet(["quantize", str(folder), str(out), "--format", precision, "--device", "cpu"]) == 0
    return out


def pairs_of(model: Any, plain: Any) -> list[tuple[Any, Any]]:
    """Return the matrices that are quantised in the first model, with those of the second."""
    others = dict(plain.named_modules())
    return [
        (module, others[name])
        for name, module in model.named_modules()
        if isinstance(module, QuantisedMatrix) and name in others
    ]


def relative_error(module: Any, plain: Any) -> float:
    eye = torch.eye(plain.layout.num_columns)
    return float((module.linear(eye) - plain.linear(eye)).norm() / plain.linear(eye).norm())


@pytest.mark.parametrize(("precision", "shape"), [("fp8", "31B"), ("int4", "26B-A4B"), ("int4", "E2B"), ("fp8", "26B-A4B")])
def test_a_written_checkpoint_equals_quantising_at_load(precision: str, shape: str, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path, shape)
    written, at_load = load(write(folder, tmp_path / "out", precision)), load(folder, precision)
    assert torch.equal(logits_of(written), logits_of(at_load))
    plain = load(folder)
    assert at_load.num_bytes == written.num_bytes < plain.num_bytes
    errors = [relative_error(module, other) for module, other in pairs_of(at_load, plain)]
    assert len(errors) >= 4 * 6
    assert max(errors) < {"fp8": 0.03, "int4": 0.12}[precision]
    assert min(errors) > 0.005


@pytest.mark.parametrize(
    ("shape", "sizes", "is_warned"),
    [("26B-A4B", {}, True), ("26B-A4B", {"moe_intermediate_size": 48}, False), ("31B", {}, False)],
)
def test_a_warning_about_experts(
    shape: str, sizes: dict[str, int], is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers does not find experts that are written one by one by itself. Those that stay plain stay in one tensor."""
    folder = write_checkpoint(tmp_path / "plain", shape, overrides=SHAPES[shape] | sizes)
    write(folder, tmp_path / "out", "int4")
    said = capsys.readouterr().err
    assert said.count("experts are written one by one") == said.count("starts with random ones") == is_warned


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "shape"), [("fp8", "31B"), ("int4", "31B"), ("int4", "E2B"), ("fp8", "E2B")])
def test_transformers_reads_a_written_checkpoint(precision: str, shape: str, tmp_path: Path) -> None:
    from transformers import Gemma4ForConditionalGeneration

    out = write(plain_folder(tmp_path, shape), tmp_path / "out", precision)
    reference = Gemma4ForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = reference(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(load(out)), wanted, rtol=0, atol=1e-4)


@pytest.fixture
def read_by_transformers() -> Iterator[Callable[[Path], Any]]:
    """Run the program in the guide, which tells transformers how to join experts. It is told only during a test."""
    from transformers import conversion_mapping

    (program,) = (block for block in blocks(ROOT / "docs/guides/quantised-weights.md", "python") if "transformers" in block)

    def read(folder: Path) -> Any:
        names: dict[str, Any] = {}
        exec(program.replace('"./26B-A4B-int4"', f'"{folder}", dtype="float32", output_loading_info=True'), names)
        model, report = names["model"]
        assert not any(report.values()), "a tensor is missing or unexpected"
        return model.eval()

    yield read
    conversion_mapping._checkpoint_conversion_mapping_cache.pop("gemma4_text", None)
    conversion_mapping.USER_REGISTERED_MAPPINGS.discard("gemma4_text")


@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_transformers_reads_written_experts(
    precision: str, tmp_path: Path, read_by_transformers: Callable[[Path], Any]
) -> None:
    """With the program of the guide, it reads every tensor. It may round the values of experts to bfloat16."""
    out = write(plain_folder(tmp_path, "26B-A4B"), tmp_path / "out", precision)
    reference = read_by_transformers(out)
    model = load(out)
    for index, layer in enumerate(reference.model.language_model.layers):
        ours = model.get_submodule(f"layers.{index}.experts.stack")
        for theirs, value in ((layer.experts.gate_up_proj, ours.gate_up), (layer.experts.down_proj, ours.down)):
            torch.testing.assert_close(theirs.data, dequantised(value), rtol=2**-8, atol=0, check_dtype=False)
            theirs.data = dequantised(value)
    with torch.no_grad():
        wanted = reference(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(model), wanted, rtol=0, atol=1e-4)


def test_transformers_reads_plain_experts(tmp_path: Path, read_by_transformers: Callable[[Path], Any]) -> None:
    """Experts that groups do not divide are not written one by one. The program of the guide does not change this."""
    folder = write_checkpoint(tmp_path / "plain", "26B-A4B", overrides={"moe_intermediate_size": 48})
    out = write(folder, tmp_path / "out", "int4")
    reference = read_by_transformers(out)
    with torch.no_grad():
        wanted = reference(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(load(out)), wanted, rtol=0, atol=1e-4)


def test_large_checkpoints_are_split_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from culet.models.quantised import write as writing

    monkeypatch.setattr(writing, "_SHARD_BYTES", 100_000)
    out = write(plain_folder(tmp_path, "31B"), tmp_path / "out", "int4")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    stored = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert sum(tensor.nbytes for tensor in stored.values()) == index["metadata"]["total_size"]
    assert (out / "tokenizer.json").is_file()
    assert torch.isfinite(logits_of(load(out))).all()


def test_experts_that_groups_do_not_divide(tmp_path: Path) -> None:
    """A width of 48 is not whole groups of 32, so a layer's experts all stay plain, as at load."""
    folder = write_checkpoint(tmp_path / "plain", "26B-A4B", overrides={"moe_intermediate_size": 48})
    written = load(write(folder, tmp_path / "out", "int4"))
    assert torch.equal(logits_of(written), logits_of(load(folder, "int4")))
    assert any(isinstance(module, QuantisedMatrix) for module in written.modules())


def test_weights_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is left that would be in the way of the next attempt."""
    folder = plain_folder(tmp_path, "31B")
    good = (folder / "model.safetensors").read_bytes()
    tensors, name = load_file(folder / "model.safetensors"), "model.language_model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    assert run_culet(["quantize", str(folder), str(tmp_path / "out"), "--format", "fp8", "--device", "cpu"]) == 1
    assert f"{name} has values that are NaN or infinite" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(good)
    assert torch.isfinite(logits_of(load(write(folder, tmp_path / "out", "fp8")))).all()


def test_what_cannot_be_quantised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plain_folder(tmp_path, "31B")
    out = write(folder, tmp_path / "out", "fp8")
    for source, target, message in (
        (out, tmp_path / "again", "already quantised"),
        (folder, out, "already exists"),
        ("random:31B", tmp_path / "random", "no files"),
    ):
        assert run_culet(["quantize", str(source), str(target), "--format", "int4", "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err
