"""Attention on Hopper in Gluon: the parts that prefill and decode share.

One warp fetches key tiles with the bulk copy engine; two warpgroups compute. While the values of tile i are multiplied, the
scores of tile i + 1 are ready and pass through the softmax, so the matrix units do not wait for it. At head dim 512 both
warpgroups share 64 packed rows: each scores half of the keys and then accumulates half of the columns, so the
probabilities pass through shared memory (over the latent: through the rows that held k_rot, which nobody reads any more). At head
dim 256 each warpgroup has 64 rows of its own.

Names of shared memory: q queries, k keys, v values (over the latent: the rows' first HEAD columns), r k_rot or probabilities,
row two numbers per packed row. Barriers: full_* a stage has arrived, empty_* it may be overwritten.
"""

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

from culet.kernels.attention_inputs import PagedKV

LOG2E = gl.constexpr(1.4426950408889634)
UNSEEN = gl.constexpr(-1.0e30)  # running maximum before any key; finite, so that (-inf) - UNSEEN stays -inf
KEYS = 64  # keys of a tile


@gluon.jit
def fetch_tile(
    K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v, count, y, x,
    ROT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch the `count`-th key tile of this program, at row y and column x of the descriptors, into its stage."""
    stage = count % STAGES
    phase = (count // STAGES) & 1
    if ROT > 0:
        mbarrier.wait(empty_v.index(stage), phase ^ 1)
        mbarrier.expect(full_k.index(stage), V_DESC.block_type.nbytes + R_DESC.block_type.nbytes)
        tma.async_copy_global_to_shared(V_DESC, [y, x], full_k.index(stage), v_smem.index(stage))
        tma.async_copy_global_to_shared(R_DESC, [y, x + 4 * ROT], full_k.index(stage), r_smem.index(stage))
    else:
        mbarrier.wait(empty_k.index(stage), phase ^ 1)
        mbarrier.expect(full_k.index(stage), K_DESC.block_type.nbytes)
        tma.async_copy_global_to_shared(K_DESC, [y, x], full_k.index(stage), k_smem.index(stage))
        mbarrier.wait(empty_v.index(stage), phase ^ 1)
        mbarrier.expect(full_v.index(stage), V_DESC.block_type.nbytes)
        tma.async_copy_global_to_shared(V_DESC, [y, x], full_v.index(stage), v_smem.index(stage))


@gluon.jit
def _score(q_smem, k_smem, v_smem, r_smem, stage, S_LAYOUT: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, ROT: gl.constexpr):
    """Issue the scores of a stage's keys."""
    s = gl.zeros([M, BN], gl.float32, S_LAYOUT)
    if ROT > 0:
        # K is the latent's columns from ROT on. Slices start at multiples of their length, hence four of equal length.
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
def _softmax(s, m, total, last, key, MASKED: gl.constexpr, WINDOW: gl.constexpr, SHARED: gl.constexpr):
    """Probabilities of a tile, the running maximum and sum, the factor by which earlier sums shrink.

    `last` is the last key each row sees. With SHARED the sum stays spread over the columns until the end, which saves an
    exchange between the warpgroups.
    """
    if MASKED:
        seen = gl.expand_dims(key, 0) <= gl.expand_dims(last, 1)
        if WINDOW > 0:
            seen = seen & (gl.expand_dims(key, 0) > gl.expand_dims(last - WINDOW, 1))
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * LOG2E)
    p = gl.exp2(s * LOG2E - gl.expand_dims(m_new, 1))
    shrink = gl.exp2(m - m_new)
    if SHARED:
        total = total * gl.expand_dims(shrink, 1) + p
    else:
        total = total * shrink + gl.sum(p, 1)
    return p, m_new, total, shrink


@gluon.jit
def _probabilities(r_smem, count, STAGES: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, ROT: gl.constexpr):
    """Where the probabilities of the `count`-th tile lie, if the warpgroups share rows."""
    if ROT > 0:
        place = r_smem.index(count % STAGES)._reinterpret(r_smem.dtype, [M, BN], gl.NVMMASharedLayout(128, 16, 2))
    else:
        place = r_smem.index(count & 1)
    return place


