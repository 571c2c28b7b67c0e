"""Drafters change no answer about media. They see no media themselves: MTP reads the target's KV, and DFlash its taps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from culet.engine.engine import Engine
from tests.engine.media.media_rig import IMAGE, Prompt, Told, ask, check_answer, image, make, run, text


def prompts(shape: str) -> list[Prompt]:
    picture, long = image(2, 5, 1), image(4, 6, 2)
    return [
        Prompt.of(shape, text(7), picture, text(5, 1)),
        Prompt.of(shape, text(2, 2), long, text(9, 2), picture, text(3, 3)),
        Prompt.of(shape, text(23, 4)),
    ]


def draft_answers(engine: Engine, answers: Mapping[Prompt, list[int]]) -> None:
    """Make most drafts right, so that many are accepted, and some a placeholder."""
    runner: Any = engine._worker
    propose = runner.drafter.propose

    def spied(batch: Any, pool: Any, num_drafts: int) -> Tensor:
        drafts_RK = propose(batch, pool, num_drafts)
        for row, (slot, length) in enumerate(zip(batch.slot_R.tolist(), batch.length_R.tolist(), strict=True)):
            tokens = runner.tokens_SL[slot, : length + 1].tolist()
            for prompt, answer in answers.items():
                known = [*prompt.token_ids, *answer]
                if known[: length + 1] == tokens:
                    rest = known[length + 1 :][:num_drafts]
                    for place, token_id in enumerate(rest):
                        drafts_RK[row, place] = IMAGE if (length + place) % 7 == 0 else token_id
        return drafts_RK

    runner.drafter.propose = spied


CASES = [("31B", "mtp"), ("12B", "dflash")]
SLOW_CASES = [("E4B", "mtp"), ("26B-A4B", "dflash"), ("E4B", "dflash"), ("12B", "mtp")]


@pytest.mark.parametrize(("shape", "method"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)])
def test_lossless(shape: str, method: str) -> None:
    found = prompts(shape)
    plain = make(shape)
    answers = [told.tokens[0] for told in run(plain, *(ask(plain, str(i), p, 16) for i, p in enumerate(found)))]
    draft = {"method": method, "model": "random:", "num_speculative_tokens": 3, "adaptive": False, "probe": False}
    engine = make(shape, speculative_config=draft, max_num_batched_tokens=8 + 27)
    draft_answers(engine, dict(zip(found, answers, strict=True)))
    for turn in range(2):  # the second time after a prefix hit
        told: list[Told] = run(engine, *(ask(engine, f"{turn} {i}", p, 16) for i, p in enumerate(found)))
        for prompt, one, answer in zip(found, told, answers, strict=True):
            assert one.tokens[0] == answer
            check_answer(shape, prompt, one)
    counters = engine.stats().counters
    assert counters.accepted_tokens > 15
    assert counters.rolled_back_tokens > 5
    assert counters.encoded_items == 2
