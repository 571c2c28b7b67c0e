"""Eager twins of fused GPU ops. Each runs several ops of `ops.py` one after the other and gives the same results.

Shapes: M tokens · K inputs · N outputs · F MLP width · T tokens · D model · L tokens with logits · V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from culet.kernels.eager.ops import gelu_gate, gelu_mul, head, residual_norm, rms_norm, silu_mul, softcap, sum_norms


def linear(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight^T, [M, N]."""
    return F.linear(x_MK, weight_NK)


def linear_parts(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return `linear` as [M, N] or as float32 parts [S, M, N] that the caller sums. This twin always returns [M, N]."""
    return F.linear(x_MK, weight_NK)


def gated_linear(x_MK: Tensor, gate_up_NK: Tensor) -> Tensor:
    """Return gelu_tanh(x @ gate^T) * (x @ up^T), [M, F]. The weight's rows are gate, then up."""
    return gelu_mul(F.linear(x_MK, gate_up_NK))


def linear_gelu_times(x_MK: Tensor, weight_NK: Tensor, factor_MN: Tensor) -> Tensor:
    """Return gelu_tanh(x @ weight^T) * factor, [M, N]. Per-layer embeddings use it as their gate."""
    return gelu_gate(F.linear(x_MK, weight_NK), factor_MN)


def capped_head(x_LD: Tensor, table_VD: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x @ table^T / cap), [L, V] float32. If `cap` is None, logits are not capped."""
    return softcap(head(x_LD, table_VD), cap)


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
    if delta_TD is not None:
        x_TD, _ = residual_norm(x_TD, delta_TD, norms[0], scalar, None, eps)
    y_TN = F.linear(rms_norm(x_TD, norms[1], eps), weight_ND)
    return x_TD, (gelu_mul(y_TN) if gate == "gelu" else silu_mul(y_TN) if gate else y_TN)


def residual_norm_two(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, next_a_D: Tensor, next_b_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x' = x + norm(delta) * weight, norm(x') * next_a and norm(x') * next_b."""
    x_TD, _ = residual_norm(x_TD, delta_TD, weight_D, None, None, eps)
    return x_TD, rms_norm(x_TD, next_a_D, eps), rms_norm(x_TD, next_b_D, eps)


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
    delta_TD = sum_norms(a_TD, b_TD, weights[0], weights[1], eps)
    return residual_norm(x_TD, delta_TD, weights[2], scalar, next_weight_D, eps)