@gluon.jit
def _step(
    q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v, count, o, m, total, shrink, p_operand, last, key,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, ROT: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply the values of tile `count` while tile count + 1 is scored and passes through the softmax."""
    SHARED: gl.constexpr = M == 64
    stage = count % STAGES
    after = (count + 1) % STAGES
    mbarrier.wait(full_k.index(after), ((count + 1) // STAGES) & 1)
    s = _score(q_smem, k_smem, v_smem, r_smem, after, S_LAYOUT, M, BN, ROT)
    if SHARED:
        o = o * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT)), 1)
    else:
        o = o * gl.expand_dims(row_smem.index(1).load(gl.SliceLayout(1, O_LAYOUT)), 1)
    if ROT == 0:
        mbarrier.wait(full_v.index(stage), (count // STAGES) & 1)
    if SHARED:
        o_next = warpgroup_mma(_probabilities(r_smem, count, STAGES, M, BN, ROT), v_smem.index(stage), o, is_async=True)
    else:
        o_next = warpgroup_mma(p_operand, v_smem.index(stage), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    if ROT == 0:
        gl.thread_barrier()
        mbarrier.arrive(empty_k.index(after), count=1)
    p, m, total, shrink = _softmax(s, m, total, last, key, MASKED, WINDOW, SHARED)
    if SHARED:
        _probabilities(r_smem, count + 1, STAGES, M, BN, ROT).store(p.to(q_smem.dtype))
        fence_async_shared()
    else:
        p_next = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        # These keep work where it is written, since the assembler does not move stores over the fence: the sum, that nobody
        # reads, keeps the softmax beside the multiplication of the values; the factor, read back once the next scores are
        # issued, keeps the shrinking of o beside those.
        row_smem.index(0).store(total)
        row_smem.index(1).store(shrink)
        fence_async_shared()
    o = warpgroup_mma_wait(0, deps=(o_next,))
    gl.thread_barrier()
    mbarrier.arrive(empty_v.index(stage), count=1)
    if not SHARED:
        p_operand = p_next
    return count + 1, o, m, total, shrink, p_operand


@gluon.jit
def attend(
    q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v,
    last, first_key, num_tiles, whole_begin, whole_end, row_end,
    WINDOW: gl.constexpr, ROT: gl.constexpr, HEAD: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Attention of the rows in q_smem over `num_tiles` >= 1 key tiles from `first_key` on: output, running sum and maximum.

    Tiles whole_begin .. whole_end - 1 are seen whole by every row. Keys from row_end on were never written: whatever lies
    there, NaN too, must not get into the sums.
    """
    SHARED: gl.constexpr = M == 64
    ROWS_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROWS_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    key = first_key + gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))
    m = gl.full([M], UNSEEN, gl.float32, ROWS_S)
    if SHARED:
        total = gl.zeros([M, BN], gl.float32, S_LAYOUT)
    else:
        total = gl.zeros([M], gl.float32, ROWS_S)
    o = gl.zeros([M, HEAD], gl.float32, O_LAYOUT)
    mbarrier.wait(full_k.index(0), 0)
    s = _score(q_smem, k_smem, v_smem, r_smem, 0, S_LAYOUT, M, BN, ROT)
    s = warpgroup_mma_wait(0, deps=(s,))
    if ROT == 0:
        gl.thread_barrier()
        mbarrier.arrive(empty_k.index(0), count=1)
    p, m, total, shrink = _softmax(s, m, total, last, key, True, WINDOW, SHARED)
    if SHARED:
        _probabilities(r_smem, 0, STAGES, M, BN, ROT).store(p.to(q_smem.dtype))
        fence_async_shared()
        p_operand = shrink
    else:
        p_operand = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        row_smem.index(1).store(shrink)
    count = 0
    if SHARED:
        for _ in range(1, num_tiles):
            key += BN
            count, o, m, total, shrink, p_operand = _step(
                q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v, count, o, m, total, shrink, p_operand,
                last, key, True, WINDOW, ROT, M, BN, STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
    else:  # masks are dear here: 32 scores a thread
        whole_begin = gl.minimum(gl.maximum(whole_begin, 1), num_tiles)
        whole_end = gl.minimum(gl.maximum(whole_end, whole_begin), num_tiles)
        for _ in range(1, whole_begin):
            key += BN
            count, o, m, total, shrink, p_operand = _step(
                q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v, count, o, m, total, shrink, p_operand,
                last, key, True, WINDOW, ROT, M, BN, STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        for _ in range(whole_begin, whole_end):
            count, o, m, total, shrink, p_operand = _step(
                q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v, count, o, m, total, shrink, p_operand,
                last, key, False, WINDOW, ROT, M, BN, STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        key += (whole_end - whole_begin) * BN
        for _ in range(whole_end, num_tiles):
            key += BN
            count, o, m, total, shrink, p_operand = _step(
                q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v, count, o, m, total, shrink, p_operand,
                last, key, True, WINDOW, ROT, M, BN, STAGES, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip

    o = o * gl.expand_dims(gl.convert_layout(shrink, ROWS_O), 1)
    stage = count % STAGES
    if ROT == 0:
        mbarrier.wait(full_v.index(stage), (count // STAGES) & 1)
    written = row_end - (first_key + (num_tiles - 1) * BN)
    if written < BN:
        CLEAR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        there = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(1, CLEAR)) < written, 1)
        for column in gl.static_range(0, HEAD, 128):
            part = v_smem.index(stage).slice(column, 128, dim=1)
            part.store(gl.where(there, part.load(CLEAR), 0.0).to(q_smem.dtype))
        fence_async_shared()
        gl.thread_barrier()
    if SHARED:
        o_next = warpgroup_mma(_probabilities(r_smem, count, STAGES, M, BN, ROT), v_smem.index(stage), o, is_async=True)
        total_rows = gl.sum(total, 1)
    else:
        o_next = warpgroup_mma(p_operand, v_smem.index(stage), o, is_async=True)
        total_rows = total
    o = warpgroup_mma_wait(0, deps=(o_next,))
    return o, total_rows, m


@gluon.jit
def allocate(
    dtype: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, STAGES: gl.constexpr
):
    """Shared memory and barriers of a program."""
    SMEM: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [M, HEAD], SMEM)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, HEAD], SMEM)
    row_smem = gl.allocate_shared_memory(gl.float32, [2, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=1)
        mbarrier.init(empty_v.index(stage), count=1)
    fence_async_shared()
    return q_smem, k_smem, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v


def describe(matrix: Tensor, columns: int) -> TensorDescriptor:
    """A descriptor of tiles of KEYS rows x `columns` of a matrix."""
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [KEYS, columns], gl.NVMMASharedLayout(128, 16, 2)
    )


def page_matrix(plane: Tensor) -> Tensor:
    """A plane [page, kv_head, token, width] as one matrix of rows of `width`, from its first row to its last."""
    width = plane.shape[-1]
    span = 1 + sum((size - 1) * stride for size, stride in zip(plane.shape, plane.stride(), strict=True))
    return plane.as_strided((span // width, width), (width, 1))


def pages_fit(kv: PagedKV) -> bool:
    """Whether key tiles can be fetched from these pages: tiles within pages, all rows on one grid."""
    return kv.page_tokens % KEYS == 0 and kv.planes.stride(1) % kv.width == 0
