"""Attention of few query tokens per row (decode: 1, verify: up to 16) over the paged cache, split along the keys.

The query heads of one KV head and the row's query tokens are packed into one tile of rows, so every key is read once. How
a row is split follows on the device from the lengths found there: a graph captured once is right, and balanced, for any
lengths. Windows are about equally long and get as many splits each; other rows get splits in proportion to their length.
Rows that need one split write their output at once; the others leave partial sums. Where rows have few splits each, the
program that comes last joins them; where they have many a second kernel does, with many programs a row.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.attention_inputs import PagedKV, RaggedRows
from culet.kernels.triton.chain import enter, is_chained, options
from culet.kernels.triton.e4m3 import widen, widens_by_hand
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
def _split_count(count, wanted, MIN_TILES: tl.constexpr):
    """Splits of a row of `count` tiles: as many as wanted where it has the tiles, all of equal length but the last."""
    splits = tl.maximum(tl.minimum(wanted, count // MIN_TILES), 1)
    return tl.cdiv(count, tl.maximum(tl.cdiv(count, splits), 1))


@triton.jit
def _share(count, total, target):
    """Splits of a row by its share of all tiles; over the rows they sum to at most `target` plus the number of rows."""
    return (count * target + total // 2) // tl.maximum(total, 1)


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
    return rows, _split_count(count, _share(count, total, target), MIN_TILES), total


@triton.jit
def _key_rows(PAGES, tile, first, lo, hi, stride_page, WIDTH: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr):
    """Positions of a tile's keys, and the element offset of each one's row in its plane (of head 0).

    Keys outside lo .. hi - 1, which the caller masks, are read where the nearest key inside lies: clamping a row index
    costs less than a mask on every load, and nothing unwritten is ever touched.
    """
    offset = tile * BN + tl.arange(0, BN)
    inside = tl.minimum(tl.maximum(offset, lo - first), hi - 1 - first)
    if PAGE % BN == 0:  # a tile lies within one page
        column = tile * BN // PAGE
        row = tl.load(PAGES + column).to(tl.int64) * stride_page + (inside - column * PAGE) * WIDTH
    else:
        row = tl.load(PAGES + inside // PAGE).to(tl.int64) * stride_page + (inside % PAGE) * WIDTH
    return first + offset, row


@triton.jit
def _score(q, k):
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def _store(OUT, row_offset, o, row_ok, BEGIN: tl.constexpr, COLUMNS: tl.constexpr):
    column = BEGIN + tl.arange(0, COLUMNS)
    tl.store(OUT + row_offset[:, None] + column[None, :], o.to(OUT.dtype.element_ty), mask=row_ok[:, None])


@triton.jit
def _join_rows(
    OUT, PARTIAL, LSE, begin, num_queries, head, packed_begin, slot, splits, stride_out_token,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, MAX_QUERIES: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the splits of ROWS packed rows, SPLITS at a time: out = sum_s 2^lse_s o_s / sum_s 2^lse_s."""
    packed = packed_begin + tl.arange(0, ROWS)
    row_ok = packed < num_queries * GROUP
    token = begin + tl.minimum(packed // GROUP, num_queries - 1)
    out_row = token.to(tl.int64) * stride_out_token + (head * GROUP + packed % GROUP) * HEAD
    first_part = (slot * KV_HEADS + head) * (MAX_QUERIES * GROUP) + packed
    column = tl.arange(0, HEAD)
    m = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, HEAD], tl.float32)
    for s0 in range(0, splits, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        part_row = first_part[None, :] + s[:, None] * (KV_HEADS * MAX_QUERIES * GROUP)
        there = (s < splits)[:, None] & row_ok[None, :]
        # Past the L1 cache, which knows nothing of what other programs wrote.
        lse = tl.load(LSE + part_row, mask=there, other=float("-inf"), cache_modifier=".cg")
        parts = PARTIAL + part_row.to(tl.int64)[:, :, None] * HEAD + column[None, None, :]
        part = tl.load(parts, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(lse, 0))
        shrink, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new[None, :])
        total = total * shrink + tl.sum(weight, 0)
        o = o * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        m = m_new
    o = o / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(OUT + out_row[:, None] + column[None, :], o.to(OUT.dtype.element_ty), mask=row_ok[:, None])


