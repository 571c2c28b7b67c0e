"""Check two ranks on one GPU: the probe, reductions over symmetric memory, and the answers of models that the ranks share.

    python benchmarks/parallel/two_ranks.py --rounds 10000 --models 31B:6,12B:12

In every round, a sum of 1, 8, 32 or 256 tokens is compared with a plain one: fused with its norm, in both directions, launched
and in a CUDA graph, and by torch's own reductions. Each model has the real widths and this many layers, random calm weights,
and graphs. An eager float32 model judges its answers, as in `culet bench offline`. The ranks share the GPU, so times mean
nothing. The exit code is 1 if a value or an answer is wrong.
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
from torch import Tensor

from culet.bench.answer_check import check_rows
from culet.bench.settings import bench_config
from culet.bench.workloads import parse_rows
from culet.kernels.captures import Captures
from culet.kernels.dispatch import for_device
from culet.kernels.eager import ops
from culet.parallel.group import RankGroup
from culet.parallel.rank import Rank
from culet.parallel.reduce.choice import PULL, PUSH, Method
from culet.parallel.reduce.probe import probe
from culet.parallel.reduce.symmetric import SymmetricMemory

NUM_RANKS = 2
TOKENS = (1, 8, 32, 256)
WIDTH = 5376  # of the 31B
ROWS = "tpot:1x1000+64,tpot:8x1000+64,ttft:1x3000"
CACHE_BYTES = 8 << 30


def check_sums(index: int, meeting_file: str, rounds: int, wrong: multiprocessing.Queue[dict[str, int]]) -> None:
    """Count the rounds with a wrong sum, for each way of adding."""
    device, rank = torch.device("cuda", 0), Rank(index, NUM_RANKS)
    RankGroup.join(rank, meeting_file, device)
    memory = SymmetricMemory.open(rank, device, WIDTH, torch.bfloat16, num_rows=max(TOKENS))
    counts = {direction: check_fused(memory.in_direction(direction), device, rounds) for direction in (PUSH, PULL)}
    wrong.put(counts | {"torch": check_torch_ops(memory, device, rounds)})


def random_terms(generator: torch.Generator, num_tokens: int, device: torch.device) -> Tensor:
    """Return the terms of all ranks. The generators of the ranks are equal."""
    return torch.randn(NUM_RANKS, num_tokens, WIDTH, generator=generator, device=device).bfloat16()


def check_fused(memory: SymmetricMemory, device: torch.device, rounds: int) -> int:
    """Compare the kernel with the eager norm of a plain sum. Every other round replays a graph of three reductions."""
    kernels, peers = for_device(device), memory.peers
    generator, num_wrong = torch.Generator(device=device).manual_seed(1), torch.zeros((), dtype=torch.int64, device=device)
    weight, eps = torch.rand(WIDTH, generator=generator, device=device), 1e-6
    streams = {count: torch.randn(count, WIDTH, generator=generator, device=device).bfloat16() for count in TOKENS}
    terms = {count: random_terms(generator, count, device) for count in TOKENS}

    def add(count: int) -> tuple[Tensor, ...]:
        deltas = (terms[count][peers.rank],)
        return kernels.residual_norm_of_ranks(streams[count], deltas, (weight,), None, (weight,), eps, peers)

    captures = Captures(device)
    graphs = {count: captures.capture(lambda count=count: [add(count) for _ in range(3)][-1]) for count in TOKENS}
    for number in range(rounds):
        count = TOKENS[number // 2 % len(TOKENS)]
        terms[count].copy_(random_terms(generator, count, device))
        if number % 2:
            graph, got = graphs[count]
            graph.replay()
        else:
            got = add(count)
        want = ops.residual_norm(streams[count], terms[count].float().sum(0), weight, None, weight, eps)
        for mine, theirs in zip(got, want, strict=True):
            num_wrong += ~torch.isclose(mine.float(), theirs.float(), rtol=0.02, atol=0.02).all()
    return int(num_wrong)


def check_torch_ops(memory: SymmetricMemory, device: torch.device, rounds: int) -> int:
    generator, num_wrong = torch.Generator(device=device).manual_seed(2), 0
    for number in range(rounds):
        parts = random_terms(generator, TOKENS[number % len(TOKENS)], device)
        own = parts[memory.peers.rank]
        for method in (Method.ONE_SHOT, Method.TWO_SHOT):
            total = memory.all_reduce(own.clone(), method)
            num_wrong += not torch.allclose(total.float(), parts.float().sum(0), rtol=0.01, atol=0.02)
        num_wrong += not torch.equal(memory.gather(own.clone(), NUM_RANKS), parts)
    return num_wrong


def run_sums(rounds: int) -> bool:
    context = multiprocessing.get_context("spawn")
    wrong = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = str(Path(folder) / "ranks"), rounds, wrong
        processes = [context.Process(target=check_sums, args=(index, *arguments)) for index in range(NUM_RANKS)]
        for process in processes:
            process.start()
        counts = [wrong.get(timeout=1200) for _ in processes]
        for process in processes:
            process.join()
    print(f"reductions: {rounds} rounds on each of {NUM_RANKS} ranks, wrong: {counts}", flush=True)
    return not any(any(count.values()) for count in counts)


def run_model(name: str, num_layers: int) -> bool:
    rows = parse_rows(ROWS)
    settings = {"model": f"random:{name}", "device": "cuda", "tensor_parallel_size": NUM_RANKS}
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
    print(f"probe: {probe(NUM_RANKS, has_nccl=False)}", flush=True)
    results = [run_sums(arguments.rounds)]
    for model in filter(None, arguments.models.split(",")):
        name, _, num_layers = model.partition(":")
        results.append(run_model(name, int(num_layers)))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
