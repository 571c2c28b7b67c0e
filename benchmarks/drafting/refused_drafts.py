"""Measure the worst case for a drafter: how much of the plain speed an engine keeps if no draft is ever accepted.

    python benchmarks/drafting/refused_drafts.py                       # the built-in model, both drafters, 1 and 8 chats
    python benchmarks/drafting/refused_drafts.py random:E4B --drafters mtp=random: --num-seqs 1

Every verify rejects all its drafts (`Runner.force_accepted`). All work is still done, and the policy decides as usual. The
engines take turns on the same prompts, a few steps each, so that other load on the machine affects both. On a busy CPU,
`own_ratio` is steadier, because it counts only the time that this process ran.
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
GPU_CACHE_BYTES = 1 << 30  # per engine, since several must fit on one GPU


def make_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Make random prompts that are the same in every run."""
    vocab = range(130, llm.engine.spec.vocab_size - 1)
    return [random.Random(seed).choices(vocab, k=length) for seed in range(count)]


class Answering:
    """An engine that answers prompts a few steps at a time. Time counts once every prompt has its first token."""

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self.engine, self.seconds, self.own_seconds, self.num_tokens = llm.engine, 0.0, 0.0, 0
        for index, prompt in enumerate(prompts):
            self.engine.add(self.engine.rules.make_request(str(index), prompt, params))
        num_waiting = len(prompts)
        while num_waiting:
            num_waiting -= sum(bool(delta.token_ids) for delta in self.engine.step())

    def advance(self, num_steps: int) -> bool:
        """Take timed steps. Return False if nothing is left to do."""
        began, own_began = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            if not self.engine.has_work:
                break
            self.num_tokens += sum(len(delta.token_ids) for delta in self.engine.step())
        self.seconds += time.perf_counter() - began
        self.own_seconds += time.process_time() - own_began
        return self.engine.has_work


def share_weights(*engines: LLM) -> None:
    """Make all engines use the same weights on a CPU, because their location in memory changes the speed by a few percent."""
    first, *others = [llm.engine._worker for llm in engines]
    for worker in others if first.fixed is None else ():
        worker.target.model = first.target.model


def compare(plain: LLM, drafting: LLM, num_seqs: int, *, num_tokens: int, turns: int, block: int) -> dict[str, Any]:
    """Return the share of the plain speed that the drafting engine reaches, for each turn and as the median."""
    drafting.engine._worker.force_accepted(0)
    share_weights(drafting, plain)
    prompts = make_prompts(plain, (turns + 1) * num_seqs, PROMPT_LEN)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    before, ratios, own_ratios = drafting.engine.stats().counters, [], []
    for turn in range(turns + 1):
        asked = prompts[turn * num_seqs : (turn + 1) * num_seqs]
        pair = [Answering(llm, asked, params) for llm in (plain, drafting)]
        order = pair if turn % 2 else pair[::-1]
        while sum(answering.advance(block) for answering in order):
            order = order[::-1]
        ratios.append(pair[0].seconds / pair[1].seconds)
        own_ratios.append(pair[0].own_seconds / pair[1].own_seconds)
    counters = drafting.engine.stats().counters.since(before)
    return {
        "num_seqs": num_seqs,
        "ratio": round(median(ratios[1:]), 4),  # the first turn is a warm-up
        "own_ratio": round(median(own_ratios[1:]), 4),
        "ratios": [round(ratio, 3) for ratio in ratios[1:]],
        "own_ratios": [round(ratio, 3) for ratio in own_ratios[1:]],
        "plain_tokens_per_s": round(num_seqs * (num_tokens - 1) / pair[0].seconds, 1),
        "verifies": counters.verifies,
        "steps": counters.steps,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that benchmarks of drafters share."""
    parser.add_argument("model", nargs="?", default=str(embedded.FOLDER / "target"))
    parser.add_argument(
        "--drafters", nargs="+", default=list(BUILT_IN), help="method=model; a folder next to the target's can be given by name"
    )
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="additional settings for all engines")
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON")


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_num_seqs": max(options.num_seqs), "max_model_len": 1024}
    if torch.cuda.is_available():
        settings["kv_cache_memory_bytes"] = GPU_CACHE_BYTES
    for setting in options.set:
        name, value = setting.split("=", 1)
        settings[name] = int(value) if value.isdigit() else value
    return settings


def draft_choice(model: str, drafter: str) -> dict[str, str]:
    """Return the `speculative_config` that `method=model` names."""
    method, name = drafter.split("=", 1)
    beside = Path(model).parent / name
    return {"method": method, "model": str(beside) if name and beside.is_dir() else name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--num-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument(
        "--block", type=int, default=32, help="number of steps that an engine takes before it is the next one's turn"
    )
    options = parser.parse_args()
    settings, results = engine_settings(options), {}
    plain = LLM(options.model, **settings)
    for drafter in options.drafters:
        drafting = LLM(options.model, **settings, speculative_config=draft_choice(options.model, drafter))
        results[drafter] = []
        for count in options.num_seqs:
            sizes = {"num_tokens": options.num_tokens, "turns": options.turns, "block": options.block}
            results[drafter].append(compare(plain, drafting, count, **sizes))
            print(drafter, results[drafter][-1], flush=True)
        del drafting
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
