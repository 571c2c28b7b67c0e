"""Attention of few query tokens per row (decode: 1, verify: up to 16) over the paged cache, split along the keys.

The query heads of one KV head and the row's query tokens are packed into one tile of rows, so every key is read once. How
a row is split follows on the device from the lengths found there: a graph captured once is right, and balanced, for any
lengths. Rows that need one split write their output at once; the others leave partial sums that a second kernel joins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.attention_inputs import PagedKV, RaggedRows
from culet.kernels.triton.launch import Launch
from culet.kernels.triton.tiles import DecodeTile, decode_tile

LOG2E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)  # running maximum before any key; finite, so that (-inf) - UNSEEN stays -inf


@triton.jit
def _tile_span(num_queries, context, first, WINDOW: tl.constexpr, BN: tl.constexpr, MAX_QUERIES: tl.constexpr):
    """First key tile of a row and the number of them; none for rows that are empty or too long for this kernel."""
    lo = first
    if WINDOW > 0:
        lo = tl.maximum(context - WINDOW + 1, first)
    begin = (lo - first) // BN
    count = tl.cdiv(context + num_queries - first, BN) - begin
    return begin, tl.where((num_queries > 0) & (num_queries <= MAX_QUERIES), count, 0)


@triton.jit
def _split_count(count, total, target, MIN_TILES: tl.constexpr):
    """Splits of a row in proportion to its share of all tiles; sums to at most `target` plus the number of rows."""
    wanted = (count * target + total // 2) // tl.maximum(total, 1)
    splits = tl.maximum(tl.minimum(wanted, count // MIN_TILES), 1)
    return tl.cdiv(count, tl.maximum(tl.cdiv(count, splits), 1))


@triton.jit
def _row_splits(
    ROW_BEGIN, CONTEXT, FIRST, num_rows, target,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr, MAX_QUERIES: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """Splits of every row, as a vector of ROWS, and all rows' tiles together."""
    rows = tl.arange(0, ROWS)
    there = rows < num_rows
    begin = tl.load(ROW_BEGIN + rows, mask=there, other=0)
    end = tl.load(ROW_BEGIN + rows + 1, mask=there, other=0)
    context = tl.load(CONTEXT + rows, mask=there, other=0)
    first = tl.load(FIRST + rows, mask=there, other=0)
    _, count = _tile_span(end - begin, context, first, WINDOW, BN, MAX_QUERIES)
    total = tl.sum(count, 0)
    return rows, _split_count(count, total, target, MIN_TILES), total


