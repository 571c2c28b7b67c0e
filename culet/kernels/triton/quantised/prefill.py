"""Linear layers over quantised weights for many tokens.

Products of fp8 weights with a scale per row run on the fp8 tensor cores, with tokens rounded to e4m3 and a scale for each. All
other weights are written to bfloat16 first, one matrix at a time, and multiplied by cuBLAS. At 8192 tokens, writing takes 3 %
of the time of the product.

Shapes: M tokens · K inputs · N outputs.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.weights import block_k_of, load_weights, weight_arguments

E4M3_MAX = 448.0
ROWS, COLUMNS = 16, 256  # of a program that dequantises


@triton.jit
def _dequantise_kernel(
    words, scale, zero, row_scale, y, N,
    K: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_FACTOR: tl.constexpr,
    BY_HAND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a tile of weights in the dtype of y."""
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K
    safe_rows = tl.where(rows < N, rows, 0)
    tile = load_weights(
        words, scale, zero, safe_rows, k, K, SCALE_STRIDE, FORMAT, GROUP, ROWS_PER_SCALE, HAS_ZERO,
        BLOCK_N, BLOCK_K, y.dtype.element_ty, BY_HAND, K % BLOCK_K != 0,
    )  # fmt: skip
    if HAS_ROW_SCALE:
        factor = tl.load(row_scale + safe_rows * ROW_STRIDE).to(tl.float32) * ROW_FACTOR
        tile = (tile.to(tl.float32) * factor[:, None]).to(y.dtype.element_ty)
    cols = tl.arange(0, BLOCK_K)
    enter(PDL)  # The previous kernel may still read y.
    at = y + rows.to(tl.int64)[:, None] * K + k + cols[None, :]
    tl.store(at, tile, mask=(rows < N)[:, None] & (cols < K - k)[None, :])


@triton.jit
def _quantise_tokens_kernel(x, y, scale, x_stride, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """Round one token to e4m3, with the scale that makes its largest value 448."""
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_K)
    inside = cols < K
    values = tl.load(x + token * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(values), 0) / 448.0, 1e-12)
    tl.store(scale + token, factor)
    tl.store(y + token * K + cols, (values / factor).to(y.dtype.element_ty), mask=inside)


def describe_dequantise(matrix: PackedMatrix, y_NK: Tensor, pdl: bool) -> Launch:
    num_rows, size_k = y_NK.shape
    block_k = block_k_of(matrix, COLUMNS)
    grid = (cdiv(size_k, block_k), cdiv(num_rows, ROWS))
    sizes: dict[str, Any] = {"y": y_NK, "N": num_rows, "BLOCK_N": ROWS, "BLOCK_K": block_k, "PDL": pdl}
    return Launch(_dequantise_kernel, grid, weight_arguments(matrix, y_NK.dtype) | sizes, options(4, pdl))


def describe_quantise_tokens(x_MK: Tensor, y_MK: Tensor, scale_M1: Tensor, pdl: bool) -> Launch:
    size_k = x_MK.shape[1]
    block_k = next_power_of_2(size_k)
    arguments = {"x": x_MK, "y": y_MK, "scale": scale_M1, "x_stride": x_MK.stride(0), "K": size_k, "BLOCK_K": block_k}
    num_warps = min(16, max(1, block_k // 1024))
    return Launch(_quantise_tokens_kernel, (x_MK.shape[0],), {**arguments, "PDL": pdl}, options(num_warps, pdl))


def dequantise(matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the weights [N, K] in `dtype`."""
    y_NK = torch.empty(matrix.num_rows, matrix.num_columns, dtype=dtype, device=matrix.words.device)
    describe_dequantise(matrix, y_NK, uses_pdl(y_NK.device)).run()
    return y_NK


def quantise_tokens(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in e4m3 and a scale for each token, [M, 1]."""
    y_MK = torch.empty(x_MK.shape, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale_M1 = torch.empty(x_MK.shape[0], 1, dtype=torch.float32, device=x_MK.device)
    describe_quantise_tokens(x_MK, y_MK, scale_M1, uses_pdl(x_MK.device)).run()
    return y_MK, scale_M1
