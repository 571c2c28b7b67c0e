"""Bytes of weights: loaded weights say their own, and everything else asks one module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from culet.attention.torch_cpu import TorchCPUBackend
from culet.bench.floor import Floor
from culet.cache.spec import plan_cache
from culet.cli.plan import plan
from culet.config import DraftChoice
from culet.drafters.base import cache_specs, open_drafter
from culet.engine.drafting import ReadBytes
from culet.errors import CheckpointError, ConfigError
from culet.hardware import Peaks
from culet.layers.weight import byte_sizes
from culet.layers.weight.byte_sizes import bytes_per_value, stored_bytes
from culet.layers.weight.weights import Weights, narrowed
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.models.weights import load_model
from tests.models import tiny_checkpoints as tiny

META = torch.device("meta")


def test_bytes_per_value() -> None:
    assert (bytes_per_value(2), bytes_per_value(4), bytes_per_value(2, "fp8")) == (2, 4, 1)
    with pytest.raises(ConfigError, match="unknown weight precision: 'int3'"):
        bytes_per_value(2, "int3")


@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_bytes_per_value_are_those_of_weights(precision: str) -> None:
    table = Weights(torch.float32, torch.device("cpu")).table("t", 64, 256)
    table = table if precision == "auto" else narrowed(table, precision)
    assert table.num_bytes == pytest.approx(64 * 256 * bytes_per_value(4, precision), rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "float8_e4m3fn"])
def test_stored_bytes_are_those_of_a_file(tmp_path: Path, dtype: str) -> None:
    save_file({"t": torch.zeros(3, 5).to(getattr(torch, dtype))}, tmp_path / "t.safetensors")
    data = (tmp_path / "t.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["t"]
    begin, end = header["data_offsets"]
    assert stored_bytes(header["dtype"], header["shape"]) == end - begin


def test_an_unknown_stored_type_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="stored as F3"):
        stored_bytes("F3", (2, 2))


def test_a_format_changes_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """If weights take half a byte, the plan, the floor and the draft policy all say so."""
    spec = read_spec(VARIANTS["26B-A4B"])
    drafter = open_drafter(DraftChoice("mtp", "random:"), spec)

    def sizes() -> list[float]:
        result = CliRunner().invoke(plan, ["26B-A4B", "--gpu", "h200", "--json"], catch_exceptions=False)
        weights = json.loads(result.output)["weights"]
        floor = Floor(spec, Peaks(bytes_per_s=1.0, flops_per_s=1e30), itemsize=2)
        read = ReadBytes.of_specs(spec, drafter, 2)
        no_keys = floor.decode_step(1, 0)
        return [weights["text_bytes"], weights["tower_bytes"], no_keys, read.dense, read.experts, read.draft]

    plain = sizes()
    monkeypatch.setitem(byte_sizes._BYTES_PER_VALUE, "auto", 0.5)
    text, *others = sizes()
    assert others == pytest.approx([size / 4 for size in plain[1:]], rel=1e-6)
    assert text == pytest.approx(plain[0] / 4, rel=5e-3)  # norms and routers are float32


def test_a_narrow_head_of_a_drafter_counts() -> None:
    spec = read_spec(VARIANTS["31B"])
    wide, narrow = (open_drafter(DraftChoice("mtp", "random:", head_dtype=dtype), spec) for dtype in ("auto", "fp8"))
    head = wide.num_parameters()["head"]
    assert wide.weight_bytes(2) - narrow.weight_bytes(2) == head


@pytest.mark.parametrize("shape", ["E4B", "26B-A4B", "31B"])
@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_loaded_weights_and_specs_agree(shape: str, method: str) -> None:
    """Specs count norms and routers as plain weights. Loaded, they are float32, as everything here is."""
    checkpoint = open_checkpoint(str(tiny.checkpoint_folder(shape)))
    target = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    planned = open_drafter(DraftChoice(method, "random:", num_speculative_tokens=2), checkpoint.spec)
    layout = plan_cache(cache_specs(checkpoint.spec, planned, 4, latent=True))
    groups = [group for group in layout.groups if group.name in planned.readers(layout)]
    backends = {group.index: TorchCPUBackend(group, planned.num_heads) for group in groups}
    loaded = ReadBytes.of_models(target, planned.build(target, backends, progress=False))
    estimated = ReadBytes.of_specs(checkpoint.spec, planned, 4)
    assert loaded.experts == estimated.experts
    assert (loaded.experts > 0) == (shape == "26B-A4B")
    # The norm weights of each head are stored in addition, which matters at this size only.
    assert loaded.dense == pytest.approx(estimated.dense, rel=0.1)
    assert loaded.draft == pytest.approx(estimated.draft, rel=0.1)


@pytest.mark.parametrize("variant", ["E2B", "26B-A4B", "31B"])
def test_loaded_weights_and_specs_agree_at_real_sizes(variant: str) -> None:
    spec = read_spec(VARIANTS[variant])
    dense, experts = Gemma4(spec, Weights(torch.float32, META)).step_bytes()
    estimated = ReadBytes.of_specs(spec, open_drafter(DraftChoice("mtp", "random:"), spec), 4)
    assert dense == pytest.approx(estimated.dense, rel=0.002)
    assert experts == estimated.experts


def test_kernel_keys_have_shapes_and_formats() -> None:
    weights = Weights(torch.float32, torch.device("cpu"))
    plain = weights.table("t", 64, 32)
    assert plain.kernel_keys() == [("PlainTable", (64, 32))]
    assert weights.table("t", 64, 16).kernel_keys() != plain.kernel_keys() != narrowed(plain, "fp8").kernel_keys()
    spec = open_checkpoint(str(tiny.checkpoint_folder("E2B"))).spec
    keys = Gemma4(spec, Weights(torch.float32, META)).kernel_keys()
    assert ("PlainTable", (spec.vocab_size, spec.hidden_size)) in keys
    assert any(key[0] == "Attention" and (spec.layers[0].head_dim,) in key for key in keys), "vectors count too"
