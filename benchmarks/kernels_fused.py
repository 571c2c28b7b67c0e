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
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
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
    """Tiles worth trying for a shape: earlier rounds left few (docs/LOG.md)."""
    found = []
    if tokens <= 2:
        block_k = min(1024, shape.k)
        found += [Tile("rows", 4, block_k, 4, fetch=fetch) for fetch in (0, 1024, 4096)]
        found += [Tile("rows", 2, block_k, 4, fetch=4096)]
    stages = 3 if shape.epilogue == GATED else 4
    programs = -(-shape.n // 64)
    split = 1
    while programs * split < 150 and split < 8 and shape.k // 128 >= 4 * split:
        split *= 2
    for fetch in (0, 256, 1024):
        found.append(Tile("tiles", 64, 128, 4, stages, split, fetch))
    if programs * split < 300:
        found.append(Tile("tiles", 64, 128, 4, 3, min(8, split * 2), 512))
    if programs < 150:
        found.append(Tile("tiles", 16, 256, 2, 4, 1, 1024))
    return [tile for tile in found if tile.block_k <= shape.k]


def linear_launch(shape: Shape, tile: Tile, x: Tensor, weight: Tensor, y: Tensor, factor: Tensor, pdl: bool = False) -> Launch:
    extra = {"factor": factor if shape.epilogue == GELU_TIMES else None, "softcap": 30.0, "pdl": pdl}
    return linear.describe(x, weight, y, tile, shape.epilogue, **extra)


def linear_on_meta(shape: Shape, tile: Tile, tokens: int, pdl: bool = True) -> Launch:
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
            dtype = torch.float32 if shape.epilogue == SOFTCAP else torch.bfloat16
            y = torch.empty(tokens, shape.n, dtype=dtype, device="cuda")
            # Every launch follows a small kernel that makes its input, as in a layer: only so does chaining show.
            source = random(tokens, shape.k)
            before = pointwise.describe_gelu_times(source, source, x, True).run
            before()
            want = linear_twin(shape, x, weights[0], factor)
            base = 2 * graph_us([step for w in weights for step in (before, partial(cublas, shape, x, w, factor))])
            ours: list[tuple[float, Tile, float]] = []
            for tile in candidates(shape, tokens):
                y.fill_(math.nan)
                try:
                    before()
                    linear_launch(shape, tile, x, weights[0], y, factor, pdl=True).run()
                    error = worst_row(y, want)
                    launches = [linear_launch(shape, tile, x, w, y, factor, pdl=True) for w in weights]
                    micros = 2 * graph_us([step for launch in launches for step in (before, launch.run)])
                except Exception as failure:  # a tile that does not fit is a result too
                    report("linear", shape.name, tokens, describe_tile(tile), failed=str(failure).splitlines()[0][:80])
                    continue
                if error > TOLERANCE:
                    report("linear", shape.name, tokens, describe_tile(tile), wrong=error)
                    continue
                ours.append((micros, tile, error))
                results.append(
                    {"section": "tile", "name": shape.name, "tokens": tokens, "variant": describe_tile(tile), "us": micros}
                )
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
    return f"{tile.kernel} {tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages} k{tile.split_k} f{tile.fetch}"


# --- experts ----------------------------------------------------------------------------------------------------------

HIDDEN, EXPERTS, TOP_K, WIDTH = 2816, 128, 8, 704
UP_ROWS = [moe.RowTile(4, 1024), moe.RowTile(8, 256), moe.RowTile(8, 512)]
DOWN_ROWS = [moe.RowTile(4, 1024), moe.RowTile(8, 1024)]
SMALL_UP = [moe.GroupTile(16, 64, 128, 4, 3), moe.GroupTile(16, 64, 64, 4, 4)]
SMALL_DOWN = [moe.GroupTile(16, 128, 64, 4, 4), moe.GroupTile(16, 64, 64, 4, 5)]
MID_UP = [moe.GroupTile(64, 64, 64, 4, 4), moe.GroupTile(64, 64, 64, 4, 3), moe.GroupTile(64, 128, 64, 8, 3)]
MID_DOWN = [moe.GroupTile(64, 128, 64, 4, 4), moe.GroupTile(64, 128, 64, 8, 3), moe.GroupTile(64, 256, 64, 8, 3)]
LARGE_UP = [
    moe.GroupTile(128, 64, 64, 8, 3),
    moe.GroupTile(128, 64, 64, 8, 4),
    moe.GroupTile(256, 64, 64, 8, 3),
    moe.GroupTile(128, 64, 128, 8, 2),
]
LARGE_DOWN = [moe.GroupTile(128, 128, 64, 8, 3), moe.GroupTile(128, 128, 64, 8, 4), moe.GroupTile(256, 128, 64, 8, 3)]
MOE_TOKENS = (1, 2, 4, 8, 32, 256, 512, 1024, 2048, 8192)
ROUTE_TILES = [(16, 64, 4), (16, 64, 8), (16, 128, 8), (32, 64, 8)]


def moe_variants(tokens: int) -> list[tuple[str, Callable[..., list[Launch]], list[tuple[Any, Any]]]]:
    """(name, describer, (up, down) tiles), each half varied beside the first of the other."""

    def pairs(ups: list[Any], downs: list[Any]) -> list[tuple[Any, Any]]:
        return [(up, downs[0]) for up in ups] + [(ups[0], down) for down in downs[1:]]

    found: list[tuple[str, Callable[..., list[Launch]], list[tuple[Any, Any]]]] = []
    if tokens <= 4:
        found.append(("assigned", moe.describe_assigned, pairs(UP_ROWS, DOWN_ROWS)))
    if 2 <= tokens <= 256:
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
    for tile in ROUTE_TILES:
        yield moe.describe_route(x, router, scale, (weights, ids), EPS, pdl=True, tile=tile)
    yield moe.describe_route(x, router, scale, (weights, ids), EPS, pdl=True)
    for _, describe, tiles in moe_variants(tokens):
        for up, down_tile in tiles:
            yield from describe(x, weights, ids, gate_up, down, meta(tokens, HIDDEN), up=up, down=down_tile, pdl=True)


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
    logits = F.linear(x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt(), router.double())
    want_ids = logits.topk(TOP_K, dim=-1).indices
    want = torch.softmax(logits.gather(-1, ids.long()), -1) * scale[ids.long()]
    error = float((weights - want).abs().max() / want.abs().max())
    other = ids.sort(-1).values.long() != want_ids.sort(-1).values
    gap = logits.gather(-1, want_ids)[:, -1] - logits.gather(-1, ids.long()).amin(-1)
    return weights, ids, f"err {error:.1e} other ids {int(other.any(-1).sum())} widest gap {float(gap.abs().max()):.1e}"


def bench_moe() -> None:
    layers = 2
    gate_up = [random(EXPERTS, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5) for _ in range(layers)]
    down = [random(EXPERTS, HIDDEN, WIDTH, scale=WIDTH**-0.5) for _ in range(layers)]
    router = random(EXPERTS, HIDDEN, scale=HIDDEN**-0.5, dtype=torch.float32)
    scale = torch.rand(EXPERTS, device="cuda") + 0.5
    for tokens in MOE_TOKENS:
        sets = 8 if tokens <= 256 else 2
        inputs = [random(tokens, HIDDEN) for _ in range(sets)]
        routed = [check_route(x, router, scale) for x in inputs]
        for tile in ROUTE_TILES:
            outs = torch.empty_like(routed[0][0]), torch.empty_like(routed[0][1])
            launches = [moe.describe_route(x, router, scale, outs, EPS, pdl=True, tile=tile) for x in inputs]
            micros = graph_us([launch.run for launch in launches])
            same = bool((outs[1] == routed[-1][1]).all())
            report("moe", "route", tokens, str(tile), us=micros, same=str(same), check=routed[0][2])
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
                    for launch in describe(inputs[0], *routed[0][:2], gate_up[0], down[0], y, up=up, down=down_tile, pdl=True):
                        launch.run()
                    error = worst_row(y, want)
                    steps = [
                        launch.run
                        for index in range(sets)
                        for launch in describe(
                            inputs[index],
                            *routed[index][:2],
                            gate_up[index % layers],
                            down[index % layers],
                            y,
                            up=up,
                            down=down_tile,
                        )
                    ]
                    micros = graph_us(steps) * len(steps) / sets
                except Exception as failure:
                    report("moe", "experts", tokens, variant, failed=str(failure).splitlines()[0][:80])
                    continue
                report(
                    "moe",
                    "experts",
                    tokens,
                    variant,
                    us=micros,
                    floor=floor,
                    **{"TFLOP/s": operations / micros / 1e6},
                    err=error,
                )


def tile_text(tile: Any) -> str:
    size = f"{tile.block_m}x" if isinstance(tile, moe.GroupTile) else ""
    return f"{size}{tile.block_n}x{tile.block_k}w{tile.num_warps}s{tile.num_stages}"


# --- small fused pieces -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dims:
    """What the small pieces of a model need to know."""

    hidden: int
    heads: int
    sliding_kv: int
    global_kv: int
    k_eq_v: bool
    ple_layers: int = 0
    is_moe: bool = False

    def head_shapes(self) -> dict[str, reference.HeadShape]:
        """Sliding and global layers; of K=V models the global one with and without the latent."""
        found = {"sliding": reference.HeadShape(self.heads, self.sliding_kv, 256, 256, False, False, EPS)}
        found["global"] = reference.HeadShape(self.heads, self.global_kv, 512, 128, self.k_eq_v, self.k_eq_v, EPS)
        if self.k_eq_v:
            found["global, K and V"] = reference.HeadShape(self.heads, self.global_kv, 512, 128, True, False, EPS)
        return found


MODELS = {
    "E2B": Dims(1536, 8, 1, 1, False, ple_layers=35),
    "E4B": Dims(2560, 8, 2, 2, False, ple_layers=42),
    "12B": Dims(3840, 16, 8, 1, True),
    "26B": Dims(2816, 16, 8, 2, True, is_moe=True),
    "31B": Dims(5376, 32, 16, 4, True),
}
SMALL_TOKENS = (1, 32, 2048)
PAGE = 32  # tokens of a page


@dataclass(frozen=True)
class Case:
    """One small kernel: what it leaves, what its twin leaves in float32, and the bytes it must move."""

    name: str
    ours: Callable[[], tuple[Tensor, ...]]
    twin: Callable[[], tuple[Tensor, ...]]
    num_bytes: int


def norm_cases(dims: Dims, tokens: int) -> Iterator[Case]:
    size = dims.hidden
    x, a, b = (random(tokens, size) for _ in range(3))
    w = [torch.rand(size, device="cuda") + 0.5 for _ in range(4)]
    scalar = torch.rand(1, device="cuda") + 0.5
    row = tokens * size * 2

    def two_twin() -> tuple[Tensor, ...]:
        out, first = reference.residual_norm(x.float(), a.float(), w[0], None, w[1], EPS)
        return out, first, reference.rms_norm(out, w[2], EPS)

    def joint_twin() -> tuple[Tensor, ...]:
        delta = reference.sum_norms(a.float(), b.float(), w[0], w[1], EPS)
        return reference.residual_norm(x.float(), delta, w[2], scalar, w[3], EPS)

    yield Case(
        "rms_norm", lambda: (norms.rms_norm(x, w[0], EPS),), lambda: (reference.rms_norm(x.float(), w[0], EPS),), 2 * row
    )
    yield Case(
        "residual_norm",
        lambda: norms.residual_norm(x, a, w[0], scalar, w[1], EPS),
        lambda: reference.residual_norm(x.float(), a.float(), w[0], scalar, w[1], EPS),
        4 * row,
    )
    if dims.is_moe:
        yield Case("residual_norm_two", lambda: norms.residual_norm_two(x, a, w[0], w[1], w[2], EPS), two_twin, 5 * row)
        yield Case(
            "residual_joint",
            lambda: norms.residual_norm_joint(x, a, b, (w[0], w[1], w[2]), scalar, w[3], EPS),
            joint_twin,
            5 * row,
        )
        yield Case(
            "sum_norms",
            lambda: (norms.sum_norms(a, b, w[0], w[1], EPS),),
            lambda: (reference.sum_norms(a.float(), b.float(), w[0], w[1], EPS),),
            3 * row,
        )


def qkv_cases(dims: Dims, tokens: int) -> Iterator[Case]:
    for name, heads in dims.head_shapes().items():
        size, num_kv = heads.head_dim, heads.num_kv_heads
        columns = (heads.num_heads + num_kv * (1 if heads.k_eq_v else 2)) * size
        x, weight = random(tokens, columns), torch.rand(heads.num_heads + num_kv, size, device="cuda") + 0.5
        positions = torch.randint(0, 131072, (tokens,), device="cuda")
        theta = 1e4 if heads.rotated_dims == size else 1e6
        frequencies = theta ** (-torch.arange(0, heads.rotated_dims, 2, device="cuda", dtype=torch.float32) / size)
        width, planes = (size + heads.rotated_dims, 1) if heads.latent else (size, 2)
        page, pages = PAGE, -(-tokens // PAGE) + 3
        # Pages inside slabs that hold other layers too, and some tokens that are not stored.
        slab = torch.zeros(pages, 3 * planes * num_kv * page * width, dtype=torch.bfloat16, device="cuda")
        shape, stride = (planes, pages, num_kv, page, width), (num_kv * page * width, slab.stride(0), page * width, width, 1)
        mine, theirs = slab.clone(), slab.float()
        slots = torch.randperm(pages * page, device="cuda")[:tokens]
        slots[1::7] = -1
        begin = planes * num_kv * page * width
        my_planes, their_planes = (buffer.as_strided(shape, stride, begin) for buffer in (mine, theirs))
        turn, twin_turn = qkv.rope(positions, frequencies), reference.rope(positions, frequencies)

        def ours(x=x, weight=weight, turn=turn, my_planes=my_planes, slots=slots, heads=heads, mine=mine) -> tuple[Tensor, ...]:
            return *qkv.prepare_qkv(x, weight, turn, my_planes, qkv.stores(slots, PAGE), heads), mine

        def twin(
            x=x, weight=weight, turn=twin_turn, planes=their_planes, slots=slots, heads=heads, buffer=theirs
        ) -> tuple[Tensor, ...]:
            return *reference.prepare_qkv(x.float(), weight, turn, planes, reference.stores(slots, PAGE), heads), buffer

        yield Case(
            f"qkv {name}", ours, twin, x.numel() * 2 + (heads.num_heads * size + 2 * num_kv * width * planes) * tokens * 2
        )
        yield Case(
            "rope", lambda p=positions, f=frequencies: qkv.rope(p, f), lambda t=twin_turn: t, tokens * heads.rotated_dims * 8
        )
        queries = reference.HeadShape(heads.num_heads, 0, size, heads.rotated_dims, heads.k_eq_v, heads.latent, EPS)
        own = x[:, : heads.num_heads * size]
        yield Case(
            f"q {name}",
            lambda own=own, weight=weight, turn=turn, queries=queries: (qkv.prepare_q(own, weight, turn, queries),),
            lambda own=own, weight=weight, turn=twin_turn, queries=queries: (
                reference.prepare_q(own.float(), weight[: queries.num_heads], turn, queries),
            ),
            own.numel() * 4,
        )


def other_cases(dims: Dims, tokens: int) -> Iterator[Case]:
    size = dims.hidden
    gate_up, logits = random(tokens, 2 * 4 * size), random(min(tokens, 32), 262144, scale=20.0)
    table, ids = random(8192, size), torch.randint(0, 8192, (tokens,), device="cuda")
    yield Case(
        "gelu_mul", lambda: (pointwise.gelu_mul(gate_up),), lambda: (reference.gelu_mul(gate_up.float()),), gate_up.numel() * 3
    )
    yield Case(
        "embed",
        lambda: (pointwise.embed(ids, table, 50.5),),
        lambda: (reference.embed(ids, table.float(), 50.5),),
        tokens * size * 4,
    )
    yield Case(
        "softcap", lambda: (pointwise.softcap(logits, 30.0),), lambda: (reference.softcap(logits, 30.0),), logits.numel() * 6
    )
    if dims.ple_layers:
        context, embedded = random(tokens, dims.ple_layers * 256), random(tokens, dims.ple_layers * 256)
        weight, gate = torch.rand(256, device="cuda") + 0.5, random(tokens, 256)
        value = embedded.view(tokens, -1, 256)[:, 3]
        yield Case(
            "ple_combine",
            lambda: (pointwise.ple_combine(context, embedded, weight, size**-0.5, EPS),),
            lambda: (reference.ple_combine(context.float(), embedded.float(), weight, size**-0.5, EPS),),
            context.numel() * 6,
        )
        yield Case(
            "gelu_gate",
            lambda: (pointwise.gelu_gate(gate, value),),
            lambda: (reference.gelu_gate(gate.float(), value.float()),),
            gate.numel() * 6,
        )


def bench_small(model: str, is_timed: bool = True) -> None:
    for tokens in SMALL_TOKENS:
        for cases in (norm_cases, qkv_cases, other_cases):
            for case in cases(MODELS[model], tokens):
                error = max(worst_row(got, want) for got, want in zip(case.ours(), case.twin(), strict=True))
                if not is_timed:
                    continue
                micros = graph_us([case.ours] * 20)
                report(
                    "small", f"{model} {case.name}", tokens, "", us=micros, floor=case.num_bytes / BANDWIDTH * 1e6, err=error
                )


# --- a layer without attention ----------------------------------------------------------------------------------------


def chain_launches(
    model: str, layers: int, tokens: int, best: dict[tuple[str, int], Tile], how: str
) -> list[Callable[[], Any]]:
    """The linear layers and small pieces of some layers, in order. `how`: torch (cuBLAS, our small pieces), ours, chained."""
    shapes = {
        shape.name.split(".")[1]: shape for shape in SHAPES if shape.name.startswith(model) and not shape.name.endswith("head")
    }
    dims, pdl = MODELS[model], how == "chained"
    heads = dims.head_shapes()["sliding"]
    x, normed = random(tokens, dims.hidden), random(tokens, dims.hidden)
    attended, factor = random(tokens, shapes["o"].k), random(tokens, 256)
    weight = torch.rand(dims.hidden, device="cuda") + 0.5
    head_weight = torch.rand(heads.num_heads + heads.num_kv_heads, 256, device="cuda")
    turn = qkv.rope(torch.arange(tokens, device="cuda"), torch.rand(128, device="cuda"))
    pages = torch.zeros(2, 8, heads.num_kv_heads, 32, 256, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(tokens, device="cuda")
    outs = {name: torch.empty(tokens, shape.n, dtype=torch.bfloat16, device="cuda") for name, shape in shapes.items()}
    q, k, v = (
        torch.empty(tokens, n, 256, dtype=torch.bfloat16, device="cuda")
        for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    steps: list[Callable[[], Any]] = []

    def add(name: str, source: Tensor) -> None:
        shape = shapes[name]
        matrix = random(shape.weight_rows, shape.k, scale=shape.k**-0.5)
        tile = best.get((shape.name, tokens), Tile("cublas"))
        if how == "torch" or tile.kernel == "cublas":
            steps.append(lambda: cublas(shape, source, matrix, factor))
        else:
            steps.append(linear_launch(shape, tile, source, matrix, outs[name], factor, pdl).run)

    def residual(delta: Tensor, has_next: bool) -> None:
        following = (weight,) if has_next else ()
        steps.append(
            norms.describe_residual(x, (delta,), (weight,), None, following, EPS, (x, normed)[: 1 + has_next], pdl).run
        )

    for _ in range(layers):
        add("qkv", normed)
        steps.append(qkv.describe_prepare(outs["qkv"], head_weight, turn, pages, slots, heads, (q, k, v), pdl).run)
        add("o", attended)
        residual(outs["o"], True)
        add("gate_up", normed)
        add("down", outs["gate_up"])
        residual(outs["down"], "ple_gate" not in shapes)
        if "ple_gate" in shapes:
            add("ple_gate", x)
            add("ple_proj", outs["ple_gate"])
            residual(outs["ple_proj"], True)
    return steps


def bench_chain(best: dict[tuple[str, int], Tile], workers: int) -> None:
    tokens_of = {(name, tile): tokens for (name, tokens), tile in best.items() if tile.kernel != "cublas"}
    by_name = {shape.name: shape for shape in SHAPES}
    compile_all([("linear", (by_name[name], tile, tokens, False)) for (name, tile), tokens in tokens_of.items()], workers)
    for model, layers in (("E4B", 12), ("26B", 12), ("31B", 4)):
        floor = sum(shape.floor_us for shape in SHAPES if shape.name.startswith(model) and not shape.name.endswith("head"))
        for tokens in (1, 8, 32):
            numbers: dict[str, float] = {"floor": floor}
            for how in ("torch", "ours", "chained"):
                steps = chain_launches(model, layers, tokens, best, how)
                numbers[how] = graph_us(steps) * len(steps) / layers
            report("chain", f"{model} layer", tokens, f"{len(steps) // layers} kernels, no attention", **numbers)


# --- everything -------------------------------------------------------------------------------------------------------


def compile_part(part: tuple[str, Any]) -> str:
    """In a worker: compile one part's kernels into the disk cache."""
    kind, what = part
    try:
        if kind == "linear":
            linear_on_meta(*what).warm()
        elif kind == "moe":
            for launch in moe_on_meta(what):
                launch.warm()
        else:
            bench_small(what, is_timed=False)
    except Exception as failure:
        return f"{kind} {what}: {type(failure).__name__} {str(failure).splitlines()[0][:120]}"
    return ""


def linear_parts(only: str) -> list[tuple[str, Any]]:
    """Each kernel once: tokens matter only for the number of columns or rows a kernel is made for."""
    found: dict[Any, tuple[str, Any]] = {}
    for shape in SHAPES:
        for tokens in TOKENS:
            for tile in candidates(shape, tokens) if only in shape.name else ():
                columns = tokens if tile.kernel == "rows" else max(16, tokens)
                found.setdefault((shape, tile, columns), ("linear", (shape, tile, tokens)))
    return list(found.values())


def compile_all(parts: list[tuple[str, Any]], workers: int) -> None:
    """Fill Triton's disk cache from many processes: one after the other it would take most of the time."""
    begin = time.time()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for problem in pool.map(compile_part, parts):
            if problem:
                print(problem, flush=True)
    print(f"compiled {len(parts)} parts in {time.time() - begin:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="linear,moe,small,chain", help="sections, separated by commas")
    parser.add_argument("--shape", default="", help="only linear shapes whose name holds this")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    sections = set(options.only.split(","))
    parts: list[tuple[str, Any]] = [("moe", tokens) for tokens in MOE_TOKENS] if "moe" in sections else []
    parts += [("small", model) for model in MODELS] if "small" in sections else []
    parts += linear_parts(options.shape) if "linear" in sections else []
    compile_all(parts, options.workers)
    torch.manual_seed(time.time_ns() % 2**31)
    best: dict[tuple[str, int], Tile] = {}
    begin = time.time()
    stages: dict[str, Callable[[], Any]] = {
        "moe": bench_moe,
        "linear": lambda: bench_linear(best, options.shape),
        "chain": lambda: bench_chain(best, options.workers),
        "small": lambda: [bench_small(model) for model in MODELS],
    }
    for name, stage in stages.items():
        if name not in sections:
            continue
        try:
            stage()
        except Exception:  # the other stages' numbers are worth having
            traceback.print_exc()
        print(f"{name} done after {time.time() - begin:.1f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))
    wrong = [row for row in results if float(row.get("err", 0)) > TOLERANCE or "wrong" in row]
    print(f"{len(results)} results, {len(wrong)} outside {TOLERANCE}: {[(row['name'], row['variant']) for row in wrong][:10]}")


if __name__ == "__main__":
    main()
