"""Linear layers for few tokens on Hopper, in Gluon. The bulk copy engine streams the weights and starts early.

The products are the same as in `few_tokens`. With dependent launch, programs start while the previous kernel is still running.
Here one warp of each program first requests as many weight tiles as fit in shared memory, because weights depend on no kernel.
Only then does it wait for the tokens. Memory is therefore not idle between two kernels. `_tiles_kernel` starts with an empty
pipeline, and this kernel starts with a full one. The fetching warp keeps requesting ahead while the other four or eight warps
multiply. Weights must be complete before the previous kernel starts. That kernel may write only tokens and `factor`.

Only the fetching warp waits for the previous kernel. That kernel may still read or write outputs, parts, counters and `factor`.
The other warps touch these only after their first tokens arrive, which were requested after that wait.

A tile of weights is the left operand of the tensor cores. Tokens are columns. There are up to 128, in one block or in two (64
and the rest), and each block is a power of two.

Shapes: M tokens · K inputs · N outputs · F gated outputs (W has 2F rows).
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from culet.kernels.triton.barriers import make_ring
from culet.kernels.triton.dependent_launch import options
from culet.kernels.triton.launch import Launch, cdiv
from culet.kernels.triton.linear.epilogue import store_sums
from culet.kernels.triton.linear.tiles import GATED, PLAIN, Tile

MAX_TOKENS = 128
SMEM = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def wait_for_kernel_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_start():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _request_weights(W, w_smem, up_smem, full, place, row, up_row, k, HAS_UP: gl.constexpr, BYTES: gl.constexpr):
    """Request the weights of one step. Their barrier also waits for the tokens. Rows past the end of the matrix are zeros."""
    mbarrier.expect(full.index(place), BYTES)
    tma.async_copy_global_to_shared(W, [row, k], full.index(place), w_smem.index(place))
    if HAS_UP:
        tma.async_copy_global_to_shared(W, [up_row, k], full.index(place), up_smem.index(place))


@gluon.jit
def _request_tokens(X, REST, x_smem, rest_smem, full, place, k, BLOCK_M: gl.constexpr, BLOCK_REST: gl.constexpr):
    """Request the tokens of one step. Tokens past the last are zeros."""
    tma.async_copy_global_to_shared(X, [0, k], full.index(place), x_smem.index(place))
    if BLOCK_REST > 0:
        tma.async_copy_global_to_shared(REST, [BLOCK_M, k], full.index(place), rest_smem.index(place))


@gluon.jit
def _fetch(
    W, X, REST, w_smem, up_smem, x_smem, rest_smem, full, empty, N,
    BLOCK_M: gl.constexpr, BLOCK_REST: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, HAS_UP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run the fetching warp."""
    BYTES: gl.constexpr = 2 * BLOCK_K * (BLOCK_N * (2 if HAS_UP else 1) + BLOCK_M + BLOCK_REST)
    row = gl.program_id(0) * BLOCK_N
    begin = gl.program_id(1) * (STEPS * BLOCK_K)
    for stage in gl.static_range(STAGES):
        _request_weights(W, w_smem, up_smem, full, stage, row, N + row, begin + stage * BLOCK_K, HAS_UP, BYTES)
    if PDL:
        wait_for_kernel_before()
    for stage in gl.static_range(STAGES):
        _request_tokens(X, REST, x_smem, rest_smem, full, stage, begin + stage * BLOCK_K, BLOCK_M, BLOCK_REST)
    if PDL:
        let_next_start()  # after the wait, as in `dependent_launch`
    for step in range(STAGES, STEPS):
        place = step % STAGES
        k = begin + step * BLOCK_K
        # A place is released once per step that reuses it, so the phase is that of the previous step in this place.
        mbarrier.wait(empty.index(place), (step // STAGES - 1) & 1)
        _request_weights(W, w_smem, up_smem, full, place, row, N + row, k, HAS_UP, BYTES)
        _request_tokens(X, REST, x_smem, rest_smem, full, place, k, BLOCK_M, BLOCK_REST)


@gluon.jit
def _multiply(
    w_smem, up_smem, x_smem, rest_smem, full, empty, y, factor, parts, arrivals, softcap: gl.constexpr,
    M, N, y_stride, factor_stride,
    BLOCK_M: gl.constexpr, BLOCK_REST: gl.constexpr, BLOCK_N: gl.constexpr, STEPS: gl.constexpr, SPLIT_K: gl.constexpr,
    KEEP_PARTS: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Run the multiplying warps."""
    HAS_UP: gl.constexpr = EPILOGUE == 1
    # number of products that may still run when the place of the previous step is released
    LEFT: gl.constexpr = (2 if HAS_UP else 1) * (2 if BLOCK_REST > 0 else 1)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    REST_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_REST if BLOCK_REST > 0 else 16, 16])
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    up = total
    rest = gl.zeros([BLOCK_N, BLOCK_REST if BLOCK_REST > 0 else 16], gl.float32, REST_SUMS)
    rest_up = rest
    for step in range(STEPS):
        place = step % STAGES
        mbarrier.wait(full.index(place), (step // STAGES) & 1)
        x_KM = x_smem.index(place).permute((1, 0))
        total = warpgroup_mma(w_smem.index(place), x_KM, total, is_async=True)
        if HAS_UP:
            up = warpgroup_mma(up_smem.index(place), x_KM, up, is_async=True)
        if BLOCK_REST > 0:
            rest_KM = rest_smem.index(place).permute((1, 0))
            rest = warpgroup_mma(w_smem.index(place), rest_KM, rest, is_async=True)
            if HAS_UP:
                rest_up = warpgroup_mma(up_smem.index(place), rest_KM, rest_up, is_async=True)
                total, up, rest, rest_up = warpgroup_mma_wait(LEFT, deps=(total, up, rest, rest_up))
            else:
                total, rest = warpgroup_mma_wait(LEFT, deps=(total, rest))
        elif HAS_UP:
            total, up = warpgroup_mma_wait(LEFT, deps=(total, up))
        else:
            total = warpgroup_mma_wait(LEFT, deps=(total,))
        # The previous step is done. Release its place if a later step uses it. Nothing waits for the other places.
        if (step > 0) & (step - 1 + STAGES < STEPS):
            gl.thread_barrier()
            mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
    total, up, rest, rest_up = warpgroup_mma_wait(0, deps=(total, up, rest, rest_up))
    _store_outputs(
        total, up, y, factor, parts, arrivals, 0, M, N, y_stride, factor_stride, softcap,
        BLOCK_N, BLOCK_M, SPLIT_K, KEEP_PARTS, EPILOGUE, WARPS,
    )  # fmt: skip
    if BLOCK_REST > 0:
        _store_outputs(
            rest, rest_up, y, factor, parts, arrivals, BLOCK_M, M, N, y_stride, factor_stride, softcap,
            BLOCK_N, BLOCK_REST, SPLIT_K, KEEP_PARTS, EPILOGUE, WARPS,
        )  # fmt: skip


@gluon.jit
def _store_outputs(
    total, up, y, factor, parts, arrivals, first_token: gl.constexpr, M, N, y_stride, factor_stride, softcap: gl.constexpr,
    BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, SPLIT_K: gl.constexpr, KEEP_PARTS: gl.constexpr, EPILOGUE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Store sums [BLOCK_N, COLUMNS], those of one block of tokens."""
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    rows = gl.expand_dims(gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT)), 1)
    tokens = gl.expand_dims(first_token + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT)), 0)
    # Each block of tokens has a counter, because a program may be the last for one block and not for the other.
    arrived = arrivals + 2 * gl.program_id(0) + (1 if first_token > 0 else 0)
    if EPILOGUE == 1:
        up = gl.convert_layout(up, OUT)
    store_sums(
        gl.convert_layout(total, OUT), up, rows, tokens, y, factor, parts, arrived, M, N, y_stride, factor_stride, softcap,
        SPLIT_K, KEEP_PARTS, EPILOGUE,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def _stream_kernel(
    W, X, REST, y, factor, parts, arrivals, softcap: gl.constexpr, M, N, y_stride, factor_stride,
    K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_REST: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SPLIT_K: gl.constexpr, KEEP_PARTS: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK_N weight rows, all tokens], over K or one of SPLIT_K parts of K."""
    HAS_UP: gl.constexpr = EPILOGUE == 1
    STEPS: gl.constexpr = K // SPLIT_K // BLOCK_K
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_K], W.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], X.layout)
    up_smem = w_smem
    rest_smem = x_smem
    if HAS_UP:
        up_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_K], W.layout)
    if BLOCK_REST > 0:
        rest_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_REST, BLOCK_K], X.layout)
    full, empty = make_ring(STAGES, 1)
    gl.warp_specialize(
        [
            (_multiply, (
                w_smem, up_smem, x_smem, rest_smem, full, empty, y, factor, parts, arrivals, softcap,
                M, N, y_stride, factor_stride,
                BLOCK_M, BLOCK_REST, BLOCK_N, STEPS, SPLIT_K, KEEP_PARTS, STAGES, EPILOGUE, WARPS,
            )),
            (_fetch, (
                W, X, REST, w_smem, up_smem, x_smem, rest_smem, full, empty, N,
                BLOCK_M, BLOCK_REST, BLOCK_N, BLOCK_K, STEPS, STAGES, HAS_UP, PDL,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def blocks_of(num_tokens: int) -> tuple[int, int]:
    """Return the columns of the first and second blocks of tokens. The second is 0 if there is only one block."""
    if num_tokens <= 64:
        return max(16, 1 << (num_tokens - 1).bit_length()), 0
    rest = 1 << (num_tokens - 65).bit_length()
    return (128, 0) if rest >= 64 else (64, max(16, rest))


def describe_stream(x_MK: Tensor, weight_NK: Tensor, out: Tensor, tile: Tile, epilogue: int = PLAIN, **extra: Any) -> Launch:
    """Describe the launch of this kernel, as in `few_tokens.describe`.

    `extra` also has workspace, for a split K whose parts are summed here.
    """
    num_tokens, size_k = x_MK.shape
    num_rows = out.shape[-1]
    block_m, rest = blocks_of(num_tokens)
    factor, softcap, pdl = extra.get("factor"), float(extra.get("softcap") or 1.0), bool(extra.get("pdl", False))

    def tiles(matrix: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, tile.block_k], SMEM)

    is_joined = tile.split_k > 1 and out.dim() == 2
    parts, arrivals = extra["workspace"] if is_joined else (out, out)
    programs = cdiv(num_rows, tile.block_n)
    assert num_tokens <= MAX_TOKENS, f"{num_tokens} tokens do not fit into two blocks"
    assert tile.block_n % (16 * tile.num_warps) == 0, f"{tile} has too few rows for its warps"
    assert size_k % (tile.block_k * tile.split_k) == 0, f"{tile} does not divide {size_k} inputs"
    assert tile.split_k == 1 or epilogue != GATED, f"{tile}: parts of gate and up cannot be joined"
    if is_joined:
        assert tile.split_k * num_tokens * num_rows <= parts.numel(), f"{tile} needs more workspace than is allocated"
        assert 2 * programs <= arrivals.numel(), f"{tile} needs more arrival counters than are allocated"
    arguments: dict[str, Any] = {
        "W": tiles(weight_NK, tile.block_n),
        "X": tiles(x_MK, block_m),
        "REST": tiles(x_MK, rest or 16),
        "y": out,
        "factor": x_MK if factor is None else factor,
        "parts": parts,
        "arrivals": arrivals,
        "softcap": softcap,
        "M": num_tokens,
        "N": num_rows,
        "y_stride": out.stride(-2),
        "factor_stride": 0 if factor is None else factor.stride(0),
        "K": size_k,
        "BLOCK_M": block_m,
        "BLOCK_REST": rest,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SPLIT_K": tile.split_k,
        "KEEP_PARTS": out.dim() == 3,
        "STAGES": min(tile.num_stages, size_k // tile.split_k // tile.block_k),
        "EPILOGUE": epilogue,
        "PDL": pdl,
        "WARPS": tile.num_warps,
    }
    # Triton would give one program all registers. Then neither a second program nor one of the next kernel could start.
    registers = {"maxnreg": 64 if block_m <= 32 else 128 if tile.num_warps == 4 else 80}
    return Launch(_stream_kernel, (programs, tile.split_k), arguments, options(tile.num_warps, pdl) | registers)
