"""Text that drafts as badly as can be: how much slower an engine with a drafter is than one without, no draft ever accepted.

    python benchmarks/refused_drafts.py                       # the built-in model, both drafters, 1 and 8 chats
    python benchmarks/refused_drafts.py random:E4B --drafters mtp=random: --num-seqs 1

Every verify refuses all its drafts (`Runner.force_accepted`); all work is done, and the policy decides as ever. The engines
take turns on the same prompts, a few steps each, so that whatever else the machine does meets both. On a CPU that others use as
well, `own_ratio` is steadier: it counts the time that this process ran.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from culet import LLM, SamplingParams
from culet.models import embedded

BUILT_IN = ("mtp=assistant", "dflash=dflash")
PROMPT_LEN = 64
GPU_CACHE_BYTES = 1 << 30  # of each engine: two must fit beside each other


def make_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Prompts that no two runs share with each other by accident."""
    vocab = range(130, llm.engine.spec.vocab_size - 1)
    return [random.Random(seed).choices(vocab, k=length) for seed in range(count)]


class Answering:
    """An engine that writes answers of one length to some prompts, a few steps at a time."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> None:
        self.engine, self.seconds, self.own_seconds = llm.engine, 0.0, 0.0
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            self.engine.add(self.engine.rules.make_request(str(index), prompt, params))
        waiting = len(prompts)
        while waiting:  # for the first token of each: what is timed comes after them
            waiting -= sum(bool(delta.token_ids) for delta in self.engine.step())

    def go_on(self, num_steps: int) -> bool:
        """Take so many steps, timed; False where nothing is left to do."""
        began, own_began = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            if not self.engine.has_work:
                break
            self.engine.step()
        self.seconds += time.perf_counter() - began
        self.own_seconds += time.process_time() - own_began
        return self.engine.has_work


def compare(plain: LLM, drafting: LLM, num_seqs: int, *, num_tokens: int, turns: int, block: int) -> dict[str, Any]:
    """What the drafting engine reaches of the other's speed: of each turn, and the median."""
    drafting.engine._worker.force_accepted(0)
    if plain.engine._worker.fixed is None:
        # Where weights lie in memory moves a CPU's speed by some percent: both compute with the same.
        plain.engine._worker.target.model = drafting.engine._worker.target.model
    prompts = make_prompts(plain, (turns + 1) * num_seqs, PROMPT_LEN)
    before, ratios, own_ratios = drafting.engine.stats().counters, [], []
    for turn in range(turns + 1):
        asked = prompts[turn * num_seqs : (turn + 1) * num_seqs]
        pair = [Answering(llm, asked, num_tokens) for llm in (plain, drafting)]
        order = pair if turn % 2 else pair[::-1]
        while sum(one.go_on(block) for one in order):
            order = order[::-1]
        ratios.append(pair[0].seconds / pair[1].seconds)
        own_ratios.append(pair[0].own_seconds / pair[1].own_seconds)
    counters = drafting.engine.stats().counters.since(before)
    return {
        "num_seqs": num_seqs,
        "ratio": round(median(ratios[1:]), 4),  # the first turn is to get warm
        "own_ratio": round(median(own_ratios[1:]), 4),
        "ratios": [round(one, 3) for one in ratios[1:]],
        "own_ratios": [round(one, 3) for one in own_ratios[1:]],
        "plain_tokens_per_s": round(num_seqs * (num_tokens - 1) / pair[0].seconds, 1),
        "verifies": counters.verifies,
        "steps": counters.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(embedded.FOLDER / "target"))
    parser.add_argument(
        "--drafters", nargs="+", default=list(BUILT_IN), help="method=model; a folder beside the target's will do"
    )
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--block", type=int, default=32, help="steps that an engine takes before the other's")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="further settings of both engines")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    given: dict[str, Any] = {"max_num_seqs": max(options.num_seqs), "max_model_len": 1024}
    if torch.cuda.is_available():
        given["kv_cache_memory_bytes"] = GPU_CACHE_BYTES
    for one in options.set:
        name, value = one.split("=", 1)
        given[name] = int(value) if value.isdigit() else value
    found: dict[str, list[dict[str, Any]]] = {}
    plain = LLM(options.model, **given)
    for drafter in options.drafters:
        method, name = drafter.split("=", 1)
        beside = Path(options.model).parent / name
        choice = {"method": method, "model": str(beside) if beside.is_dir() else name}
        drafting = LLM(options.model, **given, speculative_config=choice)
        found[drafter] = []
        for count in options.num_seqs:
            sizes = {"num_tokens": options.num_tokens, "turns": options.turns, "block": options.block}
            found[drafter].append(compare(plain, drafting, count, **sizes))
            print(drafter, found[drafter][-1], flush=True)
        del drafting
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
