"""A damaged or hostile checkpoint is refused by name, before memory is allocated for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from culet.config import build_config
from culet.engine.start.parts import build_parts
from culet.errors import CheckpointError
from culet.models.checkpoint import open_checkpoint
from culet.models.variants import VARIANTS
from culet.models.weights import load_model
from culet.testing.tiny import write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bounds"), "31B")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A writable copy of a tiny checkpoint."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path


def set_size(folder: Path, key: str, value: object) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text[key] = value
    (folder / "config.json").write_text(json.dumps(config))


SIZES = (
    "head_dim",
    "global_head_dim",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "sliding_window",
    "max_position_embeddings",
)


@pytest.mark.parametrize("key", SIZES)
def test_absurd_sizes_are_refused_by_name(folder: Path, key: str) -> None:
    set_size(folder, key, 100_000_000)
    with pytest.raises(CheckpointError, match=rf"{key}: got 100000000, expected at most \d+"):
        open_checkpoint(str(folder))


def test_sizes_that_are_absurd_together_are_refused(folder: Path) -> None:
    set_size(folder, "hidden_size", 100_000)
    set_size(folder, "intermediate_size", 1_000_000)
    set_size(folder, "vocab_size", 16_000_000)
    with pytest.raises(CheckpointError, match=r"a model of .* weights, expected at most 1e\+12"):
        open_checkpoint(str(folder))


def test_real_models_are_within_the_bounds(tmp_path: Path) -> None:
    for name, config in VARIANTS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        assert open_checkpoint(str(folder)).spec.vocab_size == 262144


def shard_as(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    weight_map = dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["x" * 5000, "é" * 200, "a\0b.safetensors", "a\nb.safetensors", "\ud800.safetensors", ""])
def test_odd_shard_names_are_refused(folder: Path, name: str) -> None:
    shard_as(folder, name)
    with pytest.raises(CheckpointError, match="expected printable names of 1 to 255 bytes") as caught:
        load_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU)
    assert len(caught.value.message) < 1000
    assert caught.value.message.isprintable()


def change_weights(folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: change(name, tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")


def start(folder: Path) -> None:
    parts = build_parts(
        build_config({"model": str(folder), "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}), progress=False
    )
    parts.worker.close()
    parts.chat_template.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_tensor_that_makes_logits_not_finite_is_named(folder: Path, value: float) -> None:
    def damage(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("layers.1.mlp.down_proj.weight"):
            tensor = tensor.clone()
            tensor[3, 5] = value
        return tensor

    change_weights(folder, damage)
    with pytest.raises(CheckpointError, match=r"1 tensor \(\S*layers\.1\.mlp\.down_proj\.weight\) with values that are NaN"):
        start(folder)


def test_all_weights_are_nan(folder: Path) -> None:
    change_weights(folder, lambda name, tensor: torch.full_like(tensor, float("nan")))
    with pytest.raises(CheckpointError, match="NaN or infinite, so the model's logits are not finite"):
        start(folder)


def test_constant_weights_are_served(folder: Path) -> None:
    change_weights(folder, lambda name, tensor: torch.zeros_like(tensor))
    start(folder)
