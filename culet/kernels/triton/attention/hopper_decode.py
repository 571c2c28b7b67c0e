"""Decode and verify with a latent cache on Hopper. A program has 64 packed query rows, split along the keys as in `splits.py`.

With so few rows, the matrix units are mostly idle. Speed depends on the bulk copy engine keeping two tiles in flight, and on
reading every latent row once for both scores and values.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from culet.kernels.triton.attention.hopper_parts import (
    KEYS,
    allocate,
    describe,
    fetch_tile,
    page_matrix,
    pages_fit,
    score_tiles,
    value_tiles,
)
from culet.kernels.triton.attention.splits import Scratch, join_launch
from culet.kernels.triton.attention.tiles import DecodeTile
from culet.kernels.triton.launch import Launch
from culet.kernels.types import PagedKV, RaggedRows

HOPPER_ROWS = 64  # packed query rows per program


@gluon.jit
def _tiles(num_queries, context, first, BN: gl.constexpr, MAX_QUERIES: gl.constexpr):
    """Return the number of key tiles of a row, as `splits._tile_span` does. Rows that are empty or too long have 0."""
    count = (context + num_queries - first + BN - 1) // BN
    return gl.where((num_queries > 0) & (num_queries <= MAX_QUERIES), count, 0)


@gluon.jit
def _split_count(count, total, target):
    """Return the number of splits of a row. The joining kernel must get the same number from `splits._split_count`."""
    wanted = (count * target + total // 2) // gl.maximum(total, 1)
    splits = gl.maximum(gl.minimum(wanted, count), 1)
    per_split = gl.maximum((count + splits - 1) // splits, 1)
    return (count + per_split - 1) // per_split


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _work(
    ROW_BEGIN, CONTEXT, FIRST, num_rows, target,
    ROWS: gl.constexpr, KV_HEADS: gl.constexpr, BN: gl.constexpr, MAX_QUERIES: gl.constexpr, M_TILES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Return this program's row, split, place of partial sums, number of splits in the row, and key tiles (maybe none)."""
    item = gl.program_id(0) // (M_TILES * KV_HEADS)
    row = 0
    split = item
    place = 0
    total = 0
    if ROWS > 1:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        rows = gl.arange(0, ROWS, LAYOUT)
        in_batch = rows < num_rows
        begins = gl.load(ROW_BEGIN + rows, mask=in_batch, other=0)
        ends = gl.load(ROW_BEGIN + rows + 1, mask=in_batch, other=0)
        contexts = gl.load(CONTEXT + rows, mask=in_batch, other=0)
        firsts = gl.load(FIRST + rows, mask=in_batch, other=0)
        counts = _tiles(ends - begins, contexts, firsts, BN, MAX_QUERIES)
        total = gl.sum(counts, 0)
        splits_R = _split_count(counts, total, target)
        row = gl.sum((gl.associative_scan(splits_R, 0, _add) <= item).to(gl.int32), 0)
        split = item - gl.sum(gl.where(rows < row, splits_R, 0), 0)
        place = gl.sum(gl.where((rows < row) & (splits_R > 1), splits_R, 0), 0)
    is_row = row < num_rows
    row = gl.minimum(row, num_rows - 1)
    begin = gl.load(ROW_BEGIN + row)
    num_queries = gl.load(ROW_BEGIN + row + 1) - begin
    context = gl.load(CONTEXT + row)
    first = gl.load(FIRST + row)
    count = _tiles(num_queries, context, first, BN, MAX_QUERIES)
    if ROWS == 1:
        total = count
    splits = _split_count(count, total, target)
    per_split = (count + splits - 1) // gl.maximum(splits, 1)
    tile_lo = split * per_split
    tile_hi = gl.where(is_row & (split < splits), gl.minimum(count, tile_lo + per_split), tile_lo)
    return row, split, place, splits, begin, num_queries, context, first, tile_lo, tile_hi


