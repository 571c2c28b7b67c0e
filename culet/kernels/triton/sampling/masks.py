"""Apply biases of single tokens and a grammar's bitmask to logits, in place on the GPU. Each takes one launch.

Shapes: R rows of logits · V vocabulary · X biased tokens · A rows with a mask · W words of 32 tokens.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch

BLOCK_WORDS = 32  # words of 32 tokens per program
BLOCK_BIASES = 256


@triton.jit(do_not_specialize=["num_biases"])
def _bias_kernel(logits, rows, tokens, values, num_biases, logits_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Add values[x] to logits[rows[x], tokens[x]]. Several x may have the same row and token."""
    enter(PDL)
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = x < num_biases
    place = tl.load(rows + x, mask=inside, other=0).to(tl.int64) * logits_stride + tl.load(tokens + x, mask=inside, other=0)
    tl.atomic_add(logits + place, tl.load(values + x, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["V"])
def _bitmask_kernel(
    logits, bitmask, rows, V, num_words, logits_stride, bitmask_stride,
    HAS_ROWS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write -inf for tokens whose bit is 0. Logits of allowed tokens are neither read nor written."""
    enter(PDL)
    line = tl.program_id(1).to(tl.int64)
    row = line
    if HAS_ROWS:
        row = tl.load(rows + line).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmask + line * bitmask_stride + word, mask=word < num_words, other=0)
    token = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_allowed = ((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) != 0
    nothing = tl.full([WORDS, 32], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * logits_stride + token, nothing, mask=(token < V) & (is_allowed == 0))


def describe_bias(logits_RV: Tensor, rows_X: Tensor, tokens_X: Tensor, values_X: Tensor, pdl: bool) -> Launch:
    arguments: dict[str, Any] = {"logits": logits_RV, "rows": rows_X, "tokens": tokens_X, "values": values_X}
    arguments |= {"num_biases": rows_X.shape[0], "logits_stride": logits_RV.stride(0), "BLOCK": BLOCK_BIASES, "PDL": pdl}
    return Launch(_bias_kernel, (triton.cdiv(rows_X.shape[0], BLOCK_BIASES),), arguments, options(4, pdl))


def describe_bitmask(logits_RV: Tensor, bitmask_AW: Tensor, rows_A: Tensor | None, pdl: bool) -> Launch:
    arguments: dict[str, Any] = {"logits": logits_RV, "bitmask": bitmask_AW, "rows": bitmask_AW if rows_A is None else rows_A}
    arguments |= {"V": logits_RV.shape[1], "num_words": bitmask_AW.shape[1], "logits_stride": logits_RV.stride(0)}
    arguments |= {"bitmask_stride": bitmask_AW.stride(0), "HAS_ROWS": rows_A is not None, "WORDS": BLOCK_WORDS, "PDL": pdl}
    grid = (triton.cdiv(logits_RV.shape[1], 32 * BLOCK_WORDS), bitmask_AW.shape[0])
    return Launch(_bitmask_kernel, grid, arguments, options(4, pdl))


def add_bias(logits_RV: Tensor, rows_X: Tensor, tokens_X: Tensor, values_X: Tensor) -> Tensor:
    """Add values[x] to logits[rows[x], tokens[x]] in place (float32). A token may occur more than once."""
    if rows_X.shape[0]:
        describe_bias(logits_RV, rows_X, tokens_X, values_X, uses_pdl(logits_RV.device)).run()
    return logits_RV


def apply_bitmask(logits_RV: Tensor, bitmask_AW: Tensor, rows_A: Tensor | None = None) -> Tensor:
    """Set the logits of tokens whose bit is 0 or missing to -inf, in place. Token t has bit t % 32 of word t // 32.

    `bitmask_AW` (int32) has a line for each row of the logits, or for each row in `rows_A` if that is given.
    """
    if bitmask_AW.shape[0]:
        describe_bitmask(logits_RV, bitmask_AW, rows_A, uses_pdl(logits_RV.device)).run()
    return logits_RV
