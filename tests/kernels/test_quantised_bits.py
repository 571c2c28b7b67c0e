"""The arithmetic of `quantised.hopper_bits`, step by step in torch. The kernel itself needs a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from culet.kernels.eager import quantised as eager
from culet.kernels.types import Fp8Weight, Int4Weight
from tests.kernels.quantised_cases import draw

WARPS = 4


def as_bfloat16(bits: Tensor) -> Tensor:
    """Return the two bfloat16 of each 32-bit word in a new last dimension, low half first, as float64."""
    return bits.to(torch.int32)[..., None].view(torch.bfloat16).double()


def int4_subnormals(words: Tensor) -> Tensor:
    """Return [..., 4, 2] as `unpack.int4_subnormals` and `unpack.eight_in_pairs` do."""
    shifted = (words >> 8) & 0xFFFFFF
    masks = ((words, 0x000F000F), (words, 0x00F000F0), (shifted, 0x000F000F), (shifted, 0x00F000F0))
    return torch.stack([as_bfloat16(word & mask) for word, mask in masks], -2)


def fp8_subnormals(words: Tensor) -> Tensor:
    """Return [..., 2, 2] as `unpack.fp8_subnormals` and `unpack.four_in_pairs` do."""
    words = words.to(torch.int64)
    sign = 0x80008000
    low = ((words << 8) & sign) | ((words << 4) & 0x07F007F0)
    high = (words & sign) | ((words >> 4) & 0x07F007F0)
    return torch.stack([as_bfloat16(to_int32(bits)) for bits in (low, high)], -2)


def to_int32(bits: Tensor) -> Tensor:
    bits = bits & 0xFFFFFFFF
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


def large_tokens(x: Tensor, has_small_odd: bool) -> Tensor:
    factor = torch.tensor([2.0**64, 2.0**60 if has_small_odd else 2.0**64], dtype=torch.bfloat16)
    return (x.unflatten(-1, (-1, 2)) * factor).flatten(-2).double()


@pytest.mark.parametrize("parts", [1, 2])
def test_int4(parts: int) -> None:
    """One tile in the kernel's order of columns is a product with the twin's weights."""
    torch.manual_seed(1)
    num_rows, num_tokens, size = 32, 8, 32 * WARPS * parts
    weight = draw("int4", num_rows, size, scale_dtype=torch.bfloat16)
    x = torch.randn(num_tokens, size).to(torch.bfloat16)
    assert isinstance(weight, Int4Weight)
    words = weight.packed.view(num_rows, WARPS, parts, 4).permute(1, 0, 3, 2)  # as `_by_group`
    scale = weight.scale.view(num_rows, WARPS, parts, 1).permute(1, 0, 3, 2)
    tokens = large_tokens(x, True).view(num_tokens, WARPS, parts, 4, 2, 4).permute(1, 3, 5, 4, 0, 2)
    tokens = tokens.reshape(WARPS, 32, num_tokens, parts)
    eights = int4_subnormals(torch.full((WARPS, 16, 4), -2004318072)).reshape(WARPS, 16, 32)
    total = torch.zeros(WARPS, num_rows, num_tokens, dtype=torch.float64)
    for part in range(parts):
        start = -(eights @ tokens[..., part])
        left = int4_subnormals(words[..., part]).reshape(WARPS, num_rows, 32)
        total += (left @ tokens[..., part] + torch.cat([start] * (num_rows // 16), 1)) * scale[..., part].double()
    got = total.sum(0).T * 2.0**69
    torch.testing.assert_close(got, x.double() @ eager.dequantise(weight).double().T, rtol=1e-5, atol=1e-6)


def test_fp8() -> None:
    torch.manual_seed(2)
    num_rows, num_tokens, size = 32, 8, 32 * WARPS
    weight = draw("fp8", num_rows, size)
    x = torch.randn(num_tokens, size).to(torch.bfloat16)
    assert isinstance(weight, Fp8Weight)
    words = weight.weight.view(torch.int32).view(num_rows, WARPS, 8).permute(1, 0, 2)
    left = fp8_subnormals(words).reshape(WARPS, num_rows, 32)
    tokens = large_tokens(x, False).view(num_tokens, WARPS, 2, 4, 2, 2).permute(1, 2, 3, 5, 4, 0).reshape(WARPS, 32, num_tokens)
    got = ((left @ tokens).sum(0) * 2.0**56 * weight.scale.double()).T
    torch.testing.assert_close(got, x.double() @ eager.dequantise(weight).double().T, rtol=1e-5, atol=1e-6)


def test_every_nibble_and_byte_is_exact() -> None:
    nibbles = torch.arange(16).repeat_interleave(8).view(16, 8)
    factor = torch.tensor([2.0**133, 2.0**129], dtype=torch.float64).repeat(4)
    values = int4_subnormals(eager.pack_int4(nibbles)[:, 0]).transpose(-1, -2).flatten(1) * factor
    assert torch.equal(values, nibbles.double())
    numbers = [byte for byte in range(256) if byte & 127 != 127]  # the others are NaN
    numbers += numbers[:2]  # a multiple of four
    stored = torch.tensor(numbers, dtype=torch.uint8)
    values = fp8_subnormals(stored.view(torch.int32)).transpose(-1, -2).flatten() * 2.0**120
    assert torch.equal(values, stored.view(torch.float8_e4m3fn).double())
