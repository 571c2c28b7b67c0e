"""Drafting under everything at once, with every page index checked: growing conversations, cancels, preemption, prefix hits.

How long it runs is set by CULET_TEST_SOAK_SECONDS (default: half a minute for each drafter).
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from culet import LLM, SamplingParams
from culet.drafters.base import DraftBatch
from culet.engine.engine import Engine
from culet.engine.memory import least_slabs
from culet.models.tiny import write_checkpoint

SECONDS = float(os.environ.get("CULET_TEST_SOAK_SECONDS", "30"))
VOCAB = range(130, 600)
MAX_LEN = 400


def tell(engine: Engine, truth: list[list[int]], chance: random.Random) -> None:
    """Let the drafter propose, three times in four, what is known to come."""
    runner = engine._runner
    drafter: Any = runner.drafter
    propose = drafter.propose

    def told(batch: DraftBatch, pool: Any, num_drafts: int) -> Tensor:
        proposals = propose(batch, pool, num_drafts)
        for row, (slot, length) in enumerate(zip(batch.slot_R.tolist(), batch.length_R.tolist(), strict=True)):
            said = runner.tokens_SL[slot, : length + 1].tolist()
            whole = next((one for one in truth if one[: length + 1] == said), [])
            for index, token in enumerate(whole[length + 1 : length + 1 + num_drafts]):
                if chance.random() < 0.75:
                    proposals[row, index] = token
        return proposals

    drafter.propose = told


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mtp", "dflash"])
@pytest.mark.timeout(SECONDS * 2 + 600)
def test_soak(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a conversation says is what it says without drafts, whatever goes on beside it."""
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    folder = write_checkpoint(tmp_path, "31B")
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 6, "max_model_len": MAX_LEN, "max_num_batched_tokens": 96}
    drafts = {"method": method, "model": "random:", "num_speculative_tokens": 3, "adaptive": False}
    chance = random.Random(7)
    truth: list[list[int]] = []
    with LLM(str(folder), speculative_config=drafts, **settings) as roomy:
        layout = roomy.engine._scheduler.layout
    # A cache of little more than one long sequence: what outgrows it is preempted.
    tight = layout.slab_bytes * (least_slabs(layout, MAX_LEN) + 3)
    with (
        LLM(str(folder), **settings) as plain,
        LLM(str(folder), speculative_config=drafts, kv_cache_memory_bytes=tight, **settings) as drafting,
    ):
        engine = drafting.engine
        tell(engine, truth, chance)
        chats: dict[int, list[int]] = {}
        began, num_turns, num_cancelled = time.monotonic(), 0, 0
        while time.monotonic() - began < SECONDS:
            chosen = chance.sample(range(10), chance.randint(1, 6))
            prompts = []
            for chat in chosen:
                if len(chats.setdefault(chat, [chat + 130])) > MAX_LEN - 100:
                    chats[chat] = [chat + 130]
                prompts.append([*chats[chat], *chance.choices(VOCAB, k=chance.randint(1, 30))])
            params = SamplingParams(
                temperature=chance.choice([0.0, 1.0]),
                seed=num_turns,
                max_tokens=chance.randint(1, 40),
                ignore_eos=True,
                repetition_penalty=chance.choice([1.0, 1.2]),
            )
            want = plain.generate(prompts, params)
            truth[:] = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, want, strict=True)]
            if chance.random() < 0.3:  # somebody who does not wait for the end
                engine.add(engine.rules.make_request(f"leaves-{num_turns}", prompts[0], params))
                for _ in range(chance.randint(0, 5)):
                    engine.step()
                engine.cancel(f"leaves-{num_turns}")
                num_cancelled += 1
            got = drafting.generate(prompts, params)
            assert [one.token_ids for one in got] == [one.token_ids for one in want], f"turn {num_turns}"
            chats.update(zip(chosen, [list(one) for one in truth], strict=True))
            num_turns += 1
        counters = engine.stats().counters
        print(f"{method}: {num_turns} turns, {num_cancelled} cancelled, {counters}")
        assert counters.verifies > 50
        assert counters.accepted_tokens > 50
        assert counters.prefix_hits > 5
        assert counters.preemptions > 0
        assert num_cancelled > 0
