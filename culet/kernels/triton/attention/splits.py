"""Split rows with few query tokens along their keys, and join the splits.

The device computes the splits from the lengths it finds, so a graph that was captured once is correct and balanced for any
lengths. Windows are about equally long and each get the same number of splits. Other rows get splits in proportion to their
length. Rows of one split write their output directly. The others write partial sums. If a row has few splits, the last program
to arrive joins them (`join_rows`). If it has many, a second kernel joins them, with many programs per row.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.attention.key_tiles import LOG2E, UNSEEN
from culet.kernels.triton.attention.tiles import DecodeTile
from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch
from culet.kernels.types import PagedKV, RaggedRows


class KeySplit(NamedTuple):
    """One split of one row."""

    row: Any
    begin: Any  # first query token of the row
    num_queries: Any
    context: Any  # position of the first query token
    first: Any  # position of the first key in the row's pages
    place: Any  # place of the row's first partial sums. Rows of one split have none.
    number: Any  # index among the row's splits
    splits: Any  # number of splits in the row
    tile_begin: Any
    tile_end: Any
    is_valid: Any  # whether the split exists. If not, the other fields belong to another row.


@triton.jit
def _tile_span(num_queries, context, first, WINDOW: tl.constexpr, BN: tl.constexpr, MAX_QUERIES: tl.constexpr):
    """Return the first key tile of a row and its number of tiles. Rows that are empty or too long for this kernel have 0."""
    lo = first
    if WINDOW > 0:
        lo = tl.maximum(context - WINDOW + 1, first)
    begin = (lo - first) // BN
    count = tl.cdiv(context + num_queries - first, BN) - begin
    return begin, tl.where((num_queries > 0) & (num_queries <= MAX_QUERIES), count, 0)


@triton.jit
def _split_count(count, wanted, MIN_TILES: tl.constexpr):
    """Return the number of splits for `count` tiles, at most `wanted`. All splits except the last have equal length."""
    splits = tl.maximum(tl.minimum(wanted, count // MIN_TILES), 1)
    return tl.cdiv(count, tl.maximum(tl.cdiv(count, splits), 1))


@triton.jit
def _share(count, total, target):
    """Return a row's splits by its share of all tiles. Their sum over all rows is at most `target` plus the number of rows."""
    return (count * target + total // 2) // tl.maximum(total, 1)


@triton.jit
def _load_row(ROW_BEGIN, CONTEXT, FIRST, row):
    """Load the first token, number of query tokens, position of the first token and position of the first key in pages."""
    begin = tl.load(ROW_BEGIN + row)
    return begin, tl.load(ROW_BEGIN + row + 1) - begin, tl.load(CONTEXT + row), tl.load(FIRST + row)


@triton.jit
def _row_splits(
    ROW_BEGIN, CONTEXT, FIRST, num_rows, target,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr, MAX_QUERIES: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """Return the row numbers and the splits per row (vectors of ROWS), and the total number of tiles."""
    rows = tl.arange(0, ROWS)
    in_batch = rows < num_rows
    begin = tl.load(ROW_BEGIN + rows, mask=in_batch, other=0)
    end = tl.load(ROW_BEGIN + rows + 1, mask=in_batch, other=0)
    context = tl.load(CONTEXT + rows, mask=in_batch, other=0)
    first = tl.load(FIRST + rows, mask=in_batch, other=0)
    _, count = _tile_span(end - begin, context, first, WINDOW, BN, MAX_QUERIES)
    total = tl.sum(count, 0)
    return rows, _split_count(count, _share(count, total, target), MIN_TILES), total


@triton.jit
def _first_place(rows, splits_R, row):
    """Return the place of a row's first partial sums. Rows of one split have none."""
    return tl.sum(tl.where((rows < row) & (splits_R > 1), splits_R, 0), 0)


@triton.jit
def find_split(
    ROW_BEGIN, CONTEXT, FIRST, num_rows, target, item,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr, MAX_QUERIES: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """Return the `item`-th split of all rows. If ROWS == 0, every row has room for `target` splits."""
    if ROWS == 0:
        row = item // target
        number = item % target
        place = row * target
    else:
        rows, splits_R, total = _row_splits(
            ROW_BEGIN, CONTEXT, FIRST, num_rows, target, ROWS, WINDOW, BN, MAX_QUERIES, MIN_TILES
        )
        row = tl.sum((tl.cumsum(splits_R, 0) <= item).to(tl.int32), 0)
        number = item - tl.sum(tl.where(rows < row, splits_R, 0), 0)
        place = _first_place(rows, splits_R, row)
    is_row = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    begin, num_queries, context, first = _load_row(ROW_BEGIN, CONTEXT, FIRST, row)
    tile_begin, count = _tile_span(num_queries, context, first, WINDOW, BN, MAX_QUERIES)
    wanted = target if ROWS == 0 else _share(count, total, target)
    splits = _split_count(count, wanted, MIN_TILES)
    per_split = tl.cdiv(count, tl.maximum(splits, 1))
    tile_end = tile_begin + tl.minimum(count, (number + 1) * per_split)
    tile_begin += number * per_split
    is_valid = is_row & (number < splits)
    return KeySplit(row, begin, num_queries, context, first, place, number, splits, tile_begin, tile_end, is_valid)


@triton.jit
def store_lse(OUT_LSE, token, query_head, m, total, NUM_HEADS: tl.constexpr, is_valid):
    """Store the log of the sum of exponentials of the scores. A row that sees no key has total 0, which gives -inf."""
    tl.store(OUT_LSE + token.to(tl.int64) * NUM_HEADS + query_head, (m + tl.log2(total)) / LOG2E, mask=is_valid)


@triton.jit
def join_rows(
    OUT, OUT_LSE, PARTIAL, LSE, begin, num_queries, head, packed_begin, place, splits, stride_out_token,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, MAX_QUERIES: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the splits of ROWS packed rows, SPLITS at a time, as out = sum_s 2^lse_s o_s / sum_s 2^lse_s."""
    packed = packed_begin + tl.arange(0, ROWS)
    row_ok = packed < num_queries * GROUP
    token = begin + tl.minimum(packed // GROUP, num_queries - 1)
    out_row = token.to(tl.int64) * stride_out_token + (head * GROUP + packed % GROUP) * HEAD
    first_part = (place * KV_HEADS + head) * (MAX_QUERIES * GROUP) + packed
    column = tl.arange(0, HEAD)
    m = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, HEAD], tl.float32)
    for s0 in range(0, splits, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        part_row = first_part[None, :] + s[:, None] * (KV_HEADS * MAX_QUERIES * GROUP)
        is_split = (s < splits)[:, None] & row_ok[None, :]
        # Bypass the L1 cache, which does not see the writes of other programs.
        lse = tl.load(LSE + part_row, mask=is_split, other=float("-inf"), cache_modifier=".cg")
        parts = PARTIAL + part_row.to(tl.int64)[:, :, None] * HEAD + column[None, None, :]
        part = tl.load(parts, mask=is_split[:, :, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(lse, 0))
        shrink, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new[None, :])
        total = total * shrink + tl.sum(weight, 0)
        o = o * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        m = m_new
    if OUT_LSE is not None:
        store_lse(OUT_LSE, token, head * GROUP + packed % GROUP, m, total, KV_HEADS * GROUP, row_ok)
    o = o / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(OUT + out_row[:, None] + column[None, :], o.to(OUT.dtype.element_ty), mask=row_ok[:, None])


@triton.jit(do_not_specialize=["num_rows", "target"])
def _join(
    FIRST, ROW_BEGIN, CONTEXT, OUT, OUT_LSE, PARTIAL, LSE, num_rows, target, stride_out_token,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WINDOW: tl.constexpr,
    MAX_QUERIES: tl.constexpr, MIN_TILES: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Join a row's splits for COLUMNS columns of one query token and head, as out = sum_s 2^lse_s o_s / sum_s 2^lse_s."""
    row = tl.program_id(0) // MAX_QUERIES
    query = tl.program_id(0) % MAX_QUERIES
    query_head = tl.program_id(1)
    begin, num_queries, context, first = _load_row(ROW_BEGIN, CONTEXT, FIRST, row)
    _, count = _tile_span(num_queries, context, first, WINDOW, BN, MAX_QUERIES)
    wanted = target
    place = row * target
    if ROWS > 0:
        rows, splits_R, total = _row_splits(
            ROW_BEGIN, CONTEXT, FIRST, num_rows, target, ROWS, WINDOW, BN, MAX_QUERIES, MIN_TILES
        )
        place = _first_place(rows, splits_R, row)
        wanted = _share(count, total, target)
    splits = _split_count(count, wanted, MIN_TILES)
    enter(PDL)  # before any return, since a program that exits early would let the next kernel overtake the previous one
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
        part_row = ((place + s) * KV_HEADS + query_head // GROUP) * (MAX_QUERIES * GROUP) + packed
        lse = tl.load(LSE + part_row, mask=s < splits, other=float("-inf"))
        part = tl.load(PARTIAL + part_row.to(tl.int64)[:, None] * HEAD + column[None, :], mask=(s < splits)[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new)
        shrink = tl.exp2(m - m_new)
        total_weight = total_weight * shrink + tl.sum(weight, 0)
        o = o * shrink + tl.sum(part * weight[:, None], 0)
        m = m_new
    if OUT_LSE is not None:
        store_lse(OUT_LSE, token, query_head, m, total_weight, KV_HEADS * GROUP, tl.program_id(2) == 0)
    out = OUT + token.to(tl.int64) * stride_out_token + query_head * HEAD + column
    tl.store(out, (o / tl.where(total_weight > 0.0, total_weight, 1.0)).to(OUT.dtype.element_ty))


@dataclass(frozen=True)
class Scratch:
    """Memory for the partial sums of split rows. Each backend and stream has one. Calls reuse it one after the other."""

    partial: Tensor  # float32
    lse: Tensor  # float32
    arrived: Tensor  # int32, number of programs that have written their sums. It is 0 between calls.

    @classmethod
    def allocate(cls, num_rows: int, head_dim: int, device: torch.device | str) -> Scratch:
        """Allocate memory for `num_rows` partial rows, as counted by `scratch_rows`."""
        return cls(
            torch.empty(num_rows * head_dim, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
        )


def scratch_rows(tile: DecodeTile, num_kv_heads: int, group: int, max_queries: int) -> int:
    """Return the most partial rows that a call can write. A row whose share is x >= 1.5 splits gets at most x + 1/2 splits."""
    target = tile.most_splits(num_kv_heads, group, max_queries)
    return (target + target // 3 + 2) * num_kv_heads * max_queries * group


def describe_splits(
    num_heads: int, kv: PagedKV, rows: RaggedRows, max_queries: int, out_TNH: Tensor, tile: DecodeTile
) -> dict[str, Any]:
    """Return the arguments that determine how rows are split. A decode kernel and the joining kernel must agree on them."""
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
        "PDL": uses_pdl(out_TNH.device),
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
    lse_TN: Tensor | None = None,
) -> Launch:
    """Return the launch that joins the splits that a decode kernel with this tile wrote to `scratch`."""
    shape = describe_splits(num_heads, kv, rows, max_queries, out_TNH, tile)
    # Few rows need many programs per row to be fast. Many rows need few, because every program computes the splits again.
    num_queries = rows.num_rows * max_queries
    columns = min(kv.head_dim, 128) if num_queries * num_heads < 1024 else kv.head_dim
    average = shape["target"] // (rows.num_rows if shape["ROWS"] else 1)
    shape |= {
        "PARTIAL": None if scratch is None else scratch.partial,
        "LSE": None if scratch is None else scratch.lse,
        "OUT_LSE": lse_TN,
        "COLUMNS": columns,
        # Splits to read at a time. A row may get twice the average. Windows get exactly the average.
        "SPLITS": min(64, max(4, triton.next_power_of_2(average * (2 if shape["ROWS"] else 1)))),
    }
    return Launch(_join, (num_queries, num_heads, kv.head_dim // columns), shape, options(4, shape["PDL"]))
