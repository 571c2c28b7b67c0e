"""Attention with few query tokens per row (1 in decode, up to 16 in verify) over the paged cache, split along the keys.

The query heads of one KV head and the row's query tokens are packed into one tile of rows, so every key is read once. A
program runs such a tile over the key tiles of one split (see `splits.py`) and writes the output or partial sums.

Heads are processed in parts of equal width whose scores are summed at the end. One long chain of dependent matrix instructions
would take longer than the keys take to arrive. Separate keys and values have two parts each. A latent row has five parts,
v_rot | nope (three parts) | k_rot. The first four are the values and the last four are the keys.
"""

# The number of parts depends on the kind of cache, so tuples of parts are assigned in different lengths.
# mypy: disallow-untyped-defs=False, check-untyped-defs=False, disable-error-code=assignment

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.attention.e4m3 import widen, widens_by_hand
from culet.kernels.triton.attention.key_tiles import UNSEEN, add_values, key_rows, row_offset, weigh
from culet.kernels.triton.attention.splits import (
    Scratch,
    describe_splits,
    find_split,
    join_launch,
    join_rows,
    scratch_rows,
    store_lse,
)
from culet.kernels.triton.attention.tiles import DecodeTile, decode_tile
from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.launch import Launch
from culet.kernels.types import PagedKV, RaggedRows


class _Rows(NamedTuple):
    """The packed rows of a tile, query tokens x query heads of one KV head. Rows past the last token repeat it."""

    packed: Any  # row number, query * GROUP + query head
    token: Any
    is_valid: Any  # False if the row is a repetition
    seen_lo: Any  # first and last key that the row sees
    seen_hi: Any


@triton.jit
def _packed_rows(
    VISIBLE, split, m_tile, num_tokens,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, HAS_VISIBLE: tl.constexpr,
):  # fmt: skip
    """Return tile `m_tile`, which has M of the packed rows of a split's row."""
    packed = m_tile * M + tl.arange(0, M)
    query = packed // GROUP
    is_valid = query < split.num_queries
    query = tl.minimum(query, split.num_queries - 1)
    token = split.begin + query
    seen_hi = split.context + query
    seen_lo = seen_hi - (WINDOW - 1) if WINDOW > 0 else tl.zeros_like(seen_hi)
    if HAS_VISIBLE:
        seen_lo = tl.load(VISIBLE + token)
        seen_hi = tl.load(VISIBLE + num_tokens + token)
    return _Rows(packed, token, is_valid, seen_lo, seen_hi)


@triton.jit
def _load_parts(first, COUNT: tl.constexpr, dtype: tl.constexpr, BY_HAND: tl.constexpr):
    """Load the first COUNT parts of rows, widened to `dtype`. `first` points to the first part's columns."""
    parts = ()
    for i in tl.static_range(COUNT):
        parts += (widen(tl.load(first + i * first.shape[1]), dtype, BY_HAND),)
    return parts


@triton.jit
def _score_part(q, k):
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def _score(q, k):
    """Return the scores of a tile's keys. The scores of the parts are summed in pairs."""
    s = _score_part(q[0], k[0]) + _score_part(q[1], k[1])
    if len(q) == 4:
        s += _score_part(q[2], k[2]) + _score_part(q[3], k[3])
    return s


