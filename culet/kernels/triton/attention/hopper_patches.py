"""Attention between the patches of an image, on Hopper. Every patch sees every patch of its image.

torch's kernels pad heads of 72 to 128 columns. Here they have 80: a part of 64 and a part of 16, because the sides of a tile
are powers of 2. A program has 64 queries for each of two computing warpgroups, and a warp that fetches tiles of keys and
values with the bulk copy engine. While the values of tile i are multiplied, the scores of tile i + 1 go through the softmax.

Shapes: T patches of all images · N heads · H head size.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from culet.kernels.triton.attention.key_tiles import LOG2E, UNSEEN
from culet.kernels.triton.device import is_hopper
from culet.kernels.triton.launch import Launch, cdiv

WIDE, NARROW = 64, 16  # columns of the parts of a head
ROWS = 64  # queries of a warpgroup
KEYS = 128  # keys of a tile
STAGES = 2
_WIDE_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
_NARROW_LAYOUT = gl.NVMMASharedLayout(32, 16, 2)


@gluon.jit
def _place(begin, length, num_heads, num_tiles, TILE: gl.constexpr):
    """Return the head that this program computes, the first row of its image, and its first query within that image."""
    program = gl.program_id(0)
    head = program // num_tiles % num_heads
    image = program // num_tiles // num_heads
    return head, begin + image * length, program % num_tiles * TILE


class _Parts(NamedTuple):
    """The wide and the narrow columns of a head, in shared memory or as descriptors."""

    wide: Any
    narrow: Any


@gluon.jit
def _tile_of(parts, index):
    """Return the tile at `index`."""
    return _Parts(parts.wide.index(index), parts.narrow.index(index))


@gluon.jit
def _copy(descriptors, barrier, target, y, x, ROWS: gl.constexpr):
    """Fetch a tile at row y of the head that begins at column x."""
    mbarrier.expect(barrier, 2 * ROWS * 80)
    tma.async_copy_global_to_shared(descriptors.wide, [y, x], barrier, target.wide)
    tma.async_copy_global_to_shared(descriptors.narrow, [y, x + 64], barrier, target.narrow)


@gluon.jit
def _fetch(
    Q_WIDE, Q_NARROW, K_WIDE, K_NARROW, V_WIDE, V_NARROW, q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow,
    full_q, full_k, full_v, empty_k, empty_v, begin, length, num_heads, num_tiles,
    PITCH: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run the fetching warp."""
    head, first, query = _place(begin, length, num_heads, num_tiles, 2 * M)
    x = head * PITCH
    q = _Parts(q_wide, q_narrow)
    k = _Parts(k_wide, k_narrow)
    v = _Parts(v_wide, v_narrow)
    for group in gl.static_range(2):
        _copy(_Parts(Q_WIDE, Q_NARROW), full_q.index(group), _tile_of(q, group), first + query + group * M, x, M)
    for count in range((length + BN - 1) // BN):
        stage = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(empty_k.index(stage), phase ^ 1)
        _copy(_Parts(K_WIDE, K_NARROW), full_k.index(stage), _tile_of(k, stage), first + count * BN, x, BN)
        mbarrier.wait(empty_v.index(stage), phase ^ 1)
        _copy(_Parts(V_WIDE, V_NARROW), full_v.index(stage), _tile_of(v, stage), first + count * BN, x, BN)


@gluon.jit
def _score(q, k, M: gl.constexpr, BN: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Start computing the scores of a tile of keys."""
    s = gl.zeros([M, BN], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q.wide, k.wide.permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma(q.narrow, k.narrow.permute((1, 0)), s, is_async=True)


class _Sums(NamedTuple):
    """The state of a computing warpgroup."""

    m: Any  # largest score times log2 e. `m` and `total` are one tile ahead of `wide`.
    total: Any  # sum of the weights
    wide: Any  # weighted values
    narrow: Any
    p: Any  # weights of the next tile


@gluon.jit
def _softmax(s, m, total, num_keys, MASKED: gl.constexpr, BN: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Return the probabilities of a tile of `num_keys` keys, the running maximum and sum, and the factor for earlier sums."""
    if MASKED:
        is_key = gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT)) < num_keys
        s = gl.where(gl.expand_dims(is_key, 0), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * LOG2E)
    p = gl.exp2(s * LOG2E - gl.expand_dims(m_new, 1))
    shrink = gl.exp2(m - m_new)
    return p, m_new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _multiply(sums, shrink_smem, v, O_LAYOUT: gl.constexpr, X_LAYOUT: gl.constexpr):
    """Scale the sums of earlier tiles and start adding the weighted values of this one."""
    wide = sums.wide * gl.expand_dims(shrink_smem.load(gl.SliceLayout(1, O_LAYOUT)), 1)
    narrow = sums.narrow * gl.expand_dims(shrink_smem.load(gl.SliceLayout(1, X_LAYOUT)), 1)
    wide = warpgroup_mma(gl.convert_layout(sums.p, gl.DotOperandLayout(0, O_LAYOUT, 2)), v.wide, wide, is_async=True)
    narrow = warpgroup_mma(gl.convert_layout(sums.p, gl.DotOperandLayout(0, X_LAYOUT, 2)), v.narrow, narrow, is_async=True)
    return wide, narrow


