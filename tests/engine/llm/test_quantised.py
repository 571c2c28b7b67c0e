"""The engine with quantised weights: at load, with random weights, with drafters, and with an fp8 cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from culet.config import build_config
from culet.engine.llm import LLM
from culet.errors import ConfigError
from culet.layers.weight.quantised.matrices import QuantisedExperts, QuantisedMatrix
from culet.models.checkpoint import open_checkpoint
from culet.models.quantised.part_bytes import part_bytes
from culet.models.sizes import text_weights
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.models.weights import load_model
from culet.testing.tiny import write_checkpoint
from culet.types import SamplingParams

PROMPT = list(range(130, 150))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "31B")


def answer(model: str, **settings: Any) -> list[int]:
    with LLM(model, **{**SMALL, **settings}) as llm:
        (result,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY)
        return list(result.token_ids)


@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_at_load(folder: Path, precision: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="culet"):
        assert len(answer(str(folder), quantization=precision)) == 12
    said = caplog.text
    assert ("quantisation-aware training gives better files" in said) == (precision == "int4")


def test_with_a_drafter_in_fp8_and_an_fp8_cache(folder: Path) -> None:
    """The drafter may be fp8 next to an int4 target. Answers do not change."""
    drafter = {"method": "mtp", "model": "random:", "quantization": "fp8", "probe": False}
    settings = {"quantization": "int4", "kv_cache_dtype": "fp8"}
    alone = answer(str(folder), **settings)
    assert answer(str(folder), speculative_config=json.dumps(drafter), **settings) == alone
    with pytest.raises(ConfigError, match="quantization: got 'int4', expected auto or fp8"):
        build_config({"speculative_config": json.dumps({**drafter, "quantization": "int4"})})


def test_dflash_in_fp8(folder: Path) -> None:
    drafter = {"method": "dflash", "model": "random:layers=1,block=4", "quantization": "fp8", "probe": False}
    alone = answer(str(folder), quantization="fp8")
    assert answer(str(folder), quantization="fp8", speculative_config=json.dumps(drafter)) == alone


DRAFTERS = {
    "mtp": {"method": "mtp", "model": "random:"},
    "mtp, fp8 head": {"method": "mtp", "model": "random:", "head_dtype": "fp8"},
    "dflash": {"method": "dflash", "model": "random:layers=1,block=4"},
    "suffix": {"method": "suffix"},
}


@pytest.mark.parametrize("head", ["fp8", "int4"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_beside_a_rounded_head(folder: Path, name: str, head: str) -> None:
    """They look tokens up in the target's table, and DFlash scores its drafts with it. Answers do not change."""
    drafter = json.dumps({**DRAFTERS[name], "adaptive": False, "probe": False})
    alone = answer(str(folder), head_quantization=head)
    assert answer(str(folder), head_quantization=head, speculative_config=drafter) == alone


def test_a_rounded_head_is_announced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="culet"):
        assert len(answer(str(folder), head_quantization="int4")) == 12
    assert "head: int4" in caplog.text
    assert "larger models were not measured" in caplog.text


@pytest.mark.parametrize(("precision", "shape"), [("fp8", "26B-A4B"), ("int4", "E4B")])
def test_random_weights(precision: str, shape: str, tmp_path: Path) -> None:
    """Random weights are quantised too, and take the bytes that the plan says."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    config = write_checkpoint(tmp_path / shape, shape, overrides=sizes) / "config.json"
    checkpoint = open_checkpoint(f"random:{config}")
    model = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), quantization=precision)
    kinds = {type(module) for module in model.modules()}
    assert QuantisedMatrix in kinds
    assert (QuantisedExperts in kinds) == (shape == "26B-A4B")
    values = json.loads(config.read_text())
    planned = part_bytes(read_spec(values), values, 4, precision)
    assert sum(tensor.nbytes for tensor in model.parameters()) == sum(planned.values())
    assert torch.isfinite(model.embedding.embed(torch.tensor([5]))).all()


def test_planned_bytes_of_published_checkpoints() -> None:
    spec = read_spec(VARIANTS["31B"])
    plain = part_bytes(spec, VARIANTS["31B"], 2)
    small = {part: 4 * text_weights(spec)[part] for part in ("norms", "layer scalars")}  # float32
    assert plain == pytest.approx({part: 2 * count for part, count in text_weights(spec).items()} | small, rel=1e-5)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    qat = VARIANTS["31B"] | {"quantization_config": config | {"ignore": ["lm_head", "re:.*vision.*"]}}
    assert part_bytes(spec, qat, 2) == part_bytes(spec, VARIANTS["31B"], 2, "int4")
    assert part_bytes(spec, qat, 2)["dense MLP"] == pytest.approx(plain["dense MLP"] * (0.5 + 2 / 32) / 2)
    kept = VARIANTS["31B"] | {"quantization_config": config | {"ignore": ["re:.*self_attn.*"]}}
    assert part_bytes(spec, kept, 2)["attention"] == plain["attention"]
    named = [f"layers.{layer.index}.self_attn.{part}_proj" for layer in spec.layers for part in "qkvo"]
    kept = VARIANTS["31B"] | {"quantization_config": config | {"ignore": [f"model.language_model.{name}" for name in named]}}
    text_only = VARIANTS["31B"]["text_config"] | {
        "quantization_config": config | {"ignore": [f"model.{name}" for name in named]}
    }
    for each in (kept, text_only):  # the names of a text-only checkpoint are shorter
        assert part_bytes(spec, each, 2)["attention"] == plain["attention"]
