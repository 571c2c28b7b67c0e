"""Eager twins of the ops that read quantised weights. Each dequantises in float32, multiplies in float32, and rounds once.

The tensors of each format, for a weight [out, in]. Experts have a leading dimension E.

| format | tensors |
|---|---|
| int4 | packed int32 [out, in / 8]: value i of 8, plus 8, in bits 4i to 4i + 3; scale [out, in / group]; zero uint8 or None |
| int8 | weight int8 [out, in]; scale [out, in / group] or [out, 1] |
| fp8 | weight e4m3 [out, in]; scale float32 [out, 1], or one per block of 128 x 128 with ragged last blocks |
| nvfp4 | packed uint8 [out, in / 2]: e2m1, even columns in the low nibble; scale e4m3 [out, in / 16]; global_scale float32 |

Scales of int4 and int8 are bfloat16, float16 (from GGUF) or float32. `zero` has the shape of the scale and holds the zero point
as it is stored, that is plus 8, so W = (nibble - zero) * scale. Without one, the zero point is 8. `global_scale` multiplies. It
is [out, 1], because the projections of a merged matrix have different ones, or a scalar.

Shapes: T tokens · I inputs · O outputs · F MLP width · E experts · K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from culet.kernels.eager.ops import gelu_gate, gelu_mul, softcap
from culet.kernels.types import Fp8Weight, Int4Weight, Int8Weight, Nvfp4Weight

BLOCK = 128  # rows and columns of an fp8 block
NVFP4_GROUP = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@lru_cache
def _e2m1_values(device: torch.device) -> Tensor:
    """Return the value of each nibble. Bit 3 is the sign."""
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=device)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the nibbles [..., out, in] of `packed` as uint8, 0 to 15."""
    low_high = packed.contiguous().view(torch.uint8)[..., None]
    return torch.cat((low_high & 15, low_high >> 4), -1).flatten(-2)


def pack_int4(nibbles: Tensor) -> Tensor:
    """Return nibbles [..., out, in] of 0 to 15 as int32 [..., out, in / 8]."""
    pairs = nibbles.to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply [..., out, in] by scales [..., out, groups]."""
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]).flatten(-2)


def dequantise_int4(packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return the float32 weight [..., out, in]."""
    nibbles = unpack_int4(packed).float()
    assert scale.shape[-1] * group == nibbles.shape[-1], "groups cover the inputs"
    if zero is None:
        return _scaled(nibbles.sub_(8.0), scale)
    return _scaled(nibbles - zero.float().repeat_interleave(group, -1), scale)


