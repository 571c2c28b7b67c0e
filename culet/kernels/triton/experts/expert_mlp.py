"""Run the MLPs of routed experts, by assignment for few tokens and by groups of tokens for more.

    y[t] = sum_j weights[t, j] * down[ids[t, j]] @ (gelu(gate[ids[t, j]] @ x[t]) * (up[ids[t, j]] @ x[t]))

By assignment, one launch multiplies each chosen expert's gate and up rows by its token, and another sums a token's experts.
Weights are read once per assignment. By groups, the first launch lists each expert's assignments on the device, without a host
sync, so that a graph can capture it. Tiles of the expert's weights then go to the tensor cores with its tokens as columns, and
the last launch sums a token's experts. Both ways sum in float32 in a fixed order. Hopper GPUs run many tokens by groups with
the kernels in `hopper_grouped`.

Shapes: T tokens · D model · E experts · K experts per token · A = T * K assignments (a = t * K + j) · F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import shared_bytes, stages_that_fit, uses_pdl
from culet.kernels.triton.experts import hopper_grouped
from culet.kernels.triton.experts.grouping import describe_groups, describe_sum, find_members, load_tokens
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.maths import gelu


@dataclass(frozen=True, slots=True)
class GroupTile:
    """Tile of the grouped kernels, `block_m` assignments of one expert x `block_n` outputs (and as many up rows)."""

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
    """Compute hidden[a, n] = gelu(gate row n . x) * (up row n . x) for one assignment a and BLOCK_N rows."""
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
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute y[t, n] = sum over t's experts of weight * (down row n . hidden), for BLOCK_N rows.

    The rows of all experts are requested at once. `ids` and `weights` are complete before `hidden`, since the kernel before has
    waited for the router.
    """
    token = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slots = tl.arange(0, SLOTS)
    assignments = token * TOP_K + slots
    cols = tl.arange(0, BLOCK_K)
    expert = tl.load(ids + assignments, mask=slots < TOP_K, other=0).to(tl.int64)
    weight = tl.load(weights + assignments, mask=slots < TOP_K, other=0.0)
    h_ptrs = hidden + assignments[:, None] * F + cols[None, :]
    rows = tl.where(outputs < D, outputs, 0)
    down_ptrs = down + expert[None, :, None] * (D * F) + rows[:, None, None] * F + cols[None, None, :]
    enter(PDL)
    total = tl.zeros((BLOCK_N, SLOTS, BLOCK_K), tl.float32)
    for k in tl.range(0, F, BLOCK_K, num_stages=STAGES):
        inside = (slots < TOP_K)[:, None] & (cols < F - k)[None, :]
        h = tl.load(h_ptrs + k, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(down_ptrs + k, mask=inside[None, :, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        total += tile * h[None, :, :]
    y_row = tl.sum(tl.sum(total, 2) * weight[None, :], 1)
    tl.store(y + token * y_stride + outputs, y_row.to(y.dtype.element_ty), mask=outputs < D)


@triton.jit
def _load_weights(ptrs, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load columns k .. k + BLOCK_K - 1 of K, for some rows of an expert's weights."""
    if K % BLOCK_K == 0:
        tile = tl.load(ptrs + k)
    else:
        tile = tl.load(ptrs + k, mask=(tl.arange(0, BLOCK_K) < K - k)[None, :], other=0.0)
    return tile


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
    """Compute hidden[a, n] for BLOCK_M assignments of one expert and BLOCK_N gate and up rows."""
    enter(PDL)
    expert, assignment, is_real = find_members(members, counts, T, E, BLOCK_E, BLOCK_M)
    if expert < E:
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        cols = tl.arange(0, BLOCK_K)
        x_ptrs = x + (assignment // TOP_K)[None, :] * x_stride + cols[:, None]
        safe_rows = tl.where(rows < F, rows, 0)
        gate_ptrs = gate_up + expert * (2 * F * D) + safe_rows[:, None] * D + cols[None, :]
        up_ptrs = gate_ptrs + F * D
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            x_tile = load_tokens(x_ptrs, is_real, k, D, BLOCK_K)
            gate_tile = _load_weights(gate_ptrs, k, D, BLOCK_K)
            up_tile = _load_weights(up_ptrs, k, D, BLOCK_K)
            gate = tl.dot(gate_tile, x_tile, gate)
            up = tl.dot(up_tile, x_tile, up)
        out = gelu(gate) * up
        out_ptrs = hidden + assignment[None, :] * F + rows[:, None]
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
    """Compute out[a, n] = down row n . hidden[a] for BLOCK_M assignments of one expert and BLOCK_N rows."""
    enter(PDL)
    expert, assignment, is_real = find_members(members, counts, T, E, BLOCK_E, BLOCK_M)
    if expert < E:
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        cols = tl.arange(0, BLOCK_K)
        h_ptrs = hidden + assignment[None, :] * F + cols[:, None]
        safe_rows = tl.where(rows < D, rows, 0)
        down_ptrs = down + expert * (D * F) + safe_rows[:, None] * F + cols[None, :]
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in tl.range(0, F, BLOCK_K, num_stages=STAGES):
            h_tile = load_tokens(h_ptrs, is_real, k, F, BLOCK_K)
            total = tl.dot(_load_weights(down_ptrs, k, F, BLOCK_K), h_tile, total)
        out_ptrs = out + assignment[None, :] * D + rows[:, None]
        tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=is_real[None, :] & (rows < D)[:, None])


# Measured on an H200 with 128 experts of width 704, 8 per token, and hidden size 2816 (docs/log/linear.md).
ASSIGNED_TOKENS = 4  # up to this many tokens go by assignment
UP_ROWS_ONE, DOWN_ROWS_ONE = RowTile(1, 1024, 8), RowTile(2, 1024, 4)  # for one token
UP_ROWS, DOWN_ROWS = RowTile(4, 256, 4, 3), RowTile(8, 256, 4, 3)
UP_TILES = {
    16: GroupTile(16, 64, 128, 4, 3),
    32: GroupTile(32, 64, 128, 4, 3),
    64: GroupTile(64, 64, 64, 4, 3),
    128: GroupTile(128, 64, 64, 8, 3),
}
DOWN_TILES = {
    16: GroupTile(16, 128, 64, 4, 4),
    32: GroupTile(32, 128, 64, 4, 4),
    64: GroupTile(64, 128, 64, 4, 4),
    128: GroupTile(128, 128, 64, 8, 3),
}
# Each pair is (assignments per tile, limit). It applies if experts have fewer assignments than the limit on average. If none
# applies, a tile has 128 assignments.
BLOCKS = ((16, 16), (32, 32), (64, 96))


def describe_assigned(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, y_TD: Tensor, **extra: Any
) -> list[Launch]:
    """Return the two launches by assignment. `extra` may have up and down (RowTile) and pdl."""
    num_tokens, top_k = ids_TK.shape
    _, size, width = down_EDF.shape
    rows = (UP_ROWS_ONE, DOWN_ROWS_ONE) if num_tokens == 1 else (UP_ROWS, DOWN_ROWS)
    up, down = extra.get("up", rows[0]), extra.get("down", rows[1])
    up_k, down_k = min(up.block_k, next_power_of_2(size)), min(down.block_k, next_power_of_2(width))
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
        "SLOTS": next_power_of_2(top_k),
        **shape,
    }
    return [
        Launch(
            _assigned_up_kernel,
            (cdiv(width, up.block_n), num_tokens * top_k),
            {**first, "BLOCK_N": up.block_n, "BLOCK_K": up_k, "STAGES": up.num_stages},
            options(up.num_warps, bool(extra.get("pdl", False))),
        ),
        Launch(
            _assigned_down_kernel,
            (cdiv(size, down.block_n), num_tokens),
            {**second, "BLOCK_N": down.block_n, "BLOCK_K": down_k, "STAGES": down.num_stages},
            options(down.num_warps, bool(extra.get("pdl", False))),
        ),
    ]


def describe_grouped(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, y_TD: Tensor, **extra: Any
) -> list[Launch]:
    """Return the four launches by groups. `extra` may have up and down (GroupTile), pdl and shared (bytes)."""
    num_tokens, top_k = ids_TK.shape
    num_experts, size, width = down_EDF.shape
    assigned = num_tokens * top_k
    block_m = next((block for block, most in BLOCKS if assigned < most * num_experts), 128)
    up, down = extra.get("up", UP_TILES[block_m]), extra.get("down", DOWN_TILES[block_m])
    device, pdl = x_TD.device, bool(extra.get("pdl", False))
    lists, grouping = describe_groups(ids_TK, num_experts, pdl)
    hidden = torch.empty(assigned, width, dtype=x_TD.dtype, device=device)
    out = torch.empty(assigned, size, dtype=x_TD.dtype, device=device)
    block_e = next_power_of_2(num_experts)
    shape = {"T": num_tokens, "D": size, "F": width, "E": num_experts, "BLOCK_E": block_e, "PDL": pdl}
    first = {"x": x_TD, "gate_up": gate_up_EFD, "hidden": hidden, "x_stride": x_TD.stride(0), "TOP_K": top_k, **lists, **shape}
    second = {"hidden": hidden, "down": down_EDF, "out": out, **lists, **shape}
    return [
        grouping,
        _grouped(_grouped_up_kernel, width, up, first, pdl=pdl, shared=extra.get("shared")),
        _grouped(_grouped_down_kernel, size, down, second, pdl=pdl, shared=extra.get("shared")),
        describe_sum(out, weights_TK, y_TD, pdl),
    ]


def _grouped(kernel: Any, outputs: int, tile: GroupTile, arguments: dict[str, Any], **extra: Any) -> Launch:
    """Return a grouped launch over as many blocks as there can be. Blocks without assignments return at once."""
    hidden, num_experts, pdl = arguments["hidden"], arguments["E"], bool(extra.get("pdl", False))
    blocks = min(hidden.shape[0], hidden.shape[0] // tile.block_m + num_experts)
    rows = tile.block_m + tile.block_n * (2 if "gate_up" in arguments else 1)
    limit = int(extra.get("shared") or shared_bytes(hidden.device))
    stages = stages_that_fit(tile.num_stages, rows * tile.block_k * hidden.element_size(), limit)
    sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "STAGES": stages}
    grid = (cdiv(outputs, tile.block_n), blocks)
    return Launch(kernel, grid, {**arguments, **sizes}, options(tile.num_warps, pdl))


def experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""
    y_TD = torch.empty_like(x_TD)
    if not x_TD.shape[0]:
        return y_TD
    describe = describe_assigned if x_TD.shape[0] <= ASSIGNED_TOKENS else describe_grouped
    if x_TD.shape[0] >= hopper_grouped.MIN_TOKENS and hopper_grouped.supports(x_TD, gate_up_EFD, down_EDF):
        describe = hopper_grouped.describe_hopper_grouped
    for launch in describe(x_TD, weights_TK, experts_TK, gate_up_EFD, down_EDF, y_TD, pdl=uses_pdl(x_TD.device)):
        launch.run()
    return y_TD