@triton.jit
def _key_rows(PAGES, tile, first, lo, hi, stride_page, WIDTH: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr):
    """Positions of a tile's keys, which of them exist, and the element offset of each one's row in its plane (of head 0)."""
    offset = tile * BN + tl.arange(0, BN)
    key = first + offset
    there = (key >= lo) & (key < hi)
    if PAGE % BN == 0:  # a tile lies within one page
        page = tl.load(PAGES + tile * BN // PAGE).to(tl.int64)
        row = page * stride_page + (tile * BN % PAGE + tl.arange(0, BN)) * WIDTH
    else:
        page = tl.load(PAGES + offset // PAGE, mask=there, other=0).to(tl.int64)
        row = page * stride_page + (offset % PAGE) * WIDTH
    return key, there, row


@triton.jit
def _score(q, k, s, SWAP: tl.constexpr):
    if SWAP:
        s = tl.dot(k, tl.trans(q), s, input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
    return s


@triton.jit
def _accumulate(p, v, o, SWAP: tl.constexpr):
    if SWAP:
        o = tl.dot(tl.trans(v), p, o, input_precision="ieee")
    else:
        o = tl.dot(p, v, o, input_precision="ieee")
    return o


@triton.jit
def _store(OUT, row_offset, o, row_ok, BEGIN: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        o = tl.trans(o)
    column = BEGIN + tl.arange(0, COLUMNS)
    tl.store(OUT + row_offset[:, None] + column[None, :], o.to(OUT.dtype.element_ty), mask=row_ok[:, None])


@triton.jit(do_not_specialize=["num_rows", "target", "num_tokens", "stride_table"])
def _decode(
    Q, K, V, PAGES, FIRST, ROW_BEGIN, CONTEXT, VISIBLE, OUT, PARTIAL, LSE,
    num_rows, target, num_tokens, stride_table, stride_page, stride_q_token, stride_out_token,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ROT: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, MAX_QUERIES: tl.constexpr, MIN_TILES: tl.constexpr,
    M: tl.constexpr, M_TILES: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr, HAS_VISIBLE: tl.constexpr,
):  # fmt: skip
    """One split of one row for one KV head. ROT > 0: K is a latent of rows v_rot | nope | k_rot, ROT wide at both ends."""
    item = tl.program_id(0) // M_TILES
    m_tile = tl.program_id(0) % M_TILES
    head = tl.program_id(1)
    LATENT: tl.constexpr = ROT > 0
    WIDTH: tl.constexpr = HEAD + ROT
    AXIS: tl.constexpr = 0 if SWAP else 1  # the axis of keys in a tile of scores

    row = 0
    split = item
    slot = 0
    total = 0
    if ROWS > 1:
        rows, splits_R, total = _row_splits(
            ROW_BEGIN, CONTEXT, FIRST, num_rows, target, ROWS, WINDOW, BN, MAX_QUERIES, MIN_TILES
        )
        row = tl.sum((tl.cumsum(splits_R, 0) <= item).to(tl.int32), 0)
        split = item - tl.sum(tl.where(rows < row, splits_R, 0), 0)
        slot = tl.sum(tl.where((rows < row) & (splits_R > 1), splits_R, 0), 0)  # one-split rows leave no partial sums
    if row >= num_rows:
        return
    begin = tl.load(ROW_BEGIN + row)
    num_queries = tl.load(ROW_BEGIN + row + 1) - begin
    context = tl.load(CONTEXT + row)
    first = tl.load(FIRST + row)
    tile_begin, count = _tile_span(num_queries, context, first, WINDOW, BN, MAX_QUERIES)
    if ROWS == 1:
        total = count
    splits = _split_count(count, total, target, MIN_TILES)
    if (split >= splits) | (m_tile * M >= num_queries * GROUP):
        return
    per_split = tl.cdiv(count, splits)
    tile_end = tile_begin + tl.minimum(count, (split + 1) * per_split)
    tile_begin += split * per_split

    packed = m_tile * M + tl.arange(0, M)  # query token x query head of this KV head
    query = packed // GROUP
    row_ok = query < num_queries
    query = tl.minimum(query, num_queries - 1)
    token = begin + query
    seen_hi = context + query
    seen_lo = seen_hi - (WINDOW - 1) if WINDOW > 0 else tl.zeros_like(seen_hi)
    lo = tl.maximum(context - WINDOW + 1, first) if WINDOW > 0 else first
    hi = context + num_queries
    if HAS_VISIBLE:
        seen_lo = tl.load(VISIBLE + token)
        seen_hi = tl.load(VISIBLE + num_tokens + token)

    PART_B: tl.constexpr = 2 * ROT if LATENT else HEAD
    q_rows = Q + token.to(tl.int64)[:, None] * stride_q_token + (head * GROUP + packed % GROUP)[:, None] * HEAD
    column_b = tl.arange(0, PART_B)
    q_b = tl.load(q_rows + column_b[None, :])
    if LATENT:
        column_r = tl.arange(0, ROT)
        q_c = tl.load(q_rows + 2 * ROT + column_r[None, :])
        q_d = tl.load(q_rows + 3 * ROT + column_r[None, :])
        o_a = tl.zeros([ROT, M] if SWAP else [M, ROT], tl.float32)
        o_c = tl.zeros([ROT, M] if SWAP else [M, ROT], tl.float32)
    o_b = tl.zeros([PART_B, M] if SWAP else [M, PART_B], tl.float32)
    m = tl.full([M], UNSEEN, tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    PAGES += row * stride_table
    K += head * (PAGE * WIDTH)
    V += head * (PAGE * WIDTH)
    zero = tl.zeros([BN, M] if SWAP else [M, BN], tl.float32)

    for tile in range(tile_begin, tile_end):
        key, there, offset = _key_rows(PAGES, tile, first, lo, hi, stride_page, WIDTH, PAGE, BN)
        rows_K = K + offset[:, None]
        if LATENT:
            k_a = tl.load(rows_K + column_r[None, :], mask=there[:, None], other=0.0)
            k_b = tl.load(rows_K + ROT + column_b[None, :], mask=there[:, None], other=0.0)
            k_c = tl.load(rows_K + 3 * ROT + column_r[None, :], mask=there[:, None], other=0.0)
            k_d = tl.load(rows_K + 4 * ROT + column_r[None, :], mask=there[:, None], other=0.0)
            s = _score(q_b, k_b, zero, SWAP)
            s = _score(q_c, k_c, s, SWAP)
            s = _score(q_d, k_d, s, SWAP)
        else:
            k_b = tl.load(rows_K + column_b[None, :], mask=there[:, None], other=0.0)
            s = _score(q_b, k_b, zero, SWAP)
        k_pos = tl.expand_dims(key, 1 - AXIS)
        visible = (k_pos <= tl.expand_dims(seen_hi, AXIS)) & (k_pos >= tl.expand_dims(seen_lo, AXIS))
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, AXIS) * LOG2E)
        p = tl.exp2(s * LOG2E - tl.expand_dims(m_new, AXIS))
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(p, AXIS)  # noqa: E741
        m = m_new
        p = p.to(Q.dtype.element_ty)
        shrink = tl.expand_dims(shrink, AXIS)
        if LATENT:
            o_a = _accumulate(p, k_a, o_a * shrink, SWAP)
            o_b = _accumulate(p, k_b, o_b * shrink, SWAP)
            o_c = _accumulate(p, k_c, o_c * shrink, SWAP)
        else:
            v_b = tl.load(V + offset[:, None] + column_b[None, :], mask=there[:, None], other=0.0)
            o_b = _accumulate(p, v_b, o_b * shrink, SWAP)

    scale = tl.expand_dims(1.0 / tl.where(l > 0.0, l, 1.0), AXIS)
    PART_BEGIN: tl.constexpr = ROT  # where o_b starts
    if splits == 1:
        out_row = token.to(tl.int64) * stride_out_token + (head * GROUP + packed % GROUP) * HEAD
        _store(OUT, out_row, o_b * scale, row_ok, PART_BEGIN, PART_B, SWAP)
        if LATENT:
            _store(OUT, out_row, o_a * scale, row_ok, 0, ROT, SWAP)
            _store(OUT, out_row, o_c * scale, row_ok, 3 * ROT, ROT, SWAP)
    else:
        part_row = ((slot + split) * KV_HEADS + head) * (MAX_QUERIES * GROUP) + packed
        tl.store(LSE + part_row, m + tl.log2(l), mask=row_ok)
        part_row = part_row.to(tl.int64) * HEAD
        _store(PARTIAL, part_row, o_b * scale, row_ok, PART_BEGIN, PART_B, SWAP)
        if LATENT:
            _store(PARTIAL, part_row, o_a * scale, row_ok, 0, ROT, SWAP)
            _store(PARTIAL, part_row, o_c * scale, row_ok, 3 * ROT, ROT, SWAP)


@triton.jit(do_not_specialize=["num_rows", "target"])
def _join(
    FIRST, ROW_BEGIN, CONTEXT, OUT, PARTIAL, LSE, num_rows, target, stride_out_token,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WINDOW: tl.constexpr,
    MAX_QUERIES: tl.constexpr, MIN_TILES: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join a row's splits for one query token and head: out = sum_s 2^lse_s o_s / sum_s 2^lse_s, COLUMNS of it."""
    token = tl.program_id(0)
    query_head = tl.program_id(1)
    row = 0
    slot = 0
    total = 0
    if ROWS > 1:
        rows, splits_R, total = _row_splits(
            ROW_BEGIN, CONTEXT, FIRST, num_rows, target, ROWS, WINDOW, BN, MAX_QUERIES, MIN_TILES
        )
        ends = tl.load(ROW_BEGIN + rows + 1, mask=rows < num_rows, other=2147483647)
        row = tl.sum((ends <= token).to(tl.int32), 0)
        slot = tl.sum(tl.where((rows < row) & (splits_R > 1), splits_R, 0), 0)
    if row >= num_rows:
        return
    begin = tl.load(ROW_BEGIN + row)
    num_queries = tl.load(ROW_BEGIN + row + 1) - begin
    _, count = _tile_span(num_queries, tl.load(CONTEXT + row), tl.load(FIRST + row), WINDOW, BN, MAX_QUERIES)
    if ROWS == 1:
        total = count
    splits = _split_count(count, total, target, MIN_TILES)
    if (count == 0) | (splits <= 1) | (token >= begin + num_queries):
        return
    packed = (token - begin) * GROUP + query_head % GROUP
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    m = UNSEEN
    l = 0.0  # noqa: E741
    o = tl.zeros([COLUMNS], tl.float32)
    for s0 in range(0, splits, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        part_row = ((slot + s) * KV_HEADS + query_head // GROUP) * (MAX_QUERIES * GROUP) + packed
        lse = tl.load(LSE + part_row, mask=s < splits, other=float("-inf"))
        part = tl.load(PARTIAL + part_row.to(tl.int64)[:, None] * HEAD + column[None, :], mask=(s < splits)[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new)
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(weight, 0)  # noqa: E741
        o = o * shrink + tl.sum(part * weight[:, None], 0)
        m = m_new
    out = OUT + token.to(tl.int64) * stride_out_token + query_head * HEAD + column
    tl.store(out, (o / l).to(OUT.dtype.element_ty))


@dataclass(frozen=True)
class Scratch:
    """Room for the partial sums of rows that are split. One per backend and stream; calls may share it in turn."""

    partial: Tensor  # float32
    lse: Tensor  # float32

    @classmethod
    def allocate(cls, num_rows: int, head_dim: int, device: torch.device | str) -> Scratch:
        """For `num_rows` partial rows, as `scratch_rows` counts them."""
        return cls(
            torch.empty(num_rows * head_dim, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
        )


def _target(tile: DecodeTile, num_kv_heads: int, group: int, max_queries: int) -> int:
    """Splits of all rows together that fill the GPU."""
    m_tiles = -(-max_queries * group // tile.rows)
    return max(1, tile.programs // (num_kv_heads * m_tiles))


def scratch_rows(tile: DecodeTile, num_kv_heads: int, group: int, max_queries: int) -> int:
    """Most partial rows that a call can leave: a row with a share of x >= 1.5 splits gets at most x + 1/2 of them."""
    target = _target(tile, num_kv_heads, group, max_queries)
    return (target + target // 3 + 2) * num_kv_heads * max_queries * group


def decode_launches(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    *,
    max_queries: int,
    out_TNH: Tensor,
    tile: DecodeTile,
    scratch: Scratch | None,
) -> list[Launch]:
    """The launches of one call, in order."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    rotated = kv.width - head_dim
    assert not rotated or rotated * 4 == head_dim, f"a latent of {rotated} rotated dims at head dim {head_dim}"
    assert q_TNH.stride(1) == head_dim and out_TNH.stride(1) == head_dim, "heads of a token must be contiguous"
    target = _target(tile, num_kv_heads, group, max_queries)
    m_tiles = -(-max_queries * group // tile.rows)
    shape: dict[str, Any] = {
        "num_rows": rows.num_rows,
        "target": target,
        "stride_out_token": out_TNH.stride(0),
        "ROWS": 1 if rows.num_rows == 1 else max(16, triton.next_power_of_2(rows.num_rows)),
        "GROUP": group,
        "KV_HEADS": num_kv_heads,
        "HEAD": head_dim,
        "WINDOW": kv.window or 0,
        "MAX_QUERIES": max_queries,
        "MIN_TILES": tile.min_tiles,
        "BN": tile.keys,
        "FIRST": kv.first_B,
        "ROW_BEGIN": rows.row_begin_B1,
        "CONTEXT": rows.context_B,
        "OUT": out_TNH,
        "PARTIAL": None if scratch is None else scratch.partial,
        "LSE": None if scratch is None else scratch.lse,
    }
    decode = Launch(
        _decode,
        ((target + rows.num_rows if target > 1 else rows.num_rows) * m_tiles, num_kv_heads),
        shape
        | {
            "Q": q_TNH,
            "K": kv.planes[0],
            "V": kv.planes[-1],
            "PAGES": kv.pages_BP,
            "VISIBLE": rows.visible_2T,
            "num_tokens": num_tokens,
            "stride_table": kv.pages_BP.stride(0),
            "stride_page": kv.planes.stride(1),
            "stride_q_token": q_TNH.stride(0),
            "ROT": rotated,
            "PAGE": kv.page_tokens,
            "M": tile.rows,
            "M_TILES": m_tiles,
            "SWAP": tile.swapped,
            "HAS_VISIBLE": rows.visible_2T is not None,
        },
        {"num_warps": tile.warps, "num_stages": tile.stages},
    )
    if target == 1:
        return [decode]
    columns = min(head_dim, 128)
    join = Launch(
        _join,
        (num_tokens, num_heads, head_dim // columns),
        shape | {"COLUMNS": columns, "SPLITS": min(64, triton.next_power_of_2(target))},
        {"num_warps": 4},
    )
    return [decode, join]


def decode_attention(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    *,
    max_queries: int,
    out_TNH: Tensor | None = None,
    tile: DecodeTile | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Attention of every row that has 1 to `max_queries` query tokens, all keys in pages; other rows' output stays as it is.

    Safe under CUDA graphs: the launch depends on shapes and `max_queries` alone, every length is read on the device.
    """
    out_TNH = torch.empty_like(q_TNH) if out_TNH is None else out_TNH
    group = q_TNH.shape[1] // kv.num_kv_heads
    tile = tile or decode_tile(q_TNH, kv, rows.num_rows, max_queries)
    if scratch is None:
        scratch = Scratch.allocate(scratch_rows(tile, kv.num_kv_heads, group, max_queries), kv.head_dim, q_TNH.device)
    launches = decode_launches(q_TNH, kv, rows, max_queries=max_queries, out_TNH=out_TNH, tile=tile, scratch=scratch)
    for launch in launches:
        launch.run()
    return out_TNH
