"""The router and the experts of 26B-A4B, by assignment and by groups, against the bytes and operations they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from fused_timing import BANDWIDTH, EPS, graph_us, meta, random, report, worst_row
from torch import Tensor

from culet.kernels.eager import ops as eager_ops
from culet.kernels.triton.experts import expert_mlp, route
from culet.kernels.triton.launch import Launch
from culet.kernels.triton.norms import pointwise

HIDDEN, EXPERTS, TOP_K, WIDTH = 2816, 128, 8, 704
UP_ROWS = [expert_mlp.RowTile(4, 256), expert_mlp.RowTile(8, 256)]
DOWN_ROWS = [expert_mlp.RowTile(8, 1024), expert_mlp.RowTile(16, 256)]
SMALL_UP = [expert_mlp.GroupTile(16, 64, 128, 4, 3), expert_mlp.GroupTile(16, 128, 64, 4, 3)]
SMALL_DOWN = [expert_mlp.GroupTile(16, 128, 64, 4, 4), expert_mlp.GroupTile(16, 64, 64, 4, 5)]
MID_UP = [
    expert_mlp.GroupTile(64, 64, 64, 4, 4),
    expert_mlp.GroupTile(64, 64, 64, 4, 3),
    expert_mlp.GroupTile(32, 64, 128, 4, 3),
]
MID_DOWN = [
    expert_mlp.GroupTile(64, 128, 64, 4, 4),
    expert_mlp.GroupTile(64, 128, 64, 4, 3),
    expert_mlp.GroupTile(32, 128, 64, 4, 4),
]
LARGE_UP = [expert_mlp.GroupTile(128, 64, 64, 8, 3), expert_mlp.GroupTile(128, 64, 64, 4, 3)]
LARGE_DOWN = [expert_mlp.GroupTile(128, 128, 64, 8, 3), expert_mlp.GroupTile(128, 128, 64, 4, 3)]
MOE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
ROUTE_FEW = [(1, 1), (2, 2)]  # experts per program, warps
ROUTE_TILES = [(16, 64, 4), (32, 128, 4)]  # tokens, columns, warps


def moe_variants(tokens: int) -> list[tuple[str, Callable[..., list[Launch]], list[tuple[Any, Any]]]]:
    """(name, describer, (up, down) tiles), each half varied beside the first of the other."""

    def pairs(ups: list[Any], downs: list[Any]) -> list[tuple[Any, Any]]:
        return [(up, downs[0]) for up in ups] + [(ups[0], down) for down in downs[1:]]

    found: list[tuple[str, Callable[..., list[Launch]], list[tuple[Any, Any]]]] = []
    if tokens <= 4:
        found.append(("assigned", expert_mlp.describe_assigned, pairs(UP_ROWS, DOWN_ROWS)))
    if 2 <= tokens <= 256:
        found.append(("grouped", expert_mlp.describe_grouped, pairs(SMALL_UP, SMALL_DOWN)))
    if 256 <= tokens <= 2048:
        found.append(("grouped", expert_mlp.describe_grouped, pairs(MID_UP, MID_DOWN)))
    if tokens >= 512:
        found.append(("grouped", expert_mlp.describe_grouped, pairs(LARGE_UP, LARGE_DOWN)))
    return found


def route_variants(tokens: int) -> list[dict[str, Any]]:
    if tokens <= route.FEW_TOKENS:
        return [{"few": few} for few in ROUTE_FEW] + [{"tile": ROUTE_TILES[0]}]
    return [{"tile": tile} for tile in ROUTE_TILES]


def moe_on_meta(tokens: int) -> Iterator[Launch]:
    x, weights = meta(tokens, HIDDEN), meta(tokens, TOP_K, dtype=torch.float32)
    ids = meta(tokens, TOP_K, dtype=torch.int32)
    gate_up, down = meta(EXPERTS, 2 * WIDTH, HIDDEN), meta(EXPERTS, HIDDEN, WIDTH)
    router, scale = meta(EXPERTS, HIDDEN, dtype=torch.float32), meta(EXPERTS, dtype=torch.float32)
    for extra in route_variants(tokens):
        yield route.describe_route(x, router, scale, (weights, ids), EPS, pdl=True, **extra)
    yield route.describe_route(x, router, scale, (weights, ids), EPS, pdl=True)
    for _, describe, tiles in moe_variants(tokens):
        for up, down_tile in tiles:
            yield from describe(x, weights, ids, gate_up, down, meta(tokens, HIDDEN), up=up, down=down_tile, pdl=True)


def experts_twin(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Float32, one expert's weights upcast at a time."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(EXPERTS):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel():
            hidden = eager_ops.gelu_mul(F.linear(x[token].float(), gate_up[expert].float()))
            out.index_add_(0, token, F.linear(hidden, down[expert].float()) * weights[token, slot, None])
    return out


def check_route(x: Tensor, router: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, str]:
    """Ours, and a word on where it differs from the twin: ids may only at near-ties."""
    weights, ids = route.route(x, router, scale, TOP_K, EPS)
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
        for extra in route_variants(tokens):
            outs = torch.empty_like(routed[0][0]), torch.empty_like(routed[0][1])
            launches = [route.describe_route(x, router, scale, outs, EPS, pdl=True, **extra) for x in inputs]
            micros = graph_us([launch.run for launch in launches])
            same = bool((outs[1] == routed[-1][1]).all())
            report("moe", "route", tokens, str(extra), us=micros, same=str(same), check=routed[0][2])
        y = torch.empty_like(inputs[0])
        want = experts_twin(inputs[0], *routed[0][:2], gate_up[0], down[0])
        used = sum(float(ids.unique().numel()) for _, ids, _ in routed) / sets
        floor = used * 3 * WIDTH * HIDDEN * 2 / BANDWIDTH * 1e6
        operations = tokens * TOP_K * 6 * WIDTH * HIDDEN
        if tokens >= 512:
            report(
                "moe", "experts", tokens, "torch grouped_mm, GEMMs alone", us=grouped_mm_us(routed[0][1], gate_up[0], down[0])
            )
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


def grouped_mm_us(ids: Tensor, gate_up: Tensor, down: Tensor) -> float:
    """torch's grouped GEMM over rows that are already sorted: its two products and the GELU, without gather and sum."""
    ends = torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
    rows = random(ids.numel(), HIDDEN)

    def products() -> Tensor:
        hidden = pointwise.gelu_mul(F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
        return F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)

    try:
        return graph_us([products] * 2)
    except Exception as failure:
        print("grouped_mm:", str(failure).splitlines()[0][:120])
        return math.nan


def tile_text(tile: Any) -> str:
    size = f"{tile.block_m}x" if isinstance(tile, expert_mlp.GroupTile) else ""
    return f"{size}{tile.block_n}x{tile.block_k}w{tile.num_warps}s{tile.num_stages}"


def moe_parts() -> list[tuple[str, Any]]:
    """Each kernel once, by its constants."""
    found: dict[Any, tuple[str, Any]] = {}
    for tokens in MOE_TOKENS:
        for index, launch in enumerate(moe_on_meta(tokens)):
            constants = [launch.arguments[one.name] for one in launch.kernel.params if one.is_constexpr]
            found.setdefault(str((launch.kernel, constants, launch.options)), ("moe", (tokens, index)))
    return list(found.values())