@triton.jit
def _attend(
    q, K, V, PAGES, split, seen_lo, seen_hi, stride_page,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr,
    HAS_VISIBLE: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Attend `q` to the split's key tiles. Return weighted sums of values in parts, and the weights' maximum and sum."""
    PARTS: tl.constexpr = len(q)
    M: tl.constexpr = q[0].shape[0]
    PART: tl.constexpr = q[0].shape[1]
    IS_LATENT: tl.constexpr = WIDTH > PARTS * PART  # a latent row is wider by k_rot
    dtype: tl.constexpr = q[0].dtype
    lo = tl.maximum(split.context - WINDOW + 1, split.first) if WINDOW > 0 else split.first
    hi = split.context + split.num_queries
    column = tl.arange(0, PART)[None, :]
    o = ()
    for _ in tl.static_range(PARTS):
        o += (tl.zeros([M, PART], tl.float32),)
    m = tl.full([M], UNSEEN, tl.float32)
    total = tl.zeros([M, BN], tl.float32)  # The columns are summed once at the end, not for every tile.
    for tile in range(split.tile_begin, split.tile_end):
        key, offset = key_rows(PAGES, tile, split.first, lo, hi, stride_page, WIDTH, PAGE, BN)
        if IS_LATENT:
            row = _load_parts(K + offset[:, None] + column, PARTS + 1, dtype, BY_HAND)
            s = _score(q, row[1:])
        else:
            s = _score(q, _load_parts(K + offset[:, None] + column, PARTS, dtype, BY_HAND))
        visible = key[None, :] <= seen_hi[:, None]
        if HAS_VISIBLE or WINDOW > 0:
            visible = visible & (key[None, :] >= seen_lo[:, None])
        p, m, shrink = weigh(tl.where(visible, s, float("-inf")), m)
        total = total * shrink[:, None] + p
        p = p.to(dtype)
        if IS_LATENT:
            v = row[:PARTS]
        else:
            v = _load_parts(V + offset[:, None] + column, PARTS, dtype, BY_HAND)
        o = add_values(o, p, v, shrink)
    return o, m, tl.sum(total, 1)


@triton.jit
def _store_parts(OUT, offset, o, scale, is_valid):
    """Store the scaled parts side by side in the rows of OUT at `offset`."""
    for i in tl.static_range(len(o)):
        part = o[i] * scale
        column = i * part.shape[1] + tl.arange(0, part.shape[1])
        tl.store(OUT + offset[:, None] + column[None, :], part.to(OUT.dtype.element_ty), mask=is_valid[:, None])


@triton.jit(do_not_specialize=["num_rows", "target", "num_tokens", "stride_table"])
def _decode(
    Q, K, V, PAGES, FIRST, ROW_BEGIN, CONTEXT, VISIBLE, OUT, OUT_LSE, PARTIAL, LSE, ARRIVED,
    num_rows, target, num_tokens, stride_table, stride_page, stride_q_token, stride_out_token,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ROT: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, MAX_QUERIES: tl.constexpr, MIN_TILES: tl.constexpr,
    M: tl.constexpr, M_TILES: tl.constexpr, BN: tl.constexpr, HAS_VISIBLE: tl.constexpr, JOINS: tl.constexpr,
    JOIN_ROWS: tl.constexpr, JOIN_SPLITS: tl.constexpr, BY_HAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process one split of one row for one KV head.

    If ROT > 0, K has latent rows v_rot | nope | k_rot. Both ends are ROT wide.
    """
    # Heads vary faster than items. Programs without work come last, so those with work spread over all multiprocessors.
    m_tile = tl.program_id(0) % M_TILES
    head = tl.program_id(0) // M_TILES % KV_HEADS
    item = tl.program_id(0) // (M_TILES * KV_HEADS)
    # Work that depends only on the step's inputs comes before the wait.
    split = find_split(ROW_BEGIN, CONTEXT, FIRST, num_rows, target, item, ROWS, WINDOW, BN, MAX_QUERIES, MIN_TILES)
    WIDTH: tl.constexpr = HEAD + ROT
    PAGES += split.row * stride_table
    K += head * (PAGE * WIDTH)
    V += head * (PAGE * WIDTH)
    has_work = split.is_valid & (m_tile * M < split.num_queries * GROUP)
    enter(PDL)  # before any return, since a program that exits early would let the next kernel overtake the previous one
    if not has_work:
        return

    rows = _packed_rows(VISIBLE, split, m_tile, num_tokens, GROUP, WINDOW, M, HAS_VISIBLE)
    PARTS: tl.constexpr = 4 if ROT > 0 else 2
    column = tl.arange(0, HEAD // PARTS)[None, :]
    q_rows = Q + row_offset(rows.token, rows.packed, head, stride_q_token, GROUP, HEAD)[:, None]
    q = _load_parts(q_rows + column, PARTS, Q.dtype.element_ty, False)
    o, m, sums = _attend(
        q, K, V, PAGES, split, rows.seen_lo, rows.seen_hi, stride_page, WIDTH, PAGE, WINDOW, BN, HAS_VISIBLE, BY_HAND
    )

    scale = (1.0 / tl.where(sums > 0.0, sums, 1.0))[:, None]
    out_row = row_offset(rows.token, rows.packed, head, stride_out_token, GROUP, HEAD)
    if split.splits == 1:
        _store_parts(OUT, out_row, o, scale, rows.is_valid)
        if OUT_LSE is not None:
            store_lse(OUT_LSE, rows.token, head * GROUP + rows.packed % GROUP, m, sums, KV_HEADS * GROUP, rows.is_valid)
    else:
        part_row = ((split.place + split.number) * KV_HEADS + head) * (MAX_QUERIES * GROUP) + rows.packed
        tl.store(LSE + part_row, m + tl.log2(sums), mask=rows.is_valid)
        _store_parts(PARTIAL, part_row.to(tl.int64) * HEAD, o, scale, rows.is_valid)
        if JOINS:
            tl.debug_barrier()  # write all of this program's sums before it reports its arrival
            arrived = ARRIVED + (split.place * KV_HEADS + head) * M_TILES + m_tile
            if tl.atomic_add(arrived, 1, sem="acq_rel") == split.splits - 1:
                tl.store(arrived, 0)
                join_rows(
                    OUT, OUT_LSE, PARTIAL, LSE, split.begin, split.num_queries, head, m_tile * M, split.place, split.splits,
                    stride_out_token, GROUP, KV_HEADS, HEAD, MAX_QUERIES, JOIN_ROWS, JOIN_SPLITS,
                )  # fmt: skip


def decode_launches(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    *,
    max_queries: int,
    out_TNH: Tensor,
    tile: DecodeTile,
    scratch: Scratch | None,
    lse_TN: Tensor | None = None,
) -> list[Launch]:
    """Return the launches of one call, in order."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    rotated = kv.width - head_dim
    assert not rotated or rotated * 4 == head_dim, f"unsupported latent: {rotated} rotated dims at head dim {head_dim}"
    assert q_TNH.stride(1) == out_TNH.stride(1) == head_dim, "heads of a token must be contiguous"
    shape = describe_splits(num_heads, kv, rows, max_queries, out_TNH, tile)
    splits = tile.splits(kv, rows.num_rows, shape["GROUP"], max_queries)
    target, m_tiles = splits.target, -(-max_queries * shape["GROUP"] // tile.rows)
    shape |= {
        "PARTIAL": None if scratch is None else scratch.partial,
        "LSE": None if scratch is None else scratch.lse,
        "ARRIVED": None if scratch is None else scratch.arrived,
        "OUT_LSE": lse_TN,
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
    join = join_launch(num_heads, kv, rows, max_queries=max_queries, out_TNH=out_TNH, tile=tile, scratch=scratch, lse_TN=lse_TN)
    return [decode, join]


def decode_attention(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    *,
    max_queries: int,
    out_TNH: Tensor | None = None,
    lse_TN: Tensor | None = None,
    tile: DecodeTile | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Return the attention of every row with 1 to `max_queries` query tokens. All keys are in pages.

    If `lse_TN` is given, it gets the log of the sum of exponentials of each query's scores, float32. Rows of which no query
    sees a key (context + query tokens = 0) are not written, and neither are other rows. This is safe in CUDA graphs, because
    the launch depends only on shapes and `max_queries`. Lengths are read on the device.
    """
    out_TNH = torch.empty_like(q_TNH) if out_TNH is None else out_TNH
    group = q_TNH.shape[1] // kv.num_kv_heads
    tile = tile or decode_tile(q_TNH, kv, max_queries, rows.num_rows)
    if scratch is None:
        scratch = Scratch.allocate(scratch_rows(tile, kv.num_kv_heads, group, max_queries), kv.head_dim, q_TNH.device)
    launches = decode_launches(
        q_TNH, kv, rows, max_queries=max_queries, out_TNH=out_TNH, tile=tile, scratch=scratch, lse_TN=lse_TN
    )
    for launch in launches:
        launch.run()
    return out_TNH
