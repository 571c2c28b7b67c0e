"""Attention with many query tokens per row, for prompts and their chunks. One launch handles any number of rows.

A program runs a tile of packed rows (query tokens x the query heads of one KV head) over the keys they see. Context keys come
from pages. The chunk's own keys come from the fresh tensors, because a chunk longer than the window stores no KV for its early
tokens. If the caller passes no fresh tensors, they come from pages too. Key tiles that every row sees whole are not masked.

Separate keys and values are processed whole. A latent row has four parts, v_rot (a) | nope (b, c) | k_rot (d). The values
are a, b, c and the keys are b, c, d. Widths are powers of two, so b is twice as wide as the others.
"""

# The number of parts depends on the kind of cache, so tuples of parts are assigned in different lengths.
# mypy: disallow-untyped-defs=False, check-untyped-defs=False, disable-error-code=assignment

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.attention.e4m3 import widen, widens_by_hand
from culet.kernels.triton.attention.key_tiles import UNSEEN, add_values, key_rows, row_offset, weigh
from culet.kernels.triton.attention.splits import store_lse
from culet.kernels.triton.attention.tiles import PrefillTile, prefill_tile
from culet.kernels.triton.launch import Launch
from culet.kernels.types import PagedKV, RaggedRows


class _Sight(NamedTuple):
    """The keys that a tile of packed rows sees."""

    row_lo: Any  # first and last key that each row sees
    row_hi: Any
    lo: Any  # some row sees keys lo .. hi - 1
    hi: Any
    all_lo: Any  # every row sees keys all_lo .. all_hi - 1
    all_hi: Any


class _Sums(NamedTuple):
    """Running sums of a tile of packed rows."""

    o: Any  # weighted values, in parts
    m: Any  # largest score, times log2 e
    total: Any  # sum of the weights


