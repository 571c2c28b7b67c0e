"""Check and time the GPU kernels besides attention: `python benchmarks/kernels_fused.py [--only linear,moe,...] [--json PATH]`.

Every variant is checked against its eager twin in float32 on fresh random inputs, then timed as the median of CUDA-graph
replays over rotating weights, so that none of them sit in the L2. A short table comes last.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from culet.kernels import reference
from culet.kernels.triton import linear, moe, norms, pointwise, qkv
from culet.kernels.triton.launch import Launch
from culet.kernels.triton.linear import GATED, GELU_TIMES, PLAIN, SOFTCAP, Tile

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


# --- linear -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A linear layer of a model: N outputs (of GATED: half the weight's rows), K inputs."""

    name: str
    n: int
    k: int
    epilogue: int = PLAIN

    @property
    def weight_rows(self) -> int:
        return self.n * (2 if self.epilogue == GATED else 1)

    @property
    def floor_us(self) -> float:
        return self.weight_rows * self.k * 2 / BANDWIDTH * 1e6


SHAPES = [
    Shape("E4B.qkv", 3072, 2560),
    Shape("E4B.o", 2560, 2048),
    Shape("E4B.gate_up", 10240, 2560, GATED),
    Shape("E4B.down", 2560, 10240),
    Shape("E4B.ple_gate", 256, 2560, GELU_TIMES),
    Shape("E4B.ple_proj", 2560, 256),
    Shape("E4B.head", 262144, 2560, SOFTCAP),
    Shape("26B.qkv", 8192, 2816),
    Shape("26B.o", 2816, 4096),
    Shape("26B.gate_up", 2112, 2816, GATED),
    Shape("26B.down", 2816, 2112),
    Shape("31B.qkv", 16384, 5376),
    Shape("31B.o", 5376, 8192),
    Shape("31B.gate_up", 21504, 5376, GATED),
    Shape("31B.down", 5376, 21504),
]
TOKENS = (1, 2, 4, 8, 16, 32)


