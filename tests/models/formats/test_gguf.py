"""GGUF files written by the gguf package: weights, config and tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from culet.cli.main import run as run_culet
from culet.errors import CheckpointError, ConfigError
from culet.layers.weight.base import Matrix
from culet.models import read_ahead, weight_files
from culet.models.checkpoint import open_checkpoint
from culet.models.quantised.gguf_file import read_gguf
from culet.models.weight_files import read_headers
from culet.models.weights import load_model
from culet.text.tokenizer import Tokenizer
from tests.models.formats.comparing import assert_same_values, dequantised, load, logits_of
from tests.models.formats.writing import PREFIX, plain_tensors, write_folder

RENAMED = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path / "cache"))


@functools.cache
def name_map(num_layers: int) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, num_layers)


def gguf_name(name: str, num_layers: int) -> str:
    """Return the name that llama.cpp's converter gives to a tensor."""
    names = name_map(num_layers)
    local = name.removeprefix(PREFIX)
    for ending, renamed in RENAMED.items():
        if local.endswith(ending):
            return f"blk.{local.split('.')[1]}.{renamed}"
    if local.endswith("router.proj.weight"):
        return f"blk.{local.split('.')[1]}.ffn_gate_inp.weight"
    found = names.get_name("model." + local.removesuffix(".weight"))
    assert found is not None, name
    return f"{found}.weight"


