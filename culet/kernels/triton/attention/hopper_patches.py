"""Attention between the patches of an image, on Hopper. Every patch sees every patch of its image.

torch's kernels pad heads of 72 to 128 columns. Here they have 80: a part of 64 and a part of 16, because the sides of a tile
are powers of 2. A program has 64 queries for each of two computing warpgroups, and a warp that fetches tiles of keys and
values with the bulk copy engine. While one warpgroup turns scores into weights, the other one multiplies.

Weights are e^score, without subtracting a maximum first. The norms of queries and keys keep scores small, and float32 and
bfloat16 hold e^80. The padding after a head's values starts with a 1, so multiplying the values also adds up the weights. If
the sum of a row shows that its weights were too large or too small, `patch_retries` computes its tile with a maximum.

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

from culet.kernels.triton.attention.key_tiles import LOG2E
from culet.kernels.triton.attention.patch_retries import describe_patch_retries
from culet.kernels.triton.device import is_hopper
from culet.kernels.triton.launch import Launch, cdiv

WIDE, NARROW = 64, 16  # columns of the parts of a head
ROWS = 64  # queries of a warpgroup
KEYS = 128  # keys of a tile
STAGES = 2
# Bounds of a row's sum. Beyond them, a weight or a sum may have overflowed, or weights that matter may have become 0.
LEAST_TOTAL, MOST_TOTAL = gl.constexpr(2.0**-90), gl.constexpr(2.0**120)
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


class _State(NamedTuple):
    """The state of a computing warpgroup."""

    s: Any  # scores of the next tile
    wide: Any  # weighted values of earlier tiles
    narrow: Any


@gluon.jit
def _weigh(s, dtype: gl.constexpr):
    """Return the weights of a tile."""
    return gl.exp2(s * LOG2E).to(dtype)


@gluon.jit
def _multiply(p, v, wide, narrow, O_LAYOUT: gl.constexpr, X_LAYOUT: gl.constexpr):
    """Start adding the weighted values of a tile."""
    wide = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, O_LAYOUT, 2)), v.wide, wide, is_async=True)
    narrow = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, X_LAYOUT, 2)), v.narrow, narrow, is_async=True)
    return wide, narrow


@gluon.jit
def _step(
    q, k, v, full_k, full_v, empty_k, empty_v, state, count,
    M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weigh tile `count` and multiply its values. Score tile count + 1."""
    stage = count % STAGES
    after = (count + 1) % STAGES
    p = _weigh(state.s, q.wide.dtype)
    mbarrier.wait(full_k.index(after), ((count + 1) // STAGES) & 1)
    mbarrier.wait(full_v.index(stage), (count // STAGES) & 1)
    wide, narrow = _multiply(p, _tile_of(v, stage), state.wide, state.narrow, O_LAYOUT, X_LAYOUT)
    s = _score(q, _tile_of(k, after), M, BN, S_LAYOUT)
    s, wide, narrow = warpgroup_mma_wait(0, deps=(s, wide, narrow))
    gl.thread_barrier()
    mbarrier.arrive(empty_k.index(after), count=1)
    mbarrier.arrive(empty_v.index(stage), count=1)
    return _State(s, wide, narrow)


@gluon.jit
def _store(
    wide, narrow, OUT, RETRY, rows, num_rows, stride, x,
    HEAD: gl.constexpr, M: gl.constexpr, O_LAYOUT: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store the rows' attention, and for each row whether it must be retried. Rows from `num_rows` on are of the next image."""
    row = gl.arange(0, M, gl.SliceLayout(1, X_LAYOUT))
    column = gl.arange(0, 16, gl.SliceLayout(0, X_LAYOUT))
    is_one = gl.expand_dims(column == HEAD - 64, 0)  # the values have a 1 there
    total = gl.sum(gl.where(is_one, narrow, 0.0), 1)
    is_retried = ((total < LEAST_TOTAL) | ~(total < MOST_TOTAL)) & (row < num_rows)
    gl.store(RETRY + row, is_retried.to(gl.int8))
    scale = 1.0 / total
    offsets = gl.expand_dims((rows + row).to(gl.int64) * stride, 1) + gl.expand_dims(x + 64 + column, 0)
    is_inside = gl.expand_dims(row < num_rows, 1) & gl.expand_dims(column < HEAD - 64, 0)
    gl.store(OUT + offsets, (narrow * gl.expand_dims(scale, 1)).to(OUT.dtype.element_ty), mask=is_inside)
    row = gl.arange(0, M, gl.SliceLayout(1, O_LAYOUT))
    column = gl.arange(0, 64, gl.SliceLayout(0, O_LAYOUT))
    offsets = gl.expand_dims((rows + row).to(gl.int64) * stride, 1) + gl.expand_dims(x + column, 0)
    wide = wide * gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, O_LAYOUT)), 1)
    gl.store(OUT + offsets, wide.to(OUT.dtype.element_ty), mask=gl.expand_dims(row < num_rows, 1))


@gluon.jit
def _compute(
    q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, full_q, full_k, full_v, empty_k, empty_v,
    OUT, RETRY, begin, length, num_heads, num_tiles, out_stride,
    GROUP: gl.constexpr, HEAD: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run one of the computing warpgroups."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    X_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    head, first, query = _place(begin, length, num_heads, num_tiles, 2 * M)
    query += GROUP * M
    q = _Parts(q_wide.index(GROUP), q_narrow.index(GROUP))
    k = _Parts(k_wide, k_narrow)
    v = _Parts(v_wide, v_narrow)
    mbarrier.wait(full_q.index(GROUP), 0)
    mbarrier.wait(full_k.index(0), 0)
    s = _score(q, _tile_of(k, 0), M, BN, S_LAYOUT)
    s = warpgroup_mma_wait(0, deps=(s,))
    gl.thread_barrier()
    mbarrier.arrive(empty_k.index(0), count=1)
    state = _State(s, gl.zeros([M, 64], gl.float32, O_LAYOUT), gl.zeros([M, 16], gl.float32, X_LAYOUT))
    last = (length - 1) // BN
    for count in range(last):
        state = _step(
            q, k, v, full_k, full_v, empty_k, empty_v, state, count,
            M, BN, STAGES, S_LAYOUT, O_LAYOUT, X_LAYOUT,
        )  # fmt: skip
    is_key = gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT)) < length - last * BN
    p = _weigh(gl.where(gl.expand_dims(is_key, 0), state.s, float("-inf")), q_wide.dtype)
    mbarrier.wait(full_v.index(last % STAGES), (last // STAGES) & 1)
    wide, narrow = _multiply(p, _tile_of(v, last % STAGES), state.wide, state.narrow, O_LAYOUT, X_LAYOUT)
    wide, narrow = warpgroup_mma_wait(0, deps=(wide, narrow))
    retry = RETRY + (2 * gl.program_id(0) + GROUP) * M
    _store(wide, narrow, OUT, retry, first + query, length - query, out_stride, head * HEAD, HEAD, M, O_LAYOUT, X_LAYOUT)


@gluon.jit(do_not_specialize=["begin", "length", "num_heads", "num_tiles"])
def _patch_attention_kernel(
    Q_WIDE, Q_NARROW, K_WIDE, K_NARROW, V_WIDE, V_NARROW, OUT, RETRY, begin, length, num_heads, num_tiles, out_stride,
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
    full_q = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for group in gl.static_range(2):
        mbarrier.init(full_q.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=2)
        mbarrier.init(empty_v.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, full_q, full_k, full_v, empty_k, empty_v,
                OUT, RETRY, begin, length, num_heads, num_tiles, out_stride, 0, HEAD, M, BN, STAGES,
            )),
            (_compute, (
                q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, full_q, full_k, full_v, empty_k, empty_v,
                OUT, RETRY, begin, length, num_heads, num_tiles, out_stride, 1, HEAD, M, BN, STAGES,
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
    """Return how many columns a head takes in memory for patches like `x`. `patch_qkv` says what the padding holds."""
    is_padded = is_hopper(x.device) and x.element_size() == 2 and WIDE < head_dim < WIDE + NARROW
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
) -> tuple[Launch, Launch]:
    """Return the two launches for `num_images` images of `length` patches each, the first of which begins at row `begin`.

    The first launch computes all tiles. The second one recomputes those whose sums left their bounds.
    """
    _, num_heads, head_dim = q_TNH.shape
    num_tiles = cdiv(length, 2 * ROWS)
    num_programs = num_tiles * num_heads * num_images
    retry = torch.empty(2 * num_programs, ROWS, dtype=torch.int8, device=q_TNH.device)
    q_wide, q_narrow = _describe(_matrix(q_TNH), ROWS)
    (k_wide, k_narrow), (v_wide, v_narrow) = (_describe(_matrix(x), KEYS) for x in (k_TNH, v_TNH))
    arguments: dict[str, Any] = {"Q_WIDE": q_wide, "Q_NARROW": q_narrow, "K_WIDE": k_wide, "K_NARROW": k_narrow}
    arguments |= {"V_WIDE": v_wide, "V_NARROW": v_narrow, "OUT": out_TNH, "RETRY": retry, "begin": begin, "length": length}
    arguments |= {"num_heads": num_heads, "num_tiles": num_tiles, "out_stride": out_TNH.stride(0), "HEAD": head_dim}
    arguments |= {"PITCH": q_TNH.stride(1), "M": ROWS, "BN": KEYS, "STAGES": STAGES}
    attention = Launch(_patch_attention_kernel, (num_programs,), arguments, {"num_warps": 4})
    return attention, describe_patch_retries(retry, q_TNH, k_TNH, v_TNH, out_TNH, begin, length)


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
        for launch in describe_patch_attention(q_TNH, k_TNH, v_TNH, out_TNH, begin, length, num_images):
            launch.run()
        begin += length * num_images
    return out_TNH
