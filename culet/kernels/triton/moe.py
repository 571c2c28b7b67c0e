"""Routed experts: the router in one launch, and the experts by assignment (few tokens) or by groups of tokens (more).

    u = x / rms(x); logits = router @ u; ids = top K of the logits, equal ones by rising id
    weights = softmax(logits[ids]) * expert_scale[ids]                                          route
    y[t] = sum_j weights[t, j] * down[ids[t, j]] @ (gelu(gate[ids[t, j]] @ x[t]) * (up[ids[t, j]] @ x[t]))    experts

By assignment: one launch multiplies each chosen expert's gate and up rows with its token, one adds up a token's experts;
weights are read once per assignment. By groups: each expert's assignments are listed on the device (no host sync, so that
a graph may hold it), tiles of its weights go to the tensor cores with its tokens as columns, and the last launch adds a
token's experts up. Both sum in float32 in a fixed order.

Shapes: T tokens · D model · E experts · K experts per token · A = T * K assignments (a = t * K + j) · F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.chain import enter, fetch_rows, is_chained, options
from culet.kernels.triton.launch import Launch
from culet.kernels.triton.linear import gelu, workspace


@dataclass(frozen=True, slots=True)
class GroupTile:
    """Tile of the grouped kernels: `block_m` assignments of one expert x `block_n` outputs (and as many up rows)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class RowTile:
    """Tile of the kernels by assignment."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 1


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
    """Logits of BLOCK_T tokens over one of SPLIT parts of D; the last part to arrive chooses the experts."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    names = tl.arange(0, BLOCK_E)
    cols = tl.arange(0, BLOCK_D)
    is_token = tokens < T
    part_d: tl.constexpr = (D + BLOCK_D * SPLIT - 1) // (BLOCK_D * SPLIT) * BLOCK_D
    begin = tl.program_id(1) * part_d
    if PDL and SPLIT > 1:
        fetch_rows(router + tl.where(names < E, names, 0)[:, None] * D, begin, D, part_d)
    enter(PDL)
    logits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    for step in tl.range(0, part_d, BLOCK_D, num_stages=STAGES):
        inside = cols < D - begin - step
        x_tile = tl.load(
            x + tokens[:, None].to(tl.int64) * x_stride + begin + step + cols[None, :],
            mask=is_token[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        # The router as columns: [BLOCK_D, BLOCK_E].
        r_tile = tl.load(
            router + names[None, :] * D + begin + step + cols[:, None],
            mask=(names < E)[None, :] & inside[:, None],
            other=0.0,
        )
        # Three tf32 products stand for one float32 one: which experts a token gets must not hang on rounding.
        logits = tl.dot(x_tile, r_tile, logits, input_precision="tf32x3")
        squares += tl.sum(x_tile * x_tile, 1)
    if SPLIT == 1:
        _choose(logits, squares, expert_scale, weights, ids, tokens, T, D, E, TOP_K, eps, BLOCK_T, BLOCK_E)
    else:
        # A part holds the logits, then the squares, of this launch's tokens.
        offsets = tokens[:, None] * BLOCK_E + names[None, :]
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
            # Unrolled: the parts' loads are under way together.
            for part in tl.static_range(SPLIT):
                other = parts + part * width
                logits += tl.load(other + offsets, mask=is_token[:, None], other=0.0, cache_modifier=".cg")
                squares += tl.load(other + squares_at, mask=is_token, other=0.0, cache_modifier=".cg")
            _choose(logits, squares, expert_scale, weights, ids, tokens, T, D, E, TOP_K, eps, BLOCK_T, BLOCK_E)
            tl.store(arrivals + tl.program_id(0), 0)  # ready for the next launch


@triton.jit
def _choose(
    logits,
    squares,
    expert_scale,
    weights,
    ids,
    tokens,
    T,
    D: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    eps: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Top-k and its softmax for logits [BLOCK_T, BLOCK_E] of which x's rms has not been divided out yet."""
    names = tl.arange(0, BLOCK_E)[None, :]
    SLOTS: tl.constexpr = triton.next_power_of_2(TOP_K)
    slots = tl.arange(0, SLOTS)[None, :]
    left = tl.where(names < E, logits * tl.rsqrt(squares / D + eps)[:, None], float("-inf"))
    values = tl.full((BLOCK_T, SLOTS), float("-inf"), tl.float32)
    chosen = tl.zeros((BLOCK_T, SLOTS), tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(left, 1)
        name = tl.min(tl.where(left == best[:, None], names, BLOCK_E - 1), 1)
        values = tl.where(slots == j, best[:, None], values)
        chosen = tl.where(slots == j, name[:, None], chosen)
        left = tl.where(names == name[:, None], float("-inf"), left)
    share = tl.exp(values - tl.max(values, 1)[:, None])
    share = share / tl.sum(share, 1)[:, None]
    mask = (tokens < T)[:, None] & (slots < TOP_K)
    share *= tl.load(expert_scale + chosen, mask=mask, other=0.0)
    offsets = tokens[:, None] * TOP_K + slots
    tl.store(weights + offsets, share, mask=mask)
    tl.store(ids + offsets, chosen, mask=mask)


@triton.jit
def _assigned_up_kernel(
    x,
    ids,
    gate_up,
    hidden,
    x_stride,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden[a, n] = gelu(gate row n . x) * (up row n . x) for one assignment a and BLOCK_N rows."""
    enter(PDL)
    assignment = tl.program_id(1)
    expert = tl.load(ids + assignment).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
    x_ptr = x + (assignment // TOP_K).to(tl.int64) * x_stride
    gate_ptrs = gate_up + expert * (2 * F * D) + tl.where(rows < F, rows, 0)[:, None] * D + cols[None, :]
    up_ptrs = gate_ptrs + F * D
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    WHOLE: tl.constexpr = D // BLOCK_K * BLOCK_K
    for k in tl.range(0, WHOLE, BLOCK_K, num_stages=STAGES):
        x_row = tl.load(x_ptr + k + cols).to(tl.float32)[None, :]
        gate += tl.load(gate_ptrs + k, eviction_policy="evict_first").to(tl.float32) * x_row
        up += tl.load(up_ptrs + k, eviction_policy="evict_first").to(tl.float32) * x_row
    if WHOLE < D:
        inside = cols < D - WHOLE
        x_row = tl.load(x_ptr + WHOLE + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gate_ptrs + WHOLE, mask=inside[None, :], other=0.0).to(tl.float32) * x_row
        up += tl.load(up_ptrs + WHOLE, mask=inside[None, :], other=0.0).to(tl.float32) * x_row
    out = gelu(tl.sum(gate, 1)) * tl.sum(up, 1)
    tl.store(hidden + assignment * F + rows, out.to(hidden.dtype.element_ty), mask=rows < F)


@triton.jit
def _assigned_down_kernel(
    hidden,
    ids,
    weights,
    down,
    y,
    y_stride,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t, n] = sum over t's experts of weight * (down row n . hidden), BLOCK_N rows; the experts' widths as one long sum."""
    token = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
    safe_rows = tl.where(rows < D, rows, 0)
    if PDL:
        # The ids are the router's, two kernels ago at least: they may be read before the wait.
        slots = tl.arange(0, triton.next_power_of_2(TOP_K))
        chosen = tl.load(ids + token * TOP_K + tl.minimum(slots, TOP_K - 1)).to(tl.int64)
        their_rows = (chosen[None, :] * D + safe_rows[:, None]).reshape(BLOCK_N * triton.next_power_of_2(TOP_K), 1)
        fetch_rows(down + their_rows * F, 0, F, F)
    enter(PDL)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    LENGTH: tl.constexpr = TOP_K * F
    for k in tl.range(0, LENGTH, BLOCK_K, num_stages=STAGES):
        at = k + cols
        inside = at < LENGTH
        j = at // F
        expert = tl.load(ids + token * TOP_K + j, mask=inside, other=0).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + j, mask=inside, other=0.0)
        h = tl.load(hidden + token * LENGTH + at, mask=inside, other=0.0).to(tl.float32) * weight
        down_ptrs = down + (expert * (D * F) + at % F)[None, :] + safe_rows[:, None] * F
        tile = tl.load(down_ptrs, mask=inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        total += tile * h[None, :]
    tl.store(y + token * y_stride + rows, tl.sum(total, 1).to(y.dtype.element_ty), mask=rows < D)


@triton.jit(do_not_specialize=["A", "T"])
def _group_kernel(ids, members, counts, A, T, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """members[e, :counts[e]] = the assignments of expert e, rising. One program per expert."""
    enter(PDL)
    expert = tl.program_id(0)
    offsets = tl.arange(0, CHUNK)
    count = 0
    for begin in tl.range(0, A, CHUNK):
        at = begin + offsets
        is_mine = (tl.load(ids + at, mask=at < A, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(is_mine, 0) - is_mine
        tl.store(members + expert.to(tl.int64) * T + place, at, mask=is_mine != 0)
        count += tl.sum(is_mine, 0)
    tl.store(counts + expert, count)


@triton.jit
def _find_block(counts, block, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert whose assignments the `block`-th tile of all experts' tiles holds (E: none), first of them, their number."""
    names = tl.arange(0, BLOCK_E)
    number = tl.load(counts + names, mask=names < E, other=0)
    tiles = (number + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    first = (block - tl.max(tl.where(ends <= block, ends, 0), 0)) * BLOCK_M
    mine = tl.sum(tl.where(names == expert, number, 0), 0)
    return expert, first, mine


@triton.jit(do_not_specialize=["T"])
def _grouped_up_kernel(
    x,
    members,
    counts,
    gate_up,
    hidden,
    T,
    x_stride,
    D: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden[a, n] for BLOCK_M assignments of one expert and BLOCK_N gate and up rows."""
    enter(PDL)
    expert, first, mine = _find_block(counts, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if expert < E:
        place = first + tl.arange(0, BLOCK_M)
        is_real = place < mine
        assignment = tl.load(members + expert.to(tl.int64) * T + place, mask=is_real, other=0)
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        cols = tl.arange(0, BLOCK_K)
        x_ptrs = x + (assignment // TOP_K).to(tl.int64)[None, :] * x_stride + cols[:, None]
        safe_rows = tl.where(rows < F, rows, 0)
        gate_ptrs = gate_up + expert.to(tl.int64) * (2 * F * D) + safe_rows[:, None] * D + cols[None, :]
        up_ptrs = gate_ptrs + F * D
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            if D % BLOCK_K == 0:
                x_tile = tl.load(x_ptrs + k, mask=is_real[None, :], other=0.0)
                gate_tile = tl.load(gate_ptrs + k)
                up_tile = tl.load(up_ptrs + k)
            else:
                inside = cols < D - k
                x_tile = tl.load(x_ptrs + k, mask=is_real[None, :] & inside[:, None], other=0.0)
                gate_tile = tl.load(gate_ptrs + k, mask=inside[None, :], other=0.0)
                up_tile = tl.load(up_ptrs + k, mask=inside[None, :], other=0.0)
            gate = tl.dot(gate_tile, x_tile, gate)
            up = tl.dot(up_tile, x_tile, up)
        out = gelu(gate) * up
        out_ptrs = hidden + assignment.to(tl.int64)[None, :] * F + rows[:, None]
        tl.store(out_ptrs, out.to(hidden.dtype.element_ty), mask=is_real[None, :] & (rows < F)[:, None])


@triton.jit(do_not_specialize=["T"])
def _grouped_down_kernel(
    hidden,
    members,
    counts,
    down,
    out,
    T,
    D: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[a, n] = down row n . hidden[a] for BLOCK_M assignments of one expert and BLOCK_N rows."""
    enter(PDL)
    expert, first, mine = _find_block(counts, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if expert < E:
        place = first + tl.arange(0, BLOCK_M)
        is_real = place < mine
        assignment = tl.load(members + expert.to(tl.int64) * T + place, mask=is_real, other=0).to(tl.int64)
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        cols = tl.arange(0, BLOCK_K)
        h_ptrs = hidden + assignment[None, :] * F + cols[:, None]
        safe_rows = tl.where(rows < D, rows, 0)
        down_ptrs = down + expert.to(tl.int64) * (D * F) + safe_rows[:, None] * F + cols[None, :]
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in tl.range(0, F, BLOCK_K, num_stages=STAGES):
            if F % BLOCK_K == 0:
                h_tile = tl.load(h_ptrs + k, mask=is_real[None, :], other=0.0)
                down_tile = tl.load(down_ptrs + k)
            else:
                inside = cols < F - k
                h_tile = tl.load(h_ptrs + k, mask=is_real[None, :] & inside[:, None], other=0.0)
                down_tile = tl.load(down_ptrs + k, mask=inside[None, :], other=0.0)
            total = tl.dot(down_tile, h_tile, total)
        out_ptrs = out + assignment[None, :] * D + rows[:, None]
        tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=is_real[None, :] & (rows < D)[:, None])


@triton.jit
def _combine_kernel(
    out,
    weights,
    y,
    y_stride,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t] = sum_j weights[t, j] * out[t * K + j]."""
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + j)
        total += weight * tl.load(out + (token * TOP_K + j) * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(y + token * y_stride + cols, total.to(y.dtype.element_ty), mask=cols < D)


# Measured on an H200, 128 experts of 704, 8 a token, hidden 2816 (docs/LOG.md).
ASSIGNED_TOKENS = 8  # up to this many tokens go by assignment
UP_ROWS = RowTile(4, 1024, 4)
DOWN_ROWS = RowTile(4, 1024, 4)
UP_TILES = {16: GroupTile(16, 64, 128, 4, 3), 32: GroupTile(32, 64, 128, 4, 3), 128: GroupTile(128, 64, 64, 8, 3)}
DOWN_TILES = {16: GroupTile(16, 64, 64, 4, 4), 32: GroupTile(32, 64, 64, 4, 4), 128: GroupTile(128, 128, 64, 8, 3)}
GROUP_CHUNK = 2048
ROUTE_FEW, ROUTE_MANY = (16, 64, 4), (32, 64, 4)  # tokens, columns, warps
ROUTE_SPLIT = 11  # parts of D at most: they spread the router's weights over programs
ROUTE_PROGRAMS = 264  # beyond this D is split no further


def describe_route(
    x_TD: Tensor, router_ED: Tensor, expert_scale_E: Tensor, out: tuple[Tensor, Tensor], eps: float, **extra: Any
) -> Launch:
    """The router's launch; `out` is (weights, ids). `extra`: pdl."""
    num_tokens, size = x_TD.shape
    num_experts, top_k = router_ED.shape[0], out[0].shape[1]
    block_t, block_d, num_warps = extra.get("tile") or (ROUTE_FEW if num_tokens <= 512 else ROUTE_MANY)
    block_e = max(16, triton.next_power_of_2(num_experts))
    split = max(1, min(ROUTE_SPLIT, ROUTE_PROGRAMS // triton.cdiv(num_tokens, block_t), triton.cdiv(size, block_d)))
    parts, arrivals = workspace(x_TD.device) if split > 1 else (out[0], out[1])
    arguments = {
        "x": x_TD,
        "router": router_ED,
        "expert_scale": expert_scale_E,
        "weights": out[0],
        "ids": out[1],
        "parts": parts,
        "arrivals": arrivals,
        "T": num_tokens,
        "x_stride": x_TD.stride(0),
        "D": size,
        "E": num_experts,
        "TOP_K": top_k,
        "eps": eps,
        "BLOCK_T": block_t,
        "BLOCK_E": block_e,
        "BLOCK_D": block_d,
        "SPLIT": split,
        "STAGES": 2,
        "PDL": bool(extra.get("pdl", False)),
    }
    return Launch(
        _route_kernel, (triton.cdiv(num_tokens, block_t), split), arguments, options(num_warps, bool(extra.get("pdl", False)))
    )


def describe_assigned(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, y_TD: Tensor, **extra: Any
) -> list[Launch]:
    """The two launches by assignment. `extra`: up and down (RowTile), pdl."""
    num_tokens, top_k = ids_TK.shape
    _, size, width = down_EDF.shape
    up, down = extra.get("up", UP_ROWS), extra.get("down", DOWN_ROWS)
    hidden = torch.empty(num_tokens * top_k, width, dtype=x_TD.dtype, device=x_TD.device)
    shape = {"D": size, "F": width, "TOP_K": top_k, "PDL": bool(extra.get("pdl", False))}
    first = {"x": x_TD, "ids": ids_TK, "gate_up": gate_up_EFD, "hidden": hidden, "x_stride": x_TD.stride(0), **shape}
    second = {
        "hidden": hidden,
        "ids": ids_TK,
        "weights": weights_TK,
        "down": down_EDF,
        "y": y_TD,
        "y_stride": y_TD.stride(0),
        **shape,
    }
    return [
        Launch(
            _assigned_up_kernel,
            (triton.cdiv(width, up.block_n), num_tokens * top_k),
            {**first, "BLOCK_N": up.block_n, "BLOCK_K": up.block_k, "STAGES": up.num_stages},
            options(up.num_warps, bool(extra.get("pdl", False))),
        ),
        Launch(
            _assigned_down_kernel,
            (triton.cdiv(size, down.block_n), num_tokens),
            {**second, "BLOCK_N": down.block_n, "BLOCK_K": down.block_k, "STAGES": down.num_stages},
            options(down.num_warps, bool(extra.get("pdl", False))),
        ),
    ]


def describe_grouped(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, y_TD: Tensor, **extra: Any
) -> list[Launch]:
    """The four launches by groups. `extra`: up and down (GroupTile), pdl."""
    num_tokens, top_k = ids_TK.shape
    num_experts, size, width = down_EDF.shape
    assigned = num_tokens * top_k
    block_m = 16 if assigned <= 16 * num_experts else 32 if assigned <= 32 * num_experts else 128
    up, down = extra.get("up", UP_TILES[block_m]), extra.get("down", DOWN_TILES[block_m])
    device, pdl = x_TD.device, bool(extra.get("pdl", False))
    members = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    hidden = torch.empty(assigned, width, dtype=x_TD.dtype, device=device)
    out = torch.empty(assigned, size, dtype=x_TD.dtype, device=device)
    block_e = triton.next_power_of_2(num_experts)
    shape = {"T": num_tokens, "D": size, "F": width, "E": num_experts, "BLOCK_E": block_e, "PDL": pdl}
    lists = {"members": members, "counts": counts}
    first = {"x": x_TD, "gate_up": gate_up_EFD, "hidden": hidden, "x_stride": x_TD.stride(0), "TOP_K": top_k, **lists, **shape}
    second = {"hidden": hidden, "down": down_EDF, "out": out, **lists, **shape}
    third = {"out": out, "weights": weights_TK, "y": y_TD, "y_stride": y_TD.stride(0), "D": size, "TOP_K": top_k}
    chunk = min(GROUP_CHUNK, max(128, triton.next_power_of_2(assigned)))
    grouping = {"ids": ids_TK, "A": assigned, "T": num_tokens, "CHUNK": chunk, "PDL": pdl, **lists}
    block_d = min(1024, triton.next_power_of_2(size))
    return [
        Launch(_group_kernel, (num_experts,), grouping, options(4, bool(extra.get("pdl", False)))),
        _grouped(_grouped_up_kernel, width, assigned, num_experts, up, first, extra),
        _grouped(_grouped_down_kernel, size, assigned, num_experts, down, second, extra),
        Launch(
            _combine_kernel,
            (num_tokens, triton.cdiv(size, block_d)),
            {**third, "BLOCK_D": block_d, "PDL": pdl},
            options(4, bool(extra.get("pdl", False))),
        ),
    ]


def _grouped(
    kernel: Any, outputs: int, assigned: int, num_experts: int, tile: GroupTile, arguments: dict[str, Any], extra: Any
) -> Launch:
    """A grouped launch over as many blocks as there can be: those without assignments return at once."""
    blocks = min(assigned, assigned // tile.block_m + num_experts)
    sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "STAGES": tile.num_stages}
    return Launch(
        kernel,
        (triton.cdiv(outputs, tile.block_n), blocks),
        {**arguments, **sizes},
        options(tile.num_warps, bool(extra.get("pdl", False))),
    )


def route(x_TD: Tensor, router_ED: Tensor, expert_scale_E: Tensor, top_k: int, eps: float) -> tuple[Tensor, Tensor]:
    """Weights [T, K] (float32) and ids [T, K] (int32) of each token's experts, in one launch."""
    weights = torch.empty(x_TD.shape[0], top_k, dtype=torch.float32, device=x_TD.device)
    ids = torch.empty(x_TD.shape[0], top_k, dtype=torch.int32, device=x_TD.device)
    describe_route(x_TD, router_ED, expert_scale_E, (weights, ids), eps, pdl=is_chained(x_TD.device)).run()
    return weights, ids


def experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""
    y_TD = torch.empty_like(x_TD)
    describe = describe_assigned if x_TD.shape[0] <= ASSIGNED_TOKENS else describe_grouped
    for launch in describe(x_TD, weights_TK, experts_TK, gate_up_EFD, down_EDF, y_TD, pdl=is_chained(x_TD.device)):
        launch.run()
    return y_TD