@gluon.jit
def _step(
    q, k, v, total_smem, shrink_smem, full_k, full_v, empty_k, empty_v, order, sums, count, num_keys,
    MASKED: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply the values of tile `count` while tile count + 1, of `num_keys` keys, is scored and goes through the softmax."""
    stage = count % STAGES
    after = (count + 1) % STAGES
    mbarrier.wait(full_k.index(after), ((count + 1) // STAGES) & 1)
    # The warpgroups take turns, so that one is in its softmax while the other one multiplies.
    mbarrier.wait(order.index(GROUP), (count & 1) ^ (1 - GROUP))
    s = _score(q, _tile_of(k, after), M, BN, S_LAYOUT)
    mbarrier.wait(full_v.index(stage), (count // STAGES) & 1)
    wide, narrow = _multiply(sums, shrink_smem, _tile_of(v, stage), O_LAYOUT, X_LAYOUT)
    mbarrier.arrive(order.index(1 - GROUP), count=1)
    s = warpgroup_mma_wait(2, deps=(s,))
    gl.thread_barrier()
    mbarrier.arrive(empty_k.index(after), count=1)
    p, m, total, shrink = _softmax(s, sums.m, sums.total, num_keys, MASKED, BN, S_LAYOUT)
    p = p.to(q.wide.dtype)
    # As in `hopper_prefill`, these stores keep the softmax before the wait: the assembler moves no store across the fence.
    total_smem.store(total)
    shrink_smem.store(shrink)
    fence_async_shared()
    wide, narrow = warpgroup_mma_wait(0, deps=(wide, narrow))
    gl.thread_barrier()
    mbarrier.arrive(empty_v.index(stage), count=1)
    return _Sums(m, total, wide, narrow, p)


@gluon.jit
def _store(
    sums, OUT, rows, num_rows, stride, x, HEAD: gl.constexpr, M: gl.constexpr, O_LAYOUT: gl.constexpr, X_LAYOUT: gl.constexpr
):
    """Store the rows' attention. Rows from `num_rows` on belong to the next image."""
    scale = 1.0 / sums.total
    row = gl.arange(0, M, gl.SliceLayout(1, O_LAYOUT))
    column = gl.arange(0, 64, gl.SliceLayout(0, O_LAYOUT))
    offsets = gl.expand_dims((rows + row).to(gl.int64) * stride, 1) + gl.expand_dims(x + column, 0)
    wide = sums.wide * gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, O_LAYOUT)), 1)
    gl.store(OUT + offsets, wide.to(OUT.dtype.element_ty), mask=gl.expand_dims(row < num_rows, 1))
    row = gl.arange(0, M, gl.SliceLayout(1, X_LAYOUT))
    column = gl.arange(0, 16, gl.SliceLayout(0, X_LAYOUT))
    offsets = gl.expand_dims((rows + row).to(gl.int64) * stride, 1) + gl.expand_dims(x + 64 + column, 0)
    narrow = sums.narrow * gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, X_LAYOUT)), 1)
    is_inside = gl.expand_dims(row < num_rows, 1) & gl.expand_dims(column < HEAD - 64, 0)
    gl.store(OUT + offsets, narrow.to(OUT.dtype.element_ty), mask=is_inside)


