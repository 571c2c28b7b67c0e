"""Group the assignments by expert, and add up the outputs of each token's experts.

All kernels that run experts for more than a few tokens need both.

Shapes: T tokens · D model · E experts · K experts per token · A = T * K assignments (a = t * K + j) · R rows of outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2

CHUNK = 4096  # assignments that a program reads at a time


@triton.jit(do_not_specialize=["A", "T"])
def group_kernel(ids, members, counts, A, T, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Write the assignments of expert e to members[e, :counts[e]], in ascending order. Each program handles one expert."""
    enter(PDL)
    expert = tl.program_id(0)
    offsets = tl.arange(0, CHUNK)
    count = 0
    for begin in tl.range(0, A, CHUNK):
        at = begin + offsets
        is_mine = (tl.load(ids + at, mask=at < A, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(is_mine, 0) - is_mine
        tl.store(members + expert.to(tl.int64) * T + place, at, mask=is_mine != 0)
        count += tl.sum(is_mine, 0)
    tl.store(counts + expert, count)


@triton.jit
def find_members(members, counts, T, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return this program's expert (E if there is none), the assignments in its tile, and a mask of the real ones."""
    block = tl.program_id(1)
    experts = tl.arange(0, BLOCK_E)
    number = tl.load(counts + experts, mask=experts < E, other=0)
    tiles = (number + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= block).to(tl.int32), 0).to(tl.int64)
    first = (block - tl.max(tl.where(ends <= block, ends, 0), 0)) * BLOCK_M
    place = first + tl.arange(0, BLOCK_M)
    is_real = place < tl.sum(tl.where(experts == expert, number, 0), 0)
    return expert, tl.load(members + expert * T + place, mask=is_real, other=0).to(tl.int64), is_real


@triton.jit
def load_tokens(ptrs, is_real, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load columns k .. k + BLOCK_K - 1 of K as rows of a tile.

    The tile has one column per assignment, with zeros for those that are not real.
    """
    mask = is_real[None, :]
    if K % BLOCK_K != 0:
        mask = mask & (tl.arange(0, BLOCK_K) < K - k)[:, None]
    return tl.load(ptrs + k, mask=mask, other=0.0)


@triton.jit
def combine_kernel(
    out,
    places,
    weights,
    y,
    y_stride,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute y[t] = sum_j weights[t, j] * out[place of t * K + j]. Without `places`, row a of `out` is assignment a."""
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for j in tl.static_range(TOP_K):
        place = token * TOP_K + j
        weight = tl.load(weights + place)
        if places is not None:
            place = tl.load(places + place).to(tl.int64)
        total += weight * tl.load(out + place * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(y + token * y_stride + cols, total.to(y.dtype.element_ty), mask=cols < D)


def describe_groups(ids_TK: Tensor, num_experts: int, pdl: bool) -> tuple[dict[str, Tensor], Launch]:
    """Return the lists for `find_members` and the launch that fills them."""
    num_tokens, assigned = ids_TK.shape[0], ids_TK.numel()
    lists = {
        "members": torch.empty(num_experts, num_tokens, dtype=torch.int32, device=ids_TK.device),
        "counts": torch.empty(num_experts, dtype=torch.int32, device=ids_TK.device),
    }
    chunk, num_warps = min(CHUNK, max(128, next_power_of_2(assigned))), 4 if assigned <= CHUNK else 8
    arguments = {"ids": ids_TK, "A": assigned, "T": num_tokens, "CHUNK": chunk, "PDL": pdl, **lists}
    return lists, Launch(group_kernel, (num_experts,), arguments, options(num_warps, pdl))


def describe_sum(out_RD: Tensor, weights_TK: Tensor, y_TD: Tensor, pdl: bool, places_A: Tensor | None = None) -> Launch:
    """Return the launch that adds up the outputs of each token's experts. `places_A` has the row of each assignment."""
    num_tokens, size = y_TD.shape
    block_d = min(1024, next_power_of_2(size))
    arguments = {"out": out_RD, "places": places_A, "weights": weights_TK, "y": y_TD, "y_stride": y_TD.stride(0)}
    sizes = {"D": size, "TOP_K": weights_TK.shape[1], "BLOCK_D": block_d, "PDL": pdl}
    return Launch(combine_kernel, (num_tokens, cdiv(size, block_d)), {**arguments, **sizes}, options(4, pdl))
