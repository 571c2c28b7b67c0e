"""Kernels of vision towers: norms and rope per head for patches, and the gate of a clipped MLP.

    patch_qkv          n = clamp(projected head) / rms, q = rope(n * w0), k = rope(n * w1), v = n
    clipped_gelu_mul   clamp(gelu(clamp(gate)) * clamp(up)), columns gate | up

Shapes: T patches · N heads · H head size · F MLP width · X all projected columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.attention.hopper_patches import head_pitch
from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.maths import gelu
from culet.kernels.types import Rope

BLOCK = 1024  # columns per program of the gate


@triton.jit
def _clamp(x, bounds, index, inside):
    """Clamp to row `index` of the bounds. Columns outside stay 0."""
    low, high = tl.load(bounds + 2 * index), tl.load(bounds + 2 * index + 1)
    return tl.where(inside, tl.minimum(tl.maximum(x, low), high), 0.0)


@triton.jit(do_not_specialize=["T"])
def _patch_qkv_kernel(
    qkv, weight, cos, sin, bounds, out, qkv_stride, T,
    N: tl.constexpr, H: tl.constexpr, PITCH: tl.constexpr, eps: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Prepare all heads of one patch: its queries, keys or values. `out` is [3, T, N, PITCH]."""
    enter(PDL)
    token, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, half = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_H)[None, :]
    HALF: tl.constexpr = H // 2
    inside = (heads < N) & (half < HALF)
    offsets = heads * H + half
    rows = qkv + token * qkv_stride + kind * (N * H)
    first = tl.load(rows + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(rows + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_BOUNDS:
        first, second = _clamp(first, bounds, kind, inside), _clamp(second, bounds, kind, inside)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares / H + eps)[:, None]
    first, second = first * scale, second * scale
    if kind < 2:
        is_column = half < HALF
        first *= tl.load(weight + kind * H + half, mask=is_column, other=0.0)
        second *= tl.load(weight + kind * H + HALF + half, mask=is_column, other=0.0)
        c = tl.load(cos + token * H + half, mask=is_column, other=0.0)
        s = tl.load(sin + token * H + HALF + half, mask=is_column, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    to = out + (kind.to(tl.int64) * T + token) * (N * PITCH) + heads * PITCH + half
    tl.store(to, first.to(out.dtype.element_ty), mask=inside)
    tl.store(to + HALF, second.to(out.dtype.element_ty), mask=inside)
    if PITCH > H:
        padding = tl.where((half == 0) & (kind == 2), 1.0, tl.zeros_like(first))
        tl.store(to + H, padding.to(out.dtype.element_ty), mask=(heads < N) & (half < PITCH - H))


@triton.jit
def _clipped_gelu_kernel(
    gate_up, bounds, y, gate_up_stride, y_stride, F: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr
):
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = cols < F
    row = gate_up + token * gate_up_stride + cols
    gate = _clamp(tl.load(row, mask=inside, other=0.0).to(tl.float32), bounds, 0, inside)
    up = _clamp(tl.load(row + F, mask=inside, other=0.0).to(tl.float32), bounds, 1, inside)
    gated = _clamp(gelu(gate) * up, bounds, 2, inside)
    tl.store(y + token * y_stride + cols, gated.to(y.dtype.element_ty), mask=inside)


def describe_patch_qkv(
    qkv_TX: Tensor, weight_2H: Tensor, rope: Rope, num_heads: int, eps: float, bounds_32: Tensor | None, out: Tensor, pdl: bool
) -> Launch:
    num_patches, size = qkv_TX.shape[0], weight_2H.shape[1]
    arguments: dict[str, Any] = {"qkv": qkv_TX, "weight": weight_2H, "cos": rope.cos_T1R, "sin": rope.sin_T1R}
    arguments |= {"bounds": weight_2H if bounds_32 is None else bounds_32, "out": out, "qkv_stride": qkv_TX.stride(0)}
    arguments |= {"T": num_patches, "N": num_heads, "H": size, "PITCH": out.shape[3], "eps": eps}
    arguments["HAS_BOUNDS"] = bounds_32 is not None
    arguments |= {"BLOCK_N": next_power_of_2(num_heads), "BLOCK_H": next_power_of_2(size // 2), "PDL": pdl}
    return Launch(_patch_qkv_kernel, (num_patches, 3), arguments, options(1, pdl))


def describe_clipped_gelu(gate_up_TX: Tensor, bounds_32: Tensor, y_TF: Tensor, pdl: bool) -> Launch:
    num_patches, width = y_TF.shape
    block = min(BLOCK, next_power_of_2(width))
    arguments: dict[str, Any] = {"gate_up": gate_up_TX, "bounds": bounds_32, "y": y_TF, "F": width, "BLOCK_F": block}
    arguments |= {"gate_up_stride": gate_up_TX.stride(0), "y_stride": y_TF.stride(0), "PDL": pdl}
    return Launch(_clipped_gelu_kernel, (num_patches, cdiv(width, block)), arguments, options(4, pdl))


def patch_qkv(
    qkv_TX: Tensor, weight_2H: Tensor, rope: Rope, num_heads: int, eps: float, bounds_32: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [T, N, H] of patches. The columns are q | k | v.

    With n = projected head / rms, q = rope(n * weight[0]), k = rope(n * weight[1]) and v = n. Rope turns all columns. The
    projected values are first clamped to `bounds_32`, with a row each for q, k and v. In memory, heads may have padding,
    which `patch_attention` reads: a 1 after the values of each head, so that it adds up their weights, and zeros.
    """
    size = weight_2H.shape[1]
    out = qkv_TX.new_empty(3, qkv_TX.shape[0], num_heads, head_pitch(qkv_TX, size))
    if qkv_TX.shape[0]:
        describe_patch_qkv(qkv_TX, weight_2H, rope, num_heads, eps, bounds_32, out, uses_pdl(out.device)).run()
    q, k, v = out[..., :size].unbind(0)
    return q, k, v


def clipped_gelu_mul(gate_up_TX: Tensor, bounds_32: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up. The columns are gate | up. `bounds_32` are the bounds of gate, of up and of the product."""
    y_TF = gate_up_TX.new_empty(gate_up_TX.shape[0], gate_up_TX.shape[1] // 2)
    if gate_up_TX.shape[0]:
        describe_clipped_gelu(gate_up_TX, bounds_32, y_TF, uses_pdl(y_TF.device)).run()
    return y_TF
