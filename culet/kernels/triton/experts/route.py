"""Route tokens to experts. One launch computes the rms, float32 logits, the best experts and their weights.

    u = x / rms(x), logits = router @ u, ids = the K largest logits (equal ones in order of id)
    weights = softmax(logits[ids]) * expert_scale[ids]

`router` includes the router's input scale. With up to FEW_TOKENS tokens, a program computes the logits of a few experts for one
token. It loads their rows before it waits for the previous kernel. With more tokens, tensor cores compute tiles of tokens x all
experts, with D split into parts. Each float32 weight is split into three bfloat16 numbers, whose products are exact. With many
tokens, a launch of its own does that first.

Shapes: T tokens · D model · E experts · K experts per token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import shared_bytes, stages_that_fit, uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.linear.few_tokens import workspace

# Measured on an H200 with 128 experts and hidden size 2816 (docs/log/linear.md).
FEW_TOKENS = 16
FEW = (1, 1)  # experts per program, warps. One warp needs no barriers, neither for its sum nor for the choice.
TILE, LARGE_TILE = (16, 64, 4), (64, 64, 4)  # tokens, columns, warps
LARGE_TOKENS = 1536  # from this many tokens on, LARGE_TILE is used, with the router's parts
# The router's weights are split along D into one of these numbers of parts, so that enough programs share the work. Each number
# needs its own kernel, so there are few.
SPLITS = (11, 8, 4, 2, 1)
MAX_PROGRAMS, MAX_LARGE_PROGRAMS = 264, 132  # D is not split beyond this many programs
SPLIT_BLOCK = 1024  # weights that a program splits into parts

router_workspace = partial(workspace, user="router")  # its own, because the dense MLP runs beside the router


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    x,
    router,
    expert_scale,
    weights,
    ids,
    parts,
    arrivals,
    T,
    x_stride,
    D: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    eps: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute logits of BLOCK_T tokens over one of SPLIT parts of D. The last part to arrive chooses their experts."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    cols = tl.arange(0, BLOCK_D)
    is_token = tokens < T
    part_d: tl.constexpr = (D + BLOCK_D * SPLIT - 1) // (BLOCK_D * SPLIT) * BLOCK_D
    begin = tl.program_id(1) * part_d
    enter(PDL)
    logits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    for step in tl.range(0, part_d, BLOCK_D, num_stages=STAGES):
        inside = cols < D - begin - step
        x_tile = tl.load(
            x + tokens[:, None].to(tl.int64) * x_stride + begin + step + cols[None, :],
            mask=is_token[:, None] & inside[None, :],
            other=0.0,
        )
        # the router as columns, [BLOCK_D, BLOCK_E]
        r_ptrs = router + experts[None, :] * D + begin + step + cols[:, None]
        is_weight = (experts < E)[None, :] & inside[:, None]
        r_tile = tl.load(r_ptrs, mask=is_weight, other=0.0)
        if router.dtype.element_ty == tl.bfloat16:
            middle = tl.load(r_ptrs + E * D, mask=is_weight, other=0.0)
            low = tl.load(r_ptrs + 2 * E * D, mask=is_weight, other=0.0)
            logits += _dot_parts(x_tile, r_tile, middle, low)
        else:
            logits = _dot_exactly(x_tile, r_tile, logits)
        x_tile = x_tile.to(tl.float32)
        squares += tl.sum(x_tile * x_tile, 1)
    if SPLIT == 1:
        _choose(
            logits * tl.rsqrt(squares / D + eps)[:, None], expert_scale, weights, ids, tokens, T, E, TOP_K, BLOCK_T, BLOCK_E
        )
    else:
        # A part holds the logits of this launch's tokens, then the squares.
        offsets = tokens[:, None] * BLOCK_E + experts[None, :]
        width = tl.num_programs(0) * BLOCK_T * (BLOCK_E + 1)
        squares_at = tl.num_programs(0) * BLOCK_T * BLOCK_E + tokens
        mine = parts + tl.program_id(1) * width
        tl.store(mine + offsets, logits, mask=is_token[:, None])
        tl.store(mine + squares_at, squares, mask=is_token)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            logits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
            squares = tl.zeros((BLOCK_T,), tl.float32)
            # The loop is unrolled, so that all loads are in flight together.
            for part in tl.static_range(SPLIT):
                other = parts + part * width
                logits += tl.load(other + offsets, mask=is_token[:, None], other=0.0, cache_modifier=".cg")
                squares += tl.load(other + squares_at, mask=is_token, other=0.0, cache_modifier=".cg")
            _choose(
                logits * tl.rsqrt(squares / D + eps)[:, None], expert_scale, weights, ids, tokens, T, E, TOP_K, BLOCK_T, BLOCK_E
            )
            tl.store(arrivals + tl.program_id(0), 0)  # ready for the next launch


@triton.jit(do_not_specialize=["T"])
def _route_few_kernel(
    x,
    router,
    expert_scale,
    weights,
    ids,
    logits,
    arrivals,
    T,
    x_stride,
    D: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    eps: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS logits of one token per program. The token's last program to arrive chooses its experts."""
    token = tl.program_id(1)
    experts = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    mask = (experts < E)[:, None] & (cols < D)[None, :]
    rows = tl.load(router + experts[:, None] * D + cols[None, :], mask=mask, other=0.0)
    enter(PDL)
    row = tl.load(x + token.to(tl.int64) * x_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / D + eps)
    tl.store(logits + token * BLOCK_E + experts, tl.sum(rows * row[None, :], 1) * scale, mask=experts < BLOCK_E)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + token, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        every = tl.arange(0, BLOCK_E)
        mine = token + tl.arange(0, 1)
        found = tl.load(logits + mine[:, None] * BLOCK_E + every[None, :], cache_modifier=".cg")
        _choose(found, expert_scale, weights, ids, mine, T, E, TOP_K, 1, BLOCK_E)
        tl.store(arrivals + token, 0)  # ready for the next launch


