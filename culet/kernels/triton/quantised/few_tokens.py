"""Linear layers over quantised weights, in tiles that go to the tensor cores.

The products and epilogues are those of `linear.few_tokens`. Weights are unpacked to the activations' dtype in registers, as the
left operand. Tokens are columns. K may be split over programs, whose parts the last one to arrive sums in a fixed order.

Shapes: M tokens · K inputs · N outputs · F gated outputs (W has 2F rows).
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import shared_bytes, stages_that_fit
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.linear.epilogue import store_sums
from culet.kernels.triton.linear.few_tokens import MIN_COLUMNS, workspace
from culet.kernels.triton.linear.tiles import GATED, MAX_ARRIVALS, MAX_PARTS, PLAIN, SOFTCAP, Tile
from culet.kernels.triton.quantised.hopper_bits import describe_bits
from culet.kernels.triton.quantised.hopper_stream import describe_stream
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.warps import describe_warps
from culet.kernels.triton.quantised.weights import block_k_of, load_weights, scale_rows, weight_arguments

MAX_COLUMNS = 64  # tokens of one program. More tokens take more programs, which read the weights again.


@triton.jit(do_not_specialize=["M"])
def _quantised_tiles_kernel(
    x, words, scale, zero, row_scale, y, factor, parts, arrivals, softcap: tl.constexpr,
    M, N, x_stride, y_stride, factor_stride,
    K: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW_FACTOR: tl.constexpr,
    BY_HAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    KEEP_PARTS: tl.constexpr, STAGES: tl.constexpr, EPILOGUE: tl.constexpr, TOKENS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK_N weight rows, BLOCK_M tokens], over K or one of SPLIT_K parts of K.

    With KEEP_PARTS, y has a plane [M, N] for each part, and the caller sums the planes. With TOKENS_FIRST, programs that read
    the same weights run side by side.
    """
    row_tile, token_tile = tl.program_id(0), tl.program_id(2)
    if TOKENS_FIRST:
        row_tile, token_tile = tl.program_id(2), tl.program_id(0)
    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)
    safe_rows = tl.where(rows < N, rows, 0)
    dtype: tl.constexpr = x.dtype.element_ty
    x_ptrs = x + tokens.to(tl.int64)[None, :] * x_stride + cols[:, None]
    is_token = tokens < M
    part_k: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    begin = tl.program_id(1) * part_k
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    enter(PDL)
    for step in tl.range(0, part_k, BLOCK_K, num_stages=STAGES):
        k = begin + step
        if K % (BLOCK_K * SPLIT_K) == 0:
            x_tile = tl.load(x_ptrs + k, mask=is_token[None, :], other=0.0)
        else:
            x_tile = tl.load(x_ptrs + k, mask=is_token[None, :] & (cols < K - k)[:, None], other=0.0)
        w_tile = load_weights(
            words, scale, zero, safe_rows, k, K, SCALE_STRIDE, FORMAT, GROUP, ROWS_PER_SCALE, HAS_ZERO,
            BLOCK_N, BLOCK_K, dtype, BY_HAND, K % (BLOCK_K * SPLIT_K) != 0,
        )  # fmt: skip
        total = tl.dot(w_tile, x_tile, total, input_precision="ieee")
        if EPILOGUE == 1:
            up_tile = load_weights(
                words, scale, zero, N + safe_rows, k, K, SCALE_STRIDE, FORMAT, GROUP, ROWS_PER_SCALE, HAS_ZERO,
                BLOCK_N, BLOCK_K, dtype, BY_HAND, K % (BLOCK_K * SPLIT_K) != 0,
            )  # fmt: skip
            up = tl.dot(up_tile, x_tile, up, input_precision="ieee")
    if HAS_ROW_SCALE:
        total = scale_rows(total, row_scale, rows, N, ROW_STRIDE, ROW_FACTOR)
        if EPILOGUE == 1:
            up = scale_rows(up, row_scale + N * ROW_STRIDE, rows, N, ROW_STRIDE, ROW_FACTOR)
    store_sums(
        total, up, rows[:, None], tokens.to(tl.int64)[None, :], y, factor, parts,
        arrivals + token_tile * tl.cdiv(N, BLOCK_N) + row_tile, M, N, y_stride, factor_stride,
        softcap, SPLIT_K, KEEP_PARTS, EPILOGUE,
    )  # fmt: skip


