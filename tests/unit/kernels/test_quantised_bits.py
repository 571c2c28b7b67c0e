"""The arithmetic of `quantised.hopper_bits`, step by step in torch, and its tiles. The kernel itself needs a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from culet.kernels.eager import quantised as eager
from culet.kernels.types import Int4Weight
from tests.kernels.quantised.cases import draw

pytest.importorskip("triton")

from culet.kernels.triton.linear.tiles import GATED, PLAIN
from culet.kernels.triton.quantised.hopper_bits import BLOCK_K, NUM_WARPS
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.tiles import Product, choose_bits, choose_hopper


def as_bfloat16(bits: Tensor) -> Tensor:
    """Return the two bfloat16 of each 32-bit word in a new last dimension, low half first, as float64."""
    return bits.to(torch.int32)[..., None].view(torch.bfloat16).double()


def int4_subnormals(words: Tensor) -> Tensor:
    """Return [..., 4, 2] as `unpack.int4_subnormals` and `unpack.eight_in_pairs` do."""
    shifted = (words >> 8) & 0xFFFFFF
    masks = ((words, 0x000F000F), (words, 0x00F000F0), (shifted, 0x000F000F), (shifted, 0x00F000F0))
    return torch.stack([as_bfloat16(word & mask) for word, mask in masks], -2)


def large_tokens(x: Tensor) -> Tensor:
    """Return what `unpack.int4_tokens` does."""
    factor = torch.tensor([2.0**64, 2.0**60], dtype=torch.bfloat16)
    return (x.unflatten(-1, (-1, 2)) * factor).flatten(-2).double()


def test_a_tile() -> None:
    """One tile in the kernel's order of columns is a product with the twin's weights."""
    torch.manual_seed(1)
    num_rows, num_tokens = 32, 8
    weight = draw("int4", num_rows, BLOCK_K, scale_dtype=torch.bfloat16)
    x = torch.randn(num_tokens, BLOCK_K).to(torch.bfloat16)
    assert isinstance(weight, Int4Weight)
    words = weight.packed.view(num_rows, NUM_WARPS, 2, 4).permute(1, 0, 3, 2)  # as `_groups`
    scale = weight.scale.view(num_rows, NUM_WARPS, 2, 1).permute(1, 0, 3, 2)
    tokens = large_tokens(x).view(num_tokens, NUM_WARPS, 2, 4, 2, 4).permute(1, 3, 5, 4, 0, 2)
    tokens = tokens.reshape(NUM_WARPS, 32, num_tokens, 2)
    eights = int4_subnormals(torch.full((NUM_WARPS, 16, 4), -2004318072)).reshape(NUM_WARPS, 16, 32)
    total = torch.zeros(NUM_WARPS, num_rows, num_tokens, dtype=torch.float64)
    for group in range(2):
        start = -(eights @ tokens[..., group])
        left = int4_subnormals(words[..., group]).reshape(NUM_WARPS, num_rows, 32)
        total += (left @ tokens[..., group] + torch.cat([start] * (num_rows // 16), 1)) * scale[..., group].double()
    got = total.sum(0).T * 2.0**69
    torch.testing.assert_close(got, x.double() @ eager.dequantise(weight).double().T, rtol=1e-5, atol=1e-6)


def test_every_nibble_is_exact() -> None:
    nibbles = torch.arange(16).repeat_interleave(8).view(16, 8)
    factor = torch.tensor([2.0**133, 2.0**129], dtype=torch.float64).repeat(4)
    values = int4_subnormals(eager.pack_int4(nibbles)[:, 0]).transpose(-1, -2).flatten(1) * factor
    assert torch.equal(values, nibbles.double())


def matrix_of(num_rows: int, size: int) -> PackedMatrix:
    words = torch.empty(num_rows, size // 8, dtype=torch.int32, device="meta")
    return PackedMatrix.of(Int4Weight(words, torch.empty(num_rows, size // 32, dtype=torch.bfloat16, device="meta"), None))


# Tokens, outputs, inputs, epilogue, and kernel, rows, stages and parts of the tile. None is `warps`.
CHOICES = (
    (1, 16384, 5376, PLAIN, ("bits", 64, 4, 1)),  # 31B
    (8, 16384, 5376, PLAIN, ("bits", 64, 6, 1)),
    (1, 5376, 8192, PLAIN, ("stream", 64, 3, 4)),
    (8, 5376, 8192, PLAIN, ("bits", 64, 4, 4)),
    (1, 21504, 5376, GATED, ("bits", 64, 2, 1)),
    (8, 21504, 5376, GATED, ("bits", 64, 2, 1)),
    (1, 5376, 21504, PLAIN, ("bits", 64, 6, 3)),
    (8, 5376, 21504, PLAIN, ("bits", 64, 6, 3)),
    (8, 18432, 5376, PLAIN, ("bits", 64, 4, 1)),
    (8, 5376, 16384, PLAIN, ("bits", 64, 4, 4)),
    (8, 8192, 3840, PLAIN, ("stream", 64, 3, 3)),  # 12B
    (8, 3840, 4096, PLAIN, ("stream", 64, 3, 4)),
    (1, 15360, 3840, GATED, ("stream", 64, 3, 1)),
    (1, 3840, 15360, PLAIN, ("bits", 64, 6, 4)),
    (1, 10240, 2560, GATED, ("bits", 32, 3, 1)),  # E4B
    (1, 2560, 10240, PLAIN, ("stream", 64, 3, 5)),
    (1, 256, 2560, PLAIN, None),
    (1, 8192, 2816, PLAIN, ("bits", 64, 4, 1)),  # 26B
    (1, 2816, 4096, PLAIN, ("stream", 64, 3, 8)),
)


@pytest.mark.parametrize(("num_tokens", "num_rows", "size", "epilogue", "wanted"), CHOICES)
def test_measured_tiles(
    num_tokens: int, num_rows: int, size: int, epilogue: int, wanted: tuple[str, int, int, int] | None
) -> None:
    matrix = matrix_of(num_rows * (2 if epilogue == GATED else 1), size)
    tile = choose_hopper(Product(num_tokens, num_rows, epilogue), matrix)
    assert wanted == (None if tile is None else (tile.kernel, tile.block_n, tile.num_stages, tile.split_k))
    assert choose_bits(Product(9, num_rows, epilogue), matrix) is None  # `hopper_stream` is faster
