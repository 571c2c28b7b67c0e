"""Products of many tokens on Hopper, with GELU in the same kernel.

    y[m, f] = gelu(sum_k x[m, k] * W[f, k]) * sum_k x[m, k] * W[F + f, k]

cuBLAS would write gate and up to memory, and another kernel would read them. Here a program computes tiles of 128 tokens and
128 gated outputs, one after the other. Each of two computing warpgroups has half of the tokens. A warp fetches tokens and
weights with the bulk copy engine, across the borders of tiles. The two warpgroups need not be at the same step, so one can
multiply while the other one stores its outputs.

Shapes: M tokens · F gated outputs · K inputs.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from culet.kernels.triton.barriers import make_ring, store_tile
from culet.kernels.triton.device import can_bulk_copy, device_facts
from culet.kernels.triton.launch import Launch, cdiv, is_only_warming

ROWS = 64  # tokens of a warpgroup
OUTPUTS = 128  # of a tile
DEPTH = 64  # inputs of a step
STAGES = 4
BAND = 16  # tiles of tokens that are computed together, so that their programs share weights in the cache
MIN_USED = 0.83  # the least `used_area`. Below it, cuBLAS is faster, because it chooses among tiles of several sizes.
_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def _place(tile, num_token_tiles, num_output_tiles, M: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr):
    """Return the first token and the first output of a tile."""
    first = tile // (BAND * num_output_tiles) * BAND
    height = gl.minimum(num_token_tiles - first, BAND)
    within = tile % (BAND * num_output_tiles)
    return (first + within % height) * 2 * M, within // height * BN


@gluon.jit
def _fetch(
    X, W, x_tiles, gate_tiles, up_tiles, full, empty, num_token_tiles, num_output_tiles, num_steps, num_outputs,
    M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Run the fetching warp."""
    count = 0
    for tile in range(gl.program_id(0), num_token_tiles * num_output_tiles, gl.num_programs(0)):
        token, output = _place(tile, num_token_tiles, num_output_tiles, M, BN, BAND)
        for step in range(num_steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, (2 * M + 2 * BN) * BK * 2)
            tma.async_copy_global_to_shared(X, [token, step * BK], barrier, x_tiles.index(stage))
            tma.async_copy_global_to_shared(W, [output, step * BK], barrier, gate_tiles.index(stage))
            tma.async_copy_global_to_shared(W, [num_outputs + output, step * BK], barrier, up_tiles.index(stage))
            count += 1


@gluon.jit
def gelu(x):
    """Return the tanh form of GELU, x * sigmoid(2 u)."""
    u = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
    return x / (1.0 + gl.exp2(-2.885390081777927 * u))


