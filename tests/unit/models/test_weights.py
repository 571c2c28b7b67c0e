"""Loading weights: single and sharded files, skipped and rejected tensors, and peak memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from culet.errors import CheckpointError
from culet.layers.weight.weights import Weights
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.weights import load_model
from tests.models import tiny_checkpoints as tiny

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Gemma4:
    return load_model(open_checkpoint(str(folder)), dtype=dtype, device=CPU)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A writable copy of a wrapped checkpoint with KV sharing, towers and unused weights."""
    shutil.copytree(tiny.checkpoint_folder("E2B"), tmp_path, dirs_exist_ok=True)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path, num_files: int = 3) -> list[str]:
    """Split the single file into shards, as in large checkpoints."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    weight_map = {name: names[i % num_files] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def same(a: Gemma4, b: Gemma4) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(name == other and torch.equal(value, twin) for (name, value), (other, twin) in pairs)


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_every_parameter_is_filled(shape: str) -> None:
    """The tensors of a checkpoint fill every parameter of a model exactly once."""
    spec = open_checkpoint(str(tiny.checkpoint_folder(shape))).spec
    model = Gemma4(spec, Weights(torch.float32, CPU))
    for parameter in model.parameters():
        parameter.zero_()
    for placement in model.placements().values():
        placement.target.add_(1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, torch.ones_like(parameter)), name


def test_sharded(folder: Path) -> None:
    whole = load(folder)
    shard(folder)
    assert same(load(folder), whole)


def test_towers_are_never_allocated(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert any("vision_tower" in name for name in tensors)
    assert any("audio_tower" in name for name in tensors)
    text = sum(value.numel() for name, value in tensors.items() if name.startswith("model.language_model."))
    unused = sum(value.numel() for name, value in tensors.items() if is_unused(name))
    assert unused > 0
    assert sum(parameter.numel() for parameter in load(folder).parameters()) == text - unused


def is_unused(name: str) -> bool:
    parts = name.split(".")
    return "language_model" in name and "layers" in parts and int(parts[3]) >= 5 and parts[-2] in ("k_proj", "v_proj", "k_norm")


def test_stored_head_and_12b_embedder_are_skipped(folder: Path) -> None:
    whole = load(folder)
    rewrite(
        folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3), "model.vision_embedder.x": torch.zeros(3)})
    )
    assert same(load(folder), whole)


def test_dtype(folder: Path) -> None:
    """Matrices are converted. Norms and other small scales stay float32."""
    exact, model = load(folder), load(folder, torch.bfloat16)
    assert torch.equal(model.embedding.tensor, exact.embedding.tensor.bfloat16())
    assert model._layers[0].mlp.gate_up.tensor.dtype == torch.bfloat16
    assert torch.equal(model._layers[0].input_norm, exact._layers[0].input_norm)


LAYER = "model.language_model.layers.0."


def remove(*names: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(LAYER + "layer_scalar"), r"1 tensor \(layers\.0\.layer_scalar\) missing"),
        (remove(*(LAYER + f"self_attn.{x}_proj.weight" for x in "qkvo")), r"4 tensors \(.*q_proj.*\) missing"),
        (lambda t: t.update({LAYER + "self_attn.q_proj.bias": torch.zeros(1)}), r"1 tensor \(.*q_proj\.bias\) unexpected"),
        (
            lambda t: t.update({f"x{i}": torch.zeros(1) for i in range(9)}),
            r"9 tensors \(x0, x1, x2, x3, x4, \.\.\.\) unexpected",
        ),
        (lambda t: t.update({LAYER + "layer_scalar": torch.zeros(2)}), r"layer_scalar: \[2\], expected \[1\]\) with the wrong"),
        (
            lambda t: t.update({"model.norm.weight": t["model.language_model.norm.weight"].clone()}),
            r"1 tensor \(model\..*norm\.weight\) unexpected",
        ),
        (
            lambda t: t.update({LAYER + "layer_scalar": torch.zeros(1, dtype=torch.int8)}),
            r"layer_scalar: I8\) of an unsupported type",
        ),
    ],
)
def test_wrong_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"not a tensor file at all"])
def test_corrupt(folder: Path, content: bytes) -> None:
    names = shard(folder)
    (folder / names[1]).write_bytes(content)
    with pytest.raises(CheckpointError, match=names[1]):
        load(folder)


def test_missing_files(folder: Path) -> None:
    names = shard(folder)
    (folder / names[2]).unlink()
    with pytest.raises(CheckpointError, match=f"cannot find 1 file .{names[2]}. listed in "):
        load(folder)
    for name in (*names[:2], "model.safetensors.index.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="the folder has no weights"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_bad_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map: expected an object"):
        load(folder)


@pytest.mark.parametrize("place", ["parent", "absolute", "below"])
def test_an_index_cannot_name_files_elsewhere(folder: Path, place: str) -> None:
    """The file exists and holds the whole model, so only the check of its name can reject it."""
    inner = folder / "inner"
    inner.mkdir()
    shutil.copy(folder / "config.json", inner)
    tensors = load_file(folder / "model.safetensors")
    (inner / "sub").mkdir()
    shutil.copy(folder / "model.safetensors", inner / "sub")
    names = {"parent": "../model.safetensors", "absolute": str(folder / "model.safetensors"), "below": "sub/model.safetensors"}
    name = names[place]
    assert (inner / name).is_file()
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    with pytest.raises(CheckpointError, match="outside this folder"):
        load(inner)


PEAK = """
import sys, torch
from pathlib import Path
from culet.layers.weight.weights import Weights
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
checkpoint = open_checkpoint(sys.argv[1])
def peak():  # not ru_maxrss, which a child process inherits from its parent
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
before = peak()
model = load_model(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"), progress=False)
after = peak()
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print((after - before) * 1024, weights)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory(tmp_path: Path) -> None:
    """Besides the weights, loading needs no more than the largest of 12 files and the allocator's overhead."""
    from transformers import Gemma4ForCausalLM

    with torch.device("meta"):
        shape = Gemma4ForCausalLM(
            tiny.text_config("E4B", hidden_size=768, intermediate_size=3072, vocab_size=8192, vocab_size_per_layer_input=8192)
        )
    names = [name for name in shape.state_dict() if name != "lm_head.weight"]
    tensors = {name: shape.state_dict()[name] for name in names}
    total = sum(value.numel() * 2 for value in tensors.values())
    weight_map, largest, size, files = {}, 0, 0, [{}]
    for name in names:
        value = torch.zeros(tensors[name].shape, dtype=torch.bfloat16)
        if size + value.nbytes > total / 12 and files[-1]:
            files.append({})
            size = 0
        files[-1][name] = value
        size += value.nbytes
        largest = max(largest, size)
    for index, part in enumerate(files):
        save_file(part, tmp_path / f"part{index}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{index}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shape.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Gemma4ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    del files
    # On Arm, torch allocates with mimalloc. In huge pages, the unused rest of each page would count, 36 MB in all.
    small_pages = os.environ | {"MIMALLOC_ALLOW_THP": "0"}
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=small_pages)
    taken, weights = map(int, done.stdout.split())
    assert weights > 250e6
    assert largest < weights / 8
    assert weights * 0.9 < taken < weights + largest + 48e6
