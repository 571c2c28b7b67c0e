"""Linear layers over quantised weights for few tokens on Hopper, in Gluon.

One warp streams packed weights and their scales into shared memory, as in `linear.hopper_stream`, and starts before the
previous kernel has finished. The other warps unpack weights in registers. A word of eight 4-bit or four 8-bit values already
lies where the tensor cores want their left operand, so unpacked values stay in place. A bfloat16 tile in shared memory would
need more of its bandwidth than there is. At 4.2 TB/s, a multiprocessor gets 33 4-bit values per clock.

Shapes: M tokens · K inputs · N outputs · F gated outputs (W has 2F rows).
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import constexpr_function

from culet.hardware import HOPPER, SHARED_BYTES
from culet.kernels.triton.barriers import make_ring
from culet.kernels.triton.dependent_launch import options
from culet.kernels.triton.launch import Launch, cdiv
from culet.kernels.triton.linear.epilogue import store_sums
from culet.kernels.triton.linear.hopper_stream import let_next_start, wait_for_kernel_before
from culet.kernels.triton.linear.tiles import GATED, PLAIN, Tile
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.tiles import RESIDENT_PROGRAMS
from culet.kernels.triton.quantised.unpack import (
    FP8,
    INT4,
    INT8,
    NVFP4,
    VALUES_PER_WORD,
    e4m3_to_float,
    eight_in_order,
    four_in_order,
    fp8_values,
    int4_values,
    int8_values,
    nvfp4_values,
)

MAX_TOKENS = 32
RESERVED = 4 << 10  # bytes of shared memory for barriers and alignment


@constexpr_function
def words_layout(rows, words, num_warps):
    """Return the layout of words whose values are the left operand of the tensor cores, each word's side by side.

    Lane 4 g + t holds word t of every four, in rows g and g + 8 of every sixteen. Warps have sixteen rows each.
    """
    registers, warps = [], []
    step = 4
    while step < words:
        registers.append([0, step])
        step *= 2
    registers.insert(1, [8, 0])
    row = 16
    while row < 16 * num_warps:
        warps.append([row, 0])
        row *= 2
    while row < rows:
        registers.append([row, 0])
        row *= 2
    return gl.DistributedLinearLayout(registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [rows, words])


@gluon.jit
def _weights(
    w_smem, scale_smem, SUMS: gl.constexpr, FORMAT: gl.constexpr, ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Return a tile of bfloat16 weights as the left operand of the tensor cores."""
    PER_WORD: gl.constexpr = 8 if FORMAT == 0 or FORMAT == 3 else 4
    WORDS: gl.constexpr = words_layout(ROWS, BLOCK_K // PER_WORD, WARPS)
    words = w_smem.load(WORDS)
    if FORMAT == 0:
        words = gl.reshape(words, [ROWS, BLOCK_K // GROUP, GROUP // 8])
        scale = gl.expand_dims(scale_smem.load(gl.SliceLayout(2, words.type.layout)), 2)
        tile = eight_in_order(
            int4_values(words, scale.to(gl.bfloat16), gl.full_like(scale, -136.0, dtype=gl.bfloat16)), ROWS, BLOCK_K
        )
    elif FORMAT == 3:
        words = gl.reshape(words, [ROWS, BLOCK_K // GROUP, GROUP // 8])
        scale = gl.expand_dims(scale_smem.load(gl.SliceLayout(2, words.type.layout)), 2)
        wide = (e4m3_to_float(scale) * 3.3230699894622897e35).to(gl.bfloat16)  # 2^118
        tile = eight_in_order(nvfp4_values(words, wide), ROWS, BLOCK_K)
    elif FORMAT == 2:
        tile = four_in_order(fp8_values(words), ROWS, BLOCK_K)
    else:
        tile = four_in_order(int8_values(words), ROWS, BLOCK_K)
    return gl.convert_layout(tile, gl.DotOperandLayout(0, SUMS, PER_WORD), assert_trivial=True)


@gluon.jit
def _request_weights(
    W, S, w_smem, scale_smem, full, place, row, up_row, k,
    ROWS: gl.constexpr, PER_WORD: gl.constexpr, GROUP: gl.constexpr, HAS_UP: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Request the weights and scales of one step. Gate and up rows lie one after the other in shared memory."""
    mbarrier.expect(full.index(place), BYTES)
    tma.async_copy_global_to_shared(W, [row, k // PER_WORD], full.index(place), w_smem.index(place * (2 if HAS_UP else 1)))
    if GROUP > 0:
        tma.async_copy_global_to_shared(S, [row, k // GROUP], full.index(place), scale_smem.index(place * (2 if HAS_UP else 1)))
    if HAS_UP:
        tma.async_copy_global_to_shared(W, [up_row, k // PER_WORD], full.index(place), w_smem.index(place * 2 + 1))
        if GROUP > 0:
            tma.async_copy_global_to_shared(S, [up_row, k // GROUP], full.index(place), scale_smem.index(place * 2 + 1))


@gluon.jit
def fetch(
    W, S, X, w_smem, scale_smem, x_smem, full, empty, N,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    PER_WORD: gl.constexpr, GROUP: gl.constexpr, SCALE_BYTES: gl.constexpr, HAS_UP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run the fetching warp. It requests weights before it waits for the kernel that computes the tokens."""
    ROW_BYTES: gl.constexpr = 4 * BLOCK_K // PER_WORD + (BLOCK_K // GROUP * SCALE_BYTES if GROUP > 0 else 0)
    BYTES: gl.constexpr = BLOCK_N * (2 if HAS_UP else 1) * ROW_BYTES + 2 * BLOCK_K * BLOCK_M
    row = gl.program_id(0) * BLOCK_N
    begin = gl.program_id(1) * (STEPS * BLOCK_K)
    for stage in gl.static_range(STAGES):
        k = begin + stage * BLOCK_K
        _request_weights(W, S, w_smem, scale_smem, full, stage, row, N + row, k, BLOCK_N, PER_WORD, GROUP, HAS_UP, BYTES)
    if PDL:
        wait_for_kernel_before()
    for stage in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(X, [0, begin + stage * BLOCK_K], full.index(stage), x_smem.index(stage))
    if PDL:
        let_next_start()  # after the wait, as in `dependent_launch`
    for step in range(STAGES, STEPS):
        place = step % STAGES
        k = begin + step * BLOCK_K
        # A place is released once per step that reuses it, so the phase is that of the previous step in this place.
        mbarrier.wait(empty.index(place), (step // STAGES - 1) & 1)
        _request_weights(W, S, w_smem, scale_smem, full, place, row, N + row, k, BLOCK_N, PER_WORD, GROUP, HAS_UP, BYTES)
        tma.async_copy_global_to_shared(X, [0, k], full.index(place), x_smem.index(place))


@gluon.jit
def _multiply(
    w_smem, scale_smem, x_smem, full, empty, scale, y, factor, parts, arrivals, softcap: gl.constexpr,
    M, N, scale_stride, y_stride, factor_stride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, SPLIT_K: gl.constexpr,
    KEEP_PARTS: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_SCALES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Run the multiplying warps."""
    HAS_UP: gl.constexpr = EPILOGUE == 1
    PER_WORD: gl.constexpr = 8 if FORMAT == 0 or FORMAT == 3 else 4
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    up = total
    row = gl.program_id(0) * BLOCK_N
    for step in range(STEPS):
        place = step % STAGES
        mbarrier.wait(full.index(place), (step // STAGES) & 1)
        x_KM = x_smem.index(place).permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, PER_WORD))
        first = place * (2 if HAS_UP else 1)
        tile = _weights(w_smem.index(first), scale_smem.index(first), SUMS, FORMAT, BLOCK_N, BLOCK_K, GROUP, WARPS)
        if BLOCK_SCALES:
            block = scale + (gl.program_id(1) * STEPS + step) * (BLOCK_K // 128)
            part = mma_v2(tile, x_KM, gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS))
            total += part * gl.load(block + row // 128 * scale_stride)
        else:
            total = mma_v2(tile, x_KM, total)
        if HAS_UP:
            tile = _weights(w_smem.index(first + 1), scale_smem.index(first + 1), SUMS, FORMAT, BLOCK_N, BLOCK_K, GROUP, WARPS)
            if BLOCK_SCALES:
                part = mma_v2(tile, x_KM, gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS))
                up += part * gl.load(block + (N + row) // 128 * scale_stride)
            else:
                up = mma_v2(tile, x_KM, up)
        # Release the place if a later step uses it. Nothing waits for the other places.
        if step + STAGES < STEPS:
            gl.thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
    store_outputs(
        total, up, scale, y, factor, parts, arrivals, M, N, scale_stride, y_stride, factor_stride, softcap,
        BLOCK_N, BLOCK_M, SPLIT_K, KEEP_PARTS, EPILOGUE, FORMAT, BLOCK_SCALES, WARPS,
    )  # fmt: skip


@gluon.jit
def _scaled(total, scale, rows, scale_stride, N, first_row, FORMAT: gl.constexpr):
    """Multiply sums by the scale of each row, or of the whole matrix if `scale_stride` is 0."""
    row_scale = gl.load(scale + (first_row + rows) * scale_stride, mask=rows < N, other=0.0).to(gl.float32)
    if FORMAT == 3:
        row_scale *= 256.0
    return total * row_scale


@gluon.jit
def store_outputs(
    total, up, scale, y, factor, parts, arrivals, M, N, scale_stride, y_stride, factor_stride, softcap: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, SPLIT_K: gl.constexpr, KEEP_PARTS: gl.constexpr, EPILOGUE: gl.constexpr,
    FORMAT: gl.constexpr, BLOCK_SCALES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Scale sums [BLOCK_N, BLOCK_M] and store them."""
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    HAS_UP: gl.constexpr = EPILOGUE == 1
    rows = gl.expand_dims(gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT)), 1)
    tokens = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT)), 0)
    total = gl.convert_layout(total, OUT)
    if HAS_UP:
        up = gl.convert_layout(up, OUT)
    if FORMAT != 0 and not BLOCK_SCALES:
        total = _scaled(total, scale, rows, scale_stride, N, 0, FORMAT)
        if HAS_UP:
            up = _scaled(up, scale, rows, scale_stride, N, N, FORMAT)
    store_sums(
        total, up, rows, tokens, y, factor, parts, arrivals + gl.program_id(0), M, N, y_stride, factor_stride, softcap,
        SPLIT_K, KEEP_PARTS, EPILOGUE,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def _quantised_stream_kernel(
    W, S, X, scale, y, factor, parts, arrivals, softcap: gl.constexpr, M, N, scale_stride, y_stride, factor_stride,
    K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, BLOCK_SCALES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr, KEEP_PARTS: gl.constexpr,
    STAGES: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK_N weight rows, all tokens], over K or one of SPLIT_K parts of K.

    GROUP is the number of inputs that share a scale of one row, or 0 if scales are not fetched with the weights.
    """
    HAS_UP: gl.constexpr = EPILOGUE == 1
    PER_WORD: gl.constexpr = 8 if FORMAT == 0 or FORMAT == 3 else 4
    STEPS: gl.constexpr = K // SPLIT_K // BLOCK_K
    PLACES: gl.constexpr = STAGES * (2 if HAS_UP else 1)
    SCALE_BYTES: gl.constexpr = 1 if FORMAT == 3 else 2
    w_smem = gl.allocate_shared_memory(gl.int32, [PLACES, BLOCK_N, BLOCK_K // PER_WORD], W.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], X.layout)
    scale_smem = w_smem
    if GROUP > 0:
        scale_smem = gl.allocate_shared_memory(S.dtype, [PLACES, BLOCK_N, BLOCK_K // GROUP], S.layout)
    full, empty = make_ring(STAGES, 1)
    gl.warp_specialize(
        [
            (_multiply, (
                w_smem, scale_smem, x_smem, full, empty, scale, y, factor, parts, arrivals, softcap,
                M, N, scale_stride, y_stride, factor_stride,
                BLOCK_M, BLOCK_N, BLOCK_K, STEPS, SPLIT_K, KEEP_PARTS, STAGES, EPILOGUE, FORMAT, GROUP, BLOCK_SCALES, WARPS,
            )),
            (fetch, (
                W, S, X, w_smem, scale_smem, x_smem, full, empty, N,
                BLOCK_M, BLOCK_N, BLOCK_K, STEPS, STAGES, PER_WORD, GROUP, SCALE_BYTES, HAS_UP, PDL,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def blocks_of(num_tokens: int) -> int:
    """Return the columns of a tile for this many tokens. The tensor cores take eight at a time."""
    return max(8, 1 << (num_tokens - 1).bit_length())


def _registers(num_tokens: int, num_programs: int, epilogue: int, weight_format: int) -> int:
    """Return the registers per thread. They decide how many programs, also of the next kernel, fit on a multiprocessor.

    With 64 there are four programs, with 96 and 128 two. If two are enough, further ones would be unevenly spread, or belong to
    the next kernel, which slows this one down.
    """
    if num_tokens <= 8:
        return 64 if num_programs > RESIDENT_PROGRAMS else 128 if epilogue == GATED else 96
    return 80 if epilogue == GATED and weight_format in (INT8, FP8) else 128


def describe_stream(x_MK: Tensor, matrix: PackedMatrix, out: Tensor, tile: Tile, epilogue: int = PLAIN, **extra: Any) -> Launch:
    """Describe the launch of this kernel, as in `few_tokens.describe`.

    `extra` also has workspace, for a split K whose parts are summed here.
    """
    num_tokens, size_k = x_MK.shape
    num_rows = out.shape[-1]
    block_m = blocks_of(num_tokens)
    factor, softcap, pdl = extra.get("factor"), float(extra.get("softcap") or 1.0), bool(extra.get("pdl", False))
    per_word = VALUES_PER_WORD[matrix.format]
    has_groups = matrix.format in (INT4, NVFP4)
    scales = matrix.scale if has_groups else matrix.words

    def tiles(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
        swizzle = min(128, columns * tensor.element_size())
        layout = gl.NVMMASharedLayout(swizzle if swizzle >= 32 else 0, 8 * tensor.element_size(), 2)
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)

    is_joined = tile.split_k > 1 and out.dim() == 2
    parts, arrivals = extra["workspace"] if is_joined else (out, out)
    programs = cdiv(num_rows, tile.block_n)
    assert num_tokens <= MAX_TOKENS, f"{num_tokens} tokens do not fit into a tile"
    row_warps = 1 if tile.kernel == "bits" else tile.num_warps  # The warps of `hopper_bits` all have the same rows.
    assert tile.block_n % (16 * row_warps) == 0, f"{tile} has too few rows for its warps"
    assert size_k % (tile.block_k * tile.split_k) == 0, f"{tile} does not divide {size_k} inputs"
    if is_joined:
        planes = tile.split_k * (2 if epilogue == GATED else 1)
        assert planes * num_tokens * num_rows <= parts.numel(), f"{tile} needs more workspace than is allocated"
        assert programs <= arrivals.numel(), f"{tile} needs more arrival counters than are allocated"
    weight_rows = tile.block_n * (2 if epilogue == GATED else 1)
    scale_bytes = scales.element_size() * tile.block_k // matrix.group if has_groups else 0
    per_stage = weight_rows * (4 * tile.block_k // per_word + scale_bytes) + 2 * block_m * tile.block_k
    # The sums pass through shared memory on their way to the layout of the outputs.
    left = SHARED_BYTES[HOPPER] - RESERVED - 4 * tile.block_n * block_m * (tile.num_warps // row_warps)
    stages = min(tile.num_stages, size_k // tile.split_k // tile.block_k, left // per_stage)
    row_scale = matrix.global_scale if matrix.format == NVFP4 else matrix.scale
    arguments: dict[str, Any] = {
        "W": tiles(matrix.words, tile.block_n, tile.block_k // per_word),
        "S": tiles(scales, tile.block_n, tile.block_k // (matrix.group if has_groups else per_word)),
        "X": tiles(x_MK, block_m, tile.block_k),
        "scale": row_scale,
        "y": out,
        "factor": x_MK if factor is None else factor,
        "parts": parts,
        "arrivals": arrivals,
        "softcap": softcap,
        "M": num_tokens,
        "N": num_rows,
        "scale_stride": 0 if row_scale is None or row_scale.dim() < 2 else row_scale.stride(0),
        "y_stride": out.stride(-2),
        "factor_stride": 0 if factor is None else factor.stride(0),
        "K": size_k,
        "FORMAT": matrix.format,
        "GROUP": matrix.group if has_groups else 0,
        "BLOCK_SCALES": matrix.has_blocks,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SPLIT_K": tile.split_k,
        "KEEP_PARTS": out.dim() == 3,
        "STAGES": stages,
        "EPILOGUE": epilogue,
        "PDL": pdl,
        "WARPS": tile.num_warps,
    }
    registers = {"maxnreg": _registers(num_tokens, programs * tile.split_k, epilogue, matrix.format)}
    return Launch(_quantised_stream_kernel, (programs, tile.split_k), arguments, options(tile.num_warps, pdl) | registers)