def candidates(shape: Shape, tokens: int) -> list[Tile]:
    """Tiles worth trying for a shape."""
    found = []
    if tokens <= 4:
        for block_n, warps in ((4, 4), (2, 4)) if tokens <= 2 else ((2, 4),):
            found.append(Tile("rows", block_n, min(1024, max(256, shape.k)), warps))
    for block_n, block_k, warps, stages in ((64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 4), (16, 256, 2, 4), (128, 64, 4, 6)):
        if block_k > shape.k or (shape.epilogue == GATED and block_n == 128):
            continue
        programs = -(-shape.n // block_n)
        best = min(8, max(1, 264 // programs), max(1, shape.k // block_k // 2))
        for split in sorted({1, 1 << (best.bit_length() - 1)}):
            if split == 1 and programs < 40 and best > 1:
                continue
            found.append(Tile("tiles", block_n, block_k, warps, stages, split))
    return found


def linear_launch(shape: Shape, tile: Tile, x: Tensor, weight: Tensor, y: Tensor, factor: Tensor, pdl: bool = False) -> Launch:
    extra = {"factor": factor if shape.epilogue == GELU_TIMES else None, "softcap": 30.0, "pdl": pdl}
    return linear.describe(x, weight, y, tile, shape.epilogue, **extra)


def linear_on_meta(shape: Shape, tile: Tile, tokens: int, pdl: bool = False) -> Launch:
    def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    out = meta(tokens, shape.n, dtype=torch.float32 if shape.epilogue == SOFTCAP else torch.bfloat16)
    return linear_launch(shape, tile, meta(tokens, shape.k), meta(shape.weight_rows, shape.k), out, meta(tokens, shape.n), pdl)


def linear_twin(shape: Shape, x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    """Float32 result on the same bfloat16 inputs, in slices so that a head's weight need not fit twice."""
    sums = torch.cat([F.linear(x.float(), part.float()) for part in weight.split(32768)], -1)
    if shape.epilogue == GATED:
        return F.gelu(sums[:, : shape.n], approximate="tanh") * sums[:, shape.n :]
    if shape.epilogue == GELU_TIMES:
        return F.gelu(sums, approximate="tanh") * factor.float()
    return 30.0 * torch.tanh(sums / 30.0) if shape.epilogue == SOFTCAP else sums


def cublas(shape: Shape, x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    """The same by torch's linear and the separate kernel that stands after it."""
    out = F.linear(x, weight)
    if shape.epilogue == GATED:
        return pointwise.gelu_mul(out)
    if shape.epilogue == GELU_TIMES:
        return pointwise.gelu_gate(out, factor)
    return pointwise.softcap(out, 30.0) if shape.epilogue == SOFTCAP else out


def bench_linear(best: dict[tuple[str, int], Tile], only: str) -> None:
    for shape in SHAPES:
        if only and only not in shape.name:
            continue
        num_bytes = shape.weight_rows * shape.k * 2
        copies = max(2, min(64, ROTATED_BYTES // num_bytes))
        weights = [random(shape.weight_rows, shape.k, scale=shape.k**-0.5) for _ in range(copies)]
        for tokens in TOKENS:
            if shape.name.endswith("head") and tokens in (2, 4, 16):
                continue
            x, factor = random(tokens, shape.k), random(tokens, shape.n)
            want = linear_twin(shape, x, weights[0], factor)
            dtype = torch.float32 if shape.epilogue == SOFTCAP else torch.bfloat16
            y = torch.empty(tokens, shape.n, dtype=dtype, device="cuda")
            base = graph_us([lambda w=w: cublas(shape, x, w, factor) for w in weights])
            ours: list[tuple[float, Tile, float]] = []
            for tile in candidates(shape, tokens):
                y.fill_(math.nan)
                try:
                    linear_launch(shape, tile, x, weights[0], y, factor).run()
                    error = worst_row(y, want)
                    launches = [linear_launch(shape, tile, x, w, y, factor) for w in weights]
                    micros = graph_us([launch.run for launch in launches])
                except Exception as failure:  # a tile that does not fit is a result too
                    report("linear", shape.name, tokens, describe_tile(tile), failed=str(failure).splitlines()[0][:80])
                    continue
                if error > TOLERANCE:
                    report("linear", shape.name, tokens, describe_tile(tile), wrong=error)
                    continue
                ours.append((micros, tile, error))
                results.append({"section": "tile", "name": shape.name, "tokens": tokens, "variant": describe_tile(tile), "us": micros})
            ours.sort(key=lambda item: item[0])
            if not ours:
                continue
            micros, tile, error = ours[0]
            best[shape.name, tokens] = tile if micros < base else Tile("cublas")
            second = f"{ours[1][0]:.1f} {describe_tile(ours[1][1])}" if len(ours) > 1 else ""
            numbers = {"us": micros, "cublas": base, "floor": shape.floor_us, "TB/s": num_bytes / micros / 1e6, "err": error}
            report("linear", shape.name, tokens, describe_tile(tile), **numbers, next=second)
        del weights


def describe_tile(tile: Tile) -> str:
    return f"{tile.kernel} {tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages} k{tile.split_k}"


# --- experts ----------------------------------------------------------------------------------------------------------

HIDDEN, EXPERTS, TOP_K, WIDTH = 2816, 128, 8, 704
UP_ROWS = [moe.RowTile(4, 1024), moe.RowTile(2, 1024), moe.RowTile(8, 256), moe.RowTile(8, 1024, 8)]
DOWN_ROWS = [moe.RowTile(4, 1024), moe.RowTile(2, 1024), moe.RowTile(8, 1024, 8)]
SMALL_UP = [moe.GroupTile(16, 64, 128, 4, 3), moe.GroupTile(16, 32, 256, 4, 3), moe.GroupTile(16, 64, 64, 4, 5)]
SMALL_DOWN = [moe.GroupTile(16, 64, 64, 4, 5), moe.GroupTile(16, 128, 64, 4, 4), moe.GroupTile(16, 64, 128, 4, 3)]
LARGE_UP = [moe.GroupTile(128, 64, 64, 8, 3), moe.GroupTile(128, 128, 64, 8, 3), moe.GroupTile(128, 64, 64, 4, 4)]
LARGE_DOWN = [moe.GroupTile(128, 128, 64, 8, 3), moe.GroupTile(128, 128, 64, 4, 4), moe.GroupTile(128, 256, 64, 8, 3)]
MID_UP = [moe.GroupTile(32, 64, 128, 4, 3), moe.GroupTile(64, 64, 64, 4, 4)]
MID_DOWN = [moe.GroupTile(32, 128, 64, 4, 4), moe.GroupTile(64, 128, 64, 4, 4)]
MOE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)


def moe_variants(tokens: int) -> list[tuple[str, Callable[..., list[Launch]], list[tuple[Any, Any]]]]:
    """(name, describer, (up, down) tiles), each half varied beside the first of the other."""

    def pairs(ups: list[Any], downs: list[Any]) -> list[tuple[Any, Any]]:
        return [(up, downs[0]) for up in ups] + [(ups[0], down) for down in downs[1:]]

    found: list[tuple[str, Callable[..., list[Launch]], list[tuple[Any, Any]]]] = []
    if tokens <= 16:
        found.append(("assigned", moe.describe_assigned, pairs(UP_ROWS, DOWN_ROWS)))
    if 4 <= tokens <= 256:
        found.append(("grouped", moe.describe_grouped, pairs(SMALL_UP, SMALL_DOWN)))
    if 256 <= tokens <= 2048:
        found.append(("grouped", moe.describe_grouped, pairs(MID_UP, MID_DOWN)))
    if tokens >= 512:
        found.append(("grouped", moe.describe_grouped, pairs(LARGE_UP, LARGE_DOWN)))
    return found


def moe_on_meta(tokens: int) -> Iterator[Launch]:
    def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    x, weights = meta(tokens, HIDDEN), meta(tokens, TOP_K, dtype=torch.float32)
    ids = meta(tokens, TOP_K, dtype=torch.int32)
    gate_up, down = meta(EXPERTS, 2 * WIDTH, HIDDEN), meta(EXPERTS, HIDDEN, WIDTH)
    router, scale = meta(EXPERTS, HIDDEN, dtype=torch.float32), meta(EXPERTS, dtype=torch.float32)
    yield moe.describe_route(x, router, scale, (weights, ids), EPS)
    for _, describe, tiles in moe_variants(tokens):
        for up, down_tile in tiles:
            yield from describe(x, weights, ids, gate_up, down, meta(tokens, HIDDEN), up=up, down=down_tile)


def experts_twin(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Float32, one expert's weights upcast at a time."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(EXPERTS):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel():
            hidden = reference.gelu_mul(F.linear(x[token].float(), gate_up[expert].float()))
            out.index_add_(0, token, F.linear(hidden, down[expert].float()) * weights[token, slot, None])
    return out


def check_route(x: Tensor, router: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, str]:
    """Ours, and a word on where it differs from the twin: ids may only at near-ties."""
    weights, ids = moe.route(x, router, scale, TOP_K, EPS)
    logits = F.linear(reference._rms(x.double(), EPS).double(), router.double())
    want_ids = logits.topk(TOP_K, dim=-1).indices
    want = torch.softmax(logits.gather(-1, ids.long()), -1) * scale[ids.long()]
    error = float((weights - want).abs().max() / want.abs().max())
    other = ids.sort(-1).values.long() != want_ids.sort(-1).values
    gap = logits.gather(-1, want_ids)[:, -1] - logits.gather(-1, ids.long()).amin(-1)
    return weights, ids, f"err {error:.1e} other ids {int(other.any(-1).sum())} widest gap {float(gap.abs().max()):.1e}"


def bench_moe(only: str) -> None:
    layers = 2
    gate_up = [random(EXPERTS, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5) for _ in range(layers)]
    down = [random(EXPERTS, HIDDEN, WIDTH, scale=WIDTH**-0.5) for _ in range(layers)]
    router = random(EXPERTS, HIDDEN, scale=HIDDEN**-0.5, dtype=torch.float32)
    scale = torch.rand(EXPERTS, device="cuda") + 0.5
    for tokens in MOE_TOKENS:
        sets = 8 if tokens <= 256 else 2
        inputs = [random(tokens, HIDDEN) for _ in range(sets)]
        routed = [check_route(x, router, scale) for x in inputs]
        micros = graph_us([lambda x=x: moe.route(x, router, scale, TOP_K, EPS) for x in inputs])
        report("moe", "route", tokens, "one launch", us=micros, check=routed[0][2])
        y = torch.empty_like(inputs[0])
        want = experts_twin(inputs[0], *routed[0][:2], gate_up[0], down[0])
        used = sum(float(ids.unique().numel()) for _, ids, _ in routed) / sets
        floor = used * 3 * WIDTH * HIDDEN * 2 / BANDWIDTH * 1e6
        operations = tokens * TOP_K * 6 * WIDTH * HIDDEN
        for name, describe, tiles in moe_variants(tokens):
            for up, down_tile in tiles:
                variant = f"{name} {tile_text(up)} / {tile_text(down_tile)}"
                y.fill_(math.nan)
                try:
                    for launch in describe(inputs[0], *routed[0][:2], gate_up[0], down[0], y, up=up, down=down_tile):
                        launch.run()
                    error = worst_row(y, want)
                    steps = [
                        launch.run
                        for index in range(sets)
                        for launch in describe(
                            inputs[index], *routed[index][:2], gate_up[index % layers], down[index % layers], y, up=up, down=down_tile
                        )
                    ]
                    micros = graph_us(steps) * len(steps) / sets
                except Exception as failure:
                    report("moe", "experts", tokens, variant, failed=str(failure).splitlines()[0][:80])
                    continue
                report("moe", "experts", tokens, variant, us=micros, floor=floor, **{"TFLOP/s": operations / micros / 1e6}, err=error)


def tile_text(tile: Any) -> str:
    size = f"{tile.block_m}x" if isinstance(tile, moe.GroupTile) else ""
    return f"{size}{tile.block_n}x{tile.block_k}w{tile.num_warps}s{tile.num_stages}"
