"""The built-in model with its drafters gives the same greedy output as without one, whatever else is running.

CULET_TEST_EMBEDDED names a folder with other weights of the same shapes.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafting import refused_drafts
from culet import LLM, SamplingParams
from culet.engine.jobs import Result
from culet.models import embedded
from culet.types import Logprobs

FOLDER = Path(os.environ.get("CULET_TEST_EMBEDDED", embedded.FOLDER))
QUESTIONS = Path(__file__).parents[3] / "training" / "questions"
DRAFTERS = {"mtp": "assistant", "dflash": "dflash"}
MAX_LEN = 768
MAX_SEQS = 6
GROUP = 4  # prompts that arrive at once, followed by their next turns
CLOSE = 1e-4  # the order of the two best tokens is uncertain if they are closer than this
MOST_CLOSE = 1e-4  # largest share of such places among all tokens


def make(method: str | None, **given: Any) -> LLM:
    """Load the model in float32 on the CPU."""
    draft = (
        {}
        if method is None
        else {
            "speculative_config": {"method": method, "model": str(FOLDER / DRAFTERS[method]), "adaptive": False, "probe": False}
        }
    )
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": MAX_LEN, "max_num_seqs": MAX_SEQS}
    return LLM(str(FOLDER / "target"), **settings, **draft, **given)


def read_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Return prompts of every kind the model knows: chats of one and more turns, tools, JSON, thoughts, and plain text."""
    chats: list[tuple[list[dict[str, str]], dict[str, Any]]] = []
    for name in ("questions", "open", "json", "tools"):
        lines = [json.loads(line) for line in (QUESTIONS / f"{name}.jsonl").read_text().splitlines()]
        for line in random.Random(name).sample(lines, min(len(lines), count)):
            asked = line.get("messages") or [{"role": "user", "content": line.get("question") or line["turns"][0]}]
            chats.append((asked, {"tools": line.get("tools")}))
    texts = ["Once upon a time, there was a little girl named", "The sun is", "A tree", "Tom and Sue went to the park. They"]
    plain = [llm.engine.tokenizer.encode(f"<bos>{text}") for text in texts]
    kinds = [llm.engine.tokenizer.encode(llm.engine.chat_template.render(chat, **more)) for chat, more in chats]
    thoughts = [
        llm.engine.tokenizer.encode(llm.engine.chat_template.render(chat, enable_thinking=True)) for chat, _ in chats[::5]
    ]
    every = [prompt for prompt in [*plain, *kinds, *thoughts] if len(prompt) < MAX_LEN // 2]
    return random.Random(3).sample(every, min(count, len(every)))


@dataclass
class Tally:
    """Counts of what was compared."""

    num_tokens: int = 0
    num_close: int = 0

    def compare(self, name: str, got: Sequence[int], want: Sequence[int], logprobs: Sequence[Logprobs]) -> None:
        """Check that the tokens are equal, or first differ where the two best tokens are nearly equal."""
        place = next((index for index, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        self.num_tokens += len(got) if place is None else place
        if place is None:
            assert len(got) <= len(want), f"{name}: {len(got)} tokens instead of {len(want)}"
            return
        best, second = sorted(logprobs[place].values(), reverse=True)[:2]
        print(f"{name}: parts at token {place} of {len(want)}, where the two best lie {best - second:.1e} apart")
        assert best - second <= CLOSE, f"{name}: parts at token {place}, where the two best lie {best - second:.1e} apart"
        self.num_close += 1


@cache
def run_plain(num_prompts: int, num_tokens: int) -> tuple[list[list[int]], list[Result], list[list[int]], list[Result]]:
    """Return prompts, their answers without drafts, their next turns, and the answers to these."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    with make(None) as plain:
        prompts = read_prompts(plain, num_prompts)
        first = plain.generate(prompts, params)
        turns = [[*prompt, *result.token_ids, *prompts[0][-20:]] for prompt, result in zip(prompts, first, strict=True)]
        return prompts, first, turns, plain.generate(turns, params)


def run(method: str, num_prompts: int, num_tokens: int) -> Tally:
    """Run all prompts, then their next turns, with preemption, cancels, and prefix hits on the first run."""
    prompts, first, turns, second = run_plain(num_prompts, num_tokens)
    chance, tally, steps = random.Random(11), Tally(), 0
    with make(method) as drafting:
        engine = drafting.engine
        asked = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        whole = list(enumerate(zip(prompts, first, strict=True))), list(enumerate(zip(turns, second, strict=True)))
        for part in (part[begin : begin + GROUP] for begin in range(0, len(prompts), GROUP) for part in whole):
            names = {f"{method} {number} of {len(prompt)} tokens": (prompt, want) for number, (prompt, want) in part}
            heard: dict[str, list[int]] = {name: [] for name in names}
            for name, (prompt, _) in names.items():
                engine.add(engine.rules.make_request(name, prompt, asked))
            left = {name for name in names if chance.random() < 0.15}
            while engine.has_work:
                steps += 1
                if steps % 17 == 0 and len(engine._scheduler._running) > 1:
                    engine._scheduler._preempt(engine._scheduler._running[-1])  # as if pages were short
                for delta in engine.step():
                    heard[delta.request_id] += delta.token_ids
                for name in [name for name in left if len(heard[name]) > num_tokens // 3]:
                    engine.cancel(name)
                    left.discard(name)
            for name, (_, want) in names.items():
                assert want.logprobs is not None
                tally.compare(name, heard[name], want.token_ids, want.logprobs)
        counters = engine.stats().counters
        print(f"{method}: {tally}, {counters}")
        assert counters.verifies
        assert counters.accepted_tokens
        assert counters.preemptions
        assert counters.prefix_hits
        assert counters.cancelled
    return tally


@pytest.mark.parametrize("method", sorted(DRAFTERS))
def test_output_is_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    assert run(method, 6, 26).num_close == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", sorted(DRAFTERS))
def test_output_of_many_prompts_is_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULET_CHECK_PAGES", "1")
    tally = run(method, 72, 120)
    assert tally.num_tokens > 8000
    assert tally.num_close <= max(1, MOST_CLOSE * tally.num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(DRAFTERS))
def test_refused_drafts_cost_little(method: str) -> None:
    """An engine whose drafts are all rejected is hardly slower than one without.

    The aim is 3 %, and the bound allows for noise.
    """
    given = {"device": "cpu", "max_num_seqs": 2, "max_model_len": MAX_LEN}
    choice = {"method": method, "model": str(FOLDER / DRAFTERS[method])}
    with (
        LLM(str(FOLDER / "target"), **given) as plain,
        LLM(str(FOLDER / "target"), **given, speculative_config=choice) as drafting,
    ):
        figures = refused_drafts.compare(plain, drafting, 1, num_tokens=200, turns=5, block=16)
    print(method, figures)
    assert figures["own_ratio"] > 0.93
