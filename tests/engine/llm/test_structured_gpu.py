"""Structured output on a GPU: the same tokens as on a CPU, with graphs, look-ahead and drafts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from culet import LLM, SamplingParams
from culet.testing.tiny import write_checkpoint
from culet.types import StructuredOutputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GIVEN = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128}
PATTERN = r"[A-F]{2}-[0-9]{4}( [a-z]{1,8}){3}"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}},
    "required": ["ok", "code"],
    "additionalProperties": False,
}
FORMS = (
    StructuredOutputs(regex=PATTERN),
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(choice=["yes", "no", "perhaps"]),
    None,
)
SETTINGS = [
    SamplingParams(max_tokens=60, seed=seed, temperature=1.0, structured_outputs=form) for form in FORMS for seed in (0, 1)
]
PROMPTS = ["A cut gem has a culet"] * len(SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"head_dim": 32, "global_head_dim": 64}  # head dims that tensor cores support
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "E4B", dtype=torch.float32, overrides=overrides)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    results = LLM(str(folder), device="cpu", **GIVEN).generate(PROMPTS, SETTINGS)
    for result in results[:2]:
        assert re.fullmatch(PATTERN, result.text)
    for result in results[2:4]:  # a random model may write white space until the limit
        assert result.finish_reason == "length" or set(json.loads(result.text)) == {"ok", "code"}
    for result in results[4:6]:
        assert result.text in ("yes", "no", "perhaps")
    return [result.token_ids for result in results]


@pytest.mark.parametrize("draft", [None, {"method": "mtp", "model": "random:", "adaptive": False}], ids=["plain", "drafts"])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_the_same_as_on_a_cpu(folder: Path, expected: list[tuple[int, ...]], draft: Any, enforce_eager: bool) -> None:
    given = GIVEN | {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": enforce_eager, "speculative_config": draft}
    llm = LLM(str(folder), device="cuda", **given)
    assert [result.token_ids for result in llm.generate(PROMPTS, SETTINGS)] == expected
    assert [llm.generate([PROMPTS[0]], params)[0].token_ids for params in SETTINGS] == expected  # one at a time
