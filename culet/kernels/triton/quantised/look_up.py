"""Lookups in quantised tables: the rows of some tokens, unpacked and scaled in one launch.

Shapes: T tokens · K columns of the table · N rows.
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
from culet.kernels.triton.launch import Launch, cdiv
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.weights import block_k_of, load_weights, weight_arguments
from culet.kernels.types import QuantisedWeight

TOKENS, COLUMNS = 4, 256  # of a program


@triton.jit(do_not_specialize=["T", "first_row", "N", "begin", "end"])
def _look_up_kernel(
    ids, words, scale, zero, row_scale, y, T, first_row, N, begin, end, embed_scale,
    K: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_FACTOR: tl.constexpr,
    BY_HAND: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write some of the columns `begin` to `end` - 1 of some tokens' rows. Rows that the table does not hold are zeros."""
    enter(PDL)  # the previous kernel draws the tokens
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.load(ids + tokens, mask=tokens < T, other=0) - first_row
    is_held = (rows >= 0) & (rows < N)
    rows = tl.where(is_held, rows, 0)
    k = (begin // BLOCK_K + tl.program_id(0)) * BLOCK_K
    tile = load_weights(
        words, scale, zero, rows, k, K, SCALE_STRIDE, FORMAT, GROUP, ROWS_PER_SCALE, HAS_ZERO,
        BLOCK_T, BLOCK_K, y.dtype.element_ty, BY_HAND, K % BLOCK_K != 0,
    )  # fmt: skip
    if HAS_ROW_SCALE:
        factor = tl.load(row_scale + rows * ROW_STRIDE).to(tl.float32) * ROW_FACTOR
        tile = (tile.to(tl.float32) * factor[:, None]).to(y.dtype.element_ty)
    embedded = tl.where(is_held[:, None], tile.to(tl.float32) * embed_scale, 0.0)
    cols = k + tl.arange(0, BLOCK_K)
    at = y + tokens.to(tl.int64)[:, None] * (end - begin) + (cols - begin)[None, :]
    tl.store(at, embedded.to(y.dtype.element_ty), mask=(tokens < T)[:, None] & ((cols >= begin) & (cols < end))[None, :])


def describe_look_up(
    ids_T: Tensor, matrix: PackedMatrix, first_row: int, begin: int, scale: float, y_TK: Tensor, pdl: bool
) -> Launch:
    """Describe the launch. `y_TK` takes the columns from `begin` on."""
    num_tokens, num_columns = y_TK.shape
    block_k = block_k_of(matrix, COLUMNS)
    end = begin + num_columns
    arguments: dict[str, Any] = {"ids": ids_T, "y": y_TK, "T": num_tokens, "first_row": first_row, "N": matrix.num_rows}
    arguments |= {"begin": begin, "end": end, "embed_scale": scale, "BLOCK_T": TOKENS, "BLOCK_K": block_k, "PDL": pdl}
    grid = (cdiv(end, block_k) - begin // block_k, cdiv(num_tokens, TOKENS))
    return Launch(_look_up_kernel, grid, weight_arguments(matrix, y_TK.dtype) | arguments, options(4, pdl))


def look_up(ids_T: Tensor, weight: QuantisedWeight, first_row: int, columns: slice, scale: float, dtype: torch.dtype) -> Tensor:
    """Return some columns of the rows with these ids, rounded to `dtype` and then multiplied by `scale`.

    `weight` holds the rows from `first_row` on. Rows that it does not hold are zeros.
    """
    matrix = PackedMatrix.of(weight)
    begin, end, _ = columns.indices(matrix.num_columns)
    y_TK = torch.empty(ids_T.shape[0], end - begin, dtype=dtype, device=ids_T.device)
    if y_TK.numel():
        describe_look_up(ids_T.contiguous(), matrix, first_row, begin, scale, y_TK, uses_pdl(y_TK.device)).run()
    return y_TK
