"""Measure the cost of draft rounds at real dimensions, with random weights.

    python benchmarks/drafting/draft_rounds.py 31B E4B 26B-A4B --out benchmarks/results/draft_rounds_h200.json

This script produces the speeds of MTP at real dimensions in docs/results.md and docs/concepts/speculation.md. It runs
`culet bench draft` for several models and forces two of three drafts to be accepted.
tests/engine/drafting/test_drafting_gpu.py checks the drafts themselves.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from culet.bench import draft
from culet.bench.answer_check import free_memory
from culet.config import build_config

CHOICE = {"method": "mtp", "model": "random:", "num_speculative_tokens": 3}
NUM_ACCEPTED = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="variants to time: E2B, E4B, 12B, 26B-A4B or 31B")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=draft.PROMPT_LEN)
    parser.add_argument("--out", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    began, results = time.perf_counter(), {}

    def log(*words: object) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s]", *words, flush=True)

    for name in options.models:
        config = build_config({"model": f"random:{name}", "speculative_config": CHOICE})
        bench = draft.DraftBench(config, max_num_seqs=max(options.num_seqs))
        log(name, "loaded")
        bench.compile(options.num_seqs, options.prompt_len)
        log(name, "compiled")
        lines = results[name] = []
        for num_seqs in options.num_seqs:
            line = bench.measure(num_seqs, prompt_len=options.prompt_len, num_accepted=NUM_ACCEPTED).as_dict()
            lines.append(line)
            log(name, {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()})
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1))
        del bench
        free_memory()


if __name__ == "__main__":
    main()
