"""One rank of the probe. Each stage is checked on every rank, and then reported by the first as a line of JSON.

Arguments: the number of this rank, the number of ranks, and the file at which they meet.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from culet.kernels.dispatch import for_device
from culet.parallel.group import RankGroup
from culet.parallel.rank import Rank
from culet.parallel.reduce.choice import ONE_SHOT_BYTES, PULL, PUSH, TORCH_OPS, Method
from culet.parallel.reduce.symmetric import SymmetricMemory

NUM_TOKENS, WIDTH, DTYPE = 8, 4096, torch.float32
NUM_ROUNDS = 50
_EPS = 1e-6


def main(index: int, num_ranks: int, meeting_file: str) -> None:
    """Run all stages. Writers come first, because reads are what hangs on some machines."""
    rank = Rank(index, num_ranks)
    device = torch.device("cuda", index % torch.cuda.device_count())
    RankGroup.join(rank, meeting_file, device)
    memories: list[SymmetricMemory] = []

    def open_memory() -> float:
        memories.append(SymmetricMemory.open(rank, device, WIDTH, DTYPE))
        return 0.0

    if _report("symmetric memory", open_memory, rank):
        for direction in (PUSH, PULL):
            _report(direction, partial(_time_fused, memories[0].in_direction(direction), device), rank)
        _report(TORCH_OPS, partial(_time_torch_ops, memories[0], rank, device), rank)


def _report(stage: str, run: Callable[[], float], rank: Rank) -> bool:
    """Run a stage on all ranks, which returns its seconds. Return whether all of them did it."""
    problem, seconds = "", 0.0
    try:
        seconds = run()
    except (AssertionError, ImportError, RuntimeError) as error:
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    found: list[tuple[str, float]] = [("", 0.0)] * rank.size
    dist.all_gather_object(found, (problem, seconds))
    problem = next((other for other, _ in found if other), "")
    if rank.index == 0:
        report = {"stage": stage, "problem": problem, "seconds": max(seconds for _, seconds in found)}
        print(msgspec.json.encode(report).decode(), flush=True)
    return not problem


def _time_fused(memory: SymmetricMemory, device: torch.device) -> float:
    """Return the seconds of a sum that is fused with a norm. Raise if one is wrong in any round."""
    ops, peers = for_device(device), memory.peers
    x_TD = torch.zeros(NUM_TOKENS, WIDTH, dtype=DTYPE, device=device)
    weight_D = torch.ones(WIDTH, device=device)
    column_TD = torch.arange(NUM_TOKENS * WIDTH, device=device).view(NUM_TOKENS, WIDTH)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(NUM_ROUNDS):
        # Small whole numbers, so that the sum is exact in any order.
        terms = [((7 * column_TD + 13 * rank + number) % 11 - 5).to(DTYPE) for rank in range(len(peers.data))]
        arguments = (weight_D,), None, (weight_D,), _EPS
        stream_TD, _ = ops.residual_norm_of_ranks(x_TD, (terms[peers.rank],), *arguments, peers)
        want_TD, _ = ops.residual_norm(x_TD, torch.stack(terms).sum(0), weight_D, None, weight_D, _EPS)
        wrong += ((stream_TD - want_TD).abs() > 0.02).sum()
    assert not int(wrong), f"{int(wrong)} values were wrong"
    dist.all_reduce(torch.zeros(1))  # on the host, so that all ranks start together
    begin = time.perf_counter()
    for _ in range(NUM_ROUNDS):
        ops.residual_norm_of_ranks(x_TD, (x_TD,), (weight_D,), None, (weight_D,), _EPS, peers)
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / NUM_ROUNDS


def _time_torch_ops(memory: SymmetricMemory, rank: Rank, device: torch.device) -> float:
    """Return the seconds of a round of torch's reductions. Raise if a sum or a gathered tensor is wrong."""
    want, begin = rank.size * (rank.size + 1) / 2, time.perf_counter()
    for _ in range(NUM_ROUNDS):
        for method, count in ((Method.ONE_SHOT, NUM_TOKENS * WIDTH), (Method.TWO_SHOT, ONE_SHOT_BYTES)):
            total = memory.all_reduce(torch.full((count,), float(rank.index + 1), device=device), method)
            assert bool((total == want).all()), f"the {method.value} sum was wrong"
        parts = memory.gather(torch.full((NUM_TOKENS,), float(rank.index), device=device), rank.size)
        assert parts[:, 0].tolist() == list(range(rank.size)), "a gathered tensor was wrong"
    return (time.perf_counter() - begin) / NUM_ROUNDS


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
