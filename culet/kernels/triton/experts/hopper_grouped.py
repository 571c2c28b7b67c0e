"""Run the MLPs of routed experts for many tokens on Hopper. In Gluon.

    y[t] = sum_j weights[t, j] * down[ids[t, j]] @ (gelu(gate[ids[t, j]] @ x[t]) * (up[ids[t, j]] @ x[t]))

The assignments of each expert fill tiles of 128 rows, the last one partly. One kernel computes gate, up and GELU of these
tiles, another multiplies them by the down weights, and the last one sums a token's experts. Each of two computing warpgroups
has 64 rows of a tile and skips them if none is real. Other warps fetch weights with the bulk copy engine. They gather tokens
with ordinary asynchronous copies, because Hopper's engine cannot gather rows.

Shapes: T tokens · D model · E experts · K experts per token · A = T * K assignments · F expert width · R rows of all tiles.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from culet.kernels.triton.barriers import make_ring, skip_tile, store_tile
from culet.kernels.triton.device import can_bulk_copy, device_facts
from culet.kernels.triton.experts.grouping import describe_groups, describe_sum
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.linear.hopper_products import gelu, matrix

ROWS = 64  # of a warpgroup
DEPTH = 64  # inputs of a step
FETCHING = 4  # warps that gather tokens


@dataclass(frozen=True, slots=True)
class TileSizes:
    """The number of outputs in a tile and of stages in its ring, for gate and up and for down."""

    up_outputs: int
    up_stages: int
    down_outputs: int
    down_stages: int


# Measured on an H200 with 128 experts of width 704, 8 per token, and hidden size 2816 (docs/log/linear.md).
MIN_TOKENS = 768  # With fewer, reading the weights takes most of the time, and the kernels in `expert_mlp` are as fast.
FEW, MANY = TileSizes(64, 6, 256, 3), TileSizes(128, 4, 128, 6)
MANY_TOKENS = 6144  # from this many tokens on, MANY is used


@triton.jit
def _tile_kernel(counts, tiles, E: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr):
    """List the tiles: how many there are, then the expert, the first assignment and the number of real rows of each."""
    experts = tl.arange(0, BLOCK_E)
    number = tl.load(counts + experts, mask=experts < E, other=0)
    own = (number + TILE - 1) // TILE
    ends = tl.cumsum(own, 0)
    tl.store(tiles, tl.sum(own, 0))
    for index in range(tl.max(own, 0)):
        at = tiles + 4 * (ends - own + index + 1)
        is_used = index < own
        tl.store(at, experts, mask=is_used)
        tl.store(at + 1, index * TILE, mask=is_used)
        tl.store(at + 2, number - index * TILE, mask=is_used)


@gluon.jit
def _read_tile(tiles, index):
    """Return the expert of a tile, the place of its first assignment in the expert's list, and the number of real rows left."""
    at = tiles + 4 * (index + 1)
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


# Gate and up


