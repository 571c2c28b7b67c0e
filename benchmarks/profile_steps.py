"""Show what the GPU does in decode and verify steps: microseconds per step by kernel, and how long it is idle.

    python benchmarks/profile_steps.py random:12B
    python benchmarks/profile_steps.py random:E4B --num-seqs 80 --prompt-len 1500
    python benchmarks/profile_steps.py random:E4B --num-seqs 8 32 --drafter mtp=random: --accept 2
    python benchmarks/profile_steps.py random:31B --set quantization=int4

With dependent launch, a kernel begins before the previous one ends and waits for it, so kernels overlap. `alone` counts only
the time after the end of all earlier kernels, so its sum is the time that the GPU is busy. `span` is from a kernel's first to
its last program.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from typing import Any

import torch
from drafting.refused_drafts import Answering, draft_choice, make_prompts
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from culet import LLM, SamplingParams

WARM_STEPS = 10


def profile_steps(answering: Answering, num_steps: int) -> Any:
    """Return the profiler after some steps."""
    answering.advance(WARM_STEPS)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        answering.advance(num_steps)
        torch.cuda.synchronize()
    return profiler


def table(profiler: Any, num_steps: int, num_lines: int) -> list[str]:
    """Return the kernels that take longest, and the whole step."""
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.end)
    counts: dict[str, int] = defaultdict(int)
    spans: dict[str, float] = defaultdict(float)
    alone: dict[str, float] = defaultdict(float)
    end = first = min(event.time_range.start for event in events)
    for event in events:
        name, begin = short(event.name), event.time_range.start
        counts[name] += 1
        spans[name] += event.time_range.end - begin
        alone[name] += max(0.0, event.time_range.end - max(begin, end))
        end = max(end, event.time_range.end)
    busy = sum(alone.values())
    lines = [f"{'kernel':64} {'launches':>9} {'alone, us':>10} {'span, us':>10}"]
    for name in sorted(alone, key=lambda name: -alone[name])[:num_lines]:
        lines.append(
            f"{name:64} {counts[name] / num_steps:9.1f} {alone[name] / num_steps:10.1f} {spans[name] / num_steps:10.1f}"
        )
    lines.append(f"{'all kernels':64} {sum(counts.values()) / num_steps:9.1f} {busy / num_steps:10.1f}")
    lines.append(f"{'idle':64} {'':9} {(end - first - busy) / num_steps:10.1f}")
    return lines


def short(name: str) -> str:
    """Return the part of a kernel's name that tells kernels apart."""
    return re.sub(r"^void |<.*|\(.*", "", name)[:64] or name[:64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-len", type=int, default=1000)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--num-lines", type=int, default=16)
    parser.add_argument("--drafter", help="method=model, such as mtp=random:")
    parser.add_argument("--accept", type=int, default=2, help="drafts that every verify accepts")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="additional settings of the engine")
    options = parser.parse_args()
    settings: dict[str, Any] = {"max_num_seqs": max(options.num_seqs), "max_model_len": options.prompt_len + 512}
    settings |= {"language_model_only": True} | dict(setting.split("=", 1) for setting in options.set)
    if options.drafter:
        settings["speculative_config"] = draft_choice(options.model, options.drafter) | {"adaptive": False}
    llm = LLM(options.model, **settings)
    if options.drafter:
        llm.engine._worker.force_accepted(options.accept)
    for count in options.num_seqs:
        params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
        answering = Answering(llm, make_prompts(llm, count, options.prompt_len), params)
        profiler = profile_steps(answering, options.num_steps)
        name = " ".join([options.model, *options.set, options.drafter or ""])
        print(f"\n{name}: {count} sequences of {options.prompt_len} tokens")
        print("\n".join(table(profiler, options.num_steps, options.num_lines)), flush=True)
        while answering.advance(64):
            pass


if __name__ == "__main__":
    main()