def describe(x_MK: Tensor, matrix: PackedMatrix, out: Tensor, tile: Tile, epilogue: int = PLAIN, **extra: Any) -> Launch:
    """Describe the launch of `tile` for these tensors.

    `out` is [M, N], or float32 [split_k, M, N] if the parts of a split K are not summed. `extra` may have factor (GELU_TIMES),
    softcap (SOFTCAP), pdl and shared (bytes).
    """
    if tile.kernel != "tiles":
        describe_other = {"stream": describe_stream, "bits": describe_bits, "warps": describe_warps}[tile.kernel]
        return describe_other(x_MK, matrix, out, tile, epilogue, workspace=workspace(x_MK.device), **extra)
    num_tokens, num_rows = x_MK.shape[0], out.shape[-1]
    factor, softcap, pdl = extra.get("factor"), float(extra.get("softcap") or 1.0), bool(extra.get("pdl", False))
    block_m = min(MAX_COLUMNS, max(MIN_COLUMNS, next_power_of_2(num_tokens)))
    block_k = block_k_of(matrix, tile.block_k)
    limit = int(extra.get("shared") or shared_bytes(x_MK.device))
    tiles, token_tiles = cdiv(num_rows, tile.block_n), cdiv(num_tokens, block_m)
    is_joined = tile.split_k > 1 and out.dim() == 2
    parts, arrivals = workspace(x_MK.device) if is_joined else (out, out)
    if is_joined:
        planes = tile.split_k * (2 if epilogue == GATED else 1)
        assert planes * num_tokens * num_rows <= MAX_PARTS, f"{tile} needs more workspace than is allocated"
        assert tiles * token_tiles <= MAX_ARRIVALS, f"{tile} needs more arrival counters than are allocated"
    arguments: dict[str, Any] = {
        "x": x_MK,
        **weight_arguments(matrix, x_MK.dtype),
        "y": out,
        "factor": x_MK if factor is None else factor,
        "parts": parts,
        "arrivals": arrivals,
        "softcap": softcap,
        "M": num_tokens,
        "N": num_rows,
        "x_stride": x_MK.stride(0),
        "y_stride": out.stride(-2),
        "factor_stride": 0 if factor is None else factor.stride(0),
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "SPLIT_K": tile.split_k,
        "KEEP_PARTS": out.dim() == 3,
        "STAGES": _stages(tile, block_m, block_k, epilogue, x_MK.element_size(), limit),
        "EPILOGUE": epilogue,
        # The head does not fit the L2 cache, so it would be read from memory for every tile of tokens.
        "TOKENS_FIRST": epilogue == SOFTCAP and token_tiles > 1,
        "PDL": pdl,
    }
    grid = (token_tiles, tile.split_k, tiles) if arguments["TOKENS_FIRST"] else (tiles, tile.split_k, token_tiles)
    return Launch(_quantised_tiles_kernel, grid, arguments, options(tile.num_warps, pdl))


def _stages(tile: Tile, block_m: int, block_k: int, epilogue: int, itemsize: int, limit: int) -> int:
    """Return how many stages fit next to one tile of unpacked weights, which may pass through shared memory."""
    weight_rows = tile.block_n * (2 if epilogue == GATED else 1)
    unpacked = weight_rows * block_k * itemsize
    per_stage = block_k * (weight_rows + block_m * itemsize)  # packed weights and scales take at most a byte per value
    return stages_that_fit(tile.num_stages, per_stage, max(per_stage, limit - unpacked))
