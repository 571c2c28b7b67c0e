"""Tiles of keys as the general attention kernels find them in pages, read them and weigh them, one after the other."""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)  # running maximum before any key; finite, so that (-inf) - UNSEEN stays -inf


@triton.jit
def key_rows(PAGES, tile, first, lo, hi, stride_page, WIDTH: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr):
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
def row_offset(token, packed, head, stride_token, GROUP: tl.constexpr, HEAD: tl.constexpr):
    """Element offset, in a tensor [T, N, H], of packed rows: query token x query head of KV head `head`."""
    return token.to(tl.int64) * stride_token + (head * GROUP + packed % GROUP) * HEAD


@triton.jit
def weigh(s, m):
    """Weights e^(s - m') of a tile's scores, their new running maximum m' (times log2 e), and what earlier sums shrink by."""
    m_new = tl.maximum(m, tl.max(s, 1) * LOG2E)
    return tl.exp2(s * LOG2E - m_new[:, None]), m_new, tl.exp2(m - m_new)


@triton.jit
def add_values(o, p, v, shrink):
    """The sums `o` of earlier tiles' values, shrunk, plus those of this tile weighted by `p`; in parts, as `v` is."""
    sums = ()
    for i in tl.static_range(len(v)):
        sums += (tl.dot(p, v[i], o[i] * shrink[:, None], input_precision="ieee"),)
    return sums