@triton.jit
def _find_sight(
    VISIBLE, query, token, query_begin, num_queries, context, first, num_tokens,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, HAS_VISIBLE: tl.constexpr,
):  # fmt: skip
    """Return the keys that M packed rows from `query_begin` on see, from the visible intervals or the text rule."""
    if HAS_VISIBLE:
        row_lo = tl.load(VISIBLE + token)
        row_hi = tl.load(VISIBLE + num_tokens + token)
        lo, all_lo = tl.min(row_lo, 0), tl.max(row_lo, 0)
        hi, all_hi = tl.max(row_hi, 0) + 1, tl.min(row_hi, 0) + 1
    else:
        row_hi = context + query
        all_hi = context + query_begin + 1
        hi = context + tl.minimum(query_begin + (M - 1) // GROUP, num_queries - 1) + 1
        if WINDOW > 0:
            row_lo = row_hi - (WINDOW - 1)
            lo, all_lo = tl.maximum(all_hi - WINDOW, 0), tl.maximum(hi - WINDOW, 0)
        else:
            row_lo = tl.zeros_like(row_hi)
            lo, all_lo = first, first
    return _Sight(row_lo, row_hi, lo, hi, all_lo, all_hi)


@triton.jit
def _load(rows, BEGIN: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr, BY_HAND: tl.constexpr):
    """Load COLUMNS columns of the rows at `rows`, from BEGIN on, widened to `dtype`."""
    return widen(tl.load(rows + BEGIN + tl.arange(0, COLUMNS)[None, :]), dtype, BY_HAND)


@triton.jit
def _load_queries(rows, HEAD: tl.constexpr, ROT: tl.constexpr):
    """Load queries in the same parts as the keys."""
    dtype: tl.constexpr = rows.dtype.element_ty
    if ROT > 0:
        q = (
            _load(rows, 0, 2 * ROT, dtype, False),
            _load(rows, 2 * ROT, ROT, dtype, False),
            _load(rows, 3 * ROT, ROT, dtype, False),
        )
    else:
        q = (_load(rows, 0, HEAD, dtype, False),)
    return q


@triton.jit
def _no_sums(M: tl.constexpr, HEAD: tl.constexpr, ROT: tl.constexpr):
    """Return the sums before any key is added."""
    if ROT > 0:
        o = (tl.zeros([M, ROT], tl.float32), tl.zeros([M, 2 * ROT], tl.float32), tl.zeros([M, ROT], tl.float32))
    else:
        o = (tl.zeros([M, HEAD], tl.float32),)
    return _Sums(o, tl.full([M], UNSEEN, tl.float32), tl.zeros([M], tl.float32))


@triton.jit
def _score(q, k):
    """Return the scores of a tile's keys, summed part after part."""
    s = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
    for i in tl.static_range(1, len(q)):
        s = tl.dot(q[i], tl.trans(k[i]), s, input_precision="ieee")
    return s


@triton.jit
def _attend_tile(
    q, sums, K, V, offset, key, sight, is_edge,
    HEAD: tl.constexpr, ROT: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys at positions `key` to `sums`. Its rows are `offset` elements from K and V, or from K for a latent."""
    dtype: tl.constexpr = q[0].dtype
    k_rows = K + offset
    if ROT > 0:
        a = _load(k_rows, 0, ROT, dtype, BY_HAND)
        b = _load(k_rows, ROT, 2 * ROT, dtype, BY_HAND)
        c = _load(k_rows, 3 * ROT, ROT, dtype, BY_HAND)
        d = _load(k_rows, 4 * ROT, ROT, dtype, BY_HAND)
        s = _score(q, (b, c, d))
    else:
        s = _score(q, (_load(k_rows, 0, HEAD, dtype, BY_HAND),))
    if is_edge:
        seen = (key[None, :] <= sight.row_hi[:, None]) & (key[None, :] >= sight.row_lo[:, None])
        s = tl.where(seen, s, float("-inf"))
    p, m, shrink = weigh(s, sums.m)
    total = sums.total * shrink + tl.sum(p, 1)
    p = p.to(dtype)
    if ROT > 0:
        v = (a, b, c)
    else:
        v = (_load(V + offset, 0, HEAD, dtype, BY_HAND),)
    return _Sums(add_values(sums.o, p, v, shrink), m, total)


@triton.jit
def _attend_pages(
    q, sums, K, V, PAGES, sight, first, stored, stride_page,
    HEAD: tl.constexpr, ROT: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Add the visible keys in pages, `first` to `stored` - 1, to `sums`."""
    lo = tl.maximum(sight.lo, first)
    hi = tl.minimum(stored, sight.hi)
    tile_begin = (lo - first) // BN
    tile_end = tl.where(hi > lo, tl.cdiv(hi - first, BN), tile_begin)
    inner_begin = tl.cdiv(tl.maximum(sight.all_lo - first, 0), BN)
    inner_end = (tl.minimum(sight.all_hi, hi) - first) // BN
    for tile in range(tile_begin, tile_end):
        is_edge = (tile < inner_begin) | (tile >= inner_end)
        key, offset = key_rows(PAGES, tile, first, lo, hi, stride_page, HEAD + ROT, PAGE, BN)
        key = tl.where(key < hi, key, 2147483647)  # Keys from hi on are fresh and come later.
        sums = _attend_tile(q, sums, K, V, offset[:, None], key, sight, is_edge, HEAD, ROT, BY_HAND)
    return sums


@triton.jit
def _attend_fresh(
    q, sums, K, V, sight, context, stride_fresh,
    HEAD: tl.constexpr, ROT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the visible keys of the chunk itself, whose first key is at position `context`, to `sums`."""
    lo = tl.maximum(sight.lo, context) - context  # relative to the chunk's first token
    hi = sight.hi - context
    inner_begin = tl.cdiv(tl.maximum(sight.all_lo - context, 0), BN)
    inner_end = (sight.all_hi - context) // BN
    for tile in range(lo // BN, tl.cdiv(hi, BN)):
        is_edge = (tile < inner_begin) | (tile >= inner_end)
        offset = tile * BN + tl.arange(0, BN)
        row = tl.minimum(offset, hi - 1)[:, None] * stride_fresh
        sums = _attend_tile(q, sums, K, V, row, context + offset, sight, is_edge, HEAD, ROT, False)
    return sums


@triton.jit
def _store(OUT, o, scale, is_valid, BEGIN: tl.constexpr):
    """Store a scaled part in the rows at OUT, in the columns from BEGIN on."""
    column = tl.arange(0, o.shape[1])[None, :]
    tl.store(OUT + BEGIN + column, (o * scale).to(OUT.dtype.element_ty), mask=is_valid[:, None])


@triton.jit(do_not_specialize=["num_tokens", "stride_table"])
def _prefill(
    Q, K, V, FRESH_K, FRESH_V, TILES, PAGES, FIRST, VISIBLE, OUT, OUT_LSE,
    num_tokens, stride_table, stride_page, stride_fresh, stride_q_token, stride_out_token,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ROT: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, HAS_FRESH: tl.constexpr, HAS_VISIBLE: tl.constexpr,
    BY_HAND: tl.constexpr,
):  # fmt: skip
    """Attend one tile of M packed rows to the keys it sees.

    If ROT > 0, rows are latent, v_rot | nope | k_rot. Both ends are ROT wide.
    """
    head = tl.program_id(0) % KV_HEADS
    tile = TILES + tl.program_id(0) // KV_HEADS * 5
    row = tl.load(tile)
    query_begin = tl.load(tile + 1)
    begin = tl.load(tile + 2)
    num_queries = tl.load(tile + 3)
    context = tl.load(tile + 4)
    first = tl.load(FIRST + row)
    packed = tl.arange(0, M)
    query = query_begin + packed // GROUP
    is_valid = query < num_queries
    query = tl.minimum(query, num_queries - 1)  # Padding rows repeat the last token, so that bounds stay tight.
    token = begin + query
    sight = _find_sight(
        VISIBLE, query, token, query_begin, num_queries, context, first, num_tokens, GROUP, WINDOW, M, HAS_VISIBLE
    )

    q_rows = Q + row_offset(token, packed, head, stride_q_token, GROUP, HEAD)[:, None]
    q = _load_queries(q_rows, HEAD, ROT)
    sums = _no_sums(M, HEAD, ROT)
    WIDTH: tl.constexpr = HEAD + ROT
    PAGES += row * stride_table
    K += head * (PAGE * WIDTH)
    V += head * (PAGE * WIDTH)
    stored = context if HAS_FRESH else sight.hi  # keys before this one are read from pages
    sums = _attend_pages(q, sums, K, V, PAGES, sight, first, stored, stride_page, HEAD, ROT, PAGE, BN, BY_HAND)
    if HAS_FRESH:
        chunk = begin.to(tl.int64) * stride_fresh + head * WIDTH
        FRESH_V += chunk
        # Latent rows begin with their values.
        FRESH_K = FRESH_V if ROT > 0 else FRESH_K + chunk
        sums = _attend_fresh(q, sums, FRESH_K, FRESH_V, sight, context, stride_fresh, HEAD, ROT, BN)

    if OUT_LSE is not None:
        store_lse(OUT_LSE, token, head * GROUP + packed % GROUP, sums.m, sums.total, KV_HEADS * GROUP, is_valid)
    scale = (1.0 / tl.where(sums.total > 0.0, sums.total, 1.0))[:, None]
    out = OUT + row_offset(token, packed, head, stride_out_token, GROUP, HEAD)[:, None]
    if ROT > 0:
        a, b, c = sums.o
        _store(out, b, scale, is_valid, ROT)  # stored first because it takes the most registers
        _store(out, a, scale, is_valid, 0)
        _store(out, c, scale, is_valid, 3 * ROT)
    else:
        _store(out, sums.o[0], scale, is_valid, 0)


def query_tiles(rows: Sequence[tuple[int, int, int, int]], queries_per_tile: int, window: int | None) -> np.ndarray:
    """Return the query tiles of rows, int32 [X, 5], starting with the one that has the most keys.

    A row is (row number, first token, number of query tokens, position of the first token). A tile is (row number, first query
    within the row, first token, number of query tokens, position of the first token). A tile has all that a program needs in
    one place, because each further load would delay its start. Programs start in this order, so the longest do not run last.
    """
    parts = []
    for row, begin, num_queries, start in rows:
        first = np.arange(0, num_queries, queries_per_tile, dtype=np.int64)
        keys = start + np.minimum(first + queries_per_tile, num_queries)
        if window is not None:
            keys = np.minimum(keys, window + queries_per_tile - 1)
        facts = (np.full_like(first, fact) for fact in (row, begin, num_queries, start))
        row_X, begin_X, num_X, start_X = facts
        parts.append(np.stack((row_X, first, begin_X, num_X, start_X, keys), axis=1))
    if not parts:
        return np.zeros((0, 5), dtype=np.int32)
    tiles = np.concatenate(parts)
    return np.ascontiguousarray(tiles[np.argsort(-tiles[:, 5], kind="stable"), :5].astype(np.int32))


def prefill_launch(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    tiles_X5: Tensor,
    *,
    fresh: tuple[Tensor, Tensor] | None,
    out_TNH: Tensor,
    tile: PrefillTile,
    lse_TN: Tensor | None = None,
) -> Launch:
    """Return the only launch of a call."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    rotated = kv.width - head_dim
    assert not rotated or rotated * 4 == head_dim, f"unsupported latent: {rotated} rotated dims at head dim {head_dim}"
    assert tile.rows % group == 0, f"{tile.rows} rows do not hold whole tokens of {group} query heads"
    assert q_TNH.stride(1) == out_TNH.stride(1) == head_dim, "heads of a token must be contiguous"
    if fresh is not None:
        assert all(part.stride(1) == kv.width for part in fresh), "fresh heads of a token must be contiguous"
        assert fresh[0].stride(0) == fresh[1].stride(0), "fresh keys and values must have one token stride"
    return Launch(
        _prefill,
        (tiles_X5.shape[0] * num_kv_heads,),
        {
            "Q": q_TNH,
            "K": kv.planes[0],
            "V": kv.planes[-1],
            "FRESH_K": None if fresh is None else fresh[0],
            "FRESH_V": None if fresh is None else fresh[1],
            "TILES": tiles_X5,
            "PAGES": kv.pages_BP,
            "FIRST": kv.first_B,
            "VISIBLE": rows.visible_2T,
            "OUT": out_TNH,
            "OUT_LSE": lse_TN,
            "num_tokens": num_tokens,
            "stride_table": kv.pages_BP.stride(0),
            "stride_page": kv.planes.stride(1),
            "stride_fresh": 0 if fresh is None else fresh[0].stride(0),
            "stride_q_token": q_TNH.stride(0),
            "stride_out_token": out_TNH.stride(0),
            "GROUP": group,
            "KV_HEADS": num_kv_heads,
            "HEAD": head_dim,
            "ROT": rotated,
            "PAGE": kv.page_tokens,
            "WINDOW": kv.window or 0,
            "M": tile.rows,
            "BN": tile.keys,
            "HAS_FRESH": fresh is not None,
            "HAS_VISIBLE": rows.visible_2T is not None,
            "BY_HAND": widens_by_hand(q_TNH, kv),
        },
        {"num_warps": tile.warps, "num_stages": tile.stages},
    )


def prefill_attention(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    tiles_X5: Tensor,
    *,
    fresh: tuple[Tensor, Tensor] | None = None,
    out_TNH: Tensor | None = None,
    lse_TN: Tensor | None = None,
    tile: PrefillTile | None = None,
) -> Tensor:
    """Return the attention of the query tokens in `tiles_X5`, from `query_tiles` with as many tokens as `tile` holds.

    Keys from the row's first query token on come from `fresh` (k_TGH, v_TGH of the same T tokens). Earlier keys come from
    pages. Without `fresh`, all keys come from pages. If `lse_TN` is given, it gets the log of the sum of exponentials of each
    query's scores, float32.
    """
    out_TNH = torch.empty_like(q_TNH) if out_TNH is None else out_TNH
    tile = tile or prefill_tile(q_TNH, kv)
    if tiles_X5.shape[0]:
        prefill_launch(q_TNH, kv, rows, tiles_X5, fresh=fresh, out_TNH=out_TNH, tile=tile, lse_TN=lse_TN).run()
    return out_TNH
