"""Prefill on Hopper, in Gluon: the bulk copy engine feeds one program per multiprocessor, matrix units never wait for softmax.

One warp fetches key tiles; two warpgroups compute. While the values of tile i are multiplied, the scores of tile i + 1 are
ready and pass through the softmax. At head dim 512 both warpgroups share 64 packed rows: each scores half of the keys
and then accumulates half of the columns, so the probabilities pass through shared memory (over the latent: through the rows
that held k_rot, which nobody reads any more). At head dim 256 each warpgroup has 64 rows of its own.
"""

from __future__ import annotations

from typing import Any

import triton
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

from culet.kernels.attention_inputs import PagedKV, RaggedRows
from culet.kernels.triton.launch import Launch

LOG2E = gl.constexpr(1.4426950408889634)
UNSEEN = gl.constexpr(-1.0e30)
KEYS = 64  # keys of a tile


@gluon.jit
def _span(TILES, ROW_BEGIN, CONTEXT, FIRST, tile_id, WINDOW: gl.constexpr, QUERIES: gl.constexpr, BN: gl.constexpr, PAGED: gl.constexpr):  # fmt: skip
    """Row, first query and query count, first token and position, position of key tile 0, and the key tiles in sight."""
    row = gl.load(TILES + tile_id * 2)
    query_begin = gl.load(TILES + tile_id * 2 + 1)
    begin = gl.load(ROW_BEGIN + row)
    num_queries = gl.load(ROW_BEGIN + row + 1) - begin
    context = gl.load(CONTEXT + row)
    origin = gl.load(FIRST + row) if PAGED else context
    hi = context + gl.minimum(query_begin + QUERIES, num_queries)
    lo = origin
    if WINDOW > 0:
        lo = gl.maximum(context + query_begin - WINDOW + 1, origin)
    return row, query_begin, num_queries, begin, context, origin, (lo - origin) // BN, (hi - origin + BN - 1) // BN


