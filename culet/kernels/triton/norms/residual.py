"""RMS norms fused with residual adds, layer scalars and the next block's norm. A program handles one token.

    norm(x, w) = x / sqrt(mean(x^2) + eps) * w                                        rms_norm
    x' = (x + norm(delta, w)) * scalar, next = norm(x', next_w)                       residual_norm (x + delta if w is None)
    the same with two next norms (dense MLP and experts read one stream)             residual_norm_two
    the same with delta = norm(a, w_a) + norm(b, w_b) (dense MLP and experts summed)  residual_norm_joint
    any of these with delta, or a and b, summed over ranks (`exchange.py`)            residual_norm_of_ranks

Arithmetic is float32. x' is rounded once, and the next norm reads the rounded x', as all later ops do.

Shapes: T tokens · D model.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, next_power_of_2, run_prepared
from culet.kernels.triton.norms.exchange import meet, next_place, read_sum, write_row
from culet.kernels.types import PeerBuffers


@triton.jit
def _norm(x, weight, D: tl.constexpr, eps: tl.constexpr):
    """Return the norm of a float32 row whose columns past D are zero. `weight` is already loaded."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * weight


@triton.jit
def _load(pointer, cols, inside):
    return tl.load(pointer + cols, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x, weight, y, x_stride, y_stride, D: tl.constexpr, eps: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    w = _load(weight, cols, inside)
    enter(PDL)
    row = _load(x + token * x_stride, cols, inside)
    tl.store(y + token * y_stride + cols, _norm(row, w, D, eps).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _sum_norms_kernel(
    a,
    b,
    weight_a,
    weight_b,
    y,
    a_stride,
    b_stride,
    D: tl.constexpr,
    eps: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    w_a, w_b = _load(weight_a, cols, inside), _load(weight_b, cols, inside)
    enter(PDL)
    total = _norm(_load(a + token * a_stride, cols, inside), w_a, D, eps)
    total += _norm(_load(b + token * b_stride, cols, inside), w_b, D, eps)
    tl.store(y + token * D + cols, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _residual_norm_kernel(
    x, delta, other, weight, delta_weight, other_weight, scalar, next_a, next_b, out, out_a, out_b,
    addresses, turns, rank, num_rows, row_stride, x_stride, delta_stride, part_stride, other_stride,
    D: tl.constexpr, eps: tl.constexpr, IS_JOINT: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALAR: tl.constexpr,
    NUM_NEXT: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_RANKS: tl.constexpr, PUSH: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute any residual norm of this file. The outputs are contiguous [T, D]. delta is the sum of its parts.

    With several ranks, delta and other are summed over the ranks before anything else.
    """
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    # Load all weights first. They need no other kernel's output, and consecutive cache misses would cost more than the rest.
    if HAS_NORM:
        w = _load(weight, cols, inside)
    if IS_JOINT:
        w_delta, w_other = _load(delta_weight, cols, inside), _load(other_weight, cols, inside)
    if NUM_NEXT >= 1:
        w_a = _load(next_a, cols, inside)
    if NUM_NEXT >= 2:
        w_b = _load(next_b, cols, inside)
    if HAS_SCALAR:
        factor = tl.load(scalar).to(tl.float32)
    enter(PDL)
    row = _load(x + token * x_stride, cols, inside)
    change = _load(delta + token * delta_stride, cols, inside)
    for part in tl.static_range(1, NUM_PARTS):
        change += _load(delta + part * part_stride + token * delta_stride, cols, inside)
    if IS_JOINT:
        more = _load(other + token * other_stride, cols, inside)
    if NUM_RANKS > 1:
        kind: tl.constexpr = out.dtype.element_ty
        turn, place = next_place(turns, token, num_rows)
        write_row(addresses, change, place, rank, cols, inside, row_stride, kind, NUM_RANKS, PUSH)
        if IS_JOINT:
            write_row(addresses, more, place, rank, D + cols, inside, row_stride, kind, NUM_RANKS, PUSH)
        meet(addresses, turns, token, turn, place, rank, NUM_RANKS)
        change = read_sum(addresses, place, rank, cols, inside, row_stride, kind, NUM_RANKS, PUSH)
        if IS_JOINT:
            more = read_sum(addresses, place, rank, D + cols, inside, row_stride, kind, NUM_RANKS, PUSH)
    if IS_JOINT:
        change = _norm(change, w_delta, D, eps) + _norm(more, w_other, D, eps)
        change = change.to(out.dtype.element_ty).to(tl.float32)
    if HAS_NORM:
        change = _norm(change, w, D, eps)
    row += change
    if HAS_SCALAR:
        row *= factor
    rounded = row.to(out.dtype.element_ty)
    tl.store(out + token * D + cols, rounded, mask=inside)
    if NUM_NEXT >= 1:
        row = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(row * row, 0) / D + eps)
        tl.store(out_a + token * D + cols, (row * scale * w_a).to(out.dtype.element_ty), mask=inside)
    if NUM_NEXT >= 2:
        tl.store(out_b + token * D + cols, (row * scale * w_b).to(out.dtype.element_ty), mask=inside)


# Up to this many tokens, the time of one program matters. Above it, the number of programs that run at once matters.
FEW_TOKENS = 64


def _num_warps(size: int, num_tokens: int) -> int:
    if size > 2048:
        return 8 if num_tokens <= FEW_TOKENS or size > 4096 else 4
    return 4 if size > 512 else 2


def describe_rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, y_TD: Tensor, pdl: bool) -> Launch:
    num_tokens, size = x_TD.shape
    assert x_TD.stride(1) == y_TD.stride(1) == 1, f"the values of a row must be adjacent, but strides are {x_TD.stride()}"
    arguments: dict[str, Any] = {
        "x": x_TD,
        "weight": weight_D,
        "y": y_TD,
        "x_stride": x_TD.stride(0),
        "y_stride": y_TD.stride(0),
    }
    arguments |= {"D": size, "eps": eps, "BLOCK_D": next_power_of_2(size), "PDL": pdl}
    return Launch(_rms_norm_kernel, (num_tokens,), arguments, options(_num_warps(size, num_tokens), pdl))


def describe_sum_norms(
    a_TD: Tensor, b_TD: Tensor, weight_a_D: Tensor, weight_b_D: Tensor, eps: float, y_TD: Tensor, pdl: bool
) -> Launch:
    num_tokens, size = a_TD.shape
    arguments: dict[str, Any] = {"a": a_TD, "b": b_TD, "weight_a": weight_a_D, "weight_b": weight_b_D, "y": y_TD}
    arguments |= {"a_stride": a_TD.stride(0), "b_stride": b_TD.stride(0), "D": size, "eps": eps}
    arguments |= {"BLOCK_D": next_power_of_2(size), "PDL": pdl}
    return Launch(_sum_norms_kernel, (num_tokens,), arguments, options(_num_warps(size, num_tokens), pdl))


def describe_residual(
    x_TD: Tensor,
    deltas: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    scalar: Tensor | None,
    next_weights: tuple[Tensor, ...],
    eps: float,
    outs: tuple[Tensor, ...],
    pdl: bool,
) -> Launch:
    """Describe the launch. `deltas` is one tensor, or two that are normed and summed. The first may be parts [S, T, D].

    `weights` has the norm weights of the deltas if there are two, then the weight of the norm before the add. If it is empty,
    delta is not normed.
    """
    num_tokens, size = x_TD.shape
    is_joint = len(deltas) == 2
    num_parts, part_stride = (deltas[0].shape[0], deltas[0].stride(0)) if deltas[0].dim() == 3 else (1, 0)
    spare = outs[0]  # stands in for pointers that are neither read nor written
    arguments: dict[str, Any] = {
        "x": x_TD,
        "delta": deltas[0],
        "other": deltas[1] if is_joint else spare,
        "weight": weights[-1] if weights else spare,
        "delta_weight": weights[0] if is_joint else spare,
        "other_weight": weights[1] if is_joint else spare,
        "scalar": spare if scalar is None else scalar,
        "next_a": next_weights[0] if next_weights else spare,
        "next_b": next_weights[1] if len(next_weights) > 1 else spare,
        "out": outs[0],
        "out_a": outs[1] if len(outs) > 1 else spare,
        "out_b": outs[2] if len(outs) > 2 else spare,
        "addresses": None,
        "turns": None,
        "rank": None,
        "num_rows": None,
        "row_stride": None,
        "x_stride": x_TD.stride(0),
        "delta_stride": deltas[0].stride(-2),
        "part_stride": part_stride,
        "other_stride": deltas[1].stride(0) if is_joint else 0,
        "D": size,
        "eps": eps,
        "IS_JOINT": is_joint,
        "HAS_NORM": bool(weights),
        "HAS_SCALAR": scalar is not None,
        "NUM_NEXT": len(next_weights),
        "NUM_PARTS": num_parts,
        "NUM_RANKS": 1,
        "PUSH": False,
        "BLOCK_D": next_power_of_2(size),
        "PDL": pdl,
    }
    return Launch(_residual_norm_kernel, (num_tokens,), arguments, options(_num_warps(size, num_tokens), pdl))


def describe_residual_of_ranks(residual: Launch, peers: PeerBuffers) -> Launch:
    """Return the launch `residual` with deltas that are summed over all ranks."""
    _, num_rows, num_ranks, num_columns = peers.data[peers.rank].shape
    own: dict[str, Any] = {"addresses": peers.addresses, "turns": peers.turn, "rank": peers.rank, "num_rows": num_rows}
    own |= {"row_stride": num_columns, "NUM_RANKS": num_ranks, "PUSH": peers.is_pushed}
    return Launch(residual.kernel, residual.grid, residual.arguments | own, residual.options)


def residual_norm_of_ranks(
    x_TD: Tensor,
    deltas: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    scalar: Tensor | None,
    next_weights: tuple[Tensor, ...],
    eps: float,
    peers: PeerBuffers,
) -> tuple[Tensor, ...]:
    """Return x' = (x + norm(delta) * weight) * scalar and norm(x') * w for each of `next_weights`. delta is the ranks' sum.

    `deltas` has this rank's term of delta, which may be parts [S, T, D]. If it has two, delta is the sum of their norms, and
    `weights` has the weights of these two norms first. Its last element is the weight of delta's norm. Terms are rounded to
    the type of x before they are added in float32. All ranks must launch this for equally many tokens. Each program waits for
    the others' programs of the same token.
    """
    outs = tuple([torch.empty_like(x_TD) for _ in range(1 + len(next_weights))])
    if x_TD.shape[0]:
        residual = describe_residual(x_TD, deltas, weights, scalar, next_weights, eps, outs, uses_pdl(x_TD.device))
        describe_residual_of_ranks(residual, peers).run()
    return outs


def _residual(
    x_TD: Tensor,
    deltas: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    scalar: Tensor | None,
    next_weights: tuple[Tensor, ...],
    eps: float,
) -> tuple[Tensor, ...]:
    num_tokens, size = x_TD.shape
    outs = tuple([torch.empty_like(x_TD) for _ in range(1 + len(next_weights))])
    if num_tokens:
        delta, scalars = deltas[0], () if scalar is None else (scalar,)
        kind = len(deltas), len(weights), len(next_weights), scalar is None, num_tokens <= FEW_TOKENS
        shapes = x_TD.stride(0), delta.shape[0] if delta.dim() == 3 else 1, delta.stride(), deltas[-1].stride(0)
        run_prepared(
            ("residual", x_TD.get_device(), x_TD.dtype, delta.dtype, deltas[-1].dtype, size, eps, kind, shapes),
            (num_tokens, 1),
            (x_TD, *deltas, *weights, *scalars, *next_weights, *outs),
            lambda: describe_residual(x_TD, deltas, weights, scalar, next_weights, eps, outs, uses_pdl(x_TD.device)),
        )
    return outs


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight. The factor is the weight itself, not 1 + weight."""
    y_TD = torch.empty_like(x_TD)
    if x_TD.shape[0]:
        describe_rms_norm(x_TD, weight_D, eps, y_TD, uses_pdl(x_TD.device)).run()
    return y_TD


def sum_norms(a_TD: Tensor, b_TD: Tensor, weight_a_D: Tensor, weight_b_D: Tensor, eps: float) -> Tensor:
    """Return norm(a) * weight_a + norm(b) * weight_b, the dense MLP plus the experts before their norm."""
    y_TD = torch.empty_like(a_TD)
    if a_TD.shape[0]:
        describe_sum_norms(a_TD, b_TD, weight_a_D, weight_b_D, eps, y_TD, uses_pdl(a_TD.device)).run()
    return y_TD


def residual_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor | None, scalar: Tensor | None, next_weight_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return x' = (x + norm(delta) * weight) * scalar and the next block's input, norm(x') * next_weight.

    The second is None if `next_weight_D` is None. If `weight_D` is None, delta is not normed, as in decoders that norm only
    before their blocks. delta may be parts [S, T, D], which are summed.
    """
    outs = _residual(
        x_TD,
        (delta_TD,),
        () if weight_D is None else (weight_D,),
        scalar,
        () if next_weight_D is None else (next_weight_D,),
        eps,
    )
    return outs[0], outs[1] if next_weight_D is not None else None


def residual_norm_two(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, next_a_D: Tensor, next_b_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x' = x + norm(delta) * weight, norm(x') * next_a and norm(x') * next_b."""
    out, out_a, out_b = _residual(x_TD, (delta_TD,), (weight_D,), None, (next_a_D, next_b_D), eps)
    return out, out_a, out_b


def residual_norm_joint(
    x_TD: Tensor,
    a_TD: Tensor,
    b_TD: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    scalar: Tensor | None,
    next_weight_D: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Return `residual_norm` for delta = norm(a) * weights[0] + norm(b) * weights[1]. weights[2] is delta's norm weight."""
    outs = _residual(x_TD, (a_TD, b_TD), weights, scalar, () if next_weight_D is None else (next_weight_D,), eps)
    return outs[0], outs[1] if next_weight_D is not None else None
