"""Linear layers over int4 weights for up to 8 tokens on Hopper, with few instructions per weight. In Gluon.

`hopper_stream` turns every weight into a bfloat16 of the right size. That takes 22 instructions for a word of eight weights,
which limits it more than memory does. This kernel fetches in the same way, but takes only 14 instructions:

- The four bits of a weight go to the tensor cores as they are. In an otherwise empty bfloat16, they are a number too, a very
  small one: the weight times 2^-133. Tensor cores do not round such numbers to zero. Tokens are multiplied by 2^64 before, and
  sums by 2^69 after. All three factors are exact.
- Weights are stored from 0 to 15 and mean -8 to 7. So the sum of a group of 32 starts at -8 times the sum of its tokens. The
  tensor cores compute that too, once for all rows.
- The group's scale multiplies its sums. There are fewer sums than weights.
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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime.jit import constexpr_function

from culet.kernels.triton.barriers import make_ring
from culet.kernels.triton.launch import Launch
from culet.kernels.triton.linear.tiles import GATED, PLAIN, Tile
from culet.kernels.triton.quantised.hopper_stream import describe_stream, fetch, store_outputs
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.tiles import has_stream_groups
from culet.kernels.triton.quantised.unpack import eight_in_pairs, int4_subnormals, int4_tokens

NUM_WARPS = 4  # With 8 warps, some products were wrong and all were slower.
BLOCK_K = 256  # two groups of 32 inputs for each warp
WARPS = gl.constexpr(NUM_WARPS)


@constexpr_function
def _bits(first, end):
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@constexpr_function
def words_layout(rows):
    """Return the layout of words [rows, 32]. A warp has two groups of four words side by side, and all rows.

    Lane 4 g + t holds word t of both groups, in rows g and g + 8 of every sixteen, as `ldmatrix` loads them.
    """
    registers = [[0, 4]] + [[row, 0] for row in _bits(8, rows)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8], [0, 16]], [], [rows, 32])


@constexpr_function
def scales_layout(rows):
    """Return the layout of scales [rows, 8], where each lane has those of the rows of its sums."""
    registers = [[0, 1]] + [[row, 0] for row in _bits(8, rows)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 2], [0, 4]], [], [rows, 8])


@constexpr_function
def tokens_layout(tokens):
    """Return the layout of tokens [tokens, 256]. A lane has the eight columns of each of its words."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 32]] + [[token, 0] for token in _bits(8, tokens)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 64], [0, 128]], [], [tokens, 256])


@gluon.jit
def _groups(tensor, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """Return the first and the second group of every warp, [WARPS, ROWS, SIZE], of a tensor [ROWS, WARPS * 2 * SIZE]."""
    return gl.split(gl.permute(gl.reshape(tensor, [ROWS, WARPS, 2, SIZE]), (1, 0, 3, 2)))


@gluon.jit
def _left(words, SUMS: gl.constexpr, ROWS: gl.constexpr):
    """Turn packed words [WARPS, ROWS, 4] into the left operand of the tensor cores. Each warp has one group of weights."""
    tile = gl.reshape(eight_in_pairs(int4_subnormals(words)), [WARPS, ROWS, 32])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, SUMS, 8))


