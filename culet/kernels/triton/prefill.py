"""Attention of many query tokens per row: prompts and their chunks, any number of rows in one launch.

A program takes a tile of packed rows (query tokens x the query heads of one KV head) through the keys they see. Context keys
come from pages; the chunk's own come from the fresh tensors, since a chunk longer than the window leaves no pages for its
early tokens, or from pages too where the caller gives no fresh tensors. Tiles that every row sees whole are not masked.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.attention_inputs import PagedKV, RaggedRows
from culet.kernels.triton.decode import LOG2E, UNSEEN, _key_rows
from culet.kernels.triton.e4m3 import widen, widens_by_hand
from culet.kernels.triton.launch import Launch
from culet.kernels.triton.tiles import PrefillTile, prefill_tile


@triton.jit
def _softmax_step(s, m, total, key, seen_lo, seen_hi, is_edge):
    """Masked probabilities of a tile, and the running maximum, sum and shrink factor."""
    if is_edge:
        seen = (key[None, :] <= seen_hi[:, None]) & (key[None, :] >= seen_lo[:, None])
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * LOG2E)
    p = tl.exp2(s * LOG2E - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    return p, m_new, total * shrink + tl.sum(p, 1), shrink


@triton.jit(do_not_specialize=["num_tokens", "stride_table"])
def _prefill(
    Q, K, V, FRESH_K, FRESH_V, TILES, PAGES, FIRST, VISIBLE, OUT,
    num_tokens, stride_table, stride_page, stride_fresh, stride_q_token, stride_out_token,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ROT: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, HAS_FRESH: tl.constexpr, HAS_VISIBLE: tl.constexpr,
    BY_HAND: tl.constexpr,
):  # fmt: skip
    """One tile of M packed rows against the keys it sees. ROT > 0: latent rows v_rot | nope | k_rot, ROT wide at both ends."""
    head = tl.program_id(0) % KV_HEADS
    tile_id = tl.program_id(0) // KV_HEADS
    row = tl.load(TILES + tile_id * 5)
    query_begin = tl.load(TILES + tile_id * 5 + 1)
    begin = tl.load(TILES + tile_id * 5 + 2)
    num_queries = tl.load(TILES + tile_id * 5 + 3)
    context = tl.load(TILES + tile_id * 5 + 4)
    LATENT: tl.constexpr = ROT > 0
    WIDTH: tl.constexpr = HEAD + ROT
    PART_B: tl.constexpr = 2 * ROT if LATENT else HEAD

    first = tl.load(FIRST + row)
    packed = tl.arange(0, M)
    query = query_begin + packed // GROUP
    row_ok = query < num_queries
    query = tl.minimum(query, num_queries - 1)  # padding rows repeat the last token, so that bounds stay tight
    token = begin + query
    if HAS_VISIBLE:
        seen_lo = tl.load(VISIBLE + token)
        seen_hi = tl.load(VISIBLE + num_tokens + token)
        lo, all_lo = tl.min(seen_lo, 0), tl.max(seen_lo, 0)
        hi, all_hi = tl.max(seen_hi, 0) + 1, tl.min(seen_hi, 0) + 1
    else:
        seen_hi = context + query
        all_hi = context + query_begin + 1
        hi = context + tl.minimum(query_begin + (M - 1) // GROUP, num_queries - 1) + 1
        if WINDOW > 0:
            seen_lo = seen_hi - (WINDOW - 1)
            lo, all_lo = tl.maximum(all_hi - WINDOW, 0), tl.maximum(hi - WINDOW, 0)
        else:
            seen_lo = tl.zeros_like(seen_hi)
            lo, all_lo = first, first

    q_rows = Q + token.to(tl.int64)[:, None] * stride_q_token + (head * GROUP + packed % GROUP)[:, None] * HEAD
    column_b = tl.arange(0, PART_B)
    q_b = tl.load(q_rows + column_b[None, :])
    o_b = tl.zeros([M, PART_B], tl.float32)
    if LATENT:
        column_r = tl.arange(0, ROT)
        q_c = tl.load(q_rows + 2 * ROT + column_r[None, :])
        q_d = tl.load(q_rows + 3 * ROT + column_r[None, :])
        o_a = tl.zeros([M, ROT], tl.float32)
        o_c = tl.zeros([M, ROT], tl.float32)
    m = tl.full([M], UNSEEN, tl.float32)
    total = tl.zeros([M], tl.float32)

    PAGES += row * stride_table
    K += head * (PAGE * WIDTH)
    V += head * (PAGE * WIDTH)
    stored = context if HAS_FRESH else hi  # keys before this one are read from pages
    paged_lo = tl.maximum(lo, first)
    paged_hi = tl.minimum(stored, hi)
    tile_begin = (paged_lo - first) // BN
    tile_end = tl.where(paged_hi > paged_lo, tl.cdiv(paged_hi - first, BN), tile_begin)
    inner_begin = tl.cdiv(tl.maximum(all_lo - first, 0), BN)
    inner_end = (tl.minimum(all_hi, paged_hi) - first) // BN
    for tile in range(tile_begin, tile_end):
        is_edge = (tile < inner_begin) | (tile >= inner_end)
        key, offset = _key_rows(PAGES, tile, first, paged_lo, paged_hi, stride_page, WIDTH, PAGE, BN)
        key = tl.where(key < paged_hi, key, 2147483647)  # keys from there on are fresh ones, read below
        rows_K = K + offset[:, None]
        if LATENT:
            k_a = widen(tl.load(rows_K + column_r[None, :]), Q.dtype.element_ty, BY_HAND)
            k_b = widen(tl.load(rows_K + ROT + column_b[None, :]), Q.dtype.element_ty, BY_HAND)
            k_c = widen(tl.load(rows_K + 3 * ROT + column_r[None, :]), Q.dtype.element_ty, BY_HAND)
            k_d = widen(tl.load(rows_K + 4 * ROT + column_r[None, :]), Q.dtype.element_ty, BY_HAND)
            s = tl.dot(q_b, tl.trans(k_b), input_precision="ieee")
            s = tl.dot(q_c, tl.trans(k_c), s, input_precision="ieee")
            s = tl.dot(q_d, tl.trans(k_d), s, input_precision="ieee")
        else:
            k_b = widen(tl.load(rows_K + column_b[None, :]), Q.dtype.element_ty, BY_HAND)
            s = tl.dot(q_b, tl.trans(k_b), input_precision="ieee")
        p, m, total, shrink = _softmax_step(s, m, total, key, seen_lo, seen_hi, is_edge)
        p = p.to(Q.dtype.element_ty)
        if LATENT:
            o_a = tl.dot(p, k_a, o_a * shrink[:, None], input_precision="ieee")
            o_b = tl.dot(p, k_b, o_b * shrink[:, None], input_precision="ieee")
            o_c = tl.dot(p, k_c, o_c * shrink[:, None], input_precision="ieee")
        else:
            v_b = widen(tl.load(V + offset[:, None] + column_b[None, :]), Q.dtype.element_ty, BY_HAND)
            o_b = tl.dot(p, v_b, o_b * shrink[:, None], input_precision="ieee")

    if HAS_FRESH:
        FRESH_K += begin.to(tl.int64) * stride_fresh + head * WIDTH
        FRESH_V += begin.to(tl.int64) * stride_fresh + head * WIDTH
        fresh_lo = tl.maximum(lo, context) - context  # counted from the chunk's first token
        fresh_hi = hi - context
        inner_begin = tl.cdiv(tl.maximum(all_lo - context, 0), BN)
        inner_end = (all_hi - context) // BN
        for tile in range(fresh_lo // BN, tl.cdiv(fresh_hi, BN)):
            is_edge = (tile < inner_begin) | (tile >= inner_end)
            offset = tile * BN + tl.arange(0, BN)
            fresh = tl.minimum(offset, fresh_hi - 1)[:, None] * stride_fresh
            if LATENT:
                k_a = tl.load(FRESH_V + fresh + column_r[None, :])
                k_b = tl.load(FRESH_V + fresh + ROT + column_b[None, :])
                k_c = tl.load(FRESH_V + fresh + 3 * ROT + column_r[None, :])
                k_d = tl.load(FRESH_V + fresh + 4 * ROT + column_r[None, :])
                s = tl.dot(q_b, tl.trans(k_b), input_precision="ieee")
                s = tl.dot(q_c, tl.trans(k_c), s, input_precision="ieee")
                s = tl.dot(q_d, tl.trans(k_d), s, input_precision="ieee")
            else:
                k_b = tl.load(FRESH_K + fresh + column_b[None, :])
                s = tl.dot(q_b, tl.trans(k_b), input_precision="ieee")
            p, m, total, shrink = _softmax_step(s, m, total, context + offset, seen_lo, seen_hi, is_edge)
            p = p.to(Q.dtype.element_ty)
            if LATENT:
                o_a = tl.dot(p, k_a, o_a * shrink[:, None], input_precision="ieee")
                o_b = tl.dot(p, k_b, o_b * shrink[:, None], input_precision="ieee")
                o_c = tl.dot(p, k_c, o_c * shrink[:, None], input_precision="ieee")
            else:
                v_b = tl.load(FRESH_V + fresh + column_b[None, :])
                o_b = tl.dot(p, v_b, o_b * shrink[:, None], input_precision="ieee")

    scale = (1.0 / total)[:, None]
    out = OUT + token.to(tl.int64)[:, None] * stride_out_token + (head * GROUP + packed % GROUP)[:, None] * HEAD
    tl.store(out + ROT + column_b[None, :], (o_b * scale).to(OUT.dtype.element_ty), mask=row_ok[:, None])
    if LATENT:
        tl.store(out + column_r[None, :], (o_a * scale).to(OUT.dtype.element_ty), mask=row_ok[:, None])
        tl.store(out + 3 * ROT + column_r[None, :], (o_c * scale).to(OUT.dtype.element_ty), mask=row_ok[:, None])


def query_tiles(rows: Sequence[tuple[int, int, int, int]], queries_per_tile: int, window: int | None) -> np.ndarray:
    """Tiles of rows given as (row, first token, query tokens, position of the first): int32 [X, 5], most keys first.

    A tile is (row, first query within it, first token, query tokens, position of the first): all that a program needs in one
    place, since each further load would put off its start. Programs start in this order, so that the longest ones do
    not end up alone at the end.
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
) -> Launch:
    """The one launch of a call."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    rotated = kv.width - head_dim
    assert not rotated or rotated * 4 == head_dim, f"a latent of {rotated} rotated dims at head dim {head_dim}"
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
    tile: PrefillTile | None = None,
) -> Tensor:
    """Attention of the query tokens that `tiles_X5` covers (of `query_tiles`, for this tile's tokens).

    Keys from the row's first query token on come from `fresh` (k_TGH, v_TGH of the same T tokens), earlier ones from pages;
    without `fresh` all come from pages.
    """
    out_TNH = torch.empty_like(q_TNH) if out_TNH is None else out_TNH
    tile = tile or prefill_tile(q_TNH, kv)
    if tiles_X5.shape[0]:
        prefill_launch(q_TNH, kv, rows, tiles_X5, fresh=fresh, out_TNH=out_TNH, tile=tile).run()
    return out_TNH
