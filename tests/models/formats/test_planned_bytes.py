"""`culet plan` counts the bytes that weights really take in memory, from the config alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from culet.cli.planning.facts import gather, shares_of
from culet.config import DraftChoice, build_config
from culet.drafters.base import open_drafter
from culet.drafters.dflash.spec import make_config as dflash_config
from culet.drafters.mtp.spec import make_config as mtp_config
from culet.errors import CheckpointError, CuletError
from culet.layers.weight.plain import PlainFormat
from culet.layers.weight.quantised.choose import rounded, with_rounded_head
from culet.layers.weight.quantised.forms import Int4, Nvfp4
from culet.layers.weight.quantised.matrices import QuantisedFormat
from culet.layers.weight.quantised.sources import PackedInt4, StoredNvfp4
from culet.layers.weight.weights import WeightFormat, Weights, all_plain
from culet.models.checkpoint import open_checkpoint
from culet.models.folder import read_config
from culet.models.gemma4 import Gemma4
from culet.models.quantised.head import head_rounding
from culet.models.quantised.part_bytes import part_bytes
from culet.models.quantised.write import quantisation_config
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.models.weights import load_model
from culet.parallel.group import RankGroup
from culet.parallel.rank import Rank
from tests.matrix import matrix
from tests.models.formats import writing
from tests.models.formats.comparing import load
from tests.models.formats.test_compressed_tensors import NVFP4, floats, integers
from tests.models.formats.test_gguf import write_gguf
from tests.models.formats.test_other_tools import write_mobile

TABLES = {
    "int4 in groups": (integers(4, 32), "pack-quantized"),
    "int4 per channel": (integers(4), "pack-quantized"),
    "int8": (integers(8), "pack-quantized"),
    "fp8": (floats("channel"), "float-quantized"),
    "nvfp4": (NVFP4, "nvfp4-pack-quantized"),
}


def planned(folder: Path) -> dict[str, int]:
    checkpoint = open_checkpoint(str(folder))
    return part_bytes(checkpoint.spec, checkpoint.config, 4)


@matrix({"case": list(TABLES), "target": ["Embedding", "re:.*embed_tokens.*"]})
def test_tables_of_compressed_tensors(case: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored like matrices, and a scheme for linear modules does not count for them."""
    monkeypatch.setattr(writing, "LINEARS", (*writing.LINEARS, "embed_tokens", "embed_tokens_per_layer"))
    weights, form = TABLES[case]
    table, matrix = writing.compressed(weights, form), writing.compressed(integers(8), "pack-quantized")
    pair = writing.write_pair(
        tmp_path,
        "E2B",
        lambda module, weight: (table if "embed_tokens" in module else matrix)(module, weight),
        writing.ct_config((["Linear"], integers(8), "pack-quantized"), ([target], weights, form)),
    )
    model, sizes = load(pair.folder), planned(pair.folder)
    assert sizes["token embedding"] == model.embedding.num_bytes
    assert sizes["per-layer embeddings"] == model.ple.table.num_bytes


def test_plain_tables_of_compressed_tensors(tmp_path: Path) -> None:
    """`Linear` means no tables."""
    weights, form = TABLES["int4 in groups"]
    pair = writing.write_pair(
        tmp_path, "E2B", writing.compressed(weights, form), writing.ct_config((["Linear"], weights, form))
    )
    model, sizes = load(pair.folder), planned(pair.folder)
    assert sizes["token embedding"] == model.embedding.num_bytes
    assert sizes["per-layer embeddings"] == model.ple.table.num_bytes


