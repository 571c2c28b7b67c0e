"""Time GPU calls by replaying a CUDA graph of one call, each time with a cold L2 cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FLUSH_BYTES = 256 << 20  # written before each replay; several times the L2 of any GPU


def flush_buffer() -> Tensor:
    """Allocate the buffer that `replay_times` overwrites to flush the L2 cache."""
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def replay_times(run: Callable[[], object], repeats: int, flush: Tensor) -> list[float]:
    """Return the microseconds of each of `repeats` replays, including the gaps between the call's kernels."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in events]
