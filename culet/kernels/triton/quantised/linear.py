"""Linear layers over quantised weights, with whichever kernel is fastest for the number of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from culet import hardware
from culet.kernels.replay import is_replayed
from culet.kernels.triton.device import is_hopper, uses_pdl
from culet.kernels.triton.linear.few_tokens import by_cublas
from culet.kernels.triton.linear.hopper_products import gated_product
from culet.kernels.triton.linear.tiles import GATED, GELU_TIMES, PLAIN, SOFTCAP, Tile
from culet.kernels.triton.norms.pointwise import gelu_gate, gelu_mul, softcap
from culet.kernels.triton.quantised.few_tokens import describe
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.prefill import dequantise, quantise_tokens
from culet.kernels.triton.quantised.tiles import MAX_STREAM_TOKENS, Product, choose_hopper, choose_tile, choose_warps
from culet.kernels.triton.quantised.unpack import FP8
from culet.kernels.types import QuantisedWeight
from culet.log import logger

MAX_KEPT_PARTS = 8  # that a reader of parts adds up
NARROW = 4096  # a matrix with at most this many outputs keeps gate and up in float32

_has_scaled_product = True  # until torch refuses it


def rounds_tokens(num_tokens: int, matrix: PackedMatrix, device: torch.device) -> bool:
    """Return whether a product rounds the tokens to e4m3. It does for many tokens, with a scale per row of the weights."""
    if matrix.format != FP8 or matrix.has_blocks or num_tokens <= MAX_STREAM_TOKENS:
        return False
    is_aligned = matrix.num_rows % 16 == 0 and matrix.num_columns % 16 == 0
    return _has_scaled_product and is_aligned and hardware.multiplies_fp8(device)


def _choose(x_MK: Tensor, matrix: PackedMatrix, product: Product) -> Tile | None:
    """Return the tile, or None if there are too many tokens for these kernels."""
    if not product.num_tokens or (x_MK.is_cuda and x_MK.dtype != torch.bfloat16):
        return None  # Tensor cores would round float32 to tf32.
    if x_MK.device.type == "cpu":
        return choose_tile(product, matrix)
    if product.epilogue != SOFTCAP and rounds_tokens(product.num_tokens, matrix, x_MK.device):
        return None
    tile = None
    if is_replayed() and is_hopper(x_MK.device) and not (x_MK.stride(0) % 8 or x_MK.data_ptr() % 16):
        tile = choose_hopper(product, matrix)
    return tile or choose_warps(product, matrix) or choose_tile(product, matrix)


def _many_tokens(x_MK: Tensor, matrix: PackedMatrix) -> Tensor:
    """Return x @ W^T for many tokens."""
    global _has_scaled_product
    if x_MK.dtype == torch.bfloat16 and rounds_tokens(x_MK.shape[0], matrix, x_MK.device):
        try:
            return scaled_product(*quantise_tokens(x_MK), matrix.words.view(torch.float8_e4m3fn), matrix.scale)
        except RuntimeError as error:
            _has_scaled_product = False
            logger.warning("fp8 weights are multiplied in bfloat16 from now on, because torch._scaled_mm failed: %s", error)
    return by_cublas(x_MK, dequantise(matrix, x_MK.dtype))


def scaled_product(x_MK: Tensor, scale_M1: Tensor, weight_NK: Tensor, scale_N1: Tensor) -> Tensor:
    """Return (x * scale) @ (weight * scale)^T of e4m3 tensors in bfloat16.

    Sums are exact to float32. Hopper's faster sums have an error of up to 4e-3 and gain 7 to 12 %.
    """
    return torch._scaled_mm(
        x_MK, weight_NK.t(), scale_a=scale_M1, scale_b=scale_N1.t(), out_dtype=torch.bfloat16, use_fast_accum=False
    )


def _run(x_MK: Tensor, matrix: PackedMatrix, out: Tensor, tile: Tile, epilogue: int, **extra: Any) -> Tensor:
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    describe(x_MK, matrix, out, tile, epilogue, pdl=uses_pdl(x_MK.device), **extra).run()
    return out


def linear(x_MK: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return x @ W^T, [M, N]."""
    matrix = PackedMatrix.of(weight)
    tile = _choose(x_MK, matrix, Product(x_MK.shape[0], matrix.num_rows))
    if tile is None:
        return _many_tokens(x_MK, matrix)
    return _run(x_MK, matrix, x_MK.new_empty(x_MK.shape[0], matrix.num_rows), tile, PLAIN)


