"""Drafting at real dimensions with random weights: what rounds cost, and whether a captured round drafts what it should.

    python benchmarks/draft_rounds.py 31B E4B 26B-A4B --out results.json

Times are those of `culet bench draft`. Besides, one captured round is replayed and its drafts are compared with the same round
launched kernel by kernel; and the assistant's first state over our kernels with that over attention in plain torch.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from culet.attention.torch_cpu import ReferenceBackend
from culet.bench import drafts
from culet.bench.drafts import DraftBench, _Loop
from culet.config import build_config
from culet.drafters.base import DraftBatch
from culet.drafters.mtp.drafter import MTPDrafter
from culet.runner.draft_round import LENGTH, SLOT


@torch.inference_mode()
def check(bench: DraftBench, num_seqs: int, prompt_len: int) -> dict[str, float]:
    """Share of equal drafts, replayed and launched; and the error of the first state against attention in torch."""
    drafter = bench.drafter
    assert isinstance(drafter, MTPDrafter)
    loop = _Loop(bench, num_seqs, drafter)
    loop.runner.force_accepted(2)
    loop.time(prompt_len, tokens_per_step=3)
    rounds = loop.rounds
    assert rounds is not None
    fixed = rounds[num_seqs, drafter.max_drafts]
    assert fixed.graph is not None
    assert fixed.proposed_RK is not None
    fixed.graph.replay()
    replayed = fixed.proposed_RK.clone()
    launched = rounds._propose(fixed)
    facts, pool = fixed.facts_4R, rounds.pool
    newest = drafter.assistant.ops.newest_tokens(rounds.tokens_SL, facts[SLOT], facts[LENGTH])
    batch = DraftBatch(newest, facts[LENGTH], facts[SLOT], rounds.hidden_SD[:num_seqs], fixed.groups)
    plain = {index: ReferenceBackend(backend.group, backend.num_heads) for index, backend in drafter.backends.items()}
    twin = MTPDrafter(drafter.assistant, drafter.target, plain, max_drafts=drafter.max_drafts)
    states = []
    for one in (drafter, twin):
        shared = one.begin(batch, pool)
        embedding = one.target.embedding, one.target.embed_scale
        x = one.assistant.ops.embed_linear(None, newest, batch.hidden_RD, *embedding, one.assistant.pre_projection.weight)
        states.append(one.assistant(x, shared).float())
    error = (states[0] - states[1]).norm(dim=-1) / states[1].norm(dim=-1)
    return {
        "equal_drafts": float((replayed == launched).float().mean()),
        "distinct_drafts": int(replayed.unique().numel()),
        "state_error": float(error.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=drafts.PROMPT_LEN)
    parser.add_argument("--rounds", type=int, default=drafts.NUM_ROUNDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    drafts.NUM_ROUNDS = options.rounds
    began, found = time.perf_counter(), {}
    choice = {"method": "mtp", "model": "random:", "num_speculative_tokens": 3}

    def say(*words: object) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s]", *words, flush=True)

    for name in options.models:
        config = build_config({"model": f"random:{name}", "speculative_config": choice})
        bench = DraftBench(config, max_num_seqs=max(options.num_seqs))
        say(name, "loaded")
        bench.compile(options.num_seqs, options.prompt_len)
        say(name, "compiled")
        lines = []
        for count in options.num_seqs:
            line = bench.measure(count, prompt_len=options.prompt_len, num_accepted=2)
            lines.append(line.as_dict())
            say(name, {key: round(value, 3) if isinstance(value, float) else value for key, value in lines[-1].items()})
        found[name] = {"lines": lines}
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1))
        found[name]["check"] = check(bench, options.num_seqs[min(1, len(options.num_seqs) - 1)], options.prompt_len)
        say(name, found[name]["check"])
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1))
        del bench
        drafts.free_memory()


if __name__ == "__main__":
    main()
