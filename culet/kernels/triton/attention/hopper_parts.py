"""Attention on Hopper in Gluon. These are the parts that prefill and decode share at head dim 512.

A program of 64 packed query rows has three roles. One warp fetches key tiles with the bulk copy engine. One warpgroup scores
them. It holds all 64 scores of a row, so the softmax needs no exchange between warpgroups. Two warpgroups multiply
probabilities and values. Each has half of the columns, because 64 x 512 sums fill their registers. While the values of tile i
are multiplied, tile i + 1 is scored and tile i + 2 is being fetched. With a latent, probabilities overwrite k_rot, which is
not read again after a tile is scored.

Shared memory:

    q      queries
    k      keys
    v      values (with a latent, the first HEAD columns of the rows)
    r      k_rot or probabilities
    row    one number per packed row, with two places for the factors of earlier sums and one for the final sums

Barriers:

    full_k, full_v      a stage has arrived
    empty_k, empty_v    a stage may be overwritten
    ready               probabilities (0, 1), queries (2) or final sums (3) are written
    taken               probabilities (0, 1) have been read
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from culet.kernels.triton.attention.key_tiles import LOG2E, UNSEEN
from culet.kernels.types import PagedKV

KEYS = 64  # keys per tile


@gluon.jit
def _copy(DESC, y, y_half, x, barrier, smem, COLUMNS: gl.constexpr, ROWS: gl.constexpr):
    """Fetch a tile of ROWS x COLUMNS at row y. If boxes have half the rows and 64 columns, fetch its halves at y and y_half."""
    if DESC.block_shape[0] == ROWS:
        tma.async_copy_global_to_shared(DESC, [y, x], barrier, smem)
    else:
        for column in gl.static_range(0, COLUMNS, 64):
            first = smem.slice(0, ROWS // 2, dim=0).slice(column, 64, dim=1)
            second = smem.slice(ROWS // 2, ROWS // 2, dim=0).slice(column, 64, dim=1)
            tma.async_copy_global_to_shared(DESC, [y, x + column], barrier, first)
            tma.async_copy_global_to_shared(DESC, [y_half, x + column], barrier, second)


@gluon.jit
def fetch_tile(
    K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v, count, y, y_half, x,
    ROT: gl.constexpr, BN: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch the `count`-th key tile of this program, at row y and column x of the descriptors, into its stage.

    If a page holds only half a tile, descriptors cover half a tile and the second half is at row y_half.
    """
    stage = count % STAGES
    phase = (count // STAGES) & 1
    if ROT > 0:
        mbarrier.wait(empty_v.index(stage), phase ^ 1)
        mbarrier.expect(full_k.index(stage), 2 * BN * (HEAD + ROT))
        _copy(V_DESC, y, y_half, x, full_k.index(stage), v_smem.index(stage), HEAD, BN)
        _copy(R_DESC, y, y_half, x + HEAD, full_k.index(stage), r_smem.index(stage), ROT, BN)
    else:
        mbarrier.wait(empty_k.index(stage), phase ^ 1)
        mbarrier.expect(full_k.index(stage), 2 * BN * HEAD)
        _copy(K_DESC, y, y_half, x, full_k.index(stage), k_smem.index(stage), HEAD, BN)
        mbarrier.wait(empty_v.index(stage), phase ^ 1)
        mbarrier.expect(full_v.index(stage), 2 * BN * HEAD)
        _copy(V_DESC, y, y_half, x, full_v.index(stage), v_smem.index(stage), HEAD, BN)


@gluon.jit
def score(q_smem, k_smem, v_smem, r_smem, stage, S_LAYOUT: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, ROT: gl.constexpr):
    """Start computing the scores of a stage's keys."""
    s = gl.zeros([M, BN], gl.float32, S_LAYOUT)
    if ROT > 0:
        # K is the latent's columns from ROT on. A slice starts at a multiple of its length, so there are four equal slices.
        rows = v_smem.index(stage)
        k_0 = rows.slice(ROT, ROT, dim=1).permute((1, 0))
        k_1 = rows.slice(2 * ROT, ROT, dim=1).permute((1, 0))
        k_2 = rows.slice(3 * ROT, ROT, dim=1).permute((1, 0))
        s = warpgroup_mma(q_smem.slice(0, ROT, dim=1), k_0, s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_smem.slice(ROT, ROT, dim=1), k_1, s, is_async=True)
        s = warpgroup_mma(q_smem.slice(2 * ROT, ROT, dim=1), k_2, s, is_async=True)
        s = warpgroup_mma(q_smem.slice(3 * ROT, ROT, dim=1), r_smem.index(stage).permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    return s


@gluon.jit
def softmax(s, m, total, last, key, MASKED: gl.constexpr, WINDOW: gl.constexpr):
    """Return the probabilities of a tile, the running maximum and sum, and the factor for earlier sums.

    `last` is the last key that each row sees.
    """
    if MASKED:
        seen = gl.expand_dims(key, 0) <= gl.expand_dims(last, 1)
        if WINDOW > 0:
            seen = seen & (gl.expand_dims(key, 0) > gl.expand_dims(last - WINDOW, 1))
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * LOG2E)
    p = gl.exp2(s * LOG2E - gl.expand_dims(m_new, 1))
    shrink = gl.exp2(m - m_new)
    return p, m_new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _place(r_smem, count, STAGES: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, ROT: gl.constexpr):
    """Return the memory for the probabilities of the `count`-th tile."""
    if ROT > 0:
        place = r_smem.index(count % STAGES)._reinterpret(r_smem.dtype, [M, BN], gl.NVMMASharedLayout(128, 16, 2))
    else:
        place = r_smem.index(count & 1)
    return place


@gluon.jit
def score_tiles(
    q_smem, k_smem, v_smem, r_smem, row_smem, full_k, empty_k, ready, taken, last, first_key, num_tiles,
    WINDOW: gl.constexpr, ROT: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Score `num_tiles` key tiles from `first_key` on, in the scoring warpgroup. Return the rows' final sums and maxima."""
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    key = first_key + gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))
    m = gl.full([M], UNSEEN, gl.float32, ROWS)
    total = gl.zeros([M], gl.float32, ROWS)
    mbarrier.wait(ready.index(2), 0)
    for count in range(num_tiles):
        stage = count % STAGES
        mbarrier.wait(full_k.index(stage), (count // STAGES) & 1)
        s = score(q_smem, k_smem, v_smem, r_smem, stage, S_LAYOUT, M, BN, ROT)
        s = warpgroup_mma_wait(0, deps=(s,))
        if ROT == 0:
            gl.thread_barrier()
            mbarrier.arrive(empty_k.index(stage), count=1)
        p, m, total, shrink = softmax(s, m, total, last, key, True, WINDOW)
        key += BN
        mbarrier.wait(taken.index(count & 1), ((count // 2) & 1) ^ 1)
        _place(r_smem, count, STAGES, M, BN, ROT).store(p.to(q_smem.dtype))
        row_smem.index(count & 1).store(shrink)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready.index(count & 1), count=1)
    row_smem.index(2).store(total)
    gl.thread_barrier()
    mbarrier.arrive(ready.index(3), count=1)
    return total, m


@gluon.jit
def _clear_unwritten(v_smem, stage, written, BN: gl.constexpr, HEAD: gl.constexpr):
    """Zero the rows of a stage from `written` on, because a probability of 0 times NaN would be NaN."""
    if written < BN:
        CLEAR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        is_written = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(1, CLEAR)) < written, 1)
        for column in gl.static_range(0, HEAD, 128):
            part = v_smem.index(stage).slice(column, 128, dim=1)
            part.store(gl.where(is_written, part.load(CLEAR), 0.0).to(v_smem.dtype))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _value_tile(
    v_smem, r_smem, row_smem, full, empty_v, ready, taken, count, o, written,
    IS_LAST: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the weighted values of the `count`-th tile to `o` and return it."""
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    if IS_LAST:
        _clear_unwritten(v_smem, stage, written, BN, HEAD)
    mbarrier.wait(ready.index(count & 1), (count // 2) & 1)
    o = o * gl.expand_dims(row_smem.index(count & 1).load(gl.SliceLayout(1, O_LAYOUT)), 1)
    o = warpgroup_mma(_place(r_smem, count, STAGES, M, BN, ROT), v_smem.index(stage), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,))
    gl.thread_barrier()
    mbarrier.arrive(empty_v.index(stage), count=1)
    mbarrier.arrive(taken.index(count & 1), count=1)
    return o


@gluon.jit
def value_tiles(
    v_smem, r_smem, row_smem, full, empty_v, ready, taken, num_tiles, written,
    HEAD: gl.constexpr, ROT: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the attention of the rows over `num_tiles` >= 1 key tiles. The two multiplying warpgroups run this.

    Only `written` keys of the last tile were written. The memory after them may hold NaN, which must not reach the sums.
    `full` has the barriers that signal the arrival of values.
    """
    o = gl.zeros([M, HEAD], gl.float32, O_LAYOUT)
    for count in range(num_tiles - 1):
        o = _value_tile(
            v_smem, r_smem, row_smem, full, empty_v, ready, taken, count, o, written,
            False, HEAD, ROT, M, BN, STAGES, O_LAYOUT,
        )  # fmt: skip
    if ROT > 0:
        # With a latent, the scoring warpgroup reads the same rows. Wait until it is done before clearing them.
        mbarrier.wait(ready.index((num_tiles - 1) & 1), ((num_tiles - 1) // 2) & 1)
    o = _value_tile(
        v_smem, r_smem, row_smem, full, empty_v, ready, taken, num_tiles - 1, o, written,
        True, HEAD, ROT, M, BN, STAGES, O_LAYOUT,
    )  # fmt: skip
    mbarrier.wait(ready.index(3), 0)
    total = row_smem.index(2).load(gl.SliceLayout(1, O_LAYOUT))
    return o * gl.expand_dims(1.0 / gl.where(total > 0.0, total, 1.0), 1)


@gluon.jit
def allocate(
    dtype: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, STAGES: gl.constexpr
):
    """Allocate a program's shared memory and barriers. 128 rows are 64 per warpgroup, so q and row exist twice."""
    SMEM: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if M == 64:
        q_smem = gl.allocate_shared_memory(dtype, [M, HEAD], SMEM)
    else:
        q_smem = gl.allocate_shared_memory(dtype, [2, M // 2, HEAD], SMEM)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, HEAD], SMEM)
    row_smem = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if ROT > 0:
        k_smem = v_smem
        r_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, ROT], SMEM)
    else:
        k_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, HEAD], SMEM)
        if M == 64:
            r_smem = gl.allocate_shared_memory(dtype, [2, M, BN], SMEM)
        else:
            r_smem = k_smem
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=M // 64)
        mbarrier.init(empty_v.index(stage), count=M // 64)
    for place in gl.static_range(4):
        mbarrier.init(ready.index(place), count=1)
    for place in gl.static_range(2):
        mbarrier.init(taken.index(place), count=1)
    fence_async_shared()
    return q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v, ready, taken


_TILE_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)  # created once, since that takes longer than creating a descriptor


def describe(matrix: Tensor, columns: int, *, in_halves: bool = False) -> TensorDescriptor:
    """Return a descriptor of a matrix in tiles of KEYS rows x `columns`, or in half tiles of 64 columns."""
    box = [KEYS // 2, 64] if in_halves else [KEYS, columns]
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, _TILE_LAYOUT)


def page_matrix(plane: Tensor) -> Tensor:
    """View a plane [page, kv_head, token, width] as one matrix of rows of `width`, from its first row to its last."""
    width = plane.shape[-1]
    span = 1 + sum((size - 1) * stride for size, stride in zip(plane.shape, plane.stride(), strict=True))
    return plane.as_strided((span // width, width), (width, 1))


def pages_fit(kv: PagedKV, part: int = KEYS) -> bool:
    """Return whether key tiles can be fetched from these pages in parts of `part` keys.

    Elements must have 16 bits and rows must be equally spaced.
    """
    return kv.planes.element_size() == 2 and kv.page_tokens % part == 0 and kv.planes.stride(1) % kv.width == 0