@gluon.jit
def _load_tokens(x_smem, SUMS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return the tokens of both groups of each warp as right operands, [WARPS, 32, BLOCK_M]."""
    x = int4_tokens(x_smem.load(tokens_layout(BLOCK_M)))
    # Columns are warp, group, lane, high, pair. Weights come as warp, group, lane, pair, high.
    x = gl.permute(gl.reshape(x, [BLOCK_M, WARPS, 2, 4, 2, 4]), (1, 3, 5, 4, 0, 2))
    first, second = gl.split(gl.reshape(x, [WARPS, 32, BLOCK_M, 2]))
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    return gl.convert_layout(first, RIGHT), gl.convert_layout(second, RIGHT)


@gluon.jit
def _starts(x, SUMS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return -8 times the sum of a group's tokens for every row, [WARPS, BLOCK_N, BLOCK_M]."""
    words = gl.full([16, 8 * WARPS], -2004318072, gl.int32, words_layout(16))  # 0x88888888
    words, _ = _groups(words, 16, 4)
    # All sixteen rows are the same, and so are all the others.
    eights = _left(words, SUMS, 16)
    minus = (eights.to(gl.int16, bitcast=True) | -32768).to(gl.bfloat16, bitcast=True)
    start = mma_v2(minus, x, gl.zeros([WARPS, 16, BLOCK_M], gl.float32, SUMS))
    if BLOCK_N >= 32:
        start = gl.reshape(gl.permute(gl.join(start, start), (0, 3, 1, 2)), [WARPS, 32, BLOCK_M])
    if BLOCK_N >= 64:
        start = gl.reshape(gl.permute(gl.join(start, start), (0, 3, 1, 2)), [WARPS, 64, BLOCK_M])
    return gl.convert_layout(start, SUMS)


@gluon.jit
def _add_group(total, words, scale, x, start, SUMS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Add the products of one group of each warp to its sums."""
    part = mma_v2(_left(words, SUMS, BLOCK_N), x, start)
    scale = gl.convert_layout(gl.reshape(scale, [WARPS, BLOCK_N]), gl.SliceLayout(2, SUMS))
    return total + part * gl.expand_dims(scale.to(gl.float32), 2)


@gluon.jit
def _load_tile(w_smem, scale_smem, BLOCK_N: gl.constexpr):
    return w_smem.load(words_layout(BLOCK_N)), scale_smem.load(scales_layout(BLOCK_N))


@gluon.jit
def _add_tile(total, words, scale, x0, x1, start0, start1, SUMS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Add the products of a tile [BLOCK_N, 256] to the sums."""
    words0, words1 = _groups(words, BLOCK_N, 4)
    scale0, scale1 = _groups(scale, BLOCK_N, 1)
    total = _add_group(total, words0, scale0, x0, start0, SUMS, BLOCK_N)
    return _add_group(total, words1, scale1, x1, start1, SUMS, BLOCK_N)


@gluon.jit
def _multiply(
    w_smem, scale_smem, x_smem, full, empty, scale, y, factor, parts, arrivals, softcap: gl.constexpr,
    M, N, scale_stride, y_stride, factor_stride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STEPS: gl.constexpr, SPLIT_K: gl.constexpr, KEEP_PARTS: gl.constexpr,
    STAGES: gl.constexpr, EPILOGUE: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Run the multiplying warps."""
    HAS_UP: gl.constexpr = EPILOGUE == 1
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    total = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, SUMS)
    up = total
    for step in range(STEPS):
        place = step % STAGES
        mbarrier.wait(full.index(place), (step // STAGES) & 1)
        gate = place * (2 if HAS_UP else 1)
        x0, x1 = _load_tokens(x_smem.index(place), SUMS, BLOCK_M)
        # Everything is loaded before the first product, so that one wait covers all loads.
        words, scales = _load_tile(w_smem.index(gate), scale_smem.index(gate), BLOCK_N)
        up_words, up_scales = words, scales
        if HAS_UP:
            up_words, up_scales = _load_tile(w_smem.index(gate + 1), scale_smem.index(gate + 1), BLOCK_N)
        start0, start1 = _starts(x0, SUMS, BLOCK_N, BLOCK_M), _starts(x1, SUMS, BLOCK_N, BLOCK_M)
        total = _add_tile(total, words, scales, x0, x1, start0, start1, SUMS, BLOCK_N)
        if HAS_UP:
            up = _add_tile(up, up_words, up_scales, x0, x1, start0, start1, SUMS, BLOCK_N)
        # Release the place if a later step uses it. Nothing waits for the other places.
        if step + STAGES < STEPS:
            gl.thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
    sums = gl.sum(total, 0) * 590295810358705651712.0  # 2^69
    up_sums = sums
    if HAS_UP:
        up_sums = gl.sum(up, 0) * 590295810358705651712.0
    store_outputs(
        sums, up_sums, scale, y, factor, parts, arrivals, M, N, scale_stride, y_stride, factor_stride, softcap,
        BLOCK_N, BLOCK_M, SPLIT_K, KEEP_PARTS, EPILOGUE, FORMAT, False, WARPS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def _quantised_bits_kernel(
    W, S, X, scale, y, factor, parts, arrivals, softcap: gl.constexpr, M, N, scale_stride, y_stride, factor_stride,
    K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr, KEEP_PARTS: gl.constexpr,
    STAGES: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK_N weight rows, all tokens], over K or one of SPLIT_K parts of K."""
    HAS_UP: gl.constexpr = EPILOGUE == 1
    STEPS: gl.constexpr = K // SPLIT_K // BLOCK_K
    PLACES: gl.constexpr = STAGES * (2 if HAS_UP else 1)
    w_smem = gl.allocate_shared_memory(gl.int32, [PLACES, BLOCK_N, BLOCK_K // 8], W.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], X.layout)
    scale_smem = gl.allocate_shared_memory(S.dtype, [PLACES, BLOCK_N, BLOCK_K // GROUP], S.layout)
    full, empty = make_ring(STAGES, 1)
    gl.warp_specialize(
        [
            (_multiply, (
                w_smem, scale_smem, x_smem, full, empty, scale, y, factor, parts, arrivals, softcap,
                M, N, scale_stride, y_stride, factor_stride,
                BLOCK_M, BLOCK_N, STEPS, SPLIT_K, KEEP_PARTS, STAGES, EPILOGUE, FORMAT,
            )),
            (fetch, (
                W, S, X, w_smem, scale_smem, x_smem, full, empty, N,
                BLOCK_M, BLOCK_N, BLOCK_K, STEPS, STAGES, 8, GROUP, 2, HAS_UP, PDL,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def describe_bits(x_MK: Tensor, matrix: PackedMatrix, out: Tensor, tile: Tile, epilogue: int = PLAIN, **extra: Any) -> Launch:
    """Describe the launch of this kernel, as `describe_stream` does."""
    assert has_stream_groups(matrix), "weights are int4 in groups of 32, without zero points"
    assert (tile.num_warps, tile.block_k) == (NUM_WARPS, BLOCK_K), f"{tile} does not give every warp two groups"
    assert tile.block_n in (16, 32, 64), f"{tile} has too many rows"
    launch = describe_stream(x_MK, matrix, out, tile, epilogue, **extra)
    arguments = {name: value for name, value in launch.arguments.items() if name not in ("BLOCK_SCALES", "WARPS")}
    registers = {"maxnreg": _registers(tile, launch.arguments["BLOCK_M"], epilogue)}
    return Launch(_quantised_bits_kernel, launch.grid, arguments, launch.options | registers)


def _registers(tile: Tile, block_m: int, epilogue: int) -> int:
    """Return the registers per thread. Triton gives those that the fetching warp does not need to the multiplying ones."""
    sums = tile.block_n * block_m * (2 if epilogue == GATED else 1)
    return 64 if sums <= 512 else 80 if sums <= 1024 else 128