@triton.jit
def _dot_exactly(x, r, total):
    """Return total + x @ r for float32 r, [T, D] x [D, E]. Rounding must not decide which experts a token gets."""
    if x.dtype == tl.bfloat16:
        high, middle, low = _split(r)
        return total + _dot_parts(x, high, middle, low)
    return tl.dot(x.to(tl.float32), r, total, input_precision="tf32x3")


@triton.jit
def _split(r):
    """Return three bfloat16 numbers whose sum is r. Their products with bfloat16 numbers are exact."""
    high = r.to(tl.bfloat16)
    rest = r - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot_parts(x, high, middle, low):
    """Return x @ (high + middle + low) of a tile. Tensor cores truncate what they add to a large sum, so a tile has its own."""
    return tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low)))


@triton.jit
def _split_kernel(router, parts, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Split the router's weights into three parts, and store the parts one after another."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    high, middle, low = _split(tl.load(router + at, mask=mask, other=0.0))
    enter(PDL)
    tl.store(parts + at, high, mask=mask)
    tl.store(parts + SIZE + at, middle, mask=mask)
    tl.store(parts + 2 * SIZE + at, low, mask=mask)


@triton.jit
def _choose(
    logits,
    expert_scale,
    weights,
    ids,
    tokens,
    T,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Store the ids of the top k logits [BLOCK_T, BLOCK_E] and their softmax. Ids are distinct and valid even with NaN."""
    experts = tl.arange(0, BLOCK_E)[None, :]
    SLOTS: tl.constexpr = triton.next_power_of_2(TOP_K)
    slots = tl.arange(0, SLOTS)[None, :]
    # NaN counts as the lowest finite number, so that it stays above experts that are taken or do not exist.
    left = tl.where(experts < E, tl.where(logits > -3e38, logits, -3e38), float("-inf"))
    values = tl.full((BLOCK_T, SLOTS), float("-inf"), tl.float32)
    chosen = tl.zeros((BLOCK_T, SLOTS), tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(left, 1)
        expert = tl.min(tl.where(left == best[:, None], experts, BLOCK_E - 1), 1)
        values = tl.where(slots == j, best[:, None], values)
        chosen = tl.where(slots == j, expert[:, None], chosen)
        left = tl.where(experts == expert[:, None], float("-inf"), left)
    share = tl.exp(values - tl.max(values, 1)[:, None])
    share = share / tl.sum(share, 1)[:, None]
    mask = (tokens < T)[:, None] & (slots < TOP_K)
    share *= tl.load(expert_scale + chosen, mask=mask, other=0.0)
    offsets = tokens[:, None] * TOP_K + slots
    tl.store(weights + offsets, share, mask=mask)
    tl.store(ids + offsets, chosen, mask=mask)


def describe_route(
    x_TD: Tensor, router_ED: Tensor, expert_scale_E: Tensor, out: tuple[Tensor, Tensor], eps: float, **extra: Any
) -> list[Launch]:
    """Describe the launches. `out` is (weights, ids).

    `extra` may have pdl, few (experts per program, warps), tile (tokens, columns, warps), is_large (whether to use the
    router's parts) and shared (bytes).
    """
    num_tokens, size = x_TD.shape
    num_experts, top_k = router_ED.shape[0], out[0].shape[1]
    block_e = max(16, next_power_of_2(num_experts))
    pdl = bool(extra.get("pdl", False))
    shape: dict[str, Any] = {"T": num_tokens, "x_stride": x_TD.stride(0), "D": size, "E": num_experts, "TOP_K": top_k}
    tensors = {"x": x_TD, "router": router_ED, "expert_scale": expert_scale_E, "weights": out[0], "ids": out[1]}
    common = {**tensors, **shape, "eps": eps, "BLOCK_E": block_e, "PDL": pdl}
    if num_tokens <= FEW_TOKENS and "tile" not in extra:
        rows, num_warps = extra.get("few", FEW)
        logits, arrivals = router_workspace(x_TD.device)
        few = {"logits": logits, "arrivals": arrivals, "ROWS": rows, "BLOCK_D": next_power_of_2(size)}
        return [Launch(_route_few_kernel, (block_e // rows, num_tokens), {**common, **few}, options(num_warps, pdl))]
    is_large = extra.get("is_large", num_tokens >= LARGE_TOKENS) and x_TD.dtype == torch.bfloat16
    block_t, block_d, num_warps = extra.get("tile", LARGE_TILE if is_large else TILE)
    blocks = cdiv(num_tokens, block_t)
    most = max(1, min((MAX_LARGE_PROGRAMS if is_large else MAX_PROGRAMS) // blocks, cdiv(size, block_d)))
    split = next(split for split in SPLITS if split <= most)
    parts, arrivals = router_workspace(x_TD.device) if split > 1 else (out[0], out[1])
    many = {"parts": parts, "arrivals": arrivals, "BLOCK_T": block_t, "BLOCK_D": block_d, "SPLIT": split, "STAGES": 2}
    if not is_large:
        return [Launch(_route_kernel, (blocks, split), {**common, **many}, options(num_warps, pdl))]
    # With three stages, shared memory holds two tiles of tokens and of the router's parts. Not every GPU has room for that.
    tile_bytes = 2 * block_d * (block_t + 3 * block_e)
    stages = 1 + stages_that_fit(2, tile_bytes, int(extra.get("shared") or shared_bytes(x_TD.device)))
    many |= {"router": torch.empty(3, *router_ED.shape, dtype=torch.bfloat16, device=x_TD.device), "STAGES": stages}
    splitting = {"router": router_ED, "parts": many["router"], "SIZE": router_ED.numel(), "BLOCK": SPLIT_BLOCK, "PDL": pdl}
    return [
        Launch(_split_kernel, (cdiv(router_ED.numel(), SPLIT_BLOCK),), splitting, options(4, pdl)),
        Launch(_route_kernel, (blocks, split), {**common, **many}, options(num_warps, pdl)),
    ]


def route(x_TD: Tensor, router_ED: Tensor, expert_scale_E: Tensor, top_k: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the weights [T, K] (float32) and ids [T, K] (int32) of each token's experts."""
    weights = torch.empty(x_TD.shape[0], top_k, dtype=torch.float32, device=x_TD.device)
    ids = torch.empty(x_TD.shape[0], top_k, dtype=torch.int32, device=x_TD.device)
    if x_TD.shape[0]:
        for launch in describe_route(x_TD, router_ED, expert_scale_E, (weights, ids), eps, pdl=uses_pdl(x_TD.device)):
            launch.run()
    return weights, ids