@gluon.jit
def _compute(
    q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, full_q, full_k, full_v, empty_k, empty_v, order,
    row_smem, OUT, begin, length, num_heads, num_tiles, out_stride,
    GROUP: gl.constexpr, HEAD: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run one of the computing warpgroups."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    X_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    head, first, query = _place(begin, length, num_heads, num_tiles, 2 * M)
    query += GROUP * M
    num_key_tiles = (length + BN - 1) // BN
    q = _Parts(q_wide.index(GROUP), q_narrow.index(GROUP))
    k = _Parts(k_wide, k_narrow)
    v = _Parts(v_wide, v_narrow)
    total_smem = row_smem.index(2 * GROUP)
    shrink_smem = row_smem.index(2 * GROUP + 1)
    mbarrier.wait(full_q.index(GROUP), 0)
    mbarrier.wait(full_k.index(0), 0)
    s = _score(q, _tile_of(k, 0), M, BN, S_LAYOUT)
    s = warpgroup_mma_wait(0, deps=(s,))
    gl.thread_barrier()
    mbarrier.arrive(empty_k.index(0), count=1)
    m = gl.full([M], UNSEEN, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    p, m, total, shrink = _softmax(s, m, total, length, True, BN, S_LAYOUT)
    shrink_smem.store(shrink)
    wide = gl.zeros([M, 64], gl.float32, O_LAYOUT)
    narrow = gl.zeros([M, 16], gl.float32, X_LAYOUT)
    sums = _Sums(m, total, wide, narrow, p.to(q_wide.dtype))
    for count in range(num_key_tiles - 2):
        sums = _step(
            q, k, v, total_smem, shrink_smem, full_k, full_v, empty_k, empty_v, order, sums, count, BN,
            False, GROUP, M, BN, STAGES, S_LAYOUT, O_LAYOUT, X_LAYOUT,
        )  # fmt: skip
    for count in range(gl.maximum(num_key_tiles - 2, 0), num_key_tiles - 1):
        num_keys = length - (count + 1) * BN
        sums = _step(
            q, k, v, total_smem, shrink_smem, full_k, full_v, empty_k, empty_v, order, sums, count, num_keys,
            True, GROUP, M, BN, STAGES, S_LAYOUT, O_LAYOUT, X_LAYOUT,
        )  # fmt: skip
    stage = (num_key_tiles - 1) % STAGES
    mbarrier.wait(full_v.index(stage), ((num_key_tiles - 1) // STAGES) & 1)
    wide, narrow = _multiply(sums, shrink_smem, _tile_of(v, stage), O_LAYOUT, X_LAYOUT)
    wide, narrow = warpgroup_mma_wait(0, deps=(wide, narrow))
    sums = _Sums(sums.m, sums.total, wide, narrow, sums.p)
    _store(sums, OUT, first + query, length - query, out_stride, head * HEAD, HEAD, M, O_LAYOUT, X_LAYOUT)


@gluon.jit(do_not_specialize=["begin", "length", "num_heads", "num_tiles"])
def _patch_attention_kernel(
    Q_WIDE, Q_NARROW, K_WIDE, K_NARROW, V_WIDE, V_NARROW, OUT, begin, length, num_heads, num_tiles, out_stride,
    HEAD: gl.constexpr, PITCH: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Process a tile of queries of one head and image."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    dtype: gl.constexpr = OUT.dtype.element_ty
    q_wide = gl.allocate_shared_memory(dtype, [2, M, 64], WIDE)
    k_wide = gl.allocate_shared_memory(dtype, [STAGES, BN, 64], WIDE)
    v_wide = gl.allocate_shared_memory(dtype, [STAGES, BN, 64], WIDE)
    q_narrow = gl.allocate_shared_memory(dtype, [2, M, 16], NARROW)
    k_narrow = gl.allocate_shared_memory(dtype, [STAGES, BN, 16], NARROW)
    v_narrow = gl.allocate_shared_memory(dtype, [STAGES, BN, 16], NARROW)
    row_smem = gl.allocate_shared_memory(gl.float32, [4, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full_q = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    order = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for group in gl.static_range(2):
        mbarrier.init(full_q.index(group), count=1)
        mbarrier.init(order.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=2)
        mbarrier.init(empty_v.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, full_q, full_k, full_v, empty_k, empty_v, order,
                row_smem, OUT, begin, length, num_heads, num_tiles, out_stride, 0, HEAD, M, BN, STAGES,
            )),
            (_compute, (
                q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, full_q, full_k, full_v, empty_k, empty_v, order,
                row_smem, OUT, begin, length, num_heads, num_tiles, out_stride, 1, HEAD, M, BN, STAGES,
            )),
            (_fetch, (
                Q_WIDE, Q_NARROW, K_WIDE, K_NARROW, V_WIDE, V_NARROW, q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow,
                full_q, full_k, full_v, empty_k, empty_v, begin, length, num_heads, num_tiles, PITCH, M, BN, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def head_pitch(x: Tensor, head_dim: int) -> int:
    """Return how many columns a head takes in memory for patches like `x`. The padding after `head_dim` must be zero."""
    is_padded = is_hopper(x.device) and x.element_size() == 2 and WIDE < head_dim <= WIDE + NARROW
    return WIDE + NARROW if is_padded else head_dim


def _matrix(x_TNH: Tensor) -> Tensor:
    """View heads, including their padding, as one matrix [T, N * columns]."""
    return x_TNH.as_strided((x_TNH.shape[0], x_TNH.shape[1] * x_TNH.stride(1)), (x_TNH.stride(0), 1))


def _describe(matrix: Tensor, rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return descriptors of the wide and the narrow part of heads, in tiles of `rows` rows."""
    shape, strides = list(matrix.shape), list(matrix.stride())
    wide = TensorDescriptor(matrix, shape, strides, [rows, WIDE], _WIDE_LAYOUT)
    return wide, TensorDescriptor(matrix, shape, strides, [rows, NARROW], _NARROW_LAYOUT)


def describe_patch_attention(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, out_TNH: Tensor, begin: int, length: int, num_images: int
) -> Launch:
    """Return the launch for `num_images` images of `length` patches each. The first image begins at row `begin`."""
    _, num_heads, head_dim = q_TNH.shape
    num_tiles = cdiv(length, 2 * ROWS)
    q_wide, q_narrow = _describe(_matrix(q_TNH), ROWS)
    (k_wide, k_narrow), (v_wide, v_narrow) = (_describe(_matrix(x), KEYS) for x in (k_TNH, v_TNH))
    arguments: dict[str, Any] = {"Q_WIDE": q_wide, "Q_NARROW": q_narrow, "K_WIDE": k_wide, "K_NARROW": k_narrow}
    arguments |= {"V_WIDE": v_wide, "V_NARROW": v_narrow, "OUT": out_TNH, "begin": begin, "length": length}
    arguments |= {"num_heads": num_heads, "num_tiles": num_tiles, "out_stride": out_TNH.stride(0), "HEAD": head_dim}
    arguments |= {"PITCH": q_TNH.stride(1), "M": ROWS, "BN": KEYS, "STAGES": STAGES}
    return Launch(_patch_attention_kernel, (num_tiles * num_heads * num_images,), arguments, {"num_warps": 4})


def _torch_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute the same with torch's kernels. They run on every GPU, and are as fast for heads that fill their tiles."""
    parts, begin = [], 0
    for length, images in groupby(lengths):
        end = begin + length * len(list(images))
        q, k, v = (x[begin:end].unflatten(0, (-1, length)).transpose(1, 2) for x in (q_TNH, k_TNH, v_TNH))
        parts.append(F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(0, 1))
        begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def patch_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the attention of each image's patches over all patches of that image, [T, N, H]. Scores are not scaled.

    `lengths` are the numbers of patches of the images. Neighbours of one size are one launch.
    """
    if q_TNH.stride(1) == q_TNH.shape[2]:  # `head_pitch` has added no padding
        return _torch_attention(q_TNH, k_TNH, v_TNH, lengths)
    out_TNH, begin = q_TNH.new_empty(q_TNH.shape), 0
    for length, images in groupby(lengths):
        num_images = len(list(images))
        describe_patch_attention(q_TNH, k_TNH, v_TNH, out_TNH, begin, length, num_images).run()
        begin += length * num_images
    return out_TNH
