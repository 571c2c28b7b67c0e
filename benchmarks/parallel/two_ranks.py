"""Check two ranks on one GPU: reductions over symmetric memory, and the answers of models that the ranks share.

    python benchmarks/parallel/two_ranks.py --rounds 10000 --models 31B:6,12B:12

Reductions of 1, 8, 32 and 256 tokens are compared with plain sums in every round. Each model has the real widths and this many
layers, random calm weights, and graphs. An eager float32 model judges its answers, as in `culet bench offline`. The ranks share
the GPU, so times mean nothing. The exit code is 1 if a value or an answer is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

import torch

from culet.bench.answer_check import check_rows
from culet.bench.settings import bench_config
from culet.bench.workloads import parse_rows
from culet.parallel.group import RankGroup
from culet.parallel.rank import Rank

NUM_RANKS = 2
TOKENS = (1, 8, 32, 256)
WIDTH = 5376  # of the 31B
ROWS = "tpot:1x1000+64,tpot:8x1000+64,ttft:1x3000"
CACHE_BYTES = 8 << 30


def check_sums(index: int, meeting_file: str, rounds: int, wrong: multiprocessing.Queue[int]) -> None:
    """Count the rounds in which a sum or a gathered tensor differs from the plain one."""
    device = torch.device("cuda", 0)
    group = RankGroup.join(Rank(index, NUM_RANKS), meeting_file, device, is_symmetric=True)
    generator, num_wrong = torch.Generator(device=device).manual_seed(0), 0  # the same on both ranks
    for number in range(rounds):
        shape = NUM_RANKS, TOKENS[number % len(TOKENS)], WIDTH
        parts = torch.randn(shape, generator=generator, device=device).bfloat16()
        total = group(parts[index].clone())
        is_right = torch.allclose(total.float(), parts.float().sum(0), rtol=0.01, atol=0.02)
        num_wrong += not (is_right and torch.equal(group.gather(parts[index].clone()), parts))
    wrong.put(num_wrong)


def run_sums(rounds: int) -> bool:
    context = multiprocessing.get_context("spawn")
    wrong = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = str(Path(folder) / "ranks"), rounds, wrong
        processes = [context.Process(target=check_sums, args=(index, *arguments)) for index in range(NUM_RANKS)]
        for process in processes:
            process.start()
        counts = [wrong.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    print(f"reductions: {rounds} rounds on each of {NUM_RANKS} ranks, wrong: {counts}", flush=True)
    return not any(counts)


def run_model(name: str, num_layers: int) -> bool:
    rows = parse_rows(ROWS)
    settings = {"model": f"random:{name}", "device": "cuda", "tensor_parallel_size": NUM_RANKS, "all_reduce": "symmetric"}
    config = bench_config(settings | {"kv_cache_memory_bytes": CACHE_BYTES}, rows)
    verdicts = check_rows(config, rows, num_layers=num_layers)
    for row, verdict in verdicts.items():
        print(f"{name}, {num_layers} layers, {row.label}: {verdict.document()}", flush=True)
    return all(verdict.is_right for verdict in verdicts.values())


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--models", default="31B:6,12B:12", help="names and numbers of layers")
    arguments = parser.parse_args()
    results = [run_sums(arguments.rounds)]
    for model in filter(None, arguments.models.split(",")):
        name, _, num_layers = model.partition(":")
        results.append(run_model(name, int(num_layers)))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
