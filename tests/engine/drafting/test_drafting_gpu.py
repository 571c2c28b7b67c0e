"""An MTP assistant on a GPU: its kernels draft the same tokens as attention in plain torch, and graphs change no token."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from culet import LLM
from culet.testing.tiny import write_checkpoint
from tests.engine.drafting.gpu_drafts import GIVEN, GREEDY, TARGET
from tests.engine.runner.real_steps import make_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MTP = {"method": "mtp", "model": "random:", "adaptive": False}


@pytest.fixture(scope="module", params=["E4B", "26B-A4B", "31B"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), request.param, dtype=torch.float32, overrides=TARGET)


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate([make_prompt(length) for length in (1, 30, 75)], GREEDY)]


@functools.cache
def without_drafts(folder: Path, enforce_eager: bool) -> list[tuple[int, ...]]:
    return tokens_of(LLM(str(folder), **GIVEN, enforce_eager=enforce_eager))


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("position", ["engine", "hf"])
def test_output_is_the_same(folder: Path, enforce_eager: bool, position: str) -> None:
    """Whole engines in float32, with and without graphs, run twice. The second time uses the prefix cache."""
    llm = LLM(str(folder), **GIVEN, enforce_eager=enforce_eager, speculative_config=MTP | {"position": position})
    for _ in range(2):
        assert tokens_of(llm) == without_drafts(folder, enforce_eager)
    assert llm.engine.stats().counters.verifies > 50
    assert llm.engine.stats().draft_seconds > 0


def test_drafts_do_not_depend_on_the_backend(folder: Path) -> None:
    """Triton's attention and torch's lead to the same proposals, step by step."""
    seen: list[list[tuple[int, int, int]]] = []
    for backend in ("triton", "torch_cpu"):
        llm = LLM(str(folder), **GIVEN, enforce_eager=True, speculative_config=MTP | {"attention_backend": backend})
        drafter = llm.engine._worker.drafter
        assert drafter is not None
        drafted: list[tuple[int, int, int]] = []
        propose = drafter.propose

        def spy(batch, pool, num_drafts, propose=propose, drafted=drafted):
            proposals = propose(batch, pool, num_drafts)
            drafted.extend(zip(batch.newest_R.tolist(), batch.length_R.tolist(), proposals[:, 0].tolist(), strict=True))
            return proposals

        drafter.propose = spy  # type: ignore[method-assign]
        llm.generate([make_prompt(length) for length in (5, 90)], replace(GREEDY, max_tokens=30))
        seen.append(drafted)
    assert len(seen[0]) == len(seen[1]) > 40
    equal = sum(a == b for a, b in zip(*seen, strict=True))
    assert equal >= 0.95 * len(seen[0])  # a draft may depend on the last bits
