"""Check two ranks on one GPU: the probe, reductions over symmetric memory, and the answers of models that the ranks share.

    python benchmarks/parallel/two_ranks.py --rounds 10000 --models 31B:6,12B:12 --soak 60

In every round, a sum of 1, 8, 32 or 256 tokens is compared with a plain one: fused with its norm, launched or in a CUDA graph.
Each direction has its own rounds. A tenth of the rounds is repeated with torch's own reductions. Each model has the real
widths and this many layers, random calm weights, and graphs. An eager float32 model judges its answers, as in `culet bench
offline`. The soak sends growing conversations to two ranks and to one rank. Some are cancelled, and most resume from cached
pages. The exit code is 1 if a value or an answer is wrong, if a page is not returned, or if a kernel is compiled while serving.

The ranks take turns on the GPU, so times mean nothing. NVIDIA's MPS would let them run at once, but this check hangs with it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

import torch
from torch import Tensor

from culet import LLM, SamplingParams
from culet.bench.answer_check import check_rows
from culet.bench.settings import bench_config
from culet.bench.workloads import parse_rows
from culet.kernels.captures import Captures
from culet.kernels.dispatch import for_device
from culet.kernels.eager import ops
from culet.models.random_checkpoint import random_name
from culet.parallel.group import RankGroup
from culet.parallel.rank import Rank
from culet.parallel.reduce.choice import PULL, PUSH, Method
from culet.parallel.reduce.probe import probe
from culet.parallel.reduce.symmetric import SymmetricMemory

NUM_RANKS = 2
TOKENS = (1, 8, 32, 256)
WIDTH = 5376  # of the 31B
BATCH = 8  # reductions in a graph
ROWS = "tpot:1x1000+64,tpot:8x1000+64,ttft:1x3000"
CACHE_BYTES = 8 << 30
SOAK_LEN = 2000  # tokens of the longest conversation
SOAK_CHATS = 12


def check_sums(index: int, meeting_file: str, rounds: int, wrong: multiprocessing.Queue[dict[str, int]]) -> None:
    """Count the rounds with a wrong sum, for each way of adding."""
    device, rank = torch.device("cuda", 0), Rank(index, NUM_RANKS)
    RankGroup.join(rank, meeting_file, device)
    memory = SymmetricMemory.open(rank, device, WIDTH, torch.bfloat16, num_rows=max(TOKENS))
    counts = {direction: check_fused(memory.in_direction(direction), device, rounds) for direction in (PUSH, PULL)}
    wrong.put(counts | {"torch": check_torch_ops(memory, device, max(1, rounds // 10))})


def random_terms(generator: torch.Generator, num_tokens: int, device: torch.device) -> Tensor:
    """Return the terms of all ranks. The generators of the ranks are equal."""
    return torch.randn(NUM_RANKS, num_tokens, WIDTH, generator=generator, device=device).bfloat16()


def check_fused(memory: SymmetricMemory, device: torch.device, rounds: int) -> int:
    """Compare the kernel with the eager norm of a plain sum. BATCH reductions follow each other, launched or in a graph."""
    kernels, peers = for_device(device), memory.peers
    generator, num_wrong = torch.Generator(device=device).manual_seed(1), torch.zeros((), dtype=torch.int64, device=device)
    weight, eps = torch.rand(WIDTH, generator=generator, device=device), 1e-6
    streams = {count: torch.randn(count, WIDTH, generator=generator, device=device).bfloat16() for count in TOKENS}
    terms = {count: random_terms(generator, BATCH * count, device) for count in TOKENS}

    def add(count: int) -> list[tuple[Tensor, Tensor]]:
        own = terms[count][peers.rank].split(count)
        return [kernels.residual_norm_of_ranks(streams[count], (x,), (weight,), None, (weight,), eps, peers) for x in own]

    captures, began = Captures(device), time.monotonic()
    graphs = {count: captures.capture(partial(add, count)) for count in TOKENS}
    for number in range(rounds // BATCH):
        count = TOKENS[number // 2 % len(TOKENS)]
        terms[count].copy_(random_terms(generator, BATCH * count, device))
        if number % 2:
            graph, got = graphs[count]
            graph.replay()
        else:
            got = add(count)
        sums = terms[count].float().sum(0)
        stream, normed = ops.residual_norm(streams[count].repeat(BATCH, 1), sums, weight, None, weight, eps)
        assert normed is not None
        for mine, theirs in zip(zip(*got, strict=True), (stream, normed), strict=True):
            is_close = torch.isclose(torch.cat(mine).float(), theirs.float(), rtol=0.02, atol=0.02)
            num_wrong += (~is_close.view(BATCH, -1).all(1)).sum()
        if number * BATCH % 1000 == 0 and not peers.rank:
            print(f"  {number * BATCH} rounds in {time.monotonic() - began:.1f} s, {int(num_wrong)} wrong", flush=True)
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


def run_soak(name: str, num_layers: int, seconds: float) -> bool:
    """Compare growing conversations on two ranks with the same ones on one rank. Rounding may change a few answers."""
    chance = random.Random(7)
    settings: dict[str, Any] = {"device": "cuda", "max_num_seqs": 8, "max_model_len": SOAK_LEN, "max_num_batched_tokens": 512}
    settings |= {"kv_cache_memory_bytes": 1 << 30}
    model = random_name(name, num_layers=num_layers, draw="calm")
    chats: dict[int, list[int]] = {}
    num_answers = num_same = num_cancelled = 0
    with LLM(model, **settings) as plain, LLM(model, tensor_parallel_size=NUM_RANKS, **settings) as ranks:
        began = time.monotonic()  # the time to load is not part of the soak
        while time.monotonic() - began < seconds:
            chosen = chance.sample(range(SOAK_CHATS), chance.randint(1, 8))
            for chat in chosen:
                if len(chats.setdefault(chat, [chat + 130])) > SOAK_LEN - 500:
                    chats[chat] = [chat + 130]
                chats[chat] += chance.choices(range(130, 600), k=chance.randint(1, 300))
            prompts = [chats[chat] for chat in chosen]
            params = SamplingParams(temperature=0.0, max_tokens=chance.randint(1, 60), ignore_eos=True)
            if chance.random() < 0.3:  # a client that does not wait for the end
                ranks.engine.add(ranks.engine.rules.make_request("leaves", prompts[0], params))
                for _ in range(chance.randint(0, 5)):
                    ranks.engine.step()
                ranks.engine.cancel("leaves")
                num_cancelled += 1
            want, got = plain.generate(prompts, params), ranks.generate(prompts, params)
            num_answers += len(got)
            num_same += sum(ours.token_ids == theirs.token_ids for ours, theirs in zip(got, want, strict=True))
            for chat, result in zip(chosen, want, strict=True):
                chats[chat] = [*chats[chat], *result.token_ids]
        stats = ranks.engine.stats()
    num_kept = stats.num_pages - stats.num_free_pages - stats.num_resume_point_pages
    print(
        f"soak of {name}, {num_layers} layers, {seconds:.0f} s: {num_same} of {num_answers} answers the same as on one rank, "
        f"{num_cancelled} cancelled, {num_kept} pages not returned, "
        f"{stats.kernels_compiled} kernels compiled while serving, {stats.counters}",
        flush=True,
    )
    return num_kept == stats.kernels_compiled == 0 and num_same > 0.8 * num_answers > 0


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--models", default="31B:6,12B:12", help="names and numbers of layers")
    parser.add_argument("--soak", type=float, default=60.0, metavar="SECONDS", help="of each model")
    arguments = parser.parse_args()
    print(f"probe: {probe(NUM_RANKS, has_nccl=False)}", flush=True)
    results = [run_sums(arguments.rounds)]
    for model in filter(None, arguments.models.split(",")):
        name, _, num_layers = model.partition(":")
        results.append(run_model(name, int(num_layers)))
        if arguments.soak:
            results.append(run_soak(name, int(num_layers), arguments.soak))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