def dequantise_int8(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 weight [..., out, in]."""
    return _scaled(weight.float(), scale)


def dequantise_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 weight [..., out, in]."""
    num_rows, num_columns = weight.shape[-2:]
    if scale.shape[-2:] != (num_rows, 1):
        scale = scale.repeat_interleave(BLOCK, -2)[..., :num_rows, :].repeat_interleave(BLOCK, -1)[..., :num_columns]
    return weight.float() * scale


def dequantise_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return the float32 weight [..., out, in]."""
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return _scaled(_e2m1_values(packed.device)[nibbles.long()], scale.float() * global_scale)


def _product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI.float(), weight_OI).to(x_TI.dtype)


def _gated(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return gelu_mul(F.linear(x_TI.float(), weight_OI)).to(x_TI.dtype)


def _gelu_times(x_TI: Tensor, factor_TO: Tensor, weight_OI: Tensor) -> Tensor:
    return gelu_gate(F.linear(x_TI.float(), weight_OI), factor_TO.float()).to(x_TI.dtype)


def int4_linear(x_TI: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return x @ W^T, [T, O]."""
    return _product(x_TI, dequantise_int4(packed, scale, zero, group))


def int8_linear(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ W^T, [T, O]."""
    return _product(x_TI, dequantise_int8(weight, scale))


def fp8_linear(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ W^T, [T, O]. A kernel may round activations to e4m3 with a scale per token. This twin does not."""
    return _product(x_TI, dequantise_fp8(weight, scale))


def nvfp4_linear(x_TI: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return x @ W^T, [T, O]."""
    return _product(x_TI, dequantise_nvfp4(packed, scale, global_scale))


def int4_gated_linear(x_TI: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [T, F]. The weight's rows are gate, then up."""
    return _gated(x_TI, dequantise_int4(packed, scale, zero, group))


def int8_gated_linear(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [T, F]. The weight's rows are gate, then up."""
    return _gated(x_TI, dequantise_int8(weight, scale))


def fp8_gated_linear(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [T, F]. The weight's rows are gate, then up."""
    return _gated(x_TI, dequantise_fp8(weight, scale))


def nvfp4_gated_linear(x_TI: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [T, F]. The weight's rows are gate, then up."""
    return _gated(x_TI, dequantise_nvfp4(packed, scale, global_scale))


def int4_linear_parts(x_TI: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return x @ W^T as [T, O], or as float32 parts [S, T, O] that the caller sums. This twin returns [T, O]."""
    return int4_linear(x_TI, packed, scale, zero, group)


def int8_linear_parts(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ W^T as [T, O], or as float32 parts [S, T, O] that the caller sums. This twin returns [T, O]."""
    return int8_linear(x_TI, weight, scale)


def fp8_linear_parts(x_TI: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ W^T as [T, O], or as float32 parts [S, T, O] that the caller sums. This twin returns [T, O]."""
    return fp8_linear(x_TI, weight, scale)


def nvfp4_linear_parts(x_TI: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return x @ W^T as [T, O], or as float32 parts [S, T, O] that the caller sums. This twin returns [T, O]."""
    return nvfp4_linear(x_TI, packed, scale, global_scale)


def int4_linear_gelu_times(
    x_TI: Tensor, factor_TO: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int
) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [T, O]."""
    return _gelu_times(x_TI, factor_TO, dequantise_int4(packed, scale, zero, group))


def int8_linear_gelu_times(x_TI: Tensor, factor_TO: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [T, O]."""
    return _gelu_times(x_TI, factor_TO, dequantise_int8(weight, scale))


def fp8_linear_gelu_times(x_TI: Tensor, factor_TO: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [T, O]."""
    return _gelu_times(x_TI, factor_TO, dequantise_fp8(weight, scale))


def nvfp4_linear_gelu_times(x_TI: Tensor, factor_TO: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [T, O]."""
    return _gelu_times(x_TI, factor_TO, dequantise_nvfp4(packed, scale, global_scale))


def int4_capped_head(x_TI: Tensor, cap: float | None, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return cap * tanh(x @ W^T / cap), [T, O] float32. If `cap` is None, logits are not capped."""
    return softcap(F.linear(x_TI.float(), dequantise_int4(packed, scale, zero, group)), cap)


def int8_capped_head(x_TI: Tensor, cap: float | None, weight: Tensor, scale: Tensor) -> Tensor:
    """Return cap * tanh(x @ W^T / cap), [T, O] float32. If `cap` is None, logits are not capped."""
    return softcap(F.linear(x_TI.float(), dequantise_int8(weight, scale)), cap)


def fp8_capped_head(x_TI: Tensor, cap: float | None, weight: Tensor, scale: Tensor) -> Tensor:
    """Return cap * tanh(x @ W^T / cap), [T, O] float32. If `cap` is None, logits are not capped."""
    return softcap(F.linear(x_TI.float(), dequantise_fp8(weight, scale)), cap)


def nvfp4_capped_head(x_TI: Tensor, cap: float | None, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return cap * tanh(x @ W^T / cap), [T, O] float32. If `cap` is None, logits are not capped."""
    return softcap(F.linear(x_TI.float(), dequantise_nvfp4(packed, scale, global_scale)), cap)


def int4_rows(ids_T: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """Return the float32 rows of the ids, [T, I]."""
    zero_rows = None if zero is None else zero.index_select(0, ids_T)
    return dequantise_int4(packed.index_select(0, ids_T), scale.index_select(0, ids_T), zero_rows, group)


def int8_rows(ids_T: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 rows of the ids, [T, I]."""
    return dequantise_int8(weight.index_select(0, ids_T), scale.index_select(0, ids_T))


def _experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up_of: Callable[[int], Tensor],
    down_of: Callable[[int], Tensor],
) -> Tensor:
    """Run each token's experts, dequantising only those that have tokens."""
    num_tokens, top_k = experts_TK.shape
    assigned = experts_TK.flatten()
    out = torch.zeros(num_tokens * top_k, x_TD.shape[1], dtype=torch.float32, device=x_TD.device)
    for expert in assigned.unique().tolist():
        places = (assigned == expert).nonzero().squeeze(1)
        gated = gelu_mul(F.linear(x_TD[places // top_k].float(), gate_up_of(expert)))
        out[places] = F.linear(gated, down_of(expert))
    return out.view(num_tokens, top_k, -1).mul_(weights_TK[..., None]).sum(1).to(x_TD.dtype)


def int4_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Int4Weight, down: Int4Weight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""

    def whole(weight: Int4Weight, expert: int) -> Tensor:
        zero = None if weight.zero is None else weight.zero[expert]
        return dequantise_int4(weight.packed[expert], weight.scale[expert], zero, weight.group)

    return _experts(x_TD, weights_TK, experts_TK, lambda expert: whole(gate_up, expert), lambda expert: whole(down, expert))


def int8_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Int8Weight, down: Int8Weight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""

    def whole(weight: Int8Weight, expert: int) -> Tensor:
        return dequantise_int8(weight.weight[expert], weight.scale[expert])

    return _experts(x_TD, weights_TK, experts_TK, lambda expert: whole(gate_up, expert), lambda expert: whole(down, expert))


def fp8_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Fp8Weight, down: Fp8Weight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""

    def whole(weight: Fp8Weight, expert: int) -> Tensor:
        return dequantise_fp8(weight.weight[expert], weight.scale[expert])

    return _experts(x_TD, weights_TK, experts_TK, lambda expert: whole(gate_up, expert), lambda expert: whole(down, expert))


def nvfp4_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Nvfp4Weight, down: Nvfp4Weight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""

    def whole(weight: Nvfp4Weight, expert: int) -> Tensor:
        return dequantise_nvfp4(weight.packed[expert], weight.scale[expert], weight.global_scale[expert])

    return _experts(x_TD, weights_TK, experts_TK, lambda expert: whole(gate_up, expert), lambda expert: whole(down, expert))