@gluon.jit
def _compute(
    Y, x_tiles, gate_tiles, up_tiles, y_tiles, full, empty, num_token_tiles, num_output_tiles, num_steps,
    GROUP: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Run one of the computing warpgroups."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    count = 0
    y_tile = y_tiles.index(GROUP)
    for tile in range(gl.program_id(0), num_token_tiles * num_output_tiles, gl.num_programs(0)):
        token, output = _place(tile, num_token_tiles, num_output_tiles, M, BN, BAND)
        gate = gl.zeros([M, BN], gl.float32, LAYOUT)
        up = gl.zeros([M, BN], gl.float32, LAYOUT)
        for step in range(num_steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            x_tile = x_tiles.index(stage).slice(GROUP * M, M, 0)
            gate = warpgroup_mma(x_tile, gate_tiles.index(stage).permute((1, 0)), gate, use_acc=step > 0, is_async=True)
            up = warpgroup_mma(x_tile, up_tiles.index(stage).permute((1, 0)), up, use_acc=step > 0, is_async=True)
            gate, up = warpgroup_mma_wait(2, deps=(gate, up))
            # The products of the step before have ended.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        gate, up = warpgroup_mma_wait(0, deps=(gate, up))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        store_tile(Y, token + GROUP * M, output, y_tile, (gelu(gate) * up).to(y_tile.dtype))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_token_tiles", "num_output_tiles", "num_steps", "num_outputs"])
def _gated_product_kernel(
    X, W, Y, num_token_tiles, num_output_tiles, num_steps, num_outputs,
    M: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Compute every tile whose number is this program's, modulo the number of programs."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = X.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, 2 * M, BK], LAYOUT)
    gate_tiles = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], LAYOUT)
    up_tiles = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], LAYOUT)
    y_tiles = gl.allocate_shared_memory(dtype, [2, M, BN], LAYOUT)
    full, empty = make_ring(STAGES, 2)
    gl.warp_specialize(
        [
            (_compute, (
                Y, x_tiles, gate_tiles, up_tiles, y_tiles, full, empty, num_token_tiles, num_output_tiles, num_steps,
                0, M, BN, BK, STAGES, BAND,
            )),
            (_compute, (
                Y, x_tiles, gate_tiles, up_tiles, y_tiles, full, empty, num_token_tiles, num_output_tiles, num_steps,
                1, M, BN, BK, STAGES, BAND,
            )),
            (_fetch, (
                X, W, x_tiles, gate_tiles, up_tiles, full, empty, num_token_tiles, num_output_tiles, num_steps, num_outputs,
                M, BN, BK, STAGES, BAND,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def matrix(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix that the bulk copy engine reads or writes in tiles of this size."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], _LAYOUT)


def describe_gated_product(x_MK: Tensor, gate_up_NK: Tensor, out_MF: Tensor) -> Launch:
    """Describe the launch for these tensors. The weight's rows are gate, then up."""
    (num_tokens, size_k), num_outputs = x_MK.shape, out_MF.shape[1]
    arguments: dict[str, Any] = {
        "X": matrix(x_MK, 2 * ROWS, DEPTH),
        "W": matrix(gate_up_NK, OUTPUTS, DEPTH),
        "Y": matrix(out_MF, ROWS, OUTPUTS),
        "num_token_tiles": cdiv(num_tokens, 2 * ROWS),
        "num_output_tiles": cdiv(num_outputs, OUTPUTS),
        "num_steps": cdiv(size_k, DEPTH),
        "num_outputs": num_outputs,
        "M": ROWS,
        "BN": OUTPUTS,
        "BK": DEPTH,
        "STAGES": STAGES,
        "BAND": BAND,
    }
    num_tiles = arguments["num_token_tiles"] * arguments["num_output_tiles"]
    num_programs = min(num_tiles, device_facts(x_MK.device)[1])
    return Launch(_gated_product_kernel, (num_programs,), arguments, {"num_warps": 4})


def used_area(num_tokens: int, num_outputs: int, num_programs: int) -> float:
    """Return the share of the programs' work that gives outputs. The rest is padding, or programs without a tile."""
    num_tiles = cdiv(num_tokens, 2 * ROWS) * cdiv(num_outputs, OUTPUTS)
    return num_tokens * num_outputs / (cdiv(num_tiles, num_programs) * num_programs * 2 * ROWS * OUTPUTS)


def gated_product(x_MK: Tensor, gate_up_NK: Tensor) -> Tensor | None:
    """Return gelu_tanh(x @ gate^T) * (x @ up^T), [M, F], or None if this kernel cannot be used or cuBLAS is as fast."""
    num_tokens, num_outputs = x_MK.shape[0], gate_up_NK.shape[0] // 2
    if not num_tokens or num_outputs % 8 or not can_bulk_copy(x_MK, gate_up_NK):
        return None
    # All shapes have the same kernel, so whichever of them is warmed first compiles it for those that use it.
    if not is_only_warming() and used_area(num_tokens, num_outputs, device_facts(x_MK.device)[1]) < MIN_USED:
        return None
    out_MF = torch.empty(num_tokens, num_outputs, dtype=x_MK.dtype, device=x_MK.device)
    describe_gated_product(x_MK, gate_up_NK, out_MF).run()
    return out_MF