@triton.jit(do_not_specialize=["num_rows", "target", "num_tokens", "stride_table"])
def _decode(
    Q, K, V, PAGES, FIRST, ROW_BEGIN, CONTEXT, VISIBLE, OUT, PARTIAL, LSE, ARRIVED,
    num_rows, target, num_tokens, stride_table, stride_page, stride_q_token, stride_out_token,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ROT: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, MAX_QUERIES: tl.constexpr, MIN_TILES: tl.constexpr,
    M: tl.constexpr, M_TILES: tl.constexpr, BN: tl.constexpr, HAS_VISIBLE: tl.constexpr, JOINS: tl.constexpr,
    JOIN_ROWS: tl.constexpr, JOIN_SPLITS: tl.constexpr, BY_HAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one row for one KV head. ROT > 0: K is a latent of rows v_rot | nope | k_rot, ROT wide at both ends."""
    # Heads before items: programs without work come last, where they cannot crowd the others onto few multiprocessors.
    m_tile = tl.program_id(0) % M_TILES
    head = tl.program_id(0) // M_TILES % KV_HEADS
    item = tl.program_id(0) // (M_TILES * KV_HEADS)
    LATENT: tl.constexpr = ROT > 0
    WIDTH: tl.constexpr = HEAD + ROT

    wanted = target
    if ROWS == 0:  # every row the same
        row = item // target
        split = item % target
        slot = row * target
    else:
        rows, splits_R, total = _row_splits(
            ROW_BEGIN, CONTEXT, FIRST, num_rows, target, ROWS, WINDOW, BN, MAX_QUERIES, MIN_TILES
        )
        row = tl.sum((tl.cumsum(splits_R, 0) <= item).to(tl.int32), 0)
        split = item - tl.sum(tl.where(rows < row, splits_R, 0), 0)
        slot = tl.sum(tl.where((rows < row) & (splits_R > 1), splits_R, 0), 0)  # one-split rows leave no partial sums
    # What the step's inputs decide comes before the wait.
    is_row = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    begin = tl.load(ROW_BEGIN + row)
    num_queries = tl.load(ROW_BEGIN + row + 1) - begin
    context = tl.load(CONTEXT + row)
    first = tl.load(FIRST + row)
    tile_begin, count = _tile_span(num_queries, context, first, WINDOW, BN, MAX_QUERIES)
    if ROWS > 0:
        wanted = _share(count, total, target)
    splits = _split_count(count, wanted, MIN_TILES)
    per_split = tl.cdiv(count, tl.maximum(splits, 1))
    tile_end = tile_begin + tl.minimum(count, (split + 1) * per_split)
    tile_begin += split * per_split
    lo = tl.maximum(context - WINDOW + 1, first) if WINDOW > 0 else first
    hi = context + num_queries
    PAGES += row * stride_table
    K += head * (PAGE * WIDTH)
    V += head * (PAGE * WIDTH)
    has_work = is_row & (split < splits) & (m_tile * M < num_queries * GROUP)
    enter(PDL)  # before any return: a program that left early would let the next kernel overtake the one before this
    if not has_work:
        return

    packed = m_tile * M + tl.arange(0, M)  # query token x query head of this KV head
    query = packed // GROUP
    row_ok = query < num_queries
    query = tl.minimum(query, num_queries - 1)
    token = begin + query
    seen_hi = context + query
    seen_lo = seen_hi - (WINDOW - 1) if WINDOW > 0 else tl.zeros_like(seen_hi)
    if HAS_VISIBLE:
        seen_lo = tl.load(VISIBLE + token)
        seen_hi = tl.load(VISIBLE + num_tokens + token)

    # Heads are taken in parts of PART columns whose scores are summed at the end: one long chain of dependent matrix
    # instructions would take longer than the keys take to arrive.
    PART: tl.constexpr = ROT if LATENT else HEAD // 2
    column = tl.arange(0, PART)[None, :]
    q_rows = Q + token.to(tl.int64)[:, None] * stride_q_token + (head * GROUP + packed % GROUP)[:, None] * HEAD + column
    q_0 = tl.load(q_rows)
    q_1 = tl.load(q_rows + PART)
    o_0 = tl.zeros([M, PART], tl.float32)
    o_1 = tl.zeros([M, PART], tl.float32)
    if LATENT:
        q_2 = tl.load(q_rows + 2 * PART)
        q_3 = tl.load(q_rows + 3 * PART)
        o_2 = tl.zeros([M, PART], tl.float32)
        o_3 = tl.zeros([M, PART], tl.float32)
    m = tl.full([M], UNSEEN, tl.float32)
    total = tl.zeros([M, BN], tl.float32)  # summed over its columns at the end: once, not for every tile

    for tile in range(tile_begin, tile_end):
        key, offset = _key_rows(PAGES, tile, first, lo, hi, stride_page, WIDTH, PAGE, BN)
        rows_K = K + offset[:, None] + column
        if LATENT:
            v_0 = widen(tl.load(rows_K), Q.dtype.element_ty, BY_HAND)
            v_1 = widen(tl.load(rows_K + PART), Q.dtype.element_ty, BY_HAND)
            v_2 = widen(tl.load(rows_K + 2 * PART), Q.dtype.element_ty, BY_HAND)
            v_3 = widen(tl.load(rows_K + 3 * PART), Q.dtype.element_ty, BY_HAND)
            k_3 = widen(tl.load(rows_K + 4 * PART), Q.dtype.element_ty, BY_HAND)
            s = (_score(q_0, v_1) + _score(q_1, v_2)) + (_score(q_2, v_3) + _score(q_3, k_3))
        else:
            k_0 = widen(tl.load(rows_K), Q.dtype.element_ty, BY_HAND)
            k_1 = widen(tl.load(rows_K + PART), Q.dtype.element_ty, BY_HAND)
            s = _score(q_0, k_0) + _score(q_1, k_1)
        visible = key[None, :] <= seen_hi[:, None]
        if HAS_VISIBLE or WINDOW > 0:
            visible = visible & (key[None, :] >= seen_lo[:, None])
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * LOG2E)
        p = tl.exp2(s * LOG2E - m_new[:, None])
        shrink = tl.exp2(m - m_new)[:, None]
        total = total * shrink + p
        m = m_new
        p = p.to(Q.dtype.element_ty)
        if not LATENT:
            rows_V = V + offset[:, None] + column
            v_0 = widen(tl.load(rows_V), Q.dtype.element_ty, BY_HAND)
            v_1 = widen(tl.load(rows_V + PART), Q.dtype.element_ty, BY_HAND)
        o_0 = tl.dot(p, v_0, o_0 * shrink, input_precision="ieee")
        o_1 = tl.dot(p, v_1, o_1 * shrink, input_precision="ieee")
        if LATENT:
            o_2 = tl.dot(p, v_2, o_2 * shrink, input_precision="ieee")
            o_3 = tl.dot(p, v_3, o_3 * shrink, input_precision="ieee")

    sums = tl.sum(total, 1)
    scale = (1.0 / tl.where(sums > 0.0, sums, 1.0))[:, None]
    out_row = token.to(tl.int64) * stride_out_token + (head * GROUP + packed % GROUP) * HEAD
    if splits == 1:
        _store(OUT, out_row, o_0 * scale, row_ok, 0, PART)
        _store(OUT, out_row, o_1 * scale, row_ok, PART, PART)
        if LATENT:
            _store(OUT, out_row, o_2 * scale, row_ok, 2 * PART, PART)
            _store(OUT, out_row, o_3 * scale, row_ok, 3 * PART, PART)
    else:
        part_row = ((slot + split) * KV_HEADS + head) * (MAX_QUERIES * GROUP) + packed
        tl.store(LSE + part_row, m + tl.log2(sums), mask=row_ok)
        part_row = part_row.to(tl.int64) * HEAD
        _store(PARTIAL, part_row, o_0 * scale, row_ok, 0, PART)
        _store(PARTIAL, part_row, o_1 * scale, row_ok, PART, PART)
        if LATENT:
            _store(PARTIAL, part_row, o_2 * scale, row_ok, 2 * PART, PART)
            _store(PARTIAL, part_row, o_3 * scale, row_ok, 3 * PART, PART)
        if JOINS:
            tl.debug_barrier()  # all of this program's sums are on their way before it says that it has arrived
            arrived = ARRIVED + (slot * KV_HEADS + head) * M_TILES + m_tile
            if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
                tl.store(arrived, 0)
                _join_rows(
                    OUT, PARTIAL, LSE, begin, num_queries, head, m_tile * M, slot, splits, stride_out_token,
                    GROUP, KV_HEADS, HEAD, MAX_QUERIES, JOIN_ROWS, JOIN_SPLITS,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "target"])
def _join(
    FIRST, ROW_BEGIN, CONTEXT, OUT, PARTIAL, LSE, num_rows, target, stride_out_token,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WINDOW: tl.constexpr,
    MAX_QUERIES: tl.constexpr, MIN_TILES: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Join a row's splits for one query token and head: out = sum_s 2^lse_s o_s / sum_s 2^lse_s, COLUMNS of it."""
    row = tl.program_id(0) // MAX_QUERIES
    query = tl.program_id(0) % MAX_QUERIES
    query_head = tl.program_id(1)
    begin = tl.load(ROW_BEGIN + row)
    num_queries = tl.load(ROW_BEGIN + row + 1) - begin
    _, count = _tile_span(num_queries, tl.load(CONTEXT + row), tl.load(FIRST + row), WINDOW, BN, MAX_QUERIES)
    wanted = target
    slot = row * target
    if ROWS > 0:
        rows, splits_R, total = _row_splits(
            ROW_BEGIN, CONTEXT, FIRST, num_rows, target, ROWS, WINDOW, BN, MAX_QUERIES, MIN_TILES
        )
        slot = tl.sum(tl.where((rows < row) & (splits_R > 1), splits_R, 0), 0)
        wanted = _share(count, total, target)
    splits = _split_count(count, wanted, MIN_TILES)
    enter(PDL)  # before any return: a program that left early would let the next kernel overtake the one before this
    if (count == 0) | (splits <= 1) | (query >= num_queries):
        return
    token = begin + query
    packed = query * GROUP + query_head % GROUP
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    m = UNSEEN
    total_weight = 0.0
    o = tl.zeros([COLUMNS], tl.float32)
    for s0 in range(0, splits, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        part_row = ((slot + s) * KV_HEADS + query_head // GROUP) * (MAX_QUERIES * GROUP) + packed
        lse = tl.load(LSE + part_row, mask=s < splits, other=float("-inf"))
        part = tl.load(PARTIAL + part_row.to(tl.int64)[:, None] * HEAD + column[None, :], mask=(s < splits)[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new)
        shrink = tl.exp2(m - m_new)
        total_weight = total_weight * shrink + tl.sum(weight, 0)
        o = o * shrink + tl.sum(part * weight[:, None], 0)
        m = m_new
    out = OUT + token.to(tl.int64) * stride_out_token + query_head * HEAD + column
    tl.store(out, (o / total_weight).to(OUT.dtype.element_ty))


@dataclass(frozen=True)
class Scratch:
    """Room for the partial sums of rows that are split. One per backend and stream; calls may share it in turn."""

    partial: Tensor  # float32
    lse: Tensor  # float32
    arrived: Tensor  # int32; programs that have left their sums; 0 between calls

    @classmethod
    def allocate(cls, num_rows: int, head_dim: int, device: torch.device | str) -> Scratch:
        """For `num_rows` partial rows, as `scratch_rows` counts them."""
        return cls(
            torch.empty(num_rows * head_dim, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
        )


def scratch_rows(tile: DecodeTile, num_kv_heads: int, group: int, max_queries: int) -> int:
    """Most partial rows that a call can leave: a row with a share of x >= 1.5 splits gets at most x + 1/2 of them."""
    target = tile.most_splits(num_kv_heads, group, max_queries)
    return (target + target // 3 + 2) * num_kv_heads * max_queries * group


def _shape(
    num_heads: int, kv: PagedKV, rows: RaggedRows, max_queries: int, out_TNH: Tensor, tile: DecodeTile
) -> dict[str, Any]:
    """What the two kernels must agree on."""
    group = num_heads // kv.num_kv_heads
    return {
        "num_rows": rows.num_rows,
        "target": tile.splits(kv, rows.num_rows, group, max_queries).target,
        "stride_out_token": out_TNH.stride(0),
        "ROWS": 0 if kv.window or rows.num_rows == 1 else max(16, triton.next_power_of_2(rows.num_rows)),
        "GROUP": group,
        "KV_HEADS": kv.num_kv_heads,
        "HEAD": kv.head_dim,
        "WINDOW": kv.window or 0,
        "MAX_QUERIES": max_queries,
        "MIN_TILES": tile.min_tiles,
        "BN": tile.keys,
        "FIRST": kv.first_B,
        "ROW_BEGIN": rows.row_begin_B1,
        "CONTEXT": rows.context_B,
        "OUT": out_TNH,
        "PDL": is_chained(out_TNH.device),
    }


def join_launch(
    num_heads: int,
    kv: PagedKV,
    rows: RaggedRows,
    *,
    max_queries: int,
    out_TNH: Tensor,
    tile: DecodeTile,
    scratch: Scratch | None,
) -> Launch:
    """The launch that joins the splits which a decode kernel with this tile left in `scratch`."""
    shape = _shape(num_heads, kv, rows, max_queries, out_TNH, tile)
    # Few rows need many programs to be quick, many rows few: each one must work out the splits anew.
    num_queries = rows.num_rows * max_queries
    columns = min(kv.head_dim, 128) if num_queries * num_heads < 1024 else kv.head_dim
    average = shape["target"] // (rows.num_rows if shape["ROWS"] else 1)
    shape |= {
        "PARTIAL": None if scratch is None else scratch.partial,
        "LSE": None if scratch is None else scratch.lse,
        "COLUMNS": columns,
        # Taken at a time; a row may get twice the average, windows get it exactly.
        "SPLITS": min(64, max(4, triton.next_power_of_2(average * (2 if shape["ROWS"] else 1)))),
    }
    return Launch(_join, (num_queries, num_heads, kv.head_dim // columns), shape, options(4, shape["PDL"]))


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
    rotated = kv.width - head_dim
    assert not rotated or rotated * 4 == head_dim, f"a latent of {rotated} rotated dims at head dim {head_dim}"
    assert q_TNH.stride(1) == out_TNH.stride(1) == head_dim, "heads of a token must be contiguous"
    shape = _shape(num_heads, kv, rows, max_queries, out_TNH, tile)
    splits = tile.splits(kv, rows.num_rows, shape["GROUP"], max_queries)
    target, m_tiles = splits.target, -(-max_queries * shape["GROUP"] // tile.rows)
    shape |= {
        "PARTIAL": None if scratch is None else scratch.partial,
        "LSE": None if scratch is None else scratch.lse,
        "ARRIVED": None if scratch is None else scratch.arrived,
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
        "HAS_VISIBLE": rows.visible_2T is not None,
        "JOINS": splits.joins,
        "JOIN_ROWS": min(tile.rows, triton.next_power_of_2(max_queries * shape["GROUP"])),
        "JOIN_SPLITS": splits.at_once,
        "BY_HAND": widens_by_hand(q_TNH, kv),
    }
    items = rows.num_rows * target if shape["ROWS"] == 0 else rows.num_rows + (target if target > 1 else 0)
    decode = Launch(
        _decode, (items * m_tiles * kv.num_kv_heads,), shape, options(tile.warps, shape["PDL"]) | {"num_stages": tile.stages}
    )
    if target == 1 or splits.joins:
        return [decode]
    join = join_launch(num_heads, kv, rows, max_queries=max_queries, out_TNH=out_TNH, tile=tile, scratch=scratch)
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
    tile = tile or decode_tile(q_TNH, kv, max_queries, rows.num_rows)
    if scratch is None:
        scratch = Scratch.allocate(scratch_rows(tile, kv.num_kv_heads, group, max_queries), kv.head_dim, q_TNH.device)
    launches = decode_launches(q_TNH, kv, rows, max_queries=max_queries, out_TNH=out_TNH, tile=tile, scratch=scratch)
    for launch in launches:
        launch.run()
    return out_TNH
