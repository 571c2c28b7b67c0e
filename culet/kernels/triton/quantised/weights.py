"""Load a tile of quantised weights in the activations' dtype, in Triton kernels."""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.unpack import (
    NVFP4,
    NVFP4_SHIFT,
    VALUES_PER_WORD,
    e4m3_to_float,
    eight_in_order,
    four_in_order,
    fp8_values,
    int4_values,
    int8_values,
    nvfp4_values,
)
from culet.kernels.types import FP8_BLOCK


@triton.jit
def _values(words, FORMAT: tl.constexpr, PER_WORD: tl.constexpr):
    """Return the float32 values of each word in a new last dimension. Those of int4 are still unsigned."""
    place = tl.arange(0, PER_WORD)[None, None, None, :]
    words = words[:, :, :, None]
    if FORMAT == 0:
        values = ((words >> (4 * place)) & 15).to(tl.float32)
    elif FORMAT == 1:
        values = ((words << (24 - 8 * place)) >> 24).to(tl.float32)
    elif FORMAT == 2:
        values = e4m3_to_float(words >> (8 * place))
    else:
        nibble = words >> (4 * place)  # e2m1. The factor is 2^126.
        values = (((nibble & 7) << 22) | ((nibble & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return values


@triton.jit
def _load_groups(at, inside, MASKED: tl.constexpr):
    """Load one value per row and group, with zeros past the last group."""
    if MASKED:
        found = tl.load(at, mask=inside[None, :], other=0)
    else:
        found = tl.load(at)
    return found


@triton.jit
def load_weights(
    words, scale, zero, rows, k, K: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    dtype: tl.constexpr, BY_HAND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return columns k to k + BLOCK_K - 1 of the given rows as [BLOCK_N, BLOCK_K].

    `words`, `scale` and `zero` point to the matrix, or for each row to the matrix that it belongs to. Scales of a whole row,
    and the global scale of nvfp4, are left to the caller. BY_HAND unpacks bfloat16 with bit operations. MASKED allows columns
    past K, which are not zero. Tokens must be zero there.
    """
    PER_WORD: tl.constexpr = 8 if FORMAT == 0 or FORMAT == 3 else 4
    GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
    HAS_GROUPS: tl.constexpr = GROUP < K or ROWS_PER_SCALE > 1
    columns = tl.arange(0, BLOCK_K // PER_WORD)
    at = (words + rows.to(tl.int64) * (K // PER_WORD))[:, None] + k // PER_WORD + columns[None, :]
    if not MASKED:
        packed = tl.load(at, eviction_policy="evict_first")
    else:
        packed = tl.load(at, mask=(columns < (K - k) // PER_WORD)[None, :], other=0, eviction_policy="evict_first")
    packed = tl.reshape(packed, [BLOCK_N, GROUPS, BLOCK_K // PER_WORD // GROUPS])
    group = tl.arange(0, GROUPS)
    scale_row = (rows // ROWS_PER_SCALE).to(tl.int64) * SCALE_STRIDE
    group_at = k // GROUP + group[None, :]
    zero_at = (zero + scale_row)[:, None] + group_at
    if HAS_GROUPS:
        scales = _load_groups((scale + scale_row)[:, None] + group_at, group * GROUP < K - k, MASKED)[:, :, None]
        if FORMAT == 3:
            scales = e4m3_to_float(scales)
    if BY_HAND:
        if FORMAT == 0:
            middle = tl.full([BLOCK_N, GROUPS, 1], -136.0, tl.bfloat16)
            if HAS_ZERO:
                points = _load_groups(zero_at, group * GROUP < K - k, MASKED)
                middle = (-128.0 - points.to(tl.float32)).to(tl.bfloat16)[:, :, None]
            if HAS_GROUPS:
                tile = eight_in_order(int4_values(packed, scales.to(tl.bfloat16), middle), BLOCK_N, BLOCK_K)
            else:
                tile = eight_in_order(
                    int4_values(packed, tl.full([BLOCK_N, GROUPS, 1], 1.0, tl.bfloat16), middle), BLOCK_N, BLOCK_K
                )
        elif FORMAT == 3:
            # The factor is 2^118. The caller multiplies by NVFP4_SHIFT.
            tile = eight_in_order(nvfp4_values(packed, (scales * 3.3230699894622897e35).to(tl.bfloat16)), BLOCK_N, BLOCK_K)
        else:
            if FORMAT == 1:
                tile = four_in_order(int8_values(packed), BLOCK_N, BLOCK_K)
            else:
                tile = four_in_order(fp8_values(packed), BLOCK_N, BLOCK_K)
            if HAS_GROUPS:
                wide = tl.reshape(tile, [BLOCK_N, GROUPS, BLOCK_K // GROUPS]).to(tl.float32) * scales.to(tl.float32)
                tile = tl.reshape(wide.to(tl.bfloat16), [BLOCK_N, BLOCK_K])
    else:
        wide = _values(packed, FORMAT, PER_WORD)
        if HAS_ZERO:
            wide -= _load_groups(zero_at, group * GROUP < K - k, MASKED).to(tl.float32)[:, :, None, None]
        elif FORMAT == 0:
            wide -= 8.0
        if HAS_GROUPS:
            wide *= scales.to(tl.float32)[:, :, :, None]
        tile = tl.reshape(wide, [BLOCK_N, BLOCK_K]).to(dtype)
    return tile


@triton.jit
def scale_rows(total, row_scale, rows, N, ROW_STRIDE: tl.constexpr, FACTOR: tl.constexpr):
    """Multiply sums [rows, tokens] by the scale of each row, or of the whole matrix if ROW_STRIDE is 0."""
    return total * (tl.load(row_scale + rows * ROW_STRIDE, mask=rows < N, other=0.0).to(tl.float32) * FACTOR)[:, None]


def weight_arguments(matrix: PackedMatrix, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a kernel that describe the weights of one matrix, or of one of several experts."""
    by_hand = dtype == torch.bfloat16 and matrix.words.device.type != "cpu"
    row_scale = _row_scale(matrix)
    factor = NVFP4_SHIFT if matrix.format == NVFP4 and by_hand else 1.0
    return {
        "words": matrix.words,
        "scale": matrix.scale,
        "zero": matrix.words if matrix.zero is None else matrix.zero,
        "row_scale": matrix.scale if row_scale is None else row_scale,
        "K": matrix.num_columns,
        "SCALE_STRIDE": matrix.scale.shape[-1],
        "FORMAT": matrix.format,
        "GROUP": matrix.group,
        "ROWS_PER_SCALE": FP8_BLOCK if matrix.has_blocks else 1,
        "HAS_ZERO": matrix.zero is not None,
        "HAS_ROW_SCALE": row_scale is not None,
        "ROW_STRIDE": 0 if row_scale is None or row_scale.numel() == 1 else 1,
        "ROW_FACTOR": factor,
        "BY_HAND": by_hand,
    }


def _row_scale(matrix: PackedMatrix) -> Tensor | None:
    """Return the scales that are applied to sums, or None if all scales are applied to weights."""
    if matrix.format == NVFP4:
        return matrix.global_scale
    return matrix.scale if matrix.group == matrix.num_columns and not matrix.has_blocks else None


def block_k_of(matrix: PackedMatrix, wanted: int) -> int:
    """Return the columns of a tile: `wanted`, but a power of two that groups of several columns divide."""
    group = matrix.group if matrix.group < matrix.num_columns else VALUES_PER_WORD[matrix.format]
    return max(wanted, 1 << (group - 1).bit_length())
