"""`--head-quantization`: the table that is embedding and head, rounded while it is loaded, beside plain and stored formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from culet.cli.planning.facts import gather
from culet.config import build_config
from culet.engine.resolve import resolve
from culet.errors import ConfigError
from culet.layers.weight.quantised.matrices import QuantisedMatrix, QuantisedTable
from culet.models.checkpoint import open_checkpoint
from culet.models.quantised.part_bytes import part_bytes
from culet.models.variants import VARIANTS
from culet.models.weights import load_model
from culet.testing.tiny import write_checkpoint
from tests.models.formats.comparing import CPU, dequantised, load, logits_of
from tests.models.formats.test_compressed_tensors import integers
from tests.models.formats.test_gguf import write_gguf
from tests.models.formats.test_other_tools import write_mobile
from tests.models.formats.writing import PREFIX, SHAPES, compressed, ct_config, write_folder, write_pair

TABLE = f"{PREFIX}embed_tokens.weight"


def rounded_to_fp8(table: Tensor) -> Tensor:
    """Return the float32 values of the formula: e4m3, and a scale per row that is stored in bfloat16."""
    scale = (table.float().abs().amax(1, keepdim=True) / 448).bfloat16().float()
    return (table.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def rounded_to_int4(table: Tensor) -> Tensor:
    """Return the float32 values of the formula: -8 to 7, and a scale per 32 columns that is stored in bfloat16.

    Groups of zeros, of which random Q6_K blocks have some, stay zeros.
    """
    groups = table.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(2, keepdim=True) / 7.5).clamp(min=1e-12).bfloat16().float()
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)


FORMULAS = {"fp8": rounded_to_fp8, "int4": rounded_to_int4}


def write_plain(root: Path, shape: str) -> tuple[Path, dict[str, Tensor]]:
    folder = write_checkpoint(root / "plain", shape, overrides=SHAPES[shape])
    return folder, load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("shape", "quantization"), [("31B", "auto"), ("E2B", "int4"), ("26B-A4B", "fp8"), ("31B", "int4")])
@pytest.mark.parametrize("precision", FORMULAS)
def test_a_plain_checkpoint(precision: str, shape: str, quantization: str, tmp_path: Path) -> None:
    """The model equals one whose table has the values of the formula. Per-layer tables and everything else stay the same."""
    folder, tensors = write_plain(tmp_path, shape)
    values = FORMULAS[precision](tensors[TABLE])
    twin = write_folder(tmp_path / "twin", folder, {name: each.float() for name, each in tensors.items()} | {TABLE: values}, {})
    model, plain = load(folder, quantization, precision), load(twin, quantization)
    assert isinstance(model.embedding, QuantisedTable)
    assert torch.equal(dequantised(model.embedding.tensors), values)
    ids = torch.tensor([0, 5, 830, 5])
    torch.testing.assert_close(model.embedding.embed(ids), plain.embedding.embed(ids), rtol=1e-6, atol=0)
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=1e-4)
    others = load(folder, quantization)
    assert model.num_bytes - model.embedding.num_bytes == others.num_bytes - others.embedding.num_bytes
    if model.ple is not None:
        assert type(model.ple.table) is type(others.ple.table)


def test_embeddings_in_bfloat16_have_the_scale_of_a_plain_table(tmp_path: Path) -> None:
    """It is rounded to bfloat16, as in training: 128 ** 0.5 is 11.3125."""
    folder, _ = write_plain(tmp_path, "31B")
    ids = torch.arange(9)
    for precision in FORMULAS:
        checkpoint = open_checkpoint(str(folder))
        model = load_model(checkpoint, dtype=torch.bfloat16, device=CPU, head_quantization=precision, progress=False)
        assert isinstance(model.embedding, QuantisedTable)
        rows = dequantised(model.embedding.tensors)[:9].bfloat16()
        assert torch.equal(model.embedding.embed(ids), rows * torch.tensor(128**0.5).bfloat16())


def assert_rounded(folder: Path, precision: str) -> Any:
    """Check a checkpoint whose table is plain after loading. Return the model with a rounded one."""
    model, others = load(folder, head=precision), load(folder)
    assert torch.equal(dequantised(model.embedding.tensors), FORMULAS[precision](others.embedding.tensor))
    assert model.num_bytes - model.embedding.num_bytes == others.num_bytes - others.embedding.num_bytes
    sizes = part_bytes(model.spec, open_checkpoint(str(folder)).config, 4, head_precision=precision)
    assert sizes["token embedding"] == model.embedding.num_bytes
    assert torch.isfinite(logits_of(model)).all()
    return model


@pytest.mark.parametrize("precision", FORMULAS)
def test_beside_stored_int4(precision: str, tmp_path: Path) -> None:
    """Only the table of a compressed-tensors checkpoint is rounded."""
    weights = integers(4, 32)
    pair = write_pair(
        tmp_path, "31B", compressed(weights, "pack-quantized"), ct_config((["Linear"], weights, "pack-quantized"))
    )
    model = assert_rounded(pair.folder, precision)
    assert any(isinstance(module, QuantisedMatrix) for module in model.modules())


@pytest.mark.parametrize("kind", ["BF16", "Q6_K"])
@pytest.mark.parametrize("precision", FORMULAS)
def test_tables_of_gguf(precision: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q6_K blocks are unpacked first. Without the option, they become a plain table."""
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(SHAPES, "31B", SHAPES["31B"] | {"hidden_size": 256})
    if kind == "Q6_K":
        path, _ = write_gguf(tmp_path, "31B", "Q4_0", tables="Q6_K")
    else:
        path, _ = write_gguf(tmp_path, "31B", "Q4_0", others={"embed_tokens.": kind})
    assert_rounded(path, precision)