def random_q6_k(shape: tuple[int, ...]) -> np.ndarray:
    """Return blocks with random values. The package cannot write this type, but reads it."""
    random = np.random.default_rng(shape[0])
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 256, 210), dtype=np.uint8)
    blocks[..., 208:] = np.frombuffer(np.float16(3e-5).tobytes(), dtype=np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    root: Path,
    shape: str,
    kind: str,
    *,
    tables: str = "",
    arch: str = "gemma4",
    others: Mapping[str, str] | None = None,
) -> tuple[Path, Path]:
    """Write a file whose matrices and tables have this type, and a plain checkpoint of the same values.

    `others` are the types of tensors whose name contains a word.
    """
    plain, tensors = plain_tensors(root, shape)
    text = json.loads((plain / "config.json").read_text())["text_config"]
    num_layers, sliding = text["num_hidden_layers"], [each == "sliding_attention" for each in text["layer_types"]]
    path = root / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    _add_metadata(writer, text, sliding)
    _add_tokenizer(writer, plain)
    twin = {}
    for name, tensor in tensors.items():
        data = tensor.float().numpy()
        quantised = data.ndim > 1 and "router" not in name and data.shape[-1] % 32 == 0
        is_other = bool(tables) and data.ndim > 1 and data.shape[-1] % 256 == 0
        own = next((other for word, other in (others or {}).items() if word in name), kind)
        chosen = gguf.GGMLQuantizationType[tables if is_other else own if quantised else "F32"]
        raw = random_q6_k(data.shape) if is_other else gguf.quants.quantize(data, chosen)
        twin[name] = torch.from_numpy(np.array(gguf.quants.dequantize(raw, chosen), dtype=np.float32)).view(tensor.shape)
        writer.add_tensor(gguf_name(name, num_layers), raw, raw_dtype=chosen)
    half = text["global_head_dim"] // 2
    factors = np.array([1.0] * (half // 4) + [1e30] * (half - half // 4), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, write_folder(root / "twin", plain, twin, {})


def _add_metadata(writer: Any, text: dict[str, Any], sliding: list[bool]) -> None:
    writer.add_block_count(len(sliding))
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_head_count(text["num_attention_heads"])
    in_global = text["num_global_key_value_heads"] or text["num_key_value_heads"]
    writer.add_head_count_kv([text["num_key_value_heads"] if each else in_global for each in sliding])
    shared, width = text.get("num_kv_shared_layers", 0), text["intermediate_size"]
    doubled = text.get("use_double_wide_mlp", False)
    first = len(sliding) - shared
    writer.add_feed_forward_length([width * 2 if doubled and index >= first else width for index in range(len(sliding))])
    writer.add_key_length(text["global_head_dim"])
    writer.add_value_length(text["global_head_dim"])
    writer.add_key_length_swa(text["head_dim"])
    writer.add_value_length_swa(text["head_dim"])
    writer.add_sliding_window(text["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(text.get("hidden_size_per_layer_input", 0))
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_final_logit_softcapping(text["final_logit_softcapping"])
    writer.add_rope_freq_base(text["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(text["rope_parameters"]["sliding_attention"]["rope_theta"])
    if text.get("enable_moe_block"):
        writer.add_expert_count(text["num_experts"])
        writer.add_expert_used_count(text["top_k_experts"])
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])


def _add_tokenizer(writer: Any, plain: Path) -> None:
    written = json.loads((plain / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    special = {token["content"] for token in written["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    merges = written["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(1)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("Q4_0", "31B"),
        ("Q8_0", "E2B"),
        pytest.param("Q4_0", "E2B", marks=pytest.mark.slow),
        ("Q4_0", "26B-A4B"),
        pytest.param("Q8_0", "31B", marks=pytest.mark.slow),
        pytest.param("F16", "31B", marks=pytest.mark.slow),
    ],
)
def test_values_and_logits(kind: str, shape: str, tmp_path: Path) -> None:
    path, twin = write_gguf(tmp_path, shape, kind)
    model, plain = load(path), load(twin)
    spec, other = open_checkpoint(str(path)).spec, open_checkpoint(str(twin)).spec
    assert (spec.layers, spec.moe, spec.ple_dim, spec.rms_eps) == (other.layers, other.moe, other.ple_dim, other.rms_eps)
    assert (assert_same_values(model, plain) >= 4 * 6) == (kind != "F16")
    ids = torch.arange(300)
    assert torch.equal(model.embedding.embed(ids), plain.embedding.embed(ids))
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=1e-4)


def test_the_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real header has a vocabulary that takes a second to read, and the experts of the 26B are thousands of reads."""
    path, _ = write_gguf(tmp_path, "26B-A4B", "Q4_0")
    open_checkpoint(str(path))
    calls: list[Path] = []
    monkeypatch.setattr(weight_files, "read_gguf", lambda file: calls.append(file) or read_gguf(file))
    load(path)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_scales_keep_their_bits_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """The scales of the file are float16, which bfloat16 cannot hold."""
    path, twin = write_gguf(tmp_path, "26B-A4B", kind)
    checkpoint = open_checkpoint(str(path))
    model = load_model(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"), progress=False)
    experts, plain = model._layers[0].experts.stack, load(twin)._layers[0].experts.stack
    assert torch.equal(dequantised(experts.gate_up), plain.gate_up)
    assert torch.equal(dequantised(experts.down), plain.down)


def test_another_version_reads_the_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a version derived from the file may be wrong or incomplete for the next one."""
    path, _ = write_gguf(tmp_path, "31B", "Q4_0")
    folder = open_checkpoint(str(path)).folder
    assert open_checkpoint(str(path)).folder == folder
    monkeypatch.setattr("culet.models.quantised.gguf_folder.__version__", "99.0")
    assert open_checkpoint(str(path)).folder != folder


def test_a_folder_with_only_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="has no config") as caught:
        open_checkpoint(str(tmp_path))
    assert f"pass the file {tmp_path / 'model.gguf'}" in caught.value.hint


def test_large_tables_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the host nor the device needs memory for the unpacked values of a whole table."""
    path, twin = write_gguf(tmp_path, "E2B", "Q4_0")
    monkeypatch.setattr(read_ahead, "_READ_BYTES", 5000)
    folder, places = open_checkpoint(str(path)).folder, (model := load(path)).placements()
    assert_same_values(model, load(twin))
    stored = read_headers(folder)
    for table in ("embed_tokens.weight", "embed_tokens_per_layer.weight"):
        reads = list(read_ahead.plan_reads(stored[f"model.{table}"], places[table]))
        assert sum(read.num_bytes for read in reads) == stored[f"model.{table}"].num_bytes
        assert max(read.num_bytes for read in reads) <= 5000
        assert all(read.run is not None for read in reads)  # bytes that lie together go through the ring


@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_a_plain_file_can_be_quantised(precision: str, tmp_path: Path) -> None:
    path, twin = write_gguf(tmp_path, "31B", "F16")
    wanted = logits_of(load(twin, precision))
    assert torch.equal(logits_of(load(path, precision)), wanted)
    assert run_culet(["quantize", str(path), str(tmp_path / "out"), "--format", precision, "--device", "cpu"]) == 0
    torch.testing.assert_close(logits_of(load(tmp_path / "out")), wanted, rtol=0, atol=1e-4)


def test_a_quantised_file_cannot_be_quantised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its config says that most weights are plain, but its Q6_K tables are not."""
    path, _ = write_gguf(tmp_path, "31B", "F16", tables="Q6_K")
    assert run_culet(["quantize", str(path), str(tmp_path / "out"), "--format", "int4", "--device", "cpu"]) == 2
    assert f"{path} is already quantised" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=r"model\.gguf are already quantised"):
        load(path, "int4")


def test_q6_k_becomes_plain(tmp_path: Path) -> None:
    """The matrices whose rows are whole blocks, with an order of columns among them, and the rest in Q4_0."""
    path, twin = write_gguf(tmp_path, "31B", "Q4_0", tables="Q6_K")
    model, plain = load(path), load(twin)
    assert {str(tensor.kind) for tensor in read_gguf(path).tensors.values()} == {"Q6_K", "Q4_0", "F32"}
    matrices = dict(model.named_modules())
    for name, module in plain.named_modules():
        if isinstance(module, Matrix):
            eye = torch.eye(module.layout.num_columns)
            assert torch.equal(matrices[name].linear(eye), module.linear(eye)), name
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=1e-4)


def test_the_tokenizer_comes_from_the_file_or_its_folder(tmp_path: Path) -> None:
    path, twin = write_gguf(tmp_path, "31B", "Q4_0")
    text = "<|turn>user\nWhat is the capital of France? \u00e9\U0001f600<turn|>"
    wanted = Tokenizer(twin)
    made = Tokenizer(open_checkpoint(str(path)).folder)
    assert made.encode(text) == wanted.encode(text)
    assert made.decode(made.encode(text), skip_special=False) == text
    assert set(made.control_tokens) == set(wanted.control_tokens)
    (tmp_path / "tokenizer.json").write_bytes((twin / "tokenizer.json").read_bytes())
    folder = open_checkpoint(str(path)).folder
    assert (folder / "tokenizer.json").read_bytes() == (twin / "tokenizer.json").read_bytes()


def test_bad_files(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path, "31B", "Q4_0")
    data = path.read_bytes()
    bad = tmp_path / "bad.gguf"

    def refused(content: bytes) -> str:
        bad.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(str(bad))
        return f"{caught.value.message} {caught.value.hint}"

    assert "but the file has only" in refused(data[:-100])
    assert "inside its header" in refused(data[:300])
    assert "not a GGUF file" in refused(b"GGML" + data[4:])
    assert "cannot be read" in refused(b"")
    assert "version 9" in refused(data[:4] + b"\x09\0\0\0" + data[8:])
    assert "'llama', expected 'gemma4'" in refused(data.replace(b"\x06\0\0\0\0\0\0\0gemma4", b"\x05\0\0\0\0\0\0\0llama", 1))
    assert "Culet serves only Gemma 4" in refused(data.replace(b"\x06\0\0\0\0\0\0\0gemma4", b"\x06\0\0\0\0\0\0\0gemma3", 1))


def test_other_block_types_are_named(tmp_path: Path) -> None:
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    kind = gguf.GGMLQuantizationType.Q4_K
    writer.add_tensor("token_embd.weight", np.zeros((4, 144), dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is stored as Q4_K"):
        read_gguf(path)
