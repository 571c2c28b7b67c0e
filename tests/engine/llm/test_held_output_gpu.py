"""Tool calls, thinking budgets and `min_tokens` on a GPU: the same tokens as on a CPU, with graphs, look-ahead and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from culet import LLM, SamplingParams
from culet.testing.tiny import write_checkpoint
from tests.engine.drafting.test_held_output import SCHEMA, TOOLS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GIVEN = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
CHATS: Any = [[{"role": "user", "content": f"Cut stone {index}."}] for index in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"head_dim": 32, "global_head_dim": 64}  # head dims that tensor cores support
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "E4B", dtype=torch.float32, overrides=overrides)


def settings_of(llm: LLM) -> list[SamplingParams]:
    """Return settings with calls, budgets, both, a least length, and none of them. Biases open calls and thoughts."""
    ids = [llm.engine.tokenizer.token_id(name) for name in ("<|tool_call>", "<|channel>", "<channel|>", "<turn|>")]
    opens, thinks, thought, ends = [token_id for token_id in ids if token_id is not None]
    given: list[dict[str, Any]] = [
        {"logit_bias": {opens: 11.0}},
        {"logit_bias": {opens: 11.0}},
        {"logit_bias": {thinks: 14.0, thought: -100.0}, "thinking_token_budget": 0},
        {"logit_bias": {thinks: 14.0, thought: -100.0}, "thinking_token_budget": 1},
        {"logit_bias": {thinks: 14.0, thought: -100.0}, "thinking_token_budget": 7},
        {"logit_bias": {thinks: 11.0, opens: 11.0}, "thinking_token_budget": 7},
        {"logit_bias": {ends: 14.0}, "min_tokens": 30},
        {},
    ]
    return [SamplingParams(temperature=1.0, max_tokens=80, seed=seed, **fields) for seed, fields in enumerate(given)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    llm = LLM(str(folder), device="cpu", **GIVEN)
    results = llm.chat(CHATS, settings_of(llm), tools=TOOLS, enable_thinking=True)
    calls = [call for result in results for call in result.tool_calls if call.is_complete]
    assert calls
    for call in calls:
        if call.name == "cut":
            jsonschema.validate(call.arguments, SCHEMA)
    assert [result.samples[0].num_thought_tokens for result in results[2:5]] == [0, 1, 7]
    return [result.token_ids for result in results]


@pytest.mark.parametrize("method", [None, "mtp", "dflash"])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_the_same_as_on_a_cpu(folder: Path, expected: list[tuple[int, ...]], method: str | None, enforce_eager: bool) -> None:
    draft = None if method is None else {"method": method, "model": "random:", "adaptive": False}
    given = GIVEN | {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": enforce_eager, "speculative_config": draft}
    llm = LLM(str(folder), device="cuda", **given)
    settings = settings_of(llm)
    got = llm.chat(CHATS, settings, tools=TOOLS, enable_thinking=True)
    assert [result.token_ids for result in got] == expected
    for index, params in enumerate(settings):  # one at a time, so that free sequences look ahead
        (result,) = llm.chat(CHATS[index], params, tools=TOOLS, enable_thinking=True)
        assert result.token_ids == expected[index]
