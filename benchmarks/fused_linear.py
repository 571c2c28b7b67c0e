"""Linear layers of few tokens against cuBLAS, each launch after a small kernel that makes its input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fused_timing import BANDWIDTH, ROTATED_BYTES, TOLERANCE, graph_us, meta, random, report, results, worst_row
from torch import Tensor

from culet.kernels.triton.launch import Launch
from culet.kernels.triton.linear import few_tokens
from culet.kernels.triton.linear.tiles import GATED, GELU_TIMES, PLAIN, SOFTCAP, Tile, choose_tile
from culet.kernels.triton.norms import pointwise


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
    Shape("E2B.qkv", 2560, 1536),
    Shape("E2B.o", 1536, 2048),
    Shape("E2B.gate_up", 12288, 1536, GATED),
    Shape("E2B.down", 1536, 12288),
    Shape("12B.qkv", 8192, 3840),
    Shape("12B.o", 3840, 4096),
    Shape("12B.gate_up", 15360, 3840, GATED),
    Shape("12B.down", 3840, 15360),
]
TOKENS = (1, 2, 4, 8, 16, 32)


def candidates(shape: Shape, tokens: int) -> list[Tile]:
    """The frozen choice first, then others that came near it in earlier rounds."""
    chosen = choose_tile(tokens, shape.n, shape.k, shape.epilogue)
    found = [] if chosen.kernel == "cublas" else [chosen]
    if tokens <= 2:
        found += [Tile("rows", rows, min(1024, shape.k)) for rows in (4, 2)]
    programs = -(-shape.n // 64)
    split = 1
    while programs * split < 128 and split < 8 and shape.k // 128 >= 4 * split:
        split *= 2
    if shape.epilogue == GATED:
        found += [Tile("tiles", 64, 128, 4, 3, split), Tile("tiles", 32, 128, 4, 4, split), Tile("tiles", 64, 64, 4, 4, split)]
    else:
        found += [Tile("tiles", 64, 128, 4, 4, split), Tile("tiles", 64, 128, 4, 3, split), Tile("tiles", 16, 256, 2, 4)]
    return [tile for tile in dict.fromkeys(found) if tile.block_k <= shape.k]


def linear_launch(shape: Shape, tile: Tile, x: Tensor, weight: Tensor, y: Tensor, factor: Tensor, pdl: bool = False) -> Launch:
    extra = {"factor": factor if shape.epilogue == GELU_TIMES else None, "softcap": 30.0, "pdl": pdl}
    return few_tokens.describe(x, weight, y, tile, shape.epilogue, **extra)


def linear_out(shape: Shape, tile: Tile, tokens: int, device: str = "cuda", *, keeps_parts: bool = True) -> Tensor:
    """What the kernel leaves: outputs, or where a split K may be left to the reader, its parts."""
    if keeps_parts and tile.split_k > 1 and shape.epilogue == PLAIN:
        return torch.empty(tile.split_k, tokens, shape.n, dtype=torch.float32, device=device)
    dtype = torch.float32 if shape.epilogue == SOFTCAP else torch.bfloat16
    return torch.empty(tokens, shape.n, dtype=dtype, device=device)


def random_weight(shape: Shape) -> Tensor:
    return random(shape.weight_rows, shape.k, scale=shape.k**-0.5)


def linear_on_meta(shape: Shape, tile: Tile, tokens: int, pdl: bool = True, keeps_parts: bool = False) -> Launch:
    out = linear_out(shape, tile, tokens, "meta", keeps_parts=keeps_parts)
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


def bench_linear(only: str) -> None:
    for shape in SHAPES:
        if only and only not in shape.name:
            continue
        num_bytes = shape.weight_rows * shape.k * 2
        copies = max(2, min(64, ROTATED_BYTES // num_bytes))
        weights = [random_weight(shape) for _ in range(copies)]
        for tokens in TOKENS:
            if shape.name.endswith("head") and tokens in (2, 4, 16):
                continue
            x, factor = random(tokens, shape.k), random(tokens, shape.n)
            dtype = torch.float32 if shape.epilogue == SOFTCAP else torch.bfloat16
            y = torch.empty(tokens, shape.n, dtype=dtype, device="cuda")
            # Every launch follows a small kernel that makes its input, as in a layer: only so does chaining show.
            source = random(tokens, shape.k)
            before = pointwise.describe_gate_times(source, source, x, True).run
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
            chosen = choose_tile(tokens, shape.n, shape.k, shape.epilogue)
            frozen = base if chosen.kernel == "cublas" else next((item[0] for item in ours if item[1] == chosen), math.nan)
            numbers = {"frozen": frozen, "best": micros, "cublas": base, "floor": shape.floor_us, "err": error}
            report("linear", shape.name, tokens, describe_tile(chosen), **numbers, best_tile=describe_tile(tile))
        del weights


def describe_tile(tile: Tile) -> str:
    return f"{tile.kernel} {tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages} k{tile.split_k}"


def linear_parts(only: str) -> list[tuple[str, Any]]:
    """Each kernel once: tokens matter only for the number of columns or rows a kernel is made for."""
    found: dict[Any, tuple[str, Any]] = {}
    for shape in SHAPES:
        for tokens in TOKENS:
            for tile in candidates(shape, tokens) if only in shape.name else ():
                columns = tokens if tile.kernel == "rows" else max(16, tokens)
                found.setdefault((shape, tile, columns), ("linear", (shape, tile, tokens)))
    return list(found.values())
