"""The ops over quantised weights by the names of their eager twins. The kernels are in the other modules of this folder.

Shapes: as in `kernels/eager/quantised.py`.
"""

from __future__ import annotations

from torch import Tensor

from culet.kernels.triton.quantised.experts import run_experts
from culet.kernels.triton.quantised.linear import (
    capped_head,
    gated_linear,
    linear,
    linear_gelu_times,
    linear_parts,
)
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.types import Fp8Weight, Int4Weight, Int8Weight, Nvfp4Weight


def int4_linear(x_TI: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return x @ W^T, [T, O]."""
    return linear(x_TI, PackedMatrix.int4(packed, scale, zero, group))


def int8_linear(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ W^T, [T, O]."""
    return linear(x_TI, PackedMatrix.int8(weight, scale))


def fp8_linear(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ W^T, [T, O]."""
    return linear(x_TI, PackedMatrix.fp8(weight, scale))


def nvfp4_linear(x_TI: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return x @ W^T, [T, O]."""
    return linear(x_TI, PackedMatrix.nvfp4(packed, scale, global_scale))


def int4_linear_parts(x_TI: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return x @ W^T as [T, O], or as float32 parts [S, T, O] that the caller sums."""
    return linear_parts(x_TI, PackedMatrix.int4(packed, scale, zero, group))


def int8_linear_parts(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ W^T as [T, O], or as float32 parts [S, T, O] that the caller sums."""
    return linear_parts(x_TI, PackedMatrix.int8(weight, scale))


def fp8_linear_parts(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ W^T as [T, O], or as float32 parts [S, T, O] that the caller sums."""
    return linear_parts(x_TI, PackedMatrix.fp8(weight, scale))


def nvfp4_linear_parts(x_TI: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return x @ W^T as [T, O], or as float32 parts [S, T, O] that the caller sums."""
    return linear_parts(x_TI, PackedMatrix.nvfp4(packed, scale, global_scale))


def int4_gated_linear(x_TI: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [T, F]. The weight's rows are gate, then up."""
    return gated_linear(x_TI, PackedMatrix.int4(packed, scale, zero, group))


def int8_gated_linear(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [T, F]. The weight's rows are gate, then up."""
    return gated_linear(x_TI, PackedMatrix.int8(weight, scale))


def fp8_gated_linear(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [T, F]. The weight's rows are gate, then up."""
    return gated_linear(x_TI, PackedMatrix.fp8(weight, scale))


def nvfp4_gated_linear(x_TI: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [T, F]. The weight's rows are gate, then up."""
    return gated_linear(x_TI, PackedMatrix.nvfp4(packed, scale, global_scale))


def int4_linear_gelu_times(
    x_TI: Tensor, factor_TO: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int
) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [T, O]."""
    return linear_gelu_times(x_TI, PackedMatrix.int4(packed, scale, zero, group), factor_TO)


def int8_linear_gelu_times(x_TI: Tensor, factor_TO: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [T, O]."""
    return linear_gelu_times(x_TI, PackedMatrix.int8(weight, scale), factor_TO)


def fp8_linear_gelu_times(x_TI: Tensor, factor_TO: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [T, O]."""
    return linear_gelu_times(x_TI, PackedMatrix.fp8(weight, scale), factor_TO)


def nvfp4_linear_gelu_times(x_TI: Tensor, factor_TO: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [T, O]."""
    return linear_gelu_times(x_TI, PackedMatrix.nvfp4(packed, scale, global_scale), factor_TO)


def int4_capped_head(x_TI: Tensor, cap: float | None, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return cap * tanh(x @ W^T / cap), [T, O] float32. If `cap` is None, logits are not capped."""
    return capped_head(x_TI, PackedMatrix.int4(packed, scale, zero, group), cap)


def int8_capped_head(x_TI: Tensor, cap: float | None, weight: Tensor, scale: Tensor) -> Tensor:
    """Return cap * tanh(x @ W^T / cap), [T, O] float32. If `cap` is None, logits are not capped."""
    return capped_head(x_TI, PackedMatrix.int8(weight, scale), cap)


def fp8_capped_head(x_TI: Tensor, cap: float | None, weight: Tensor, scale: Tensor) -> Tensor:
    """Return cap * tanh(x @ W^T / cap), [T, O] float32. If `cap` is None, logits are not capped."""
    return capped_head(x_TI, PackedMatrix.fp8(weight, scale), cap)


def nvfp4_capped_head(x_TI: Tensor, cap: float | None, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return cap * tanh(x @ W^T / cap), [T, O] float32. If `cap` is None, logits are not capped."""
    return capped_head(x_TI, PackedMatrix.nvfp4(packed, scale, global_scale), cap)


def int4_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Int4Weight, down: Int4Weight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""
    return run_experts(
        x_TD, weights_TK, experts_TK, PackedMatrix.int4(*gate_up, gate_up.group), PackedMatrix.int4(*down, down.group)
    )


def int8_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Int8Weight, down: Int8Weight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""
    return run_experts(x_TD, weights_TK, experts_TK, PackedMatrix.int8(*gate_up), PackedMatrix.int8(*down))


def fp8_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Fp8Weight, down: Fp8Weight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""
    return run_experts(x_TD, weights_TK, experts_TK, PackedMatrix.fp8(*gate_up), PackedMatrix.fp8(*down))


def nvfp4_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Nvfp4Weight, down: Nvfp4Weight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""
    return run_experts(x_TD, weights_TK, experts_TK, PackedMatrix.nvfp4(*gate_up), PackedMatrix.nvfp4(*down))
