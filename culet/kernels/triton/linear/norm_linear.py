"""A residual add, the next norm and the linear layer after it in one launch, for small models and few tokens.

    x' = (x + norm(delta) * w) * scalar,   y = (norm(x') * next_w) @ W^T, or gated as in `few_tokens`

Every program norms its tokens itself. It handles some rows of W, which it loads while the previous kernel is still running. For
rows of up to MAX_SIZE columns, this is cheaper than another launch. Other shapes use one kernel for each part.

Shapes: T tokens · D model · S parts · N rows of W · F gated outputs (W has 2F rows).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.linear.few_tokens import gated_linear, linear, linear_parts
from culet.kernels.triton.maths import gelu, silu
from culet.kernels.triton.norms.pointwise import silu_mul
from culet.kernels.triton.norms.residual import residual_norm, rms_norm

MAX_SIZE = 512
MAX_TOKENS = 32
BLOCK_T = 16  # fewest columns that the tensor cores take
MAX_PARTS = 8
BLOCK_N = 16
GATES = {"": 0, "gelu": 1, "silu": 2}


@triton.jit
def _norm_columns(x, weight, D: tl.constexpr, eps: tl.constexpr):
    """Return norm(x) * weight for tokens that are columns."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)[None, :] * weight[:, None]


@triton.jit(do_not_specialize=["T"])
def _normed_linear_kernel(
    x, delta, delta_weight, scalar, next_weight, weight, out, y, T, N, x_stride, delta_stride, part_stride,
    D: tl.constexpr, eps: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALAR: tl.constexpr,
    NUM_PARTS: tl.constexpr, GATE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of BLOCK_T tokens. The first program also writes x'. `out` and `y` are contiguous."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_column = column < D
    places = weight + rows.to(tl.int64)[:, None] * D + column[None, :]
    is_weight = (rows < N)[:, None] & is_column[None, :]
    w = tl.load(places, mask=is_weight, other=0.0)
    if GATE > 0:
        up = tl.load(places + tl.cast(N, tl.int64) * D, mask=is_weight, other=0.0)
    w_next = tl.load(next_weight + column, mask=is_column, other=0.0)
    if HAS_NORM:
        w_delta = tl.load(delta_weight + column, mask=is_column, other=0.0)
    if HAS_SCALAR:
        factor = tl.load(scalar).to(tl.float32)
    enter(PDL)
    inside = is_column[:, None] & (token < T)[None, :]
    stream = tl.load(x + token[None, :] * x_stride + column[:, None], mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        change_at = delta + token[None, :] * delta_stride + column[:, None]
        change = tl.load(change_at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, NUM_PARTS):
            change += tl.load(change_at + part * part_stride, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            change = _norm_columns(change, w_delta, D, eps)
        stream += change
        if HAS_SCALAR:
            stream *= factor
        rounded = stream.to(out.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(out + token[None, :] * D + column[:, None], rounded, mask=inside)
        stream = rounded.to(tl.float32)
    normed = _norm_columns(stream, w_next, D, eps).to(y.dtype.element_ty)
    total = tl.dot(w, normed, out_dtype=tl.float32, input_precision="ieee")
    if GATE == 1:
        total = gelu(total) * tl.dot(up, normed, out_dtype=tl.float32, input_precision="ieee")
    if GATE == 2:
        total = silu(total) * tl.dot(up, normed, out_dtype=tl.float32, input_precision="ieee")
    tl.store(
        y + token[None, :] * N + rows[:, None], total.to(y.dtype.element_ty), mask=(rows < N)[:, None] & (token < T)[None, :]
    )


def describe_normed(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    norms: tuple[Tensor | None, Tensor],
    scalar: Tensor | None,
    eps: float,
    weight_ND: Tensor,
    outs: tuple[Tensor, Tensor],
    *,
    gate: str = "",
    pdl: bool,
) -> Launch:
    """Describe the launch. `outs` is (x', outputs of the linear layer)."""
    (num_tokens, size), (own, after), (out, y) = x_TD.shape, norms, outs
    delta = x_TD if delta_TD is None else delta_TD
    arguments: dict[str, Any] = {"x": x_TD, "delta": delta, "delta_weight": after if own is None else own}
    arguments |= {"scalar": after if scalar is None else scalar, "next_weight": after, "weight": weight_ND, "out": out, "y": y}
    arguments |= {"T": num_tokens, "N": y.shape[1], "x_stride": x_TD.stride(0), "delta_stride": delta.stride(-2)}
    num_parts, part_stride = (delta.shape[0], delta.stride(0)) if delta.dim() == 3 else (1, 0)
    arguments |= {"part_stride": part_stride, "D": size, "eps": eps, "HAS_DELTA": delta_TD is not None}
    arguments |= {"HAS_NORM": own is not None, "HAS_SCALAR": scalar is not None, "NUM_PARTS": num_parts, "GATE": GATES[gate]}
    arguments |= {"BLOCK_T": BLOCK_T, "BLOCK_N": BLOCK_N, "BLOCK_D": max(16, next_power_of_2(size)), "PDL": pdl}
    return Launch(_normed_linear_kernel, (cdiv(y.shape[1], BLOCK_N), cdiv(num_tokens, BLOCK_T)), arguments, options(4, pdl))


def _is_supported(x_TD: Tensor, delta_TD: Tensor | None, weight_ND: Tensor) -> bool:
    num_tokens, size = x_TD.shape
    if not 0 < num_tokens <= MAX_TOKENS or size > MAX_SIZE or not weight_ND.is_contiguous() or x_TD.stride(1) != 1:
        return False
    if x_TD.is_cuda and x_TD.dtype != torch.bfloat16:
        return False  # as in `linear`
    return delta_TD is None or (delta_TD.stride(-1) == 1 and (delta_TD.dim() == 2 or delta_TD.shape[0] <= MAX_PARTS))


def residual_norm_linear(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    norms: tuple[Tensor | None, Tensor],
    scalar: Tensor | None,
    eps: float,
    weight_ND: Tensor,
    gate: str = "",
) -> tuple[Tensor, Tensor]:
    """Return x' = (x + norm(delta) * norms[0]) * scalar and (norm(x') * norms[1]) @ weight^T, gated by `gate`.

    `gate` is gelu, silu or "". As in `residual_norm`, delta may be parts, and it is not normed if norms[0] is None. Without a
    delta, x' is x. With a gate, the weight's rows are gate, then up. Without one, the result may be parts (`linear_parts`).
    """
    if not _is_supported(x_TD, delta_TD, weight_ND):
        return _with_separate_kernels(x_TD, delta_TD, norms, scalar, eps, weight_ND, gate)
    y_TN = x_TD.new_empty(x_TD.shape[0], weight_ND.shape[0] // (2 if gate else 1))
    out_TD = x_TD if delta_TD is None else torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    pdl = uses_pdl(x_TD.device)
    describe_normed(x_TD, delta_TD, norms, scalar, eps, weight_ND, (out_TD, y_TN), gate=gate, pdl=pdl).run()
    return out_TD, y_TN


def _with_separate_kernels(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    norms: tuple[Tensor | None, Tensor],
    scalar: Tensor | None,
    eps: float,
    weight_ND: Tensor,
    gate: str,
) -> tuple[Tensor, Tensor]:
    own, after = norms
    if delta_TD is None:
        normed = rms_norm(x_TD, after, eps)
    else:
        x_TD, added = residual_norm(x_TD, delta_TD, own, scalar, after, eps)
        assert added is not None
        normed = added
    if gate == "gelu":
        return x_TD, gated_linear(normed, weight_ND)
    return x_TD, silu_mul(linear(normed, weight_ND)) if gate else linear_parts(normed, weight_ND)
