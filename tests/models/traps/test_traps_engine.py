"""The eighth trap, tested through the public engine, and the part of the ninth that concerns the target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from culet import LLM, SamplingParams
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import AFTER_FINAL_NORM
from culet.models.weights import load_model
from culet.testing.tiny import SPECIAL_TOKENS, write_checkpoint
from tests.models import tiny_checkpoints as tiny
from tests.models.harness import Harness

IDS = {name: token_id for token_id, name in SPECIAL_TOKENS.items()}
EMPTY_THOUGHT = "<|channel>thought\n<channel|>"


def open_llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", max_num_seqs=2, max_model_len=64)


def rendered(llm: LLM, **options: bool) -> str:
    [result] = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1, temperature=0), **options)
    return llm.engine.tokenizer.decode(result.prompt_token_ids, skip_special=False)


# 8: stop tokens, suppressed tokens, and the empty thought.
@pytest.mark.parametrize("stop_token", ["<eos>", "<turn|>", "<|tool_response>"])
def test_every_eos_of_generation_config_stops(stop_token: str, tmp_path: Path) -> None:
    """A bias makes the token certain. An engine that reads only the eos of config.json would continue."""
    folder = write_checkpoint(tmp_path, "31B")
    params = SamplingParams(temperature=0, max_tokens=4, logit_bias={IDS[stop_token]: 100.0})
    with open_llm(folder) as llm:
        [result] = llm.generate("hello", params)
        assert (result.finish_reason, len(result.token_ids), result.text) == ("stop", 1, "")
        [result] = llm.generate("hello", dataclasses.replace(params, ignore_eos=True))
        assert (result.finish_reason, len(result.token_ids)) == ("length", 4)
    if stop_token != "<eos>":
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
        with open_llm(folder) as llm:
            [result] = llm.generate("hello", params)
            assert (result.finish_reason, len(result.token_ids)) == ("length", 4)


def test_suppressed_tokens_are_never_drawn(tmp_path: Path) -> None:
    """Without suppression the 12B writes media end tokens into plain text. A caller's bias does not bring them back."""
    folder = write_checkpoint(tmp_path, "12B")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={IDS["<image|>"]: 100.0})
    with open_llm(folder) as llm:
        [result] = llm.generate("hello", params)
        assert IDS["<image|>"] not in result.token_ids
    config = json.loads((folder / "generation_config.json").read_text())
    assert config.pop("suppress_tokens")
    (folder / "generation_config.json").write_text(json.dumps(config))
    with open_llm(folder) as llm:
        [result] = llm.generate("hello", params)
        assert set(result.token_ids) == {IDS["<image|>"]}


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_large_models_begin_with_an_empty_thought_and_small_ones_do_not(shape: str, tmp_path: Path) -> None:
    with open_llm(write_checkpoint(tmp_path, shape)) as llm:
        assert rendered(llm).endswith("<|turn>model\n" + EMPTY_THOUGHT) == (shape not in ("E2B", "E4B"))
        assert rendered(llm).count(EMPTY_THOUGHT) <= 1
        assert EMPTY_THOUGHT not in rendered(llm, enable_thinking=True)


# 9: an assistant's inputs are the target's scaled embedding and its hidden state after the final norm.
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_what_an_assistant_is_fed(shape: str) -> None:
    token_ids = tiny.telling_prompt(shape, 2 * tiny.WINDOW)
    oracle = tiny.oracle(shape)
    with torch.no_grad():
        want = oracle(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        embedded = oracle.get_input_embeddings()(torch.tensor(token_ids[:5]))
    model = load_model(open_checkpoint(str(tiny.checkpoint_folder(shape))), dtype=torch.float32, device=torch.device("cpu"))
    harness = Harness(model, num_slots=1)
    last = len(model.spec.layers) - 1
    harness.step([(harness.add(token_ids), len(token_ids), 1)], taps=(last, AFTER_FINAL_NORM))
    tapped = harness.hidden.tapped
    limit = 1e-4 * want.abs().max()
    assert (tapped[AFTER_FINAL_NORM][-1] - want).abs().max() <= limit
    assert (tapped[last][-1] - want).abs().max() > 100 * limit  # the stream before the final norm differs
    table = model.embedding.tensor[token_ids[:5]]
    torch.testing.assert_close(table * model.embedding.scale, embedded, rtol=1e-6, atol=1e-6)
    assert (table - embedded).abs().max() > 1e-2  # the unscaled table differs
