"""Attention between patches for the few tiles whose weights `hopper_patches` could not hold.

This kernel subtracts a running maximum, so any scores will do. It is slower, but most of its programs return at once.

Shapes: T patches of all images · N heads · H head size · P tiles of queries · M queries of a tile.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.attention.key_tiles import UNSEEN, weigh
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2

KEYS = 64  # keys of a tile
TILES = 16  # tiles of queries per program, almost all of which are right already


@triton.jit
def _load(rows, num_rows, stride, ROWS: tl.constexpr, HEAD: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return `num_rows` rows of one head, and zeros after them."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_H)[None, :]
    return tl.load(rows + row * stride + column, mask=(row < num_rows) & (column < HEAD), other=0.0)


@triton.jit
def _compute_tile(
    tile, Q, K, V, OUT, begin, length, num_heads, num_tiles, stride, out_stride,
    HEAD: tl.constexpr, PITCH: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute a tile of queries of one head and image."""
    head = tile // num_tiles % num_heads
    image = begin + tile // num_tiles // num_heads * length
    first = tile % num_tiles * M
    rows = (image + first).to(tl.int64)
    q = _load(Q + rows * stride + head * PITCH, length - first, stride, M, HEAD, BLOCK_H)
    m = tl.full([M], UNSEEN, tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, BLOCK_H], tl.float32)
    for key in range(0, length, BN):
        offset = (image + key).to(tl.int64) * stride + head * PITCH
        k = _load(K + offset, length - key, stride, BN, HEAD, BLOCK_H)
        v = _load(V + offset, length - key, stride, BN, HEAD, BLOCK_H)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.where(tl.arange(0, BN)[None, :] < length - key, s, float("-inf"))
        p, m, shrink = weigh(s, m)
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
    row, column = tl.arange(0, M)[:, None], tl.arange(0, BLOCK_H)[None, :]
    to = OUT + rows * out_stride + head * HEAD + row * out_stride + column
    tl.store(to, (o / total[:, None]).to(OUT.dtype.element_ty), mask=(row < length - first) & (column < HEAD))


@triton.jit(do_not_specialize=["begin", "length", "num_heads", "num_tiles", "num_all"])
def _patch_retries_kernel(
    RETRY, Q, K, V, OUT, begin, length, num_heads, num_tiles, num_all, stride, out_stride,
    HEAD: tl.constexpr, PITCH: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BLOCK_H: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Look at TILES tiles, and compute those with a row that asks for it."""
    first = tl.program_id(0) * TILES
    flags = RETRY + first * M + tl.arange(0, TILES * M)
    if tl.max(tl.load(flags, mask=tl.arange(0, TILES * M) < (num_all - first) * M, other=0).to(tl.int32), 0) == 0:
        return
    for tile in range(first, tl.minimum(first + TILES, num_all)):
        if tl.max(tl.load(RETRY + tile * M + tl.arange(0, M)).to(tl.int32), 0):
            _compute_tile(
                tile, Q, K, V, OUT, begin, length, num_heads, num_tiles, stride, out_stride, HEAD, PITCH, M, BN, BLOCK_H
            )


def describe_patch_retries(
    retry_PM: Tensor, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, out_TNH: Tensor, begin: int, length: int
) -> Launch:
    """Return the launch for images of `length` patches each, the first of which begins at row `begin`.

    `retry_PM` says for each row of a tile whether its attention is wrong. Tiles are ordered by image, head and query.
    """
    (num_all, rows), (_, num_heads, head_dim) = retry_PM.shape, q_TNH.shape
    num_tiles = cdiv(length, 2 * rows) * 2
    arguments: dict[str, Any] = {"RETRY": retry_PM, "Q": q_TNH, "K": k_TNH, "V": v_TNH, "OUT": out_TNH, "begin": begin}
    arguments |= {"length": length, "num_heads": num_heads, "num_tiles": num_tiles, "stride": q_TNH.stride(0)}
    arguments |= {"out_stride": out_TNH.stride(0), "HEAD": head_dim, "PITCH": q_TNH.stride(1), "M": rows, "BN": KEYS}
    arguments |= {"BLOCK_H": next_power_of_2(head_dim), "num_all": num_all, "TILES": TILES}
    return Launch(_patch_retries_kernel, (cdiv(num_all, TILES),), arguments, {"num_warps": 4})