def linear_parts(x_MK: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return `linear` as [M, N], or as float32 parts [S, M, N] that the caller sums if K is split over programs."""
    matrix = PackedMatrix.of(weight)
    tile = _choose(x_MK, matrix, Product(x_MK.shape[0], matrix.num_rows))
    if tile is None or tile.split_k == 1 or tile.split_k > MAX_KEPT_PARTS:
        return linear(x_MK, weight)
    shape = (tile.split_k, x_MK.shape[0], matrix.num_rows)
    return _run(x_MK, matrix, torch.empty(shape, dtype=torch.float32, device=x_MK.device), tile, PLAIN)


def gated_linear(x_MK: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return gelu_tanh(gate(x)) * up(x), [M, F]. The weight's rows are gate, then up."""
    matrix = PackedMatrix.of(weight)
    num_rows = matrix.num_rows // 2
    tile = _choose(x_MK, matrix, Product(x_MK.shape[0], num_rows, GATED))
    if tile is not None:
        return _run(x_MK, matrix, x_MK.new_empty(x_MK.shape[0], num_rows), tile, GATED)
    if rounds_tokens(x_MK.shape[0], matrix, x_MK.device):
        return gelu_mul(_many_tokens(x_MK, matrix))
    weight_NK = dequantise(matrix, x_MK.dtype)
    y_MF = gated_product(x_MK, weight_NK)
    if y_MF is not None:
        return y_MF
    if num_rows <= NARROW and x_MK.is_cuda and x_MK.dtype == torch.bfloat16:
        # If gate and up are rounded before their product, some rows of a narrow layer are off by 5e-3. In wide layers, the
        # errors average out.
        return gelu_mul(torch.mm(x_MK, weight_NK.t(), out_dtype=torch.float32)).to(x_MK.dtype)
    return gelu_mul(by_cublas(x_MK, weight_NK))


def linear_gelu_times(x_MK: Tensor, weight: QuantisedWeight, factor_MN: Tensor) -> Tensor:
    """Return gelu_tanh(x @ W^T) * factor, [M, N]."""
    matrix = PackedMatrix.of(weight)
    tile = _choose(x_MK, matrix, Product(x_MK.shape[0], matrix.num_rows, GELU_TIMES))
    if tile is None:
        return gelu_gate(_many_tokens(x_MK, matrix), factor_MN)
    out = x_MK.new_empty(x_MK.shape[0], matrix.num_rows)
    return _run(x_MK, matrix, out, tile, GELU_TIMES, factor=factor_MN)


def capped_head(x_LD: Tensor, weight: QuantisedWeight, cap: float | None) -> Tensor:
    """Return cap * tanh(x @ W^T / cap) as float32 [L, V]. If `cap` is None, logits are not capped.

    Tokens are never rounded to e4m3, so that logits are as precise in a large batch as alone.
    """
    matrix = PackedMatrix.of(weight)
    out = torch.empty(x_LD.shape[0], matrix.num_rows, dtype=torch.float32, device=x_LD.device)
    if not x_LD.shape[0]:
        return out
    tile = _choose(x_LD, matrix, Product(x_LD.shape[0], matrix.num_rows, SOFTCAP))
    if tile is None:
        return softcap(_many_tokens(x_LD, matrix), cap)
    return _run(x_LD, matrix, out, tile, PLAIN if cap is None else SOFTCAP, softcap=cap)