@gluon.jit
def _fetch(
    V_DESC, R_DESC, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
    PAGES, FIRST, ROW_BEGIN, CONTEXT, num_rows, target, stride_table, page_rows,
    ROWS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr,
    PAGE: gl.constexpr, MAX_QUERIES: gl.constexpr, M: gl.constexpr, M_TILES: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Run the fetching warp."""
    head = gl.program_id(0) // M_TILES % KV_HEADS
    row, _, _, _, _, num_queries, _, _, tile_lo, tile_hi = _work(
        ROW_BEGIN, CONTEXT, FIRST, num_rows, target, ROWS, KV_HEADS, BN, MAX_QUERIES, M_TILES, 1
    )
    if (gl.program_id(0) % M_TILES) * M < num_queries * GROUP:
        for tile in range(tile_lo, tile_hi):
            page = gl.load(PAGES + row * stride_table + tile * BN // PAGE)
            y = page * page_rows + head * PAGE + tile * BN % PAGE
            fetch_tile(
                V_DESC, V_DESC, R_DESC, v_smem, v_smem, r_smem, full_k, full_v, empty_k, empty_v, tile - tile_lo, y, y, 0,
                ROT, BN, HEAD, STAGES,
            )  # fmt: skip


@gluon.jit
def _values(
    q_smem, v_smem, r_smem, row_smem, full_k, empty_v, ready, taken,
    Q, OUT, PARTIAL, FIRST, ROW_BEGIN, CONTEXT, num_rows, target, stride_q_token, stride_out_token,
    ROWS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr,
    MAX_QUERIES: gl.constexpr, M: gl.constexpr, M_TILES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run the multiplying warpgroups. They also load the queries and store the output, or this split's part of it."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEAD // 4, 16])  # wider layouts need more registers
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    head = gl.program_id(0) // M_TILES % KV_HEADS
    _, split, place, splits, begin, num_queries, context, first, tile_lo, tile_hi = _work(
        ROW_BEGIN, CONTEXT, FIRST, num_rows, target, ROWS, KV_HEADS, BN, MAX_QUERIES, M_TILES, 8
    )
    row_first = (gl.program_id(0) % M_TILES) * M
    if (tile_hi > tile_lo) & (row_first < num_queries * GROUP):
        packed = row_first + gl.arange(0, M, gl.SliceLayout(1, LOAD))
        column = gl.arange(0, HEAD, gl.SliceLayout(0, LOAD))
        q_row = (begin + packed // GROUP).to(gl.int64) * stride_q_token + (head * GROUP + packed % GROUP) * HEAD
        is_query = gl.expand_dims(packed < num_queries * GROUP, 1)
        q = gl.load(Q + gl.expand_dims(q_row, 1) + gl.expand_dims(column, 0), mask=is_query, other=0.0)
        q_smem.store(q)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready.index(2), count=1)
        written = context + num_queries - (first + (tile_hi - 1) * BN)
        o = value_tiles(
            v_smem, r_smem, row_smem, full_k, empty_v, ready, taken, tile_hi - tile_lo, written,
            HEAD, ROT, M, BN, STAGES, O_LAYOUT,
        )  # fmt: skip
        packed_o = row_first + gl.arange(0, M, gl.SliceLayout(1, O_LAYOUT))
        column_o = gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(0, O_LAYOUT)), 0)
        is_row = gl.expand_dims(packed_o < num_queries * GROUP, 1)
        if splits == 1:
            out_row = (begin + packed_o // GROUP).to(gl.int64) * stride_out_token + (head * GROUP + packed_o % GROUP) * HEAD
            gl.store(OUT + gl.expand_dims(out_row, 1) + column_o, o.to(OUT.dtype.element_ty), mask=is_row)
        else:
            part_row = (((place + split) * KV_HEADS + head) * (MAX_QUERIES * GROUP) + packed_o).to(gl.int64) * HEAD
            gl.store(PARTIAL + gl.expand_dims(part_row, 1) + column_o, o, mask=is_row)


@gluon.jit
def _scores(
    q_smem, v_smem, r_smem, row_smem, full_k, empty_k, ready, taken, LSE, FIRST, ROW_BEGIN, CONTEXT, num_rows, target,
    ROWS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROT: gl.constexpr,
    MAX_QUERIES: gl.constexpr, M: gl.constexpr, M_TILES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run the scoring warpgroup."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    head = gl.program_id(0) // M_TILES % KV_HEADS
    _, split, place, splits, _, num_queries, context, first, tile_lo, tile_hi = _work(
        ROW_BEGIN, CONTEXT, FIRST, num_rows, target, ROWS, KV_HEADS, BN, MAX_QUERIES, M_TILES, 4
    )
    row_first = (gl.program_id(0) % M_TILES) * M
    packed = row_first + gl.arange(0, M, gl.SliceLayout(1, S_LAYOUT))
    # This kernel has no dependent launch, so all earlier kernels are done. The joining kernel may start now and wait inside.
    packed = gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [packed], gl.int32, is_pure=False, pack=1
    )
    if (tile_hi > tile_lo) & (row_first < num_queries * GROUP):
        last = context + gl.minimum(packed // GROUP, num_queries - 1)
        total, m = score_tiles(
            q_smem, v_smem, v_smem, r_smem, row_smem, full_k, empty_k, ready, taken,
            last, first + tile_lo * BN, tile_hi - tile_lo, 0, ROT, M, BN, STAGES, S_LAYOUT,
        )  # fmt: skip
        if splits > 1:
            base = ((place + split) * KV_HEADS + head) * (MAX_QUERIES * GROUP)
            gl.store(LSE + base + packed, m + gl.log2(total), mask=packed < num_queries * GROUP)


@gluon.jit(do_not_specialize=["num_rows", "target", "stride_table", "page_rows"])
def _decode_hopper(
    V_DESC, R_DESC, Q, OUT, PARTIAL, LSE, PAGES, FIRST, ROW_BEGIN, CONTEXT,
    num_rows, target, stride_table, page_rows, stride_q_token, stride_out_token,
    ROWS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, ROT: gl.constexpr, PAGE: gl.constexpr,
    MAX_QUERIES: gl.constexpr, M: gl.constexpr, M_TILES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Process M packed rows of one split of one row, for one KV head."""
    q_smem, _, v_smem, r_smem, row_smem, full_k, full_v, empty_k, empty_v, ready, taken = allocate(
        Q.dtype.element_ty, M, BN, HEAD, ROT, STAGES
    )
    gl.warp_specialize(
        [
            (_values, (
                q_smem, v_smem, r_smem, row_smem, full_k, empty_v, ready, taken,
                Q, OUT, PARTIAL, FIRST, ROW_BEGIN, CONTEXT, num_rows, target, stride_q_token, stride_out_token,
                ROWS, KV_HEADS, GROUP, HEAD, ROT, MAX_QUERIES, M, M_TILES, BN, STAGES,
            )),
            (_scores, (
                q_smem, v_smem, r_smem, row_smem, full_k, empty_k, ready, taken,
                LSE, FIRST, ROW_BEGIN, CONTEXT, num_rows, target,
                ROWS, KV_HEADS, GROUP, ROT, MAX_QUERIES, M, M_TILES, BN, STAGES,
            )),
            (_fetch, (
                V_DESC, R_DESC, v_smem, r_smem, full_k, full_v, empty_k, empty_v,
                PAGES, FIRST, ROW_BEGIN, CONTEXT, num_rows, target, stride_table, page_rows,
                ROWS, KV_HEADS, GROUP, HEAD, ROT, PAGE, MAX_QUERIES, M, M_TILES, BN, STAGES,
            )),
        ],
        [4, 1],
        [120, 40],
    )  # fmt: skip


def hopper_decode_supports(kv: PagedKV) -> bool:
    """Return whether this kernel supports the shape. It applies only the text rule."""
    return kv.is_latent and kv.head_dim == 512 and kv.window is None and pages_fit(kv)


def hopper_decode_tile(num_sms: int) -> DecodeTile:
    """Return this kernel's tile, for `scratch_rows` and the joining kernel. Each multiprocessor runs one program."""
    return DecodeTile(HOPPER_ROWS, KEYS, 8, 2, programs=num_sms)


def hopper_decode_launches(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    *,
    max_queries: int,
    out_TNH: Tensor,
    tile: DecodeTile,
    scratch: Scratch | None,
) -> list[Launch]:
    """Return the launches of one call, in order. The contract is the same as for `decode_launches`."""
    _, num_heads, head_dim = q_TNH.shape
    num_kv_heads, group, rotated = kv.num_kv_heads, num_heads // kv.num_kv_heads, kv.width - head_dim
    m_tiles = -(-max_queries * group // HOPPER_ROWS)
    target = tile.splits(kv, rows.num_rows, group, max_queries).target
    matrix = page_matrix(kv.planes[0])
    arguments: dict[str, Any] = {
        "V_DESC": describe(matrix, head_dim),
        "R_DESC": describe(matrix, rotated),
        "Q": q_TNH,
        "OUT": out_TNH,
        "PARTIAL": None if scratch is None else scratch.partial,
        "LSE": None if scratch is None else scratch.lse,
        "PAGES": kv.pages_BP,
        "FIRST": kv.first_B,
        "ROW_BEGIN": rows.row_begin_B1,
        "CONTEXT": rows.context_B,
        "num_rows": rows.num_rows,
        "target": target,
        "stride_table": kv.pages_BP.stride(0),
        "page_rows": kv.planes.stride(1) // kv.width,
        "stride_q_token": q_TNH.stride(0),
        "stride_out_token": out_TNH.stride(0),
        "ROWS": 1 if rows.num_rows == 1 else max(32, triton.next_power_of_2(rows.num_rows)),
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD": head_dim,
        "ROT": rotated,
        "PAGE": kv.page_tokens,
        "MAX_QUERIES": max_queries,
        "M": HOPPER_ROWS,
        "M_TILES": m_tiles,
        "BN": KEYS,
        "STAGES": 2,
    }
    items = rows.num_rows + (target if target > 1 else 0)
    decode = Launch(_decode_hopper, (items * m_tiles * num_kv_heads,), arguments, {"num_warps": 8})
    if target == 1:
        return [decode]
    return [
        decode,
        join_launch(num_heads, kv, rows, max_queries=max_queries, out_TNH=out_TNH, tile=tile, scratch=scratch),
    ]