@pytest.mark.parametrize("precision", FORMULAS)
def test_random_weights(precision: str, tmp_path: Path) -> None:
    """The table is the random one of the plain model, rounded. Everything else has the same bits."""
    config = write_checkpoint(tmp_path / "E4B", "E4B", overrides={"hidden_size": 128}) / "config.json"
    checkpoint = open_checkpoint(f"random:{config}")
    plain = load_model(checkpoint, dtype=torch.float32, device=CPU)
    model = load_model(checkpoint, dtype=torch.float32, device=CPU, head_quantization=precision)
    assert torch.equal(dequantised(model.embedding.tensors), FORMULAS[precision](plain.embedding.tensor))
    own, others = dict(model.named_parameters()), dict(plain.named_parameters())
    assert all(torch.equal(own[name], others[name]) for name in own if not name.startswith("embedding."))
    planned = part_bytes(model.spec, json.loads(config.read_text()), 4, head_precision=precision)
    assert sum(planned.values()) == sum(tensor.nbytes for tensor in model.parameters())


# Errors


def refusals(folder: Path, precision: str) -> list[ConfigError]:
    """Return what the plan, the engine and the loader say about a checkpoint whose head cannot be rounded."""
    given = {"model": str(folder), "device": "cpu", "head_quantization": precision}
    found = []
    for attempt in (
        lambda: gather(str(folder), "h100", build_config({"head_quantization": precision})),
        lambda: resolve(build_config(given)),
        lambda: load(folder, head=precision),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        found.append(caught.value)
    return found


def write_ct_table(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    weights = integers(8)
    from tests.models.formats import writing

    monkeypatch.setattr(writing, "LINEARS", (*writing.LINEARS, "embed_tokens"))
    config = ct_config((["Linear", "re:.*embed_tokens$"], weights, "pack-quantized"))
    return write_pair(root, "31B", compressed(weights, "pack-quantized"), config).folder


@pytest.mark.parametrize("kind", ["compressed-tensors", "GGUF", "mobile"])
def test_a_head_that_is_already_quantised(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path / "cache"))
    if kind == "GGUF":
        folder = write_gguf(tmp_path, "31B", "BF16", others={"embed_tokens.": "Q8_0"})[0]
    else:
        folder = write_mobile(tmp_path, 0.01)[0] if kind == "mobile" else write_ct_table(tmp_path, monkeypatch)
    for error in refusals(folder, "int4"):
        assert error.message == f"head-quantization: got int4, but the head of {folder} is already quantised"
        assert error.hint == "omit --head-quantization, or pass a checkpoint whose embedding table is bfloat16"


def test_groups_that_do_not_divide_the_table(tmp_path: Path) -> None:
    """A scale per row always fits."""
    folder = write_checkpoint(tmp_path / "plain", "31B", overrides={"hidden_size": 72})
    for error in refusals(folder, "int4"):
        assert error.message == "head-quantization: got int4, but groups of 32 do not divide the table's 72 columns"
    assert isinstance(load(folder, head="fp8").embedding, QuantisedTable)


def test_every_model_can_have_a_rounded_head() -> None:
    for name in VARIANTS:
        for precision in FORMULAS:
            gather(name, "rtx4090", build_config({"head_quantization": precision}))


def test_a_wrong_precision() -> None:
    with pytest.raises(ConfigError, match="head-quantization: got 'int8', expected one of: auto, fp8, int4"):
        build_config({"head_quantization": "int8"})
