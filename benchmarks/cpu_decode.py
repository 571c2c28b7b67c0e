"""Compare the decoding speed of Culet and transformers on the CPU, with the same small float32 model and the same threads.

    python benchmarks/cpu_decode.py            prints tokens per second and ratios
    python benchmarks/cpu_decode.py --check    exits 1 if Culet is slower at one request or below 1.5x at eight

This script produces the comparison with transformers in docs/results.md and docs/log/cpu.md. The model has random weights and
the 31B's structure (five sliding layers, then a global one with K=V). For transformers, the faster of a left-padded batch and
sequential requests counts. Each measurement is the best of several alternating runs, so that a busy machine affects both.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from culet import LLM, SamplingParams
from culet.testing.tiny import write_checkpoint

# About 17M parameters, which is a suitable size for CPUs.
MODEL = {
    "hidden_size": 320,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 128,
    "global_head_dim": 256,
    "sliding_window": 128,
    "max_position_embeddings": 4096,
    "vocab_size": 8192,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
}
NEED_ONE, NEED_EIGHT = 1.0, 1.5


@dataclass(frozen=True)
class Job:
    """Prompts and the number of tokens to generate for each."""

    name: str
    prompts: list[list[int]]
    num_new: list[int]

    @property
    def total_new(self) -> int:
        return sum(self.num_new)


def make_jobs(vocab_size: int) -> list[Job]:
    """Make a job with one request, and a job with eight that differ in prompt and output length."""
    generator = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        return torch.randint(130, vocab_size, (length,), generator=generator).tolist()

    lengths = [(24, 96), (200, 32), (64, 64), (12, 128), (150, 48), (90, 24), (320, 80), (40, 112)]
    return [
        Job("1 request", [prompt(64)], [128]),
        Job("8 requests", [prompt(before) for before, _ in lengths], [after for _, after in lengths]),
    ]


class Peer:
    """transformers' generate, greedy and without stop tokens."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())

    @torch.inference_mode()
    def sequential(self, job: Job) -> list[list[int]]:
        outputs = []
        for prompt, num_new in zip(job.prompts, job.num_new, strict=True):
            ids = torch.tensor([prompt])
            output = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new)
            outputs.append(output[0, len(prompt) :].tolist())
        return outputs

    @torch.inference_mode()
    def padded(self, job: Job) -> list[list[int]]:
        longest = max(map(len, job.prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in job.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in job.prompts])
        output = self._model.generate(ids, attention_mask=mask, max_new_tokens=max(job.num_new))
        return [row[longest : longest + num_new].tolist() for row, num_new in zip(output, job.num_new, strict=True)]


class Ours:
    """Culet's LLM on the same job."""

    def __init__(self, folder: Path) -> None:
        # With prefix caching, later runs would skip the prompts.
        self._llm = LLM(str(folder), device="cpu", dtype="float32", max_model_len=1024, enable_prefix_caching=False)

    def run(self, job: Job) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True) for num_new in job.num_new]
        return [list(result.token_ids) for result in self._llm.generate(job.prompts, params)]


def best_times(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the shortest time of each run. The runs alternate after a warm-up."""
    times = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            gc.collect()
            began = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - began)
    return times


def count_equal(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """Format how many requests got the same tokens. Different answers would not be comparable."""
    return f"{sum(a == b for a, b in zip(ours, theirs, strict=True))} of {len(ours)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if Culet misses its goals")
    parser.add_argument("--repeats", type=int, default=3, help="number of runs of each; the best run counts (default: 3)")
    parser.add_argument("--threads", type=int, default=None, help="number of torch threads (default: torch's default)")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, "31B", overrides=MODEL, dtype=torch.float32)
        ours, peer = Ours(Path(folder)), Peer(Path(folder))
    print(f"{peer.num_parameters / 1e6:.1f}M parameters, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':12}{'culet':>12}{'transformers':>16}{'(padded)':>12}{'(sequential)':>14}{'ratio':>9}{'equal':>10}")
    ratios = []
    for job in make_jobs(MODEL["vocab_size"]):  # type: ignore[arg-type]
        runs: dict[str, Callable[[], object]] = {
            "culet": lambda job=job: ours.run(job),  # type: ignore[misc]
            "sequential": lambda job=job: peer.sequential(job),  # type: ignore[misc]
        }
        if len(job.prompts) > 1:
            runs["padded"] = lambda job=job: peer.padded(job)  # type: ignore[misc]
        equal = count_equal(ours.run(job), peer.sequential(job))
        speed = {name: job.total_new / seconds for name, seconds in best_times(runs, arguments.repeats).items()}
        theirs = max(speed.get("padded", 0.0), speed["sequential"])
        ratios.append(speed["culet"] / theirs)
        padded = f"{speed['padded']:.1f}" if "padded" in speed else "-"
        row = f"{job.name:12}{speed['culet']:>12.1f}{theirs:>16.1f}{padded:>12}{speed['sequential']:>14.1f}"
        print(f"{row}{ratios[-1]:>8.2f}x{equal:>10}", flush=True)
    print("output tokens per second; the time includes the prompts")
    missed = [
        f"{name}: {ratio:.2f}x, but the goal is {goal}x"
        for name, ratio, goal in zip(("1 request", "8 requests"), ratios, (NEED_ONE, NEED_EIGHT), strict=True)
        if ratio < goal
    ]
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    os.environ.setdefault("CULET_LOG_LEVEL", "warning")
    sys.exit(main())