@gluon.jit
def _fetch(
    K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
    TILES, PAGES, FIRST, ROW_BEGIN, CONTEXT, num_work, stride_table, page_rows,
    KV_HEADS: gl.constexpr, WIDTH: gl.constexpr, ROT: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr,
    QUERIES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """The fetching warp: every key tile of every piece of work, into the next free stage."""
    count = 0
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        head = work % KV_HEADS
        row, _, _, begin, _, _, tile_lo, tile_hi = _span(
            TILES, ROW_BEGIN, CONTEXT, FIRST, work // KV_HEADS, WINDOW, QUERIES, BN, PAGED
        )
        for tile in range(tile_lo, tile_hi):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            if PAGED:
                page = gl.load(PAGES + row * stride_table + tile * BN // PAGE)
                y = page * page_rows + head * PAGE + tile * BN % PAGE
                x = 0
            else:
                y = begin + tile * BN
                x = head * WIDTH
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
            count += 1


@gluon.jit
def _score(q_smem, k_smem, v_smem, r_smem, stage, S_LAYOUT: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, ROT: gl.constexpr):
    """Issue the scores of a stage's keys."""
    s = gl.zeros([M, BN], gl.float32, S_LAYOUT)
    if ROT > 0:
        # K is the latent's columns from ROT on. Slices start at multiples of their length, hence four of equal length.
        rows = v_smem.index(stage)
        s = warpgroup_mma(
            q_smem.slice(0, ROT, dim=1), rows.slice(ROT, ROT, dim=1).permute((1, 0)), s, use_acc=False, is_async=True
        )
        s = warpgroup_mma(q_smem.slice(ROT, ROT, dim=1), rows.slice(2 * ROT, ROT, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_smem.slice(2 * ROT, ROT, dim=1), rows.slice(3 * ROT, ROT, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_smem.slice(3 * ROT, ROT, dim=1), r_smem.index(stage).permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    return s


@gluon.jit
def _softmax(s, m, l, last, key, WINDOW: gl.constexpr, SHARED: gl.constexpr):
    """Probabilities of a tile, the running maximum and sum, the factor by which earlier sums shrink.

    `last` is the last key each row sees. With SHARED the sum stays spread over the columns until the end, which saves an
    exchange between the warpgroups.
    """
    seen = gl.expand_dims(key, 0) <= gl.expand_dims(last, 1)
    if WINDOW > 0:
        seen = seen & (gl.expand_dims(key, 0) > gl.expand_dims(last - WINDOW, 1))
    s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * LOG2E)
    p = gl.exp2(s * LOG2E - gl.expand_dims(m_new, 1))
    shrink = gl.exp2(m - m_new)
    if SHARED:
        l = l * gl.expand_dims(shrink, 1) + p  # noqa: E741
    else:
        l = l * shrink + gl.sum(p, 1)  # noqa: E741
    return p, m_new, l, shrink


@gluon.jit
def _compute(
    q_smem, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
    Q, OUT, TILES, FIRST, ROW_BEGIN, CONTEXT, num_work, stride_q_token, stride_out_token,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, WINDOW: gl.constexpr,
    M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """The two computing warpgroups."""
    SHARED: gl.constexpr = M == 64  # both warpgroups work on the same rows
    WARPS: gl.constexpr = [4, 2] if SHARED else [8, 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, BN // 2 if SHARED else BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, HEAD // 2 if SHARED else HEAD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    P_SMEM: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROWS_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROWS_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    QUERIES: gl.constexpr = M // GROUP
    dtype: gl.constexpr = Q.dtype.element_ty

    if not SHARED:
        row_smem = gl.allocate_shared_memory(gl.float32, [2, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    count = 0
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        head = work % KV_HEADS
        _, query_begin, num_queries, begin, context, origin, tile_lo, tile_hi = _span(
            TILES, ROW_BEGIN, CONTEXT, FIRST, work // KV_HEADS, WINDOW, QUERIES, BN, PAGED
        )
        packed = gl.arange(0, M, gl.SliceLayout(1, LOAD))
        query = query_begin + packed // GROUP
        token = (begin + gl.minimum(query, num_queries - 1)).to(gl.int64)
        column = gl.arange(0, HEAD, gl.SliceLayout(0, LOAD))
        query_head = head * GROUP + packed % GROUP
        q = gl.load(Q + gl.expand_dims(token * stride_q_token + query_head * HEAD, 1) + gl.expand_dims(column, 0))
        q_smem.store(q)
        fence_async_shared()
        packed_s = gl.arange(0, M, ROWS_S)
        last = context + gl.minimum(query_begin + packed_s // GROUP, num_queries - 1)
        key = origin + tile_lo * BN + gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))

        m = gl.full([M], UNSEEN, gl.float32, ROWS_S)
        if SHARED:
            l = gl.zeros([M, BN], gl.float32, S_LAYOUT)  # noqa: E741
        else:
            l = gl.zeros([M], gl.float32, ROWS_S)  # noqa: E741
        o = gl.zeros([M, HEAD], gl.float32, O_LAYOUT)
        stage = count % STAGES
        mbarrier.wait(full_k.index(stage), (count // STAGES) & 1)
        s = _score(q_smem, k_smem, v_smem, r_smem, stage, S_LAYOUT, M, BN, ROT)
        s = warpgroup_mma_wait(0, deps=(s,))
        if ROT == 0:
            gl.thread_barrier()
            mbarrier.arrive(empty_k.index(stage), count=1)
        p, m, l, shrink = _softmax(s, m, l, last, key, WINDOW, SHARED)  # noqa: E741
        if SHARED:
            if ROT > 0:
                r_smem.index(stage)._reinterpret(dtype, [M, BN], P_SMEM).store(p.to(dtype))
            else:
                r_smem.index(count & 1).store(p.to(dtype))
            fence_async_shared()
        else:
            p_operand = gl.convert_layout(p.to(dtype), P_LAYOUT)
            row_smem.index(1).store(shrink)

        for _ in range(tile_lo + 1, tile_hi):
            key += BN
            after = (count + 1) % STAGES
            mbarrier.wait(full_k.index(after), ((count + 1) // STAGES) & 1)
            s = _score(q_smem, k_smem, v_smem, r_smem, after, S_LAYOUT, M, BN, ROT)
            if SHARED:
                o = o * gl.expand_dims(gl.convert_layout(shrink, ROWS_O), 1)
            else:
                o = o * gl.expand_dims(row_smem.index(1).load(ROWS_O), 1)
            if ROT == 0:
                mbarrier.wait(full_v.index(stage), (count // STAGES) & 1)
            if SHARED:
                if ROT > 0:
                    p_smem = r_smem.index(stage)._reinterpret(dtype, [M, BN], P_SMEM)
                else:
                    p_smem = r_smem.index(count & 1)
                o_next = warpgroup_mma(p_smem, v_smem.index(stage), o, is_async=True)
            else:
                o_next = warpgroup_mma(p_operand, v_smem.index(stage), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            if ROT == 0:
                gl.thread_barrier()
                mbarrier.arrive(empty_k.index(after), count=1)
            p, m, l, shrink = _softmax(s, m, l, last, key, WINDOW, SHARED)  # noqa: E741
            if SHARED:
                if ROT > 0:
                    r_smem.index(after)._reinterpret(dtype, [M, BN], P_SMEM).store(p.to(dtype))
                else:
                    r_smem.index((count + 1) & 1).store(p.to(dtype))
                fence_async_shared()
            else:
                p_next = gl.convert_layout(p.to(dtype), P_LAYOUT)
                # These keep work where it is written, since the assembler does not move stores over the fence: the sum, that
                # nobody reads, keeps the softmax beside the multiplication of the values; the factor, read back once the
                # next scores are issued, keeps the shrinking of o beside those.
                row_smem.index(0).store(l)
                row_smem.index(1).store(shrink)
                fence_async_shared()
            o = warpgroup_mma_wait(0, deps=(o_next,))
            if not SHARED:
                p_operand = p_next
            gl.thread_barrier()
            mbarrier.arrive(empty_v.index(stage), count=1)
            count += 1
            stage = after

        o = o * gl.expand_dims(gl.convert_layout(shrink, ROWS_O), 1)
        if ROT == 0:
            mbarrier.wait(full_v.index(stage), (count // STAGES) & 1)
        if SHARED:
            if ROT > 0:
                p_smem = r_smem.index(stage)._reinterpret(dtype, [M, BN], P_SMEM)
            else:
                p_smem = r_smem.index(count & 1)
            o_next = warpgroup_mma(p_smem, v_smem.index(stage), o, is_async=True)
        else:
            o_next = warpgroup_mma(p_operand, v_smem.index(stage), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o_next,))
        gl.thread_barrier()
        mbarrier.arrive(empty_v.index(stage), count=1)
        count += 1

        if SHARED:
            l_rows = gl.sum(l, 1)
        else:
            l_rows = l
        o = o * gl.expand_dims(gl.convert_layout(1.0 / l_rows, ROWS_O), 1)
        q_smem.store(o.to(dtype))  # the queries are done with: through their place, so that rows leave whole
        result = q_smem.load(LOAD)
        out = OUT + gl.expand_dims(token * stride_out_token + query_head * HEAD, 1) + gl.expand_dims(column, 0)
        gl.store(out, result, mask=gl.expand_dims(query < num_queries, 1))


@gluon.jit(do_not_specialize=["num_work", "stride_table", "page_rows"])
def _prefill_hopper(
    K_DESC, V_DESC, R_DESC, Q, OUT, TILES, PAGES, FIRST, ROW_BEGIN, CONTEXT,
    num_work, stride_table, page_rows, stride_q_token, stride_out_token,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Pieces of work (query tile x KV head) program by program. ROT > 0: latent rows, V_DESC their first HEAD columns."""
    dtype: gl.constexpr = Q.dtype.element_ty
    SMEM: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [M, HEAD], SMEM)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, HEAD], SMEM)
    if ROT > 0:
        k_smem = v_smem
        r_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, ROT], SMEM)  # k_rot, then probabilities
    else:
        k_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, HEAD], SMEM)
        if M == 64:
            r_smem = gl.allocate_shared_memory(dtype, [2, M, BN], SMEM)  # probabilities
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
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    q_smem, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
                    Q, OUT, TILES, FIRST, ROW_BEGIN, CONTEXT, num_work, stride_q_token, stride_out_token,
                    KV_HEADS, GROUP, HEAD, ROT, WINDOW, M, BN, STAGES, PAGED,
                ),
            ),
            (
                _fetch,
                (
                    K_DESC, V_DESC, R_DESC, k_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
                    TILES, PAGES, FIRST, ROW_BEGIN, CONTEXT, num_work, stride_table, page_rows,
                    KV_HEADS, HEAD + ROT, ROT, PAGE, WINDOW, M // GROUP, BN, STAGES, PAGED,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def _flat(tensor: Tensor, width: int) -> Tensor:
    """Rows of `width` elements from the tensor's first to its last one, as a matrix that covers every stride."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span // width, width), (width, 1))


def can_serve(kv: PagedKV, group: int, *, fresh: bool) -> bool:
    """Whether `hopper_launch` takes this shape: whole key tiles within pages, rows of pages on one grid."""
    rows = 64 if kv.head_dim == 512 else 128
    if kv.head_dim not in (256, 512) or rows % group or (kv.is_latent and kv.head_dim != 512):
        return False
    return fresh or (kv.page_tokens % KEYS == 0 and kv.planes.stride(1) % kv.width == 0)


def hopper_launch(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    tiles_X2: Tensor,
    *,
    fresh: tuple[Tensor, Tensor] | None,
    out_TNH: Tensor,
    programs: int,
) -> Launch:
    """The launch for tiles whose keys all come from `fresh`, or all from pages. Text rule only."""
    _, num_heads, head_dim = q_TNH.shape
    num_kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    rotated = kv.width - head_dim
    m_rows = 64 if head_dim == 512 else 128
    layout = gl.NVMMASharedLayout(128, 16, 2)

    def describe(matrix: Tensor, columns: int) -> TensorDescriptor:
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [KEYS, columns], layout)

    if fresh is None:
        keys, values = _flat(kv.planes[0], kv.width), _flat(kv.planes[-1], kv.width)
    elif kv.is_latent:
        whole = fresh[1].as_strided((fresh[1].shape[0], num_kv_heads * kv.width), (fresh[1].stride(0), 1))
        keys = values = whole
    else:
        keys, values = (part.as_strided((part.shape[0], num_kv_heads * kv.width), (part.stride(0), 1)) for part in fresh)
    v_desc = describe(values, head_dim)
    k_desc = v_desc if rotated else describe(keys, head_dim)
    r_desc = describe(values, rotated) if rotated else v_desc
    num_work = tiles_X2.shape[0] * num_kv_heads
    arguments: dict[str, Any] = {
        "K_DESC": k_desc,
        "V_DESC": v_desc,
        "R_DESC": r_desc,
        "Q": q_TNH,
        "OUT": out_TNH,
        "TILES": tiles_X2,
        "PAGES": kv.pages_BP,
        "FIRST": kv.first_B,
        "ROW_BEGIN": rows.row_begin_B1,
        "CONTEXT": rows.context_B,
        "num_work": num_work,
        "stride_table": kv.pages_BP.stride(0),
        "page_rows": kv.planes.stride(1) // kv.width,
        "stride_q_token": q_TNH.stride(0),
        "stride_out_token": out_TNH.stride(0),
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD": head_dim,
        "ROT": rotated,
        "PAGE": kv.page_tokens,
        "WINDOW": kv.window or 0,
        "M": m_rows,
        "BN": KEYS,
        "STAGES": 2 if rotated or head_dim == 256 else 1,
        "PAGED": fresh is None,
    }
    return Launch(_prefill_hopper, (min(programs, num_work),), arguments, {"num_warps": 8})


assert triton.__version__ >= "3.6", "the Gluon interface used here is that of Triton 3.6"
