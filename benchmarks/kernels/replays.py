"""Time CUDA graphs of kernels."""

from __future__ import annotations

import statistics

import torch


def replay_us(graph: torch.cuda.CUDAGraph, count: int, repeats: int = 7) -> float:
    """Return the median microseconds of one of the `count` launches in a graph."""
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)
