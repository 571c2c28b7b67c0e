"""Drafting under everything at once: growing conversations, cancels, preemption and prefix hits. Every page index is checked.

CULET_TEST_SOAK_SECONDS sets the duration (default: half a minute for each drafter).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from culet import LLM, SamplingParams
from culet.drafters.base import DraftBatch
from culet.engine.engine import Engine
from culet.engine.memory import least_slabs
from culet.models import embedded
from culet.testing.tiny import write_checkpoint
from tests.engine.drafting.dflash_rig import Pauses

SECONDS = float(os.environ.get("CULET_TEST_SOAK_SECONDS", "30"))
EMBEDDED = Path(os.environ.get("CULET_TEST_EMBEDDED", embedded.FOLDER))
VOCAB = range(130, 600)
MAX_LEN = 400


def tell(engine: Engine, truth: list[list[int]], chance: random.Random) -> None:
    """Let the drafter propose the tokens known to come three times in four."""
    runner = engine._worker
    drafter: Any = runner.drafter
    propose = drafter.propose

    def told(batch: DraftBatch, pool: Any, num_drafts: int) -> Tensor:
        proposals = propose(batch, pool, num_drafts)
        for row, (slot, length) in enumerate(zip(batch.slot_R.tolist(), batch.length_R.tolist(), strict=True)):
            said = runner.tokens_SL[slot, : length + 1].tolist()
            whole = next((tokens for tokens in truth if tokens[: length + 1] == said), [])
            for index, token in enumerate(whole[length + 1 : length + 1 + num_drafts]):
                if chance.random() < 0.75:
                    proposals[row, index] = token
        return proposals

    drafter.propose = told


@dataclass
class Soak:
    """Runs growing conversations for a given time, with a drafter and without one."""

    plain: LLM
    drafting: LLM
    chance: random.Random
    vocab: Sequence[int]
    num_turns: int = 0
    num_cancelled: int = 0
    num_answers: int = 0
    num_same: int = 0

    def run(self, seconds: float, truth: list[list[int]]) -> None:
        """Run for `seconds`. The tokens that will come next are written to `truth`."""
        chance, engine = self.chance, self.drafting.engine
        chats: dict[int, list[int]] = {}
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            chosen = chance.sample(range(10), chance.randint(1, 6))
            prompts = []
            for chat in chosen:
                if len(chats.setdefault(chat, [chat + 130])) > MAX_LEN - 100:
                    chats[chat] = [chat + 130]
                prompts.append([*chats[chat], *chance.choices(self.vocab, k=chance.randint(1, 30))])
            params = SamplingParams(
                temperature=chance.choice([0.0, 1.0]),
                seed=self.num_turns,
                max_tokens=chance.randint(1, 40),
                ignore_eos=True,
                repetition_penalty=chance.choice([1.0, 1.2]),
            )
            want = self.plain.generate(prompts, params)
            truth[:] = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, want, strict=True)]
            if chance.random() < 0.3:  # a client that does not wait for the end
                name = f"leaves-{self.num_turns}"
                engine.add(engine.rules.make_request(name, prompts[0], params))
                for _ in range(chance.randint(0, 5)):
                    engine.step()
                engine.cancel(name)
                self.num_cancelled += 1
            got = self.drafting.generate(prompts, params)
            self.num_answers += len(got)
            self.num_same += sum(ours.token_ids == theirs.token_ids for ours, theirs in zip(got, want, strict=True))
            assert all(len(result.token_ids) == params.max_tokens for result in got)
            chats.update(zip(chosen, [list(tokens) for tokens in truth], strict=True))
            self.num_turns += 1
        print(
            f"{self.num_turns} turns, {self.num_cancelled} cancelled, {self.num_same} of {self.num_answers} answers the same, "
            f"{engine.stats().counters}"
        )

    def check(self) -> None:
        """Check that everything has happened and every page has been returned."""
        stats = self.drafting.engine.stats()
        assert stats.counters.verifies > 50
        assert stats.counters.accepted_tokens > 50
        assert stats.counters.prefix_hits > 5
        assert stats.counters.preemptions > 0
        assert self.num_cancelled > 0
        assert stats.num_free_pages + stats.num_resume_point_pages == stats.num_pages


def tight_bytes(llm: LLM) -> int:
    """Return the size of a cache that holds little more than one long sequence, so that sequences are preempted."""
    layout = llm.engine.layout
    return layout.slab_bytes * (least_slabs(layout, MAX_LEN) + 3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mtp", "dflash"])
@pytest.mark.timeout(SECONDS * 2 + 600)
def test_soak(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation has the same output as without drafts, whatever else is running."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    folder = str(write_checkpoint(tmp_path, "31B"))
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 6, "max_model_len": MAX_LEN, "max_num_batched_tokens": 96}
    drafts = {"method": method, "model": "random:", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(folder, speculative_config=drafts, **settings) as roomy:
        tight = tight_bytes(roomy)
    with (
        LLM(folder, **settings) as plain,
        LLM(folder, speculative_config=drafts, kv_cache_memory_bytes=tight, **settings) as drafting,
    ):
        truth: list[list[int]] = []
        soak = Soak(plain, drafting, random.Random(7), VOCAB)
        tell(drafting.engine, truth, soak.chance)
        drafting.engine._scheduler.policy = Pauses(60, 90)  # type: ignore[assignment]
        soak.run(SECONDS, truth)
        soak.check()
        # A draw may fall on the edge between two tokens. Steps of other shapes round differently, and 1e-6 of a logit decides.
        assert soak.num_answers - soak.num_same <= soak.num_answers // 2000


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", ["mtp", "dflash"])
@pytest.mark.timeout(SECONDS * 2 + 600)
def test_soak_on_a_gpu(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the trained model with graphs in bfloat16, where steps of other shapes round differently, so some answers differ."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    folder, parts = str(EMBEDDED / "target"), {"mtp": "assistant", "dflash": "dflash"}
    settings: dict[str, Any] = {"device": "cuda", "max_num_seqs": 6, "max_model_len": MAX_LEN, "max_num_batched_tokens": 96}
    drafts = {"method": method, "model": str(EMBEDDED / parts[method])}
    with LLM(folder, speculative_config=drafts, kv_cache_memory_bytes=64 << 20, **settings) as roomy:
        tight = tight_bytes(roomy)
    with (
        LLM(folder, kv_cache_memory_bytes=64 << 20, **settings) as plain,
        LLM(folder, speculative_config=drafts | {"adaptive": False}, kv_cache_memory_bytes=tight, **settings) as drafting,
    ):
        soak = Soak(plain, drafting, random.Random(7), range(130, 8000))
        soak.run(SECONDS, [])
        soak.check()
        assert soak.num_same > 0.5 * soak.num_answers
