"""Parts of the general attention kernels. They find a tile of keys in pages, weigh it and add its values."""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)  # running maximum before any key. It is finite, so (-inf) - UNSEEN stays -inf.


@triton.jit
def key_rows(PAGES, tile, first, lo, hi, stride_page, WIDTH: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr):
    """Return the positions of a tile's keys, and the element offset of each key's row in its plane (for head 0).

    Keys outside lo .. hi - 1 get the offset of the nearest key inside, and the caller masks them. Clamping a row index costs
    less than masking every load, and unwritten memory is never read.
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
    """Return the element offsets in a tensor [T, N, H] of packed rows, query tokens x query heads of KV head `head`."""
    return token.to(tl.int64) * stride_token + (head * GROUP + packed % GROUP) * HEAD


@triton.jit
def weigh(s, m):
    """Return weights e^(s - m') for scores s, the new running maximum m' (times log2 e) and the factor for earlier sums."""
    m_new = tl.maximum(m, tl.max(s, 1) * LOG2E)
    return tl.exp2(s * LOG2E - m_new[:, None]), m_new, tl.exp2(m - m_new)


@triton.jit
def add_values(o, p, v, shrink):
    """Add this tile's weighted values to those of earlier tiles. Return o * shrink + p @ v in the same parts as `v`."""
    sums = ()
    for i in tl.static_range(len(v)):
        sums += (tl.dot(p, v[i], o[i] * shrink[:, None], input_precision="ieee"),)
    return sums