@gluon.jit
def _fetch_up(
    x, W, members, places, tiles, x_tiles, gate_tiles, up_tiles, full, empty, num_tokens, x_stride,
    D: gl.constexpr, F: gl.constexpr, TOP_K: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, NUM_OUTPUT_TILES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Fetch weights with the bulk copy engine, and tokens with asynchronous copies of 16 bytes. The fetching warps run this."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, 2 * M, layout=gl.SliceLayout(1, LOADED))
    column = gl.arange(0, BK, layout=gl.SliceLayout(0, LOADED))
    count = 0
    for index in range(gl.program_id(0), gl.load(tiles) * NUM_OUTPUT_TILES, gl.num_programs(0)):
        tile, output = index // NUM_OUTPUT_TILES, index % NUM_OUTPUT_TILES * BN
        expert, first, left = _read_tile(tiles, tile)
        member = gl.load(members + expert.to(gl.int64) * num_tokens + first + row, mask=row < left, other=0)
        if output == 0:
            gl.store(places + member, tile * 2 * M + row, mask=row < left)
        source = x + (member // TOP_K).to(gl.int64)[:, None] * x_stride + column[None, :]
        # Without a mask, all other rows would fetch token 0. Reading the same memory so often is slow.
        is_real = (row < left)[:, None] & (column >= 0)[None, :]
        for step in range(D // BK):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, 2 * BN * BK * 2)
            tma.async_copy_global_to_shared(W, [expert * 2 * F + output, step * BK], barrier, gate_tiles.index(stage))
            tma.async_copy_global_to_shared(W, [expert * 2 * F + F + output, step * BK], barrier, up_tiles.index(stage))
            async_copy.async_copy_global_to_shared(x_tiles.index(stage), source + step * BK, mask=is_real)
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            count += 1


@gluon.jit
def _compute_up(
    H, tiles, x_tiles, gate_tiles, up_tiles, y_tiles, full, empty,
    GROUP: gl.constexpr, D: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    NUM_OUTPUT_TILES: gl.constexpr,
):  # fmt: skip
    """Run one of the computing warpgroups of gate and up."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    NUM_STEPS: gl.constexpr = D // BK
    y_tile = y_tiles.index(GROUP)
    count = 0
    for index in range(gl.program_id(0), gl.load(tiles) * NUM_OUTPUT_TILES, gl.num_programs(0)):
        tile, output = index // NUM_OUTPUT_TILES, index % NUM_OUTPUT_TILES * BN
        left = gl.load(tiles + 4 * (tile + 1) + 2)
        if left > GROUP * M:
            gate = gl.zeros([M, BN], gl.float32, LAYOUT)
            up = gl.zeros([M, BN], gl.float32, LAYOUT)
            for step in range(NUM_STEPS):
                stage = (count + step) % STAGES
                mbarrier.wait(full.index(stage), ((count + step) // STAGES) & 1)
                fence_async_shared()  # tokens were copied by ordinary instructions
                x_tile = x_tiles.index(stage).slice(GROUP * M, M, 0)
                gate = warpgroup_mma(x_tile, gate_tiles.index(stage).permute((1, 0)), gate, use_acc=step > 0, is_async=True)
                up = warpgroup_mma(x_tile, up_tiles.index(stage).permute((1, 0)), up, use_acc=step > 0, is_async=True)
                gate, up = warpgroup_mma_wait(2, deps=(gate, up))
                # The products of the step before have ended.
                mbarrier.arrive(empty.index((count + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
            gate, up = warpgroup_mma_wait(0, deps=(gate, up))
            mbarrier.arrive(empty.index((count + NUM_STEPS - 1) % STAGES), count=1)
            store_tile(H, (2 * tile + GROUP) * M, output, y_tile, (gelu(gate) * up).to(y_tile.dtype))
        else:
            skip_tile(full, empty, count, NUM_STEPS, STAGES)
        count += NUM_STEPS
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens"])
def _up_kernel(
    x, W, H, members, places, tiles, num_tokens, x_stride,
    D: gl.constexpr, F: gl.constexpr, TOP_K: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute gelu(gate) * up, tile by tile. Of n programs, program p computes tiles p, p + n, p + 2n and so on."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NUM_OUTPUT_TILES: gl.constexpr = (F + BN - 1) // BN
    dtype: gl.constexpr = W.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, 2 * M, BK], LAYOUT)
    gate_tiles = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], LAYOUT)
    up_tiles = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], LAYOUT)
    y_tiles = gl.allocate_shared_memory(dtype, [2, M, BN], LAYOUT)
    # Each fetching thread arrives when its copies are done, and the bulk copy engine arrives once.
    full, empty = make_ring(STAGES, 2, 1 + 32 * WARPS)
    gl.warp_specialize(
        [
            (_compute_up, (
                H, tiles, x_tiles, gate_tiles, up_tiles, y_tiles, full, empty, 0, D, M, BN, BK, STAGES, NUM_OUTPUT_TILES,
            )),
            (_compute_up, (
                H, tiles, x_tiles, gate_tiles, up_tiles, y_tiles, full, empty, 1, D, M, BN, BK, STAGES, NUM_OUTPUT_TILES,
            )),
            (_fetch_up, (
                x, W, members, places, tiles, x_tiles, gate_tiles, up_tiles, full, empty, num_tokens, x_stride,
                D, F, TOP_K, M, BN, BK, STAGES, NUM_OUTPUT_TILES, WARPS,
            )),
        ],
        [4, WARPS],
        [208, 80],
    )  # fmt: skip


# Down


@gluon.jit
def _fetch_down(
    H, W, tiles, h_tiles, w_tiles, full, empty,
    D: gl.constexpr, F: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    NUM_OUTPUT_TILES: gl.constexpr,
):  # fmt: skip
    """Fetch rows and weights with the bulk copy engine. One warp runs this."""
    count = 0
    for index in range(gl.program_id(0), gl.load(tiles) * NUM_OUTPUT_TILES, gl.num_programs(0)):
        tile, output = index // NUM_OUTPUT_TILES, index % NUM_OUTPUT_TILES * BN
        expert = gl.load(tiles + 4 * (tile + 1))
        for step in range((F + BK - 1) // BK):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, (2 * M + BN) * BK * 2)
            tma.async_copy_global_to_shared(H, [tile * 2 * M, step * BK], barrier, h_tiles.index(stage))
            tma.async_copy_global_to_shared(W, [expert * D + output, step * BK], barrier, w_tiles.index(stage))
            count += 1


@gluon.jit
def _compute_down(
    Y, tiles, h_tiles, w_tiles, y_tiles, full, empty,
    GROUP: gl.constexpr, F: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    NUM_OUTPUT_TILES: gl.constexpr,
):  # fmt: skip
    """Run one of the computing warpgroups of the down weights."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    NUM_STEPS: gl.constexpr = (F + BK - 1) // BK
    y_tile = y_tiles.index(GROUP)
    count = 0
    for index in range(gl.program_id(0), gl.load(tiles) * NUM_OUTPUT_TILES, gl.num_programs(0)):
        tile, output = index // NUM_OUTPUT_TILES, index % NUM_OUTPUT_TILES * BN
        left = gl.load(tiles + 4 * (tile + 1) + 2)
        if left > GROUP * M:
            total = gl.zeros([M, BN], gl.float32, LAYOUT)
            for step in range(NUM_STEPS):
                stage = (count + step) % STAGES
                mbarrier.wait(full.index(stage), ((count + step) // STAGES) & 1)
                h_tile = h_tiles.index(stage).slice(GROUP * M, M, 0)
                total = warpgroup_mma(h_tile, w_tiles.index(stage).permute((1, 0)), total, use_acc=step > 0, is_async=True)
                total = warpgroup_mma_wait(1, deps=(total,))
                mbarrier.arrive(empty.index((count + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
            total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(empty.index((count + NUM_STEPS - 1) % STAGES), count=1)
            store_tile(Y, (2 * tile + GROUP) * M, output, y_tile, total.to(y_tile.dtype))
        else:
            skip_tile(full, empty, count, NUM_STEPS, STAGES)
        count += NUM_STEPS
    tma.store_wait(0)


@gluon.jit
def _down_kernel(
    H, W, Y, tiles,
    D: gl.constexpr, F: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply by the down weights, tile by tile. Of n programs, program p computes tiles p, p + n, p + 2n and so on."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NUM_OUTPUT_TILES: gl.constexpr = (D + BN - 1) // BN
    dtype: gl.constexpr = H.dtype
    h_tiles = gl.allocate_shared_memory(dtype, [STAGES, 2 * M, BK], LAYOUT)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], LAYOUT)
    y_tiles = gl.allocate_shared_memory(dtype, [2, M, BN], LAYOUT)
    full, empty = make_ring(STAGES, 2)
    gl.warp_specialize(
        [
            (_compute_down, (Y, tiles, h_tiles, w_tiles, y_tiles, full, empty, 0, F, M, BN, BK, STAGES, NUM_OUTPUT_TILES)),
            (_compute_down, (Y, tiles, h_tiles, w_tiles, y_tiles, full, empty, 1, F, M, BN, BK, STAGES, NUM_OUTPUT_TILES)),
            (_fetch_down, (H, W, tiles, h_tiles, w_tiles, full, empty, D, F, M, BN, BK, STAGES, NUM_OUTPUT_TILES)),
        ],
        [4, 1],
        [240, 24],
    )


def supports(x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> bool:
    """Return whether these kernels support the inputs and weights, for any number of tokens."""
    if x_TD.shape[1] % DEPTH or down_EDF.shape[2] % 8:
        return False
    return all(weight.is_contiguous() and can_bulk_copy(x_TD, weight.flatten(0, 1)) for weight in (gate_up_EFD, down_EDF))


def describe_hopper_grouped(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, y_TD: Tensor, **extra: Any
) -> list[Launch]:
    """Return the five launches for these tensors. `extra` may set `tile_sizes` (TileSizes) and `pdl`."""
    num_tokens, top_k = ids_TK.shape
    num_experts, size, width = down_EDF.shape
    assigned, rows, device = num_tokens * top_k, 2 * ROWS, x_TD.device
    tile: TileSizes = extra.get("tile_sizes", FEW if num_tokens < MANY_TOKENS else MANY)
    pdl, num_programs = bool(extra.get("pdl", False)), device_facts(device)[1]
    num_tiles = min(assigned, assigned // rows + num_experts)
    lists, grouping = describe_groups(ids_TK, num_experts, pdl)
    tiles = torch.empty(num_tiles + 1, 4, dtype=torch.int32, device=device)
    places = torch.empty(assigned, dtype=torch.int32, device=device)
    hidden_RF = torch.empty(num_tiles * rows, width, dtype=x_TD.dtype, device=device)
    out_RD = torch.empty(num_tiles * rows, size, dtype=x_TD.dtype, device=device)
    listing = {
        "counts": lists["counts"],
        "tiles": tiles,
        "E": num_experts,
        "BLOCK_E": next_power_of_2(num_experts),
        "TILE": rows,
    }
    sizes = {"tiles": tiles, "D": size, "F": width, "M": ROWS, "BK": DEPTH}
    up = {
        "x": x_TD,
        "W": matrix(gate_up_EFD.flatten(0, 1), tile.up_outputs, DEPTH),
        "H": matrix(hidden_RF, ROWS, tile.up_outputs),
        "members": lists["members"],
        "places": places,
        "num_tokens": num_tokens,
        "x_stride": x_TD.stride(0),
        "TOP_K": top_k,
        "BN": tile.up_outputs,
        "STAGES": tile.up_stages,
        "WARPS": FETCHING,
        **sizes,
    }
    down = {
        "H": matrix(hidden_RF, rows, DEPTH),
        "W": matrix(down_EDF.flatten(0, 1), tile.down_outputs, DEPTH),
        "Y": matrix(out_RD, ROWS, tile.down_outputs),
        "BN": tile.down_outputs,
        "STAGES": tile.down_stages,
        **sizes,
    }
    return [
        grouping,
        Launch(_tile_kernel, (1,), listing, {"num_warps": 4}),
        Launch(_up_kernel, (min(num_programs, num_tiles * cdiv(width, tile.up_outputs)),), up, {"num_warps": 4}),
        Launch(_down_kernel, (min(num_programs, num_tiles * cdiv(size, tile.down_outputs)),), down, {"num_warps": 4}),
        describe_sum(out_RD, weights_TK, y_TD, pdl, places),
    ]
