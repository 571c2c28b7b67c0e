"""How the fused kernels' benchmarks check, time and report. Results pile up in `results`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BANDWIDTH = 4.2e12  # bytes/s that an H200 moves (measured copy: 4.3)
ROTATED_BYTES = 400 << 20  # several times the 60 MB of L2
TOLERANCE = 5e-3  # ||a - b|| / ||b|| per row
EPS = 1e-6

results: list[dict[str, Any]] = []


def report(section: str, name: str, tokens: int, variant: str, **numbers: float | str) -> None:
    """Keep a result and print it."""
    results.append({"section": section, "name": name, "tokens": tokens, "variant": variant, **numbers})
    shown = "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers.items())
    print(f"{section:8} {name:16} M={tokens:<5} {variant:34} {shown}", flush=True)


def worst_row(got: Tensor, want: Tensor) -> float:
    """Largest ||a - b|| / ||b|| of any row; infinite where something was not written or is NaN."""
    got, want = got.float().flatten(1), want.float().flatten(1)
    error = (got - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-20)
    return float(error.nan_to_num(math.inf, math.inf).max())


def graph_us(launches: list[Callable[[], Any]], repeats: int = 7) -> float:
    """Microseconds per launch: the list captured in one graph, median of replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float32) * scale).to(dtype)


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory, to describe launches that are only compiled."""
    return torch.empty(*size, dtype=dtype, device="meta")
