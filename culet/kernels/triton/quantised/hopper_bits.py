"""Linear layers over int4 and fp8 weights for few tokens on Hopper, with fewer instructions per weight. In Gluon.

`hopper_stream` turns every weight into a bfloat16 of the right size. That takes 22 instructions per word of eight int4 weights
and 14 per word of four fp8 weights, which limits it more than memory does. This kernel fetches in the same way, but takes 14
and 10:

- Bits go to the tensor cores as they are, as very small numbers (`unpack.int4_subnormals`, `unpack.fp8_subnormals`). Tokens are
  larger by as much.
- Sums of an int4 group start at -8 times the sum of its tokens, which the tensor cores compute too. So the zero point costs
  nothing. Then the sums are multiplied by the group's scale. There are fewer of them than weights.
- Every warp has all rows of a tile and some of its columns, so that tokens are read and prepared once. The warps' sums are
  added at the end.

Shapes: M tokens · K inputs · N outputs · F gated outputs (W has 2F rows).
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.runtime.jit import constexpr_function

from culet.kernels.triton.launch import Launch
from culet.kernels.triton.linear.tiles import GATED, PLAIN, Tile
from culet.kernels.triton.quantised.hopper_stream import _fetch, _store_outputs, describe_stream
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.tiles import can_be_bits
from culet.kernels.triton.quantised.unpack import (
    INT4,
    eight_in_pairs,
    four_in_pairs,
    fp8_subnormals,
    fp8_tokens,
    int4_subnormals,
    int4_tokens,
)


@constexpr_function
def _bits(first, end):
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@constexpr_function
def words_layout(rows, warps, parts):
    """Return the layout of words [rows, 4 * groups]. A warp has `parts` groups side by side and all rows.

    Lane 4 g + t holds word t of every group, in rows g and g + 8 of every sixteen, as `ldmatrix` loads them.
    """
    registers = [[0, 4]] if parts == 2 else []
    registers += [[row, 0] for row in _bits(8, rows)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, 4 * parts * warp] for warp in _bits(1, warps)], [], [rows, 4 * parts * warps]
    )


@constexpr_function
def scales_layout(rows, warps, parts):
    """Return the layout of scales [rows, groups], where each lane has those of the rows of its sums."""
    registers = [[0, 1]] if parts == 2 else []
    registers += [[row, 0] for row in _bits(8, rows)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, parts * warp] for warp in _bits(1, warps)], [], [rows, parts * warps]
    )


@constexpr_function
def tokens_layout(tokens, warps, parts):
    """Return the layout of tokens [tokens, columns]. A lane has the eight columns of its words."""
    registers = [[0, 1], [0, 2], [0, 4]] + ([[0, 32]] if parts == 2 else [])
    registers += [[token, 0] for token in _bits(8, tokens)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, 32 * parts * warp] for warp in _bits(1, warps)], [], [tokens, 32 * parts * warps]
    )


@constexpr_function
def fp8_tokens_layout(tokens, warps):
    """Return the layout of tokens [tokens, 32 * warps] for fp8. A lane has the four columns of each of its words."""
    registers = [[0, 1], [0, 2], [0, 16]] + [[token, 0] for token in _bits(8, tokens)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 32 * warp] for warp in _bits(1, warps)], [], [tokens, 32 * warps])


@gluon.jit
def _halves(tensor, PARTS: gl.constexpr):
    """Return both halves of the last dimension, or its only element twice."""
    if PARTS == 2:
        first, second = gl.split(tensor)
    else:
        first = gl.reshape(tensor, tensor.type.shape[:-1])
        second = first
    return first, second


@gluon.jit
def _left(words, SUMS: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr):
    """Return words [WARPS, ROWS, 4], one group of each warp, as the left operand of the tensor cores."""
    tile = gl.reshape(eight_in_pairs(int4_subnormals(words)), [WARPS, ROWS, 32])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, SUMS, 8))


@gluon.jit
def _load_int4_tokens(x_smem, SUMS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return the tokens of both groups of each warp as the right operand, [WARPS, 32, BLOCK_M]."""
    x = int4_tokens(x_smem.load(tokens_layout(BLOCK_M, WARPS, PARTS)))
    # Columns are warp, part, lane, high, pair. Weights come as warp, part, lane, pair, high.
    x = gl.permute(gl.reshape(x, [BLOCK_M, WARPS, PARTS, 4, 2, 4]), (1, 3, 5, 4, 0, 2))
    first, second = _halves(gl.reshape(x, [WARPS, 32, BLOCK_M, PARTS]), PARTS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    return gl.convert_layout(first, RIGHT), gl.convert_layout(second, RIGHT)


@gluon.jit
def _by_group(tensor, WARPS: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """Return both parts [WARPS, ROWS, SIZE] of a tensor [ROWS, WARPS * PARTS * SIZE]."""
    tensor = gl.permute(gl.reshape(tensor, [ROWS, WARPS, PARTS, SIZE]), (1, 0, 3, 2))
    return _halves(tensor, PARTS)


@gluon.jit
def _zero_points(x, SUMS: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return -8 times the sum of a group's tokens for every row, [WARPS, BLOCK_N, BLOCK_M]."""
    words = gl.full([16, 4 * WARPS], -2004318072, gl.int32, words_layout(16, WARPS, 1))  # 0x88888888
    words, _ = _by_group(words, WARPS, 1, 16, 4)
    # All sixteen rows are the same, and so are all the others.
    eights = _left(words, SUMS, WARPS, 16)
    minus = (eights.to(gl.int16, bitcast=True) | -32768).to(gl.bfloat16, bitcast=True)
    total = mma_v2(minus, x, gl.zeros([WARPS, 16, BLOCK_M], gl.float32, SUMS))
    if BLOCK_N >= 32:
        total = gl.reshape(gl.permute(gl.join(total, total), (0, 3, 1, 2)), [WARPS, 32, BLOCK_M])
    if BLOCK_N >= 64:
        total = gl.reshape(gl.permute(gl.join(total, total), (0, 3, 1, 2)), [WARPS, 64, BLOCK_M])
    if BLOCK_N >= 128:
        total = gl.reshape(gl.permute(gl.join(total, total), (0, 3, 1, 2)), [WARPS, 128, BLOCK_M])
    return gl.convert_layout(total, SUMS)


@gluon.jit
def _add_group(total, words, scale, x, start, SUMS: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Add the products of one group of each warp to its sums."""
    part = mma_v2(_left(words, SUMS, WARPS, BLOCK_N), x, start)
    scale = gl.convert_layout(gl.reshape(scale, [WARPS, BLOCK_N]), gl.SliceLayout(2, SUMS))
    return total + part * gl.expand_dims(scale.to(gl.float32), 2)


@gluon.jit
def _load_tile(w_smem, scale_smem, FORMAT: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Load the words and, of int4, the scales of a tile."""
    if FORMAT == 0:
        words = w_smem.load(words_layout(BLOCK_N, WARPS, PARTS))
        scale = scale_smem.load(scales_layout(BLOCK_N, WARPS, PARTS))
    else:
        words = w_smem.load(words_layout(BLOCK_N, WARPS, 2))
        scale = words
    return words, scale


@gluon.jit
def _add_int4_tile(
    total,
    words,
    scale,
    x0,
    x1,
    start0,
    start1,
    SUMS: gl.constexpr,
    WARPS: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Add the products of a tile [BLOCK_N, 32 * PARTS * WARPS] to the sums."""
    words0, words1 = _by_group(words, WARPS, PARTS, BLOCK_N, 4)
    scale0, scale1 = _by_group(scale, WARPS, PARTS, BLOCK_N, 1)
    total = _add_group(total, words0, scale0, x0, start0, SUMS, WARPS, BLOCK_N)
    if PARTS == 2:
        total = _add_group(total, words1, scale1, x1, start1, SUMS, WARPS, BLOCK_N)
    return total


@gluon.jit
def _load_fp8_tokens(x_smem, SUMS: gl.constexpr, WARPS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return the tokens of each warp's 32 columns as the right operand, [WARPS, 32, BLOCK_M]."""
    x = fp8_tokens(x_smem.load(fp8_tokens_layout(BLOCK_M, WARPS)))
    # Columns are warp, half, lane, high, pair. Weights come as warp, half, lane, pair, high.
    x = gl.permute(gl.reshape(x, [BLOCK_M, WARPS, 2, 4, 2, 2]), (1, 2, 3, 5, 4, 0))
    return gl.convert_layout(gl.reshape(x, [WARPS, 32, BLOCK_M]), gl.DotOperandLayout(1, SUMS, 4))


@gluon.jit
def _add_fp8_tile(total, words, x, SUMS: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Add the products of a tile [BLOCK_N, 32 * WARPS] to the sums."""
    words = gl.permute(gl.reshape(words, [BLOCK_N, WARPS, 8]), (1, 0, 2))
    tile = gl.reshape(four_in_pairs(fp8_subnormals(words)), [WARPS, BLOCK_N, 32])
    return mma_v2(gl.convert_layout(tile, gl.DotOperandLayout(0, SUMS, 4)), x, total)


@gluon.jit
def _multiply(
    w_smem, scale_smem, x_smem, full, empty, scale, y, factor, parts, arrivals, softcap: gl.constexpr,
    M, N, scale_stride, y_stride, factor_stride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, SPLIT_K: gl.constexpr,
    KEEP_PARTS: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr,
    RELEASE_EARLY: gl.constexpr,
):  # fmt: skip
    """Run the multiplying warps."""
    HAS_UP: gl.constexpr = EPILOGUE == 1
    PARTS: gl.constexpr = BLOCK_K // (32 * WARPS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    # Weights are smaller by 2^133 or 2^120, and tokens larger by 2^64.
    FACTOR: gl.constexpr = 590295810358705651712.0 if FORMAT == 0 else 72057594037927936.0
    total = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, SUMS)
    up = total
    for step in range(STEPS):
        place = step % STAGES
        mbarrier.wait(full.index(place), (step // STAGES) & 1)
        gate = place * (2 if HAS_UP else 1)
        if FORMAT == 0:
            x0, x1 = _load_int4_tokens(x_smem.index(place), SUMS, WARPS, PARTS, BLOCK_M)
        else:
            x0 = _load_fp8_tokens(x_smem.index(place), SUMS, WARPS, BLOCK_M)
        words, scales = _load_tile(w_smem.index(gate), scale_smem.index(gate), FORMAT, WARPS, PARTS, BLOCK_N)
        up_words, up_scales = words, scales
        if HAS_UP:
            up_words, up_scales = _load_tile(w_smem.index(gate + 1), scale_smem.index(gate + 1), FORMAT, WARPS, PARTS, BLOCK_N)
        # Release the place if a later step uses it. Nothing waits for the other places.
        if RELEASE_EARLY and step + STAGES < STEPS:
            gl.thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
        if FORMAT == 0:
            start0 = _zero_points(x0, SUMS, WARPS, BLOCK_N, BLOCK_M)
            start1 = start0
            if PARTS == 2:
                start1 = _zero_points(x1, SUMS, WARPS, BLOCK_N, BLOCK_M)
            total = _add_int4_tile(total, words, scales, x0, x1, start0, start1, SUMS, WARPS, PARTS, BLOCK_N)
            if HAS_UP:
                up = _add_int4_tile(up, up_words, up_scales, x0, x1, start0, start1, SUMS, WARPS, PARTS, BLOCK_N)
        else:
            total = _add_fp8_tile(total, words, x0, SUMS, WARPS, BLOCK_N)
            if HAS_UP:
                up = _add_fp8_tile(up, up_words, x0, SUMS, WARPS, BLOCK_N)
        if not RELEASE_EARLY and step + STAGES < STEPS:
            gl.thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
    sums = gl.sum(total, 0) * FACTOR
    up_sums = sums
    if HAS_UP:
        up_sums = gl.sum(up, 0) * FACTOR
    _store_outputs(
        sums, up_sums, scale, y, factor, parts, arrivals, M, N, scale_stride, y_stride, factor_stride, softcap,
        BLOCK_N, BLOCK_M, SPLIT_K, KEEP_PARTS, EPILOGUE, FORMAT, False, WARPS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def _quantised_bits_kernel(
    W, S, X, scale, y, factor, parts, arrivals, softcap: gl.constexpr, M, N, scale_stride, y_stride, factor_stride,
    K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, BLOCK_SCALES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr, KEEP_PARTS: gl.constexpr,
    STAGES: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
    RELEASE_EARLY: gl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK_N weight rows, all tokens], over K or one of SPLIT_K parts of K. FORMAT is INT4 or FP8."""
    HAS_UP: gl.constexpr = EPILOGUE == 1
    PER_WORD: gl.constexpr = 8 if FORMAT == 0 else 4
    STEPS: gl.constexpr = K // SPLIT_K // BLOCK_K
    PLACES: gl.constexpr = STAGES * (2 if HAS_UP else 1)
    w_smem = gl.allocate_shared_memory(gl.int32, [PLACES, BLOCK_N, BLOCK_K // PER_WORD], W.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], X.layout)
    scale_smem = w_smem
    if FORMAT == 0:
        scale_smem = gl.allocate_shared_memory(S.dtype, [PLACES, BLOCK_N, BLOCK_K // GROUP], S.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                w_smem, scale_smem, x_smem, full, empty, scale, y, factor, parts, arrivals, softcap,
                M, N, scale_stride, y_stride, factor_stride,
                BLOCK_M, BLOCK_N, BLOCK_K, STEPS, SPLIT_K, KEEP_PARTS, STAGES, EPILOGUE, FORMAT, WARPS, RELEASE_EARLY,
            )),
            (_fetch, (
                W, S, X, w_smem, scale_smem, x_smem, full, empty, N,
                BLOCK_M, BLOCK_N, BLOCK_K, STEPS, STAGES, PER_WORD, GROUP, 2, HAS_UP, PDL,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def describe_bits(x_MK: Tensor, matrix: PackedMatrix, out: Tensor, tile: Tile, epilogue: int = PLAIN, **extra: Any) -> Launch:
    """Describe the launch of this kernel, as `describe_stream` does. `extra` may have registers, per
    thread, and release_early, to release shared memory as soon as its values are in registers."""
    launch = describe_stream(x_MK, matrix, out, tile, epilogue, **extra)
    assert can_be_bits(matrix), "weights are int4 in groups of 32 without zero points, or fp8 with a scale per row"
    allowed = (32 * tile.num_warps, 64 * tile.num_warps) if matrix.format == INT4 else (32 * tile.num_warps,)
    assert tile.block_k in allowed, f"{tile} does not give every warp the same columns"
    launch.kernel = _quantised_bits_kernel
    launch.arguments["RELEASE_EARLY"] = bool(extra.get("release_early", False))
    launch.options["maxnreg"] = int(extra.get("registers") or _registers(tile, launch.arguments["BLOCK_M"], epilogue))
    return launch


def _registers(tile: Tile, block_m: int, epilogue: int) -> int:
    """Return the registers per thread. Triton gives those that the fetching warps do not need to the multiplying ones."""
    sums = tile.block_n * block_m * (2 if epilogue == GATED else 1)
    return 64 if sums <= 512 else 80 if sums <= 1024 else 128
