"""Bad headers of GGUF files: hostile or wrong metadata, names and types. Each gives an error that says what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from culet.errors import CheckpointError
from culet.models.checkpoint import open_checkpoint
from culet.models.quantised import gguf_file
from culet.models.quantised.gguf_file import read_gguf
from culet.models.quantised.gguf_folder import gguf_config
from culet.models.variants import VARIANTS
from tests.models.formats.comparing import load
from tests.models.formats.test_gguf import write_gguf

TYPES = gguf.GGUFValueType


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf"), "31B", "Q4_0")[0]


WRONG: dict[str, tuple[str, Any, str]] = {
    "layers without end": ("gemma4.block_count", 1 << 62, "block_count: got 4611686018427387904"),
    "layers as text": ("gemma4.block_count", "x", "block_count: got x, expected a whole number"),
    "no layers": ("gemma4.block_count", 0, "block_count: got 0"),
    "sliding layers only": ("gemma4.attention.sliding_window_pattern", True, "sliding_window_pattern: got True"),
    "a period instead of a list": ("gemma4.attention.sliding_window_pattern", 6, "sliding_window_pattern: got 6"),
    "a width per layer as text": ("gemma4.feed_forward_length", "wide", "feed_forward_length: got wide"),
    "epsilon as text": ("gemma4.attention.layer_norm_rms_epsilon", "x", "layer_norm_rms_epsilon: got x, expected a number"),
    "heads as text": ("gemma4.attention.key_length", "abc", "key_length: got abc"),
    "lists of experts": ("gemma4.expert_count", [1, 2], "expert_count: got [1, 2]"),
    "nothing": ("gemma4.embedding_length", None, "no gemma4.embedding_length"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_metadata(name: str, good: Path) -> None:
    key, value, message = WRONG[name]
    file = read_gguf(good)
    bad = gguf_file.GgufFile(file.path, {**file.metadata, key: value}, file.tensors, file.rope_factors)
    with pytest.raises(CheckpointError) as caught:
        gguf_config(bad)
    assert message in caught.value.message
    assert str(good) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("merges", [1, 2], "no complete tokenizer"),
        ("merges", ["one"], "are not pairs"),
        ("token_type", ["a"], "no complete tokenizer"),
        ("tokens", [1], "no complete tokenizer"),
    ],
)
def test_wrong_tokenizers(key: str, value: Any, message: str, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = read_gguf(good)
    bad = gguf_file.GgufFile(file.path, {**file.metadata, f"tokenizer.ggml.{key}": value}, file.tensors, file.rope_factors)
    monkeypatch.setattr("culet.models.quantised.gguf_folder.read_gguf", lambda path: bad)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(str(good))
    assert "tokenizer.json" in caught.value.hint


def changed(good: Path, target: Path, change: Callable[[bytes], bytes]) -> Path:
    target.write_bytes(change(good.read_bytes()))
    return target


def test_names_that_are_there_twice(good: Path, tmp_path: Path) -> None:
    """A second tensor of the same name would silently replace the first one."""
    twice = changed(good, tmp_path / "a.gguf", lambda data: data.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight", 1))
    with pytest.raises(CheckpointError, match=r"two tensors that are model\.layers\.0\.mlp\.up_proj"):
        read_gguf(twice)

    def rename(data: bytes) -> bytes:
        old, new = b"gemma4.attention.value_length_swa", b"gemma4.attention.value_length"
        return data.replace(len(old).to_bytes(8, "little") + old, len(new).to_bytes(8, "little") + new, 1)

    with pytest.raises(CheckpointError, match=r"has 'gemma4\.attention\.value_length' twice"):
        read_gguf(changed(good, tmp_path / "b.gguf", rename))


@pytest.mark.parametrize(
    ("step", "message"), [(-32, "begins inside"), (8, "expected a multiple of 32"), (-(1 << 14), "begins inside")]
)
def test_tensors_that_overlap(step: int, message: str, good: Path, tmp_path: Path) -> None:
    def move(data: bytes) -> bytes:
        """Move a tensor: after its name are the number of its dimensions, two sizes, its type and its offset."""
        name = b"blk.0.ffn_up.weight"
        at = data.index(name) + len(name) + 4 + 2 * 8 + 4
        return data[:at] + (int.from_bytes(data[at : at + 8], "little") + step).to_bytes(8, "little") + data[at + 8 :]

    with pytest.raises(CheckpointError, match=message):
        read_gguf(changed(good, tmp_path / "moved.gguf", move))


def written(path: Path, width: int, num_layers: int, parts: int = 0) -> Path:
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_embedding_length(width)
    writer.add_block_count(num_layers)
    if parts:
        writer.add_key_value("split.count", parts, TYPES.UINT16)
    writer.add_tensor("token_embd.weight", np.zeros((4, 144), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_the_same_model_is_named(tmp_path: Path) -> None:
    for name, config in VARIANTS.items():
        text = config["text_config"]
        with pytest.raises(CheckpointError, match="Q4_K") as caught:
            read_gguf(written(tmp_path / f"{name}.gguf", text["hidden_size"], text["num_hidden_layers"]))
        assert f"google/gemma-4-{name}-it-qat-q4_0-gguf" in caught.value.hint
        assert "Q6_K" in caught.value.hint
    with pytest.raises(CheckpointError) as caught:
        read_gguf(written(tmp_path / "other.gguf", 64, 2))
    assert "llama-quantize --pure" in caught.value.hint


def test_a_part_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="one of 3 parts") as caught:
        read_gguf(written(tmp_path / "part.gguf", 64, 2, parts=3))
    assert "llama-gguf-split --merge" in caught.value.hint


@pytest.mark.parametrize("value", [b"\xff\xff", b"\x00\x7c"])
def test_scales_that_are_not_finite(value: bytes, good: Path, tmp_path: Path) -> None:
    """The error names the file that was passed, and comes before anything is loaded."""
    offset = read_gguf(good).tensors["model.layers.0.mlp.up_proj.weight"].offset + 18 * 7
    bad = changed(good, tmp_path / "bad.gguf", lambda data: data[:offset] + value + data[offset + 2 :])
    with pytest.raises(CheckpointError) as caught:
        load(bad)
    assert f"{bad}: 1 tensor (model.layers.0.mlp.up_proj.weight) with scales that are NaN" in caught.value.message


def test_scales_of_q6_k(tmp_path: Path) -> None:
    """They are at the end of a block."""
    path, _ = write_gguf(tmp_path, "31B", "Q4_0", tables="Q6_K")
    name, tensor = next((name, each) for name, each in read_gguf(path).tensors.items() if each.kind == "Q6_K")
    at = tensor.offset + 210 * 3 + 208
    bad = changed(path, tmp_path / "bad.gguf", lambda data: data[:at] + b"\xff\x7f" + data[at + 2 :])
    with pytest.raises(CheckpointError, match=f"1 tensor \\({re.escape(name)}\\) with scales that are NaN"):
        load(bad)
