"""transformers loads checkpoints of culet.testing.tiny as Gemma 4 and generates the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from culet import LLM, SamplingParams
from culet.errors import ConfigError
from culet.models.variants import VARIANTS
from culet.testing.tiny import SHAPES, SPECIAL_TOKENS, tensor_shapes, write_checkpoint

PROMPT = "<bos>What is the capital of France? caf\u00e9 \u4f60\u597d \U0001f48e\n"


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_loads_it_and_agrees(shape: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_checkpoint(tmp_path, shape)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        expected = model.generate(ids, do_sample=False, max_new_tokens=16, suppress_tokens=None)[0, ids.shape[1] :].tolist()

    with LLM(str(folder), device="cpu", max_model_len=256) as llm:
        assert llm.engine.tokenizer.encode(PROMPT) == ids[0].tolist()
        assert llm.engine.tokenizer.decode(ids[0].tolist(), skip_special=False) == PROMPT
        [result] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))
    assert list(result.token_ids) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_structure_is_that_of_the_real_one(shape: str, tmp_path: Path) -> None:
    """config.json has the same keys, and the same flags that determine the structure."""
    config = json.loads((write_checkpoint(tmp_path, shape) / "config.json").read_text())
    real = VARIANTS[shape]
    assert config["architectures"] == real["architectures"]
    for key in ("attention_k_eq_v", "use_bidirectional_attention"):
        assert config["text_config"].get(key) == real["text_config"].get(key)
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        assert bool(config["text_config"].get(key)) == bool(real["text_config"].get(key)), key
    assert (config["text_config"].get("num_global_key_value_heads") is None) == (
        real["text_config"].get("num_global_key_value_heads") is None
    )


def test_the_same_seed_writes_the_same_weights(tmp_path: Path) -> None:
    first, second, other = (
        write_checkpoint(tmp_path / name, "31B", seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_tensors_are_those_listed(tmp_path: Path) -> None:
    from culet.models.checkpoint import open_checkpoint

    folder = write_checkpoint(tmp_path, "26B-A4B")
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    expected = {f"model.language_model.{name}": shape for name, shape in tensor_shapes(open_checkpoint(str(folder)).spec)}
    assert found == expected


def test_special_tokens_have_gemmas_ids() -> None:
    ids = {name: token_id for token_id, name in SPECIAL_TOKENS.items()}
    assert (ids["<eos>"], ids["<bos>"], ids["<|turn>"], ids["<turn|>"], ids["<|tool_response>"]) == (1, 2, 105, 106, 50)


def test_unknown_shape(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown shape: '7B'"):
        write_checkpoint(tmp_path, "7B")