def test_mobile_checkpoints(tmp_path: Path) -> None:
    """Scales of rows are float32. The head has two scales of activations too, which are not counted."""
    checkpoint = open_checkpoint(str(write_mobile(tmp_path, 0.01)[0]))
    model = load_model(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"), progress=False)
    assert model.head is not None
    assert model.ple is not None
    sizes = part_bytes(checkpoint.spec, checkpoint.config, 2)
    assert sizes["token embedding"] == model.embedding.num_bytes
    assert sizes["per-layer embeddings"] == model.ple.table.num_bytes
    assert sizes["head"] == model.head.num_bytes - 8


# GGUF


MIXED: dict[str, tuple[str, dict[str, str]]] = {
    "only Q4_0": ("Q4_0", {}),
    "Q4_0 in the MLP": ("BF16", {"mlp": "Q4_0"}),
    "Q4_0 and Q8_0": ("Q4_0", {"mlp.down_proj": "Q8_0", "layers.1.self_attn.k_proj": "Q8_0", "embed_tokens.": "Q8_0"}),
    "Q8_0 in one layer": ("F16", {"layers.2.": "Q8_0"}),
    "other types of experts": ("F16", {"experts.gate_up_proj": "Q4_0", "experts.down_proj": "Q8_0", "per_layer": "Q4_0"}),
}


@matrix({"case": list(MIXED), "shape": ["31B", "26B-A4B", "E2B"]})
def test_gguf_with_several_types(case: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts with its own type."""
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path / "cache"))
    kind, others = MIXED[case]
    path, _ = write_gguf(tmp_path, shape, kind, others=others)
    checkpoint = open_checkpoint(str(path))
    described = read_config(str(path))  # what `culet plan FILE` reads
    for dtype in torch.float32, torch.bfloat16:
        model = load_model(checkpoint, dtype=dtype, device=torch.device("cpu"), progress=False)
        sizes = part_bytes(checkpoint.spec, described, dtype.itemsize)
        assert sum(sizes.values()) == sum(tensor.nbytes for tensor in model.parameters())
        assert sizes == part_bytes(checkpoint.spec, checkpoint.config, dtype.itemsize)


# What does not fit a format


BLOCKS = floats("block", block_structure=[128, 128]), "float-quantized"


def plan_refuses(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        gather(str(folder), "h100", build_config({}))
    return caught.value


@pytest.mark.parametrize(
    ("stored", "said", "sizes", "message"),
    [
        (BLOCKS, BLOCKS, {"moe_intermediate_size": 64}, "layers.0.experts: fp8 blocks of 128 x 128 do not divide experts"),
        (
            (integers(4, 64), "pack-quantized"),
            (integers(4, 128), "pack-quantized"),
            {"intermediate_size": 192},
            "layers.0.mlp.down_proj has 192 columns, which groups of 128 do not divide",
        ),
    ],
)
def test_the_plan_refuses_what_the_loader_refuses(
    stored: Any, said: Any, sizes: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one GPU too, and with the same words."""
    monkeypatch.setitem(writing.SHAPES, "26B-A4B", writing.SHAPES["26B-A4B"] | sizes)
    quantise, config = writing.compressed(*stored), writing.ct_config((["Linear"], *said))
    pair = writing.write_pair(tmp_path, "26B-A4B", quantise, config)
    with pytest.raises(CheckpointError, match=message) as loaded:
        load(pair.folder)
    refused = plan_refuses(pair.folder)
    assert (refused.message, refused.hint) == (loaded.value.message, loaded.value.hint)


def test_formats_that_the_26b_cannot_have(tmp_path: Path) -> None:
    """Its experts are 5.5 blocks wide, and its MLP is 16.5 groups of 128."""
    path = tmp_path / "config.json"
    for weights, form in (BLOCKS, (integers(4, 128), "pack-quantized")):
        config = {"quantization_config": writing.ct_config((["Linear"], weights, form))}
        path.write_text(json.dumps(VARIANTS["26B-A4B"] | config))
        assert "do not divide" in plan_refuses(path).message
        for name in "12B", "31B":
            path.write_text(json.dumps(VARIANTS[name] | config))
            gather(str(path), "h100", build_config({}))


# Ranks


def matrices_in(chosen: WeightFormat) -> Callable[[str], WeightFormat]:
    """Return a chooser for plain tables and matrices in one format."""
    return lambda name: PlainFormat() if name.startswith("embed_tokens") else chosen


PLAIN: dict[str, Any] = {}
# By name: the quantization_config, `--quantization`, and the formats of the weights.
FORMATS: dict[str, tuple[dict[str, Any], str, Callable[[str], WeightFormat]]] = {
    "bf16": (PLAIN, "auto", all_plain),
    "fp8": (PLAIN, "fp8", rounded("fp8")),
    "int4 in groups of 32": (PLAIN, "int4", rounded("int4")),
    "int4 per channel": (
        writing.ct_config((["Linear"], integers(4), "pack-quantized")),
        "auto",
        matrices_in(QuantisedFormat(Int4(), PackedInt4(0, False))),
    ),
    # Global layers of models whose keys are values move runs of 64 columns, so their groups are smaller in memory.
    "int4 in groups of 128": (
        writing.ct_config((["Linear"], integers(4, 128, symmetric=False), "pack-quantized")),
        "auto",
        matrices_in(QuantisedFormat(Int4(128, None, True), PackedInt4(128, True))),
    ),
    "nvfp4": (
        writing.ct_config((["Linear"], NVFP4, "nvfp4-pack-quantized")),
        "auto",
        matrices_in(QuantisedFormat(Nvfp4(has_divisor=True), StoredNvfp4(False))),
    ),
}
# The same with a rounded head.
HEADS = {f"{form}, head {head}": (form, head) for form, head in (("bf16", "fp8"), ("int4 in groups of 32", "int4"))}
HEADS |= {f"{form}, head {head}": (form, head) for form, head in (("nvfp4", "int4"), ("fp8", "fp8"))}
# Ranks would cut groups.
REFUSED = {("26B-A4B", "int4 in groups of 32", 4), ("26B-A4B", "int4 in groups of 32", 8), ("26B-A4B", "nvfp4", 8)}
REFUSED |= {("26B-A4B", "int4 in groups of 128", num_ranks) for num_ranks in (1, 2, 4, 8)}  # even one rank


@matrix({"name": ["12B", "26B-A4B", "31B"], "form": [*FORMATS, *HEADS], "num_ranks": [1, 2, 4, 8]})
def test_the_bytes_of_a_rank(name: str, form: str, num_ranks: int, tmp_path: Path) -> None:
    """The parameters at real sizes, on the first and on the last rank."""
    form, head = HEADS.get(form, (form, "auto"))
    described, quantization, choose_format = FORMATS[form]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(VARIANTS[name] | ({"quantization_config": described} if described else {})))
    config = build_config({"tensor_parallel_size": num_ranks, "quantization": quantization, "head_quantization": head})
    if (name, form, num_ranks) in REFUSED:
        with pytest.raises(CuletError, match=r"are not whole groups|do not divide"):
            gather(str(path), "h100", config)
        return
    facts = gather(str(path), "h100", config)
    expected = sum(share.rank_bytes for share in shares_of(facts, text_only=True))
    if (rounding := head_rounding(facts.spec, head)) is not None:
        found = with_rounded_head(choose_format, rounding, ())
        assert found is not None
        choose_format = found
    for rank in (Rank(0, num_ranks), Rank(num_ranks - 1, num_ranks)):
        group = None if num_ranks == 1 else RankGroup(rank)
        weights = Weights(torch.bfloat16, torch.device("meta"), rank, group, choose_format=choose_format)
        assert expected == sum(tensor.nbytes for tensor in Gemma4(facts.spec, weights).parameters())


# Drafters


@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_drafters_that_are_stored_quantised(method: str, tmp_path: Path) -> None:
    """They count like those that are quantised at load."""
    spec = read_spec(VARIANTS["31B"])
    make = {"mtp": mtp_config, "dflash": dflash_config}[method]
    for name, more in (("plain", {}), ("fp8", {"quantization_config": quantisation_config("fp8", [])})):
        (tmp_path / f"{name}.json").write_text(json.dumps(make(spec) | more))

    def size(name: str, quantization: str = "auto") -> int:
        choice = DraftChoice(method, str(tmp_path / f"{name}.json"), quantization=quantization)
        return open_drafter(choice, spec).weight_bytes(2)

    assert size("fp8") == pytest.approx(size("plain", "fp8"), rel=0.002)
    assert size("fp8") < 0.8 * size("plain")
