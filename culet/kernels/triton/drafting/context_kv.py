"""Compute a drafter's context keys and values for all its layers in one launch, for small drafters and few tokens.

    n = norm(feature) * w,   k = rope(norm(n @ K^T) * w_k), v = n @ V^T, stored in pages

A program handles one head of one layer for some tokens, and norms their features itself. With longer rows or more tokens,
reading the weights repeatedly would cost more than launches do. In that case, each part has its own kernel.

Shapes: T tokens · D model · G KV heads · H head size · X projected columns, keys and then values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.triton.linear.few_tokens import linear
from culet.kernels.triton.norms.qkv import prepare_qkv, rope, stores
from culet.kernels.triton.norms.residual import rms_norm
from culet.kernels.types import ContextLayer, HeadShape

MAX_LAYERS = 8
MAX_SIZE = 256
MAX_HEAD = 128
MAX_TOKENS = 64
BLOCK_T = 16


@triton.jit
def _load_columns(matrix, first_row, rows, column, D: tl.constexpr):
    return tl.load(matrix + (first_row + rows)[:, None] * D + column[None, :], mask=(column < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["T"])
def _context_kernel(
    feature, hidden_norm, positions, inv_freq, kv_addresses, planes,
    weight_0, weight_1, weight_2, weight_3, weight_4, weight_5, weight_6, weight_7,
    norm_0, norm_1, norm_2, norm_3, norm_4, norm_5, norm_6, norm_7,
    T, feature_stride, layer_stride, plane_stride, page_stride, head_stride, page_tokens,
    D: tl.constexpr, G: tl.constexpr, H: tl.constexpr, eps: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one head of one layer for some tokens. Programs are (head, layer, tokens), with key heads before value heads."""
    layer = tl.program_id(1)
    weight, norm = weight_0, norm_0
    if layer == 1:
        weight, norm = weight_1, norm_1
    elif layer == 2:
        weight, norm = weight_2, norm_2
    elif layer == 3:
        weight, norm = weight_3, norm_3
    elif layer == 4:
        weight, norm = weight_4, norm_4
    elif layer == 5:
        weight, norm = weight_5, norm_5
    elif layer == 6:
        weight, norm = weight_6, norm_6
    elif layer == 7:
        weight, norm = weight_7, norm_7
    head = tl.program_id(0) % G
    is_key = tl.program_id(0) < G
    half = tl.arange(0, H // 2)
    column = tl.arange(0, BLOCK_D)
    first_row = tl.program_id(0) * H
    w_first = _load_columns(weight, first_row, half, column, D)
    w_second = _load_columns(weight, first_row + H // 2, half, column, D)
    n_first, n_second = tl.load(norm + head * H + half), tl.load(norm + head * H + H // 2 + half)
    w_hidden = tl.load(hidden_norm + column, mask=column < D, other=0.0)
    frequency = tl.load(inv_freq + half)
    enter(PDL)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < T
    inside = (column < D)[:, None] & is_token[None, :]
    x = tl.load(feature + token[None, :] * feature_stride + column[:, None], mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)[None, :] * w_hidden[:, None]
    x = x.to(feature.dtype.element_ty)
    first = tl.dot(w_first, x, out_dtype=tl.float32, input_precision="ieee").to(feature.dtype.element_ty).to(tl.float32)
    second = tl.dot(w_second, x, out_dtype=tl.float32, input_precision="ieee").to(feature.dtype.element_ty).to(tl.float32)
    if is_key:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / H + eps)[None, :]
        a, b = first * scale * n_first[:, None], second * scale * n_second[:, None]
        position = tl.load(positions + token, mask=is_token, other=0).to(tl.float32)
        angle = position[None, :] * frequency[:, None]
        c, s = tl.cos(angle), tl.sin(angle)
        first, second = a * c - b * s, b * c + a * s
    address = tl.load(kv_addresses + token, mask=is_token, other=-1)
    is_stored = (address >= 0)[None, :] & (half >= 0)[:, None]
    address = tl.maximum(address, 0)
    place = (address // page_tokens) * page_stride + (address % page_tokens) * H
    plane = tl.where(is_key, 0, 1) * plane_stride
    to = planes + layer * layer_stride + plane + head * head_stride + place[None, :] + half[:, None]
    tl.store(to, first.to(planes.dtype.element_ty), mask=is_stored)
    tl.store(to + H // 2, second.to(planes.dtype.element_ty), mask=is_stored)


def describe_context(
    feature_TD: Tensor,
    hidden_norm_D: Tensor,
    angles: tuple[Tensor, Tensor],
    kv_address_T: Tensor,
    layers: Sequence[ContextLayer],
    heads: HeadShape,
    pdl: bool,
) -> Launch:
    (num_tokens, size), planes = feature_TD.shape, layers[0].planes
    given = [layers[min(index, len(layers) - 1)] for index in range(MAX_LAYERS)]
    arguments: dict[str, Any] = {"feature": feature_TD, "hidden_norm": hidden_norm_D, "positions": angles[0]}
    arguments |= {"inv_freq": angles[1], "kv_addresses": kv_address_T, "planes": planes, "T": num_tokens}
    arguments |= {f"weight_{index}": layer.weight_XD for index, layer in enumerate(given)}
    arguments |= {f"norm_{index}": layer.norm_GH for index, layer in enumerate(given)}
    arguments |= {"feature_stride": feature_TD.stride(0), "layer_stride": _layer_stride(layers) or 0}
    arguments |= {"plane_stride": planes.stride(0), "page_stride": planes.stride(1), "head_stride": planes.stride(2)}
    arguments |= {"page_tokens": planes.shape[3], "D": size, "G": heads.num_kv_heads, "H": heads.head_dim, "eps": heads.eps}
    arguments |= {"BLOCK_T": BLOCK_T, "BLOCK_D": max(16, next_power_of_2(size)), "PDL": pdl}
    grid = (2 * heads.num_kv_heads, len(layers), cdiv(num_tokens, BLOCK_T))
    return Launch(_context_kernel, grid, arguments, options(8, pdl))


def _layer_stride(layers: Sequence[ContextLayer]) -> int | None:
    """Return the number of elements from one layer's planes to the next layer's, or None if that differs between layers."""
    first = layers[0].planes
    offsets = [int(layer.planes.storage_offset()) for layer in layers]
    strides = {after - before for before, after in pairwise(offsets)}
    is_alike = all(layer.planes.stride() == first.stride() for layer in layers) and len(strides) <= 1
    return next(iter(strides), 0) if is_alike else None


def _is_supported(feature_TD: Tensor, layers: Sequence[ContextLayer], heads: HeadShape) -> bool:
    (num_tokens, size), head = feature_TD.shape, heads.head_dim
    if not 0 < num_tokens <= MAX_TOKENS or size > MAX_SIZE or not 32 <= head <= MAX_HEAD or head & (head - 1):
        return False
    if feature_TD.is_cuda and feature_TD.dtype != torch.bfloat16:
        return False  # as in `linear`
    is_plain = not (heads.num_heads or heads.k_eq_v or heads.latent or heads.norm_v) and heads.rotated_dims == head
    are_rows = feature_TD.stride(1) == 1 and all(layer.weight_XD.is_contiguous() for layer in layers)
    return is_plain and are_rows and len(layers) <= MAX_LAYERS and _layer_stride(layers) is not None


def store_context(
    feature_TD: Tensor,
    hidden_norm_D: Tensor,
    angles: tuple[Tensor, Tensor],
    kv_address_T: Tensor,
    layers: Sequence[ContextLayer],
    heads: HeadShape,
) -> None:
    """Store every layer's keys and values of norm(feature) * hidden_norm at `kv_address_T`, unless that is -1.

    `angles` is (positions [T], inverse frequencies). `heads` has no query heads.
    """
    if _is_supported(feature_TD, layers, heads):
        pdl = uses_pdl(feature_TD.device)
        describe_context(feature_TD, hidden_norm_D, angles, kv_address_T, layers, heads, pdl).run()
        return
    normed_TD, cos_sin = rms_norm(feature_TD, hidden_norm_D, heads.eps), rope(*angles)
    for weight_XD, norm_GH, planes in layers:
        where = stores(kv_address_T, planes.shape[3])
        prepare_qkv(linear(normed_TD, weight_XD), norm_GH, cos_sin, planes, where, heads)
