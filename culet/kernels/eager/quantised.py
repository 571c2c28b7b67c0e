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
is [out, 1], because the projections of a merged matrix have different ones, or a scalar. Files of compressed-tensors divide by
it instead: `divisor` is then what they store, and the twin divides, so that its weights are exactly those of the file. Kernels
always multiply, which changes a weight by less than the rounding to bfloat16.

Shapes: T tokens · I inputs · O outputs · F MLP width · E experts · K experts per token.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from culet.kernels.eager.ops import gelu_gate, gelu_mul, softcap
from culet.kernels.types import FP8_BLOCK, Fp8Weight, Int4Weight, Int8Weight, Nvfp4Weight, QuantisedWeight, part_of

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
        scale = scale.repeat_interleave(FP8_BLOCK, -2)[..., :num_rows, :].repeat_interleave(FP8_BLOCK, -1)[..., :num_columns]
    return weight.float() * scale


def dequantise_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor, divisor: Tensor | None) -> Tensor:
    """Return the float32 weight [..., out, in]."""
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    scale = scale.float() * global_scale if divisor is None else scale.float() / divisor
    return _scaled(_e2m1_values(packed.device)[nibbles.long()], scale)


def dequantise(weight: QuantisedWeight) -> Tensor:
    """Return the float32 weight [..., out, in]."""
    match weight:
        case Int4Weight():
            return dequantise_int4(*weight, weight.group)
        case Int8Weight():
            return dequantise_int8(*weight)
        case Fp8Weight():
            return dequantise_fp8(*weight)
        case Nvfp4Weight():
            return dequantise_nvfp4(*weight)


def linear(x_TI: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return x @ W^T, [T, O]. A kernel may round activations to e4m3 with a scale per token. This twin does not."""
    return F.linear(x_TI.float(), dequantise(weight)).to(x_TI.dtype)


def linear_parts(x_TI: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return x @ W^T as [T, O], or as float32 parts [S, T, O] that the caller sums. This twin returns [T, O]."""
    return linear(x_TI, weight)


def gated_linear(x_TI: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [T, F]. The weight's rows are gate, then up."""
    return gelu_mul(F.linear(x_TI.float(), dequantise(weight))).to(x_TI.dtype)


def linear_gelu_times(x_TI: Tensor, weight: QuantisedWeight, factor_TO: Tensor) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [T, O]."""
    return gelu_gate(F.linear(x_TI.float(), dequantise(weight)), factor_TO.float()).to(x_TI.dtype)


def capped_head(x_TI: Tensor, weight: QuantisedWeight, cap: float | None) -> Tensor:
    """Return cap * tanh(x @ W^T / cap) as float32 [T, O]. If `cap` is None, logits are not capped."""
    return softcap(F.linear(x_TI.float(), dequantise(weight)), cap)


def look_up(ids_T: Tensor, weight: QuantisedWeight, first_row: int, columns: slice, scale: float, dtype: torch.dtype) -> Tensor:
    """Return some columns of the rows with these ids, rounded to `dtype` and then multiplied by `scale`.

    `weight` holds the rows from `first_row` on. Rows that it does not hold are zeros.
    """
    local_T = ids_T - first_row
    is_held_T = (local_T >= 0) & (local_T < weight[0].shape[0])
    rows_TI = dequantise(part_of(weight, local_T.where(is_held_T, 0)))[:, columns]
    return (rows_TI.to(dtype) * scale).masked_fill_(~is_held_T[:, None], 0.0)


def experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedWeight, down: QuantisedWeight) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D].

    Only experts that have tokens are dequantised.
    """
    num_tokens, top_k = experts_TK.shape
    assigned = experts_TK.flatten()
    out = torch.zeros(num_tokens * top_k, x_TD.shape[1], dtype=torch.float32, device=x_TD.device)
    for expert in assigned.unique().tolist():
        places = (assigned == expert).nonzero().squeeze(1)
        gated = gelu_mul(F.linear(x_TD[places // top_k].float(), dequantise(part_of(gate_up, expert))))
        out[places] = F.linear(gated, dequantise(part_of(down, expert)))
    return out.view(num_tokens, top_k, -1).mul_(weights_TK[..., None]).sum(1).to(x_TD.dtype)
