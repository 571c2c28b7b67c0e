"""Run the MLPs of routed experts whose weights are quantised.

The launches are those of `experts.expert_mlp`: by assignment for few tokens, and by groups of tokens for more. Only the tiles
of weights differ, which are unpacked in registers.

Shapes: T tokens · D model · E experts · K experts per token · A = T * K assignments (a = t * K + j) · F expert width.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import shared_bytes, stages_that_fit, uses_pdl
from culet.kernels.triton.experts.expert_mlp import (
    ASSIGNED_TOKENS,
    BLOCKS,
    GroupTile,
    RowTile,
)
from culet.kernels.triton.experts.grouping import describe_groups, describe_sum, find_members, load_tokens
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.maths import gelu
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.unpack import VALUES_PER_WORD
from culet.kernels.triton.quantised.weights import block_k_of, load_weights, scale_rows, weight_arguments
from culet.kernels.types import QuantisedWeight

# Measured on an H200 with the experts of the 26B (docs/log/quantised.md), by the values of a word.
UP_ROWS_ONE, UP_ROWS = {8: RowTile(2, 1024, 8), 4: RowTile(2, 1024, 4)}, RowTile(16, 256, 4, 3)  # one token, and more
DOWN_ROWS = RowTile(4, 256, 4, 2)
UP_TILES = {16: GroupTile(16, 64, 128, 4, 3), 32: GroupTile(32, 64, 128, 4, 3), 64: GroupTile(64, 64, 64, 4, 3)}
DOWN_TILES = {16: GroupTile(16, 128, 64, 4, 4), 32: GroupTile(32, 128, 64, 4, 4), 64: GroupTile(64, 128, 64, 4, 4)}
# With 128 assignments per tile, results for int8 were wrong on the H200. No tile has more than this.
MAX_BLOCK = 64


@triton.jit
def _assigned_up_kernel(
    x, ids, hidden, words, scale, zero, row_scale, x_stride, F: tl.constexpr, TOP_K: tl.constexpr,
    WORDS_OF_EXPERT: tl.constexpr, SCALES_OF_EXPERT: tl.constexpr,
    K: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_FACTOR: tl.constexpr,
    BY_HAND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute hidden[a, n] = gelu(gate row n . x) * (up row n . x) for one assignment a and BLOCK_N rows."""
    enter(PDL)
    assignment = tl.program_id(1)
    expert = tl.load(ids + assignment).to(tl.int64)
    pair = tl.arange(0, 2 * BLOCK_N)  # a gate row and its up row one after the other, so that one load requests both
    outputs = tl.program_id(0) * BLOCK_N + pair // 2
    rows = tl.where(outputs < F, outputs, 0) + pair % 2 * F
    cols = tl.arange(0, BLOCK_K)
    x_ptr = x + (assignment // TOP_K).to(tl.int64) * x_stride
    dtype: tl.constexpr = x.dtype.element_ty
    words += expert * WORDS_OF_EXPERT
    scale += expert * SCALES_OF_EXPERT
    zero += expert * SCALES_OF_EXPERT
    row_scale += expert * (2 * F * ROW_STRIDE)
    total = tl.zeros((2 * BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        tile = load_weights(
            words, scale, zero, rows, k, K, SCALE_STRIDE, FORMAT, GROUP, ROWS_PER_SCALE, HAS_ZERO,
            2 * BLOCK_N, BLOCK_K, dtype, BY_HAND, K % BLOCK_K != 0,
        )  # fmt: skip
        x_row = tl.load(x_ptr + k + cols, mask=cols < K - k, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * x_row[None, :]
    sums = tl.sum(total, 1)[:, None]
    if HAS_ROW_SCALE:
        sums = scale_rows(sums, row_scale, rows, 2 * F, ROW_STRIDE, ROW_FACTOR)
    gate, up = tl.split(tl.reshape(sums, [BLOCK_N, 2]))
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = gelu(gate) * up
    tl.store(hidden + assignment * F + outputs, out.to(hidden.dtype.element_ty), mask=outputs < F)


@triton.jit
def _assigned_down_kernel(
    hidden, ids, weights, y, words, scale, zero, row_scale, y_stride, D: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, WORDS_OF_EXPERT: tl.constexpr, SCALES_OF_EXPERT: tl.constexpr,
    K: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_FACTOR: tl.constexpr,
    BY_HAND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y[t, n] = sum over t's experts of weight * (down row n . hidden), for BLOCK_N rows. K is the experts' width.

    The rows of all experts are requested at once. `ids` are complete before `hidden`, since the kernel before has waited for
    the router.
    """
    token = tl.program_id(1)
    pair = tl.arange(0, BLOCK_N * SLOTS)  # each row of every expert
    slot = pair % SLOTS
    outputs = tl.program_id(0) * BLOCK_N + pair // SLOTS
    rows = tl.where(outputs < D, outputs, 0)
    expert = tl.load(ids + token * TOP_K + tl.minimum(slot, TOP_K - 1)).to(tl.int64)
    dtype: tl.constexpr = hidden.dtype.element_ty
    words += expert * WORDS_OF_EXPERT
    scale += expert * SCALES_OF_EXPERT
    zero += expert * SCALES_OF_EXPERT
    enter(PDL)
    slots = tl.arange(0, SLOTS)
    cols = tl.arange(0, BLOCK_K)
    h_ptrs = hidden + (token * TOP_K + slots)[:, None] * K + cols[None, :]
    is_slot = (slots < TOP_K)[:, None]
    total = tl.zeros((BLOCK_N, SLOTS, BLOCK_K), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        tile = load_weights(
            words, scale, zero, rows, k, K, SCALE_STRIDE, FORMAT, GROUP, ROWS_PER_SCALE, HAS_ZERO,
            BLOCK_N * SLOTS, BLOCK_K, dtype, BY_HAND, K % BLOCK_K != 0,
        )  # fmt: skip
        h = tl.load(h_ptrs + k, mask=is_slot & (cols < K - k)[None, :], other=0.0).to(tl.float32)
        total += tl.reshape(tile.to(tl.float32), [BLOCK_N, SLOTS, BLOCK_K]) * h[None, :, :]
    sums = tl.reshape(tl.sum(total, 2), [BLOCK_N * SLOTS, 1])
    if HAS_ROW_SCALE:
        sums = scale_rows(sums, row_scale + expert * (D * ROW_STRIDE), rows, D, ROW_STRIDE, ROW_FACTOR)
    weight = tl.load(weights + token * TOP_K + slots, mask=slots < TOP_K, other=0.0)
    sums = tl.reshape(sums, [BLOCK_N, SLOTS]) * weight[None, :]
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y + token * y_stride + outputs, tl.sum(sums, 1).to(y.dtype.element_ty), mask=outputs < D)


@triton.jit(do_not_specialize=["T"])
def _grouped_up_kernel(
    x, members, counts, hidden, words, scale, zero, row_scale, T, x_stride, F: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, WORDS_OF_EXPERT: tl.constexpr, SCALES_OF_EXPERT: tl.constexpr,
    K: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_FACTOR: tl.constexpr,
    BY_HAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute hidden[a, n] for BLOCK_M assignments of one expert and BLOCK_N gate and up rows."""
    enter(PDL)
    expert, assignment, is_real = find_members(members, counts, T, E, BLOCK_E, BLOCK_M)
    if expert < E:
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        safe_rows = tl.where(rows < F, rows, 0)
        x_ptrs = x + (assignment // TOP_K)[None, :] * x_stride + tl.arange(0, BLOCK_K)[:, None]
        dtype: tl.constexpr = x.dtype.element_ty
        words += expert * WORDS_OF_EXPERT
        scale += expert * SCALES_OF_EXPERT
        zero += expert * SCALES_OF_EXPERT
        row_scale += expert * (2 * F * ROW_STRIDE)
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x_tile = load_tokens(x_ptrs, is_real, k, K, BLOCK_K)
            gate_tile = load_weights(
                words, scale, zero, safe_rows, k, K, SCALE_STRIDE, FORMAT, GROUP, ROWS_PER_SCALE, HAS_ZERO,
                BLOCK_N, BLOCK_K, dtype, BY_HAND, K % BLOCK_K != 0,
            )  # fmt: skip
            gate = tl.dot(gate_tile, x_tile, gate, input_precision="ieee")
            up_tile = load_weights(
                words, scale, zero, F + safe_rows, k, K, SCALE_STRIDE, FORMAT, GROUP, ROWS_PER_SCALE, HAS_ZERO,
                BLOCK_N, BLOCK_K, dtype, BY_HAND, K % BLOCK_K != 0,
            )  # fmt: skip
            up = tl.dot(up_tile, x_tile, up, input_precision="ieee")
        if HAS_ROW_SCALE:
            gate = scale_rows(gate, row_scale, rows, F, ROW_STRIDE, ROW_FACTOR)
            up = scale_rows(up, row_scale + F * ROW_STRIDE, rows, F, ROW_STRIDE, ROW_FACTOR)
        out = gelu(gate) * up
        out_ptrs = hidden + assignment[None, :] * F + rows[:, None]
        tl.store(out_ptrs, out.to(hidden.dtype.element_ty), mask=is_real[None, :] & (rows < F)[:, None])


@triton.jit(do_not_specialize=["T"])
def _grouped_down_kernel(
    hidden, members, counts, out, words, scale, zero, row_scale, T, D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, WORDS_OF_EXPERT: tl.constexpr, SCALES_OF_EXPERT: tl.constexpr,
    K: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_FACTOR: tl.constexpr,
    BY_HAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[a, n] = down row n . hidden[a] for BLOCK_M assignments of one expert and BLOCK_N rows."""
    enter(PDL)
    expert, assignment, is_real = find_members(members, counts, T, E, BLOCK_E, BLOCK_M)
    if expert < E:
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        safe_rows = tl.where(rows < D, rows, 0)
        h_ptrs = hidden + assignment[None, :] * K + tl.arange(0, BLOCK_K)[:, None]
        dtype: tl.constexpr = hidden.dtype.element_ty
        words += expert * WORDS_OF_EXPERT
        scale += expert * SCALES_OF_EXPERT
        zero += expert * SCALES_OF_EXPERT
        row_scale += expert * (D * ROW_STRIDE)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            h_tile = load_tokens(h_ptrs, is_real, k, K, BLOCK_K)
            tile = load_weights(
                words, scale, zero, safe_rows, k, K, SCALE_STRIDE, FORMAT, GROUP, ROWS_PER_SCALE, HAS_ZERO,
                BLOCK_N, BLOCK_K, dtype, BY_HAND, K % BLOCK_K != 0,
            )  # fmt: skip
            total = tl.dot(tile, h_tile, total, input_precision="ieee")
        if HAS_ROW_SCALE:
            total = scale_rows(total, row_scale, rows, D, ROW_STRIDE, ROW_FACTOR)
        out_ptrs = out + assignment[None, :] * D + rows[:, None]
        tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=is_real[None, :] & (rows < D)[:, None])


def _expert_arguments(matrix: PackedMatrix, dtype: torch.dtype) -> dict[str, Any]:
    """Return `weight_arguments` and the sizes of one expert."""
    sizes = {"WORDS_OF_EXPERT": matrix.words.stride(0), "SCALES_OF_EXPERT": matrix.scale.stride(0)}
    return weight_arguments(matrix, dtype) | sizes


def describe_assigned(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, gate_up: PackedMatrix, down: PackedMatrix, y_TD: Tensor, **extra: Any
) -> list[Launch]:
    """Return the two launches by assignment. `extra` may have up_tile and down_tile (RowTile) and pdl."""
    num_tokens, top_k = ids_TK.shape
    size, width, pdl = down.num_rows, down.num_columns, bool(extra.get("pdl", False))
    hidden = torch.empty(num_tokens * top_k, width, dtype=x_TD.dtype, device=x_TD.device)
    up_rows = UP_ROWS_ONE[VALUES_PER_WORD[gate_up.format]] if num_tokens == 1 else UP_ROWS
    up_tile, down_tile = extra.get("up_tile", up_rows), extra.get("down_tile", DOWN_ROWS)

    def launch(kernel: Any, tile: RowTile, grid: tuple[int, int], arguments: dict[str, Any], matrix: PackedMatrix) -> Launch:
        block_k = block_k_of(matrix, min(tile.block_k, next_power_of_2(matrix.num_columns)))
        sizes = {"BLOCK_N": tile.block_n, "BLOCK_K": block_k, "STAGES": tile.num_stages, "TOP_K": top_k, "PDL": pdl}
        given = {"ids": ids_TK, "hidden": hidden, **arguments, **_expert_arguments(matrix, x_TD.dtype), **sizes}
        return Launch(kernel, grid, given, options(tile.num_warps, pdl))

    first = {"x": x_TD, "x_stride": x_TD.stride(0), "F": width}
    slots = {"SLOTS": next_power_of_2(top_k)}
    second = {"weights": weights_TK, "y": y_TD, "y_stride": y_TD.stride(0), "D": size, **slots}
    return [
        launch(_assigned_up_kernel, up_tile, (cdiv(width, up_tile.block_n), num_tokens * top_k), first, gate_up),
        launch(_assigned_down_kernel, down_tile, (cdiv(size, down_tile.block_n), num_tokens), second, down),
    ]


def describe_grouped(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, gate_up: PackedMatrix, down: PackedMatrix, y_TD: Tensor, **extra: Any
) -> list[Launch]:
    """Return the four launches by groups. `extra` may have up_tile and down_tile (GroupTile), pdl and shared (bytes)."""
    num_tokens, top_k = ids_TK.shape
    num_experts, size, width = down.words.shape[0], down.num_rows, down.num_columns
    assigned, device, pdl = num_tokens * top_k, x_TD.device, bool(extra.get("pdl", False))
    block_m = next((block for block, most in BLOCKS if assigned < most * num_experts), MAX_BLOCK)
    lists, grouping = describe_groups(ids_TK, num_experts, pdl)
    hidden = torch.empty(assigned, width, dtype=x_TD.dtype, device=device)
    out = torch.empty(assigned, size, dtype=x_TD.dtype, device=device)
    shared = {"T": num_tokens, "E": num_experts, "BLOCK_E": next_power_of_2(num_experts), "hidden": hidden, "PDL": pdl, **lists}
    first = {"x": x_TD, "x_stride": x_TD.stride(0), "F": width, "TOP_K": top_k, **shared}
    second = {"out": out, "D": size, **shared}
    limit = int(extra.get("shared") or shared_bytes(device))
    up_tile, down_tile = extra.get("up_tile", UP_TILES[block_m]), extra.get("down_tile", DOWN_TILES[block_m])
    return [
        grouping,
        _grouped(_grouped_up_kernel, width, up_tile, first, gate_up, limit),
        _grouped(_grouped_down_kernel, size, down_tile, second, down, limit),
        describe_sum(out, weights_TK, y_TD, pdl),
    ]


def _grouped(kernel: Any, outputs: int, tile: GroupTile, arguments: dict[str, Any], matrix: PackedMatrix, limit: int) -> Launch:
    """Return a grouped launch over as many blocks as there can be. Blocks without assignments return at once."""
    hidden, num_experts, pdl = arguments["hidden"], arguments["E"], arguments["PDL"]
    blocks = min(hidden.shape[0], hidden.shape[0] // tile.block_m + num_experts)
    block_k, weight_rows = block_k_of(matrix, tile.block_k), tile.block_n * (2 if "x" in arguments else 1)
    itemsize = hidden.element_size()
    per_stage = block_k * (weight_rows + tile.block_m * itemsize)  # packed weights take at most a byte per value
    stages = stages_that_fit(tile.num_stages, per_stage, max(per_stage, limit - weight_rows * block_k * itemsize))
    sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": block_k, "STAGES": stages}
    given = {**arguments, **_expert_arguments(matrix, hidden.dtype), **sizes}
    return Launch(kernel, (cdiv(outputs, tile.block_n), blocks), given, options(tile.num_warps, pdl))


def experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedWeight, down: QuantisedWeight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""
    y_TD = torch.empty_like(x_TD)
    if not x_TD.shape[0]:
        return y_TD
    describe = describe_assigned if x_TD.shape[0] <= ASSIGNED_TOKENS else describe_grouped
    matrices = PackedMatrix.of(gate_up), PackedMatrix.of(down)
    for launch in describe(x_TD, weights_TK, experts_TK, *matrices, y_TD, pdl=uses_pdl(x_TD.device)):
        launch.run()
    return y_TD
