"""Linear layers over quantised weights for few tokens, in warps that wait for nothing but memory. In Gluon.

Every warp owns some weight rows. It loads packed weights straight into registers, one step ahead, unpacks them there, and
passes them to the tensor cores as the left operand with tokens as columns. Nothing goes through shared memory and no warp waits
for another. Tokens come from the L1 cache, which all warps of a multiprocessor share. Any order of the inputs gives the same
sum, so the columns of weights and tokens are taken in the order in which lanes hold them. The first weights are requested
before the previous kernel has finished.

Shapes: M tokens · K inputs · N outputs · F gated outputs (W has 2F rows).
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.runtime.jit import constexpr_function

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.launch import Launch, cdiv
from culet.kernels.triton.linear.epilogue import store_sums
from culet.kernels.triton.linear.tiles import GATED, PLAIN, Tile
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.unpack import (
    VALUES_PER_WORD,
    e4m3_to_float,
    eight_in_order,
    four_in_order,
    fp8_values,
    int4_values,
    int8_values,
    nvfp4_values,
)
from culet.kernels.triton.quantised.weights import weight_arguments

MAX_TOKENS = 16


@constexpr_function
def words_layout(rows, words, vector, num_warps):
    """Return the layout of packed weights [rows, words]. A lane holds `vector` words side by side.

    Lane 4 g + t holds vector t of every four, in rows g and g + 8 of every sixteen. Warps have sixteen rows each, again and
    again.
    """
    registers, warps = [], []
    step = 1
    while step < vector:
        registers.append([0, step])
        step *= 2
    lanes = [[0, vector], [0, 2 * vector], [1, 0], [2, 0], [4, 0]]
    registers.append([8, 0])
    step = 4 * vector
    while step < words:
        registers.append([0, step])
        step *= 2
    row = 16
    while row < 16 * num_warps:
        warps.append([row, 0])
        row *= 2
    while row < rows:
        registers.append([row, 0])
        row *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, words])


@constexpr_function
def tokens_layout(tokens, columns, span, num_warps):
    """Return the layout of tokens [tokens, columns]. A lane holds `span` columns side by side, those of its weights."""
    registers = []
    step = 1
    while step < span:
        registers.append([0, step])
        step *= 2
    lanes = [[0, span], [0, 2 * span], [1, 0], [2, 0], [4, 0]]
    step = 4 * span
    while step < columns:
        registers.append([0, step])
        step *= 2
    token = 8
    while token < tokens:
        registers.append([token, 0])
        token *= 2
    warps = [[0, 0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [tokens, columns])


@gluon.jit
def _in_mma_order(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, VECTOR: gl.constexpr, PER_WORD: gl.constexpr):
    """Reorder columns so that pairs of a lane's values follow each other as the tensor cores take them."""
    PAIRS: gl.constexpr = VECTOR * PER_WORD // 4  # each for both halves of 16 columns
    tile = gl.reshape(tile, [ROWS, COLUMNS // (16 * PAIRS), 4, PAIRS, 2, 2])
    return gl.reshape(gl.permute(tile, (0, 1, 3, 4, 2, 5)), [ROWS, COLUMNS])


@gluon.jit
def _unpacked(
    words, scale, middle, SUMS: gl.constexpr, FORMAT: gl.constexpr, ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUPS: gl.constexpr, VECTOR: gl.constexpr, HAS_GROUPS: gl.constexpr,
):  # fmt: skip
    """Return bfloat16 weights as the left operand of the tensor cores."""
    PER_WORD: gl.constexpr = 8 if FORMAT == 0 or FORMAT == 3 else 4
    words = gl.reshape(words, [ROWS, GROUPS, BLOCK_K // PER_WORD // GROUPS])
    if FORMAT == 0:
        tile = eight_in_order(int4_values(words, scale, middle), ROWS, BLOCK_K)
    elif FORMAT == 3:
        tile = eight_in_order(nvfp4_values(words, scale), ROWS, BLOCK_K)
    else:
        if FORMAT == 2:
            v0, v1, v2, v3 = fp8_values(words)
        else:
            v0, v1, v2, v3 = int8_values(words)
        if HAS_GROUPS:
            v0 = (v0.to(gl.float32) * scale).to(gl.bfloat16)
            v1 = (v1.to(gl.float32) * scale).to(gl.bfloat16)
            v2 = (v2.to(gl.float32) * scale).to(gl.bfloat16)
            v3 = (v3.to(gl.float32) * scale).to(gl.bfloat16)
        tile = four_in_order((v0, v1, v2, v3), ROWS, BLOCK_K)
    tile = _in_mma_order(tile, ROWS, BLOCK_K, VECTOR, PER_WORD)
    return gl.convert_layout(tile, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _load_scale(scale_ptrs, zero_ptrs, k, inside, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_GROUPS: gl.constexpr,
                HAS_ZERO: gl.constexpr):  # fmt: skip
    """Return the scale of each group and -(128 + zero point), as `_unpacked` takes them."""
    one = gl.full_like(scale_ptrs, 1.0, dtype=gl.bfloat16)
    scale = one
    middle = one * -136.0
    if HAS_GROUPS:
        found = gl.load(scale_ptrs + k // GROUP, mask=inside)
        if FORMAT == 0:
            scale = found.to(gl.bfloat16)
        elif FORMAT == 3:
            scale = (e4m3_to_float(found) * 3.3230699894622897e35).to(gl.bfloat16)  # 2^118
        else:
            scale = found.to(gl.float32)
        if HAS_ZERO:
            middle = (-128.0 - gl.load(zero_ptrs + k // GROUP, mask=inside).to(gl.float32)).to(gl.bfloat16)
    return scale, middle


@gluon.jit(do_not_specialize=["M"])
def _quantised_warps_kernel(
    x, words, scale, zero, row_scale, y, factor, parts, arrivals, softcap: gl.constexpr,
    M, N, x_stride, y_stride, factor_stride,
    K: gl.constexpr, SCALE_STRIDE: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, ROWS_PER_SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr, HAS_ROW_SCALE: gl.constexpr, ROW_STRIDE: gl.constexpr, ROW_FACTOR: gl.constexpr,
    BY_HAND: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr,
    KEEP_PARTS: gl.constexpr, VECTOR: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK_N weight rows, all tokens], over K or one of SPLIT_K parts of K."""
    HAS_UP: gl.constexpr = EPILOGUE == 1
    PER_WORD: gl.constexpr = 8 if FORMAT == 0 or FORMAT == 3 else 4
    NUM_WORDS: gl.constexpr = BLOCK_K // PER_WORD
    HAS_GROUPS: gl.constexpr = GROUP < K or ROWS_PER_SCALE > 1
    GROUPS: gl.constexpr = BLOCK_K // GROUP if HAS_GROUPS and GROUP < BLOCK_K else 1
    STEPS: gl.constexpr = K // SPLIT_K // BLOCK_K
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    WORDS: gl.constexpr = words_layout(BLOCK_N, NUM_WORDS, VECTOR, WARPS)
    TOKENS: gl.constexpr = tokens_layout(BLOCK_M, BLOCK_K, VECTOR * PER_WORD, WARPS)
    first_row = gl.program_id(0) * BLOCK_N
    begin = gl.program_id(1) * (STEPS * BLOCK_K)

    rows = first_row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WORDS))
    rows = gl.where(rows < N, rows, 0)
    columns = gl.arange(0, NUM_WORDS, gl.SliceLayout(0, WORDS))
    w_ptrs = words + gl.expand_dims(rows.to(gl.int64), 1) * (K // PER_WORD) + gl.expand_dims(columns, 0) + begin // PER_WORD
    up_ptrs = w_ptrs + gl.cast(N, gl.int64) * (K // PER_WORD)
    # Scales have the layout of words in groups, [BLOCK_N, GROUPS, words of a group], with one column per group.
    grouped = gl.reshape(w_ptrs, [BLOCK_N, GROUPS, NUM_WORDS // GROUPS])
    SCALES: gl.constexpr = gl.SliceLayout(2, grouped.type.layout)
    scale_rows = first_row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SCALES))
    scale_rows = gl.where(scale_rows < N, scale_rows, 0)
    group = gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(0, SCALES)), 0) + begin // GROUP
    places = gl.expand_dims((scale_rows // ROWS_PER_SCALE).to(gl.int64), 1) * SCALE_STRIDE + group
    up_places = gl.expand_dims(((N + scale_rows) // ROWS_PER_SCALE).to(gl.int64), 1) * SCALE_STRIDE + group
    places = gl.expand_dims(places, 2)
    up_places = gl.expand_dims(up_places, 2)

    tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(1, TOKENS))
    is_token = gl.expand_dims(tokens < M, 1)
    x_columns = gl.expand_dims(gl.arange(0, BLOCK_K, gl.SliceLayout(0, TOKENS)), 0)
    x_ptrs = x + gl.expand_dims(tokens, 1) * x_stride + x_columns + begin

    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    up = total
    packed = gl.load(w_ptrs)
    factors, middle = _load_scale(scale + places, zero + places, 0, True, FORMAT, GROUP, HAS_GROUPS, HAS_ZERO)
    packed_up = packed
    factors_up, middle_up = factors, middle
    if HAS_UP:
        packed_up = gl.load(up_ptrs)
        factors_up, middle_up = _load_scale(scale + up_places, zero + up_places, 0, True, FORMAT, GROUP, HAS_GROUPS, HAS_ZERO)
    enter(PDL)
    for step in range(STEPS):
        inside = step + 1 < STEPS
        k = (step + 1) * BLOCK_K
        next_packed = gl.load(w_ptrs + k // PER_WORD, mask=inside)
        next_factors, next_middle = _load_scale(scale + places, zero + places, k, inside, FORMAT, GROUP, HAS_GROUPS, HAS_ZERO)
        if HAS_UP:
            next_packed_up = gl.load(up_ptrs + k // PER_WORD, mask=inside)
            next_factors_up, next_middle_up = _load_scale(
                scale + up_places, zero + up_places, k, inside, FORMAT, GROUP, HAS_GROUPS, HAS_ZERO
            )
        x_tile = gl.load(x_ptrs + step * BLOCK_K, mask=is_token, other=0.0)
        x_KM = gl.permute(_in_mma_order(x_tile, BLOCK_M, BLOCK_K, VECTOR, PER_WORD), (1, 0))
        x_KM = gl.convert_layout(x_KM, gl.DotOperandLayout(1, SUMS, 2), assert_trivial=True)
        tile = _unpacked(packed, factors, middle, SUMS, FORMAT, BLOCK_N, BLOCK_K, GROUPS, VECTOR, HAS_GROUPS)
        total = mma_v2(tile, x_KM, total)
        packed, factors, middle = next_packed, next_factors, next_middle
        if HAS_UP:
            tile = _unpacked(packed_up, factors_up, middle_up, SUMS, FORMAT, BLOCK_N, BLOCK_K, GROUPS, VECTOR, HAS_GROUPS)
            up = mma_v2(tile, x_KM, up)
            packed_up, factors_up, middle_up = next_packed_up, next_factors_up, next_middle_up
    _store_outputs(
        total, up, row_scale, y, factor, parts, arrivals, M, N, y_stride, factor_stride, softcap, HAS_ROW_SCALE, ROW_STRIDE,
        ROW_FACTOR, BLOCK_N, BLOCK_M, SPLIT_K, KEEP_PARTS, EPILOGUE, SUMS,
    )  # fmt: skip


@gluon.jit
def _store_outputs(
    total, up, row_scale, y, factor, parts, arrivals, M, N, y_stride, factor_stride, softcap: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr, ROW_STRIDE: gl.constexpr, ROW_FACTOR: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, SPLIT_K: gl.constexpr, KEEP_PARTS: gl.constexpr, EPILOGUE: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """Scale sums [BLOCK_N, BLOCK_M] and store them."""
    rows = gl.expand_dims(gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS)), 1)
    tokens = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS)), 0)
    if HAS_ROW_SCALE:
        total *= gl.load(row_scale + rows * ROW_STRIDE, mask=rows < N, other=0.0).to(gl.float32) * ROW_FACTOR
        if EPILOGUE == 1:
            up *= gl.load(row_scale + (N + rows) * ROW_STRIDE, mask=rows < N, other=0.0).to(gl.float32) * ROW_FACTOR
    store_sums(
        total, up, rows, tokens, y, factor, parts, arrivals + gl.program_id(0), M, N, y_stride, factor_stride, softcap,
        SPLIT_K, KEEP_PARTS, EPILOGUE,
    )  # fmt: skip


def describe_warps(x_MK: Tensor, matrix: PackedMatrix, out: Tensor, tile: Tile, epilogue: int = PLAIN, **extra: Any) -> Launch:
    """Describe the launch of this kernel, as in `few_tokens.describe`.

    `extra` also has workspace, for a split K whose parts are summed here.
    """
    num_tokens, size_k = x_MK.shape
    num_rows = out.shape[-1]
    factor, pdl = extra.get("factor"), bool(extra.get("pdl", False))
    is_joined = tile.split_k > 1 and out.dim() == 2
    parts, arrivals = extra["workspace"] if is_joined else (out, out)
    programs = cdiv(num_rows, tile.block_n)
    vector = min(4, tile.block_k // (4 * VALUES_PER_WORD[matrix.format]))
    assert num_tokens <= MAX_TOKENS, f"{num_tokens} tokens do not fit into a tile"
    assert tile.block_n % (16 * tile.num_warps) == 0, f"{tile} has too few rows for its warps"
    assert size_k % (tile.block_k * tile.split_k) == 0, f"{tile} does not divide {size_k} inputs"
    if is_joined:
        planes = tile.split_k * (2 if epilogue == GATED else 1)
        assert planes * num_tokens * num_rows <= parts.numel(), f"{tile} needs more workspace than is allocated"
        assert programs <= arrivals.numel(), f"{tile} needs more arrival counters than are allocated"
    arguments: dict[str, Any] = {
        "x": x_MK,
        **weight_arguments(matrix, x_MK.dtype),
        "y": out,
        "factor": x_MK if factor is None else factor,
        "parts": parts,
        "arrivals": arrivals,
        "softcap": float(extra.get("softcap") or 1.0),
        "M": num_tokens,
        "N": num_rows,
        "x_stride": x_MK.stride(0),
        "y_stride": out.stride(-2),
        "factor_stride": 0 if factor is None else factor.stride(0),
        "BLOCK_M": max(8, 1 << (num_tokens - 1).bit_length()),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SPLIT_K": tile.split_k,
        "KEEP_PARTS": out.dim() == 3,
        "VECTOR": vector,
        "EPILOGUE": epilogue,
        "PDL": pdl,
        "WARPS": tile.num_warps,
    }
    return Launch(_quantised_warps_kernel, (programs, tile.split_k), arguments, options(tile.num_warps, pdl))
