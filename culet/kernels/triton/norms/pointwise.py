"""Small fused ops, computed in float32 and rounded once.

    embed         table[ids] * scale
    gelu_mul      gelu(gate) * up, columns gate | up
    silu_mul      silu(gate) * up, columns gate | up
    gelu_gate     gelu(gate) * value
    ple_combine   (norm(context * scale) * weight + embedded) / sqrt(2), per layer
    softcap       cap * tanh(logits / cap)

Shapes: T tokens · D model · F MLP width · P per-layer width · L rows of logits · V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2, run_prepared
from culet.kernels.triton.maths import cap_tanh, gelu, silu

BLOCK = 1024  # columns per program in the plain elementwise kernels (128 threads x 8)


@triton.jit
def _embed_kernel(
    ids, table, y, table_stride, y_stride, D: tl.constexpr, scale: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = cols < D
    token_id = tl.load(ids + token).to(tl.int64)
    row = tl.load(table + token_id * table_stride + cols, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(y + token * y_stride + cols, row.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gate_times_kernel(
    gate,
    value,
    y,
    gate_stride,
    value_stride,
    y_stride,
    N: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute y[t, n] = gelu(gate[t, n]) * value[t, n], or the same with silu."""
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < N
    a = tl.load(gate + token * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(value + token * value_stride + cols, mask=inside, other=0.0).to(tl.float32)
    gated = silu(a) if IS_SILU else gelu(a)
    tl.store(y + token * y_stride + cols, (gated * b).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _ple_kernel(
    context,
    embedded,
    weight,
    y,
    context_stride,
    embedded_stride,
    L,
    P: tl.constexpr,
    scale: tl.constexpr,
    eps: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_L layers of one token."""
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    layers = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    cols = tl.arange(0, BLOCK_P)
    inside = (layers < L)[:, None] & (cols < P)[None, :]
    offsets = layers[:, None] * P + cols[None, :]
    c = tl.load(context + token * context_stride + offsets, mask=inside, other=0.0).to(tl.float32) * scale
    c = c * tl.rsqrt(tl.sum(c * c, 1) / P + eps)[:, None] * tl.load(weight + cols, mask=cols < P, other=0.0)[None, :]
    e = tl.load(embedded + token * embedded_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * L * P + offsets, ((c + e) * 0.7071067811865476).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _softcap_kernel(logits, y, logits_stride, V, cap: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr):
    enter(PDL)
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = cols < V
    values = tl.load(logits + row * logits_stride + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * V + cols, cap_tanh(values, cap), mask=inside)


def _block(size: int) -> int:
    return min(BLOCK, next_power_of_2(size))


def describe_embed(token_ids_T: Tensor, table_VD: Tensor, scale: float, y_TD: Tensor, pdl: bool) -> Launch:
    size = table_VD.shape[1]
    block = _block(size)
    arguments: dict[str, Any] = {"ids": token_ids_T, "table": table_VD, "y": y_TD, "table_stride": table_VD.stride(0)}
    arguments |= {"y_stride": y_TD.stride(0), "D": size, "scale": scale, "BLOCK_D": block, "PDL": pdl}
    return Launch(_embed_kernel, (token_ids_T.shape[0], cdiv(size, block)), arguments, options(4, pdl))


def describe_gate_times(gate_TN: Tensor, value_TN: Tensor, y_TN: Tensor, pdl: bool, *, is_silu: bool = False) -> Launch:
    num_tokens, size = y_TN.shape
    block = _block(size)
    arguments: dict[str, Any] = {"gate": gate_TN, "value": value_TN, "y": y_TN, "gate_stride": gate_TN.stride(0)}
    arguments |= {"value_stride": value_TN.stride(0), "y_stride": y_TN.stride(0), "N": size, "IS_SILU": is_silu}
    arguments |= {"BLOCK_N": block, "PDL": pdl}
    return Launch(_gate_times_kernel, (num_tokens, cdiv(size, block)), arguments, options(4 if block == BLOCK else 1, pdl))


def describe_ple(
    context_TX: Tensor, embedded_TX: Tensor, weight_P: Tensor, scale: float, eps: float, y_TLP: Tensor, pdl: bool
) -> Launch:
    num_tokens, num_layers, width = y_TLP.shape
    block_l, block_p = 4, next_power_of_2(width)
    arguments: dict[str, Any] = {"context": context_TX, "embedded": embedded_TX, "weight": weight_P, "y": y_TLP}
    arguments |= {"context_stride": context_TX.stride(0), "embedded_stride": embedded_TX.stride(0), "L": num_layers, "P": width}
    arguments |= {"scale": scale, "eps": eps, "BLOCK_L": block_l, "BLOCK_P": block_p, "PDL": pdl}
    return Launch(_ple_kernel, (num_tokens, cdiv(num_layers, block_l)), arguments, options(4, pdl))


def describe_softcap(logits_LV: Tensor, cap: float, y_LV: Tensor, pdl: bool) -> Launch:
    num_rows, width = logits_LV.shape
    arguments = {"logits": logits_LV, "y": y_LV, "logits_stride": logits_LV.stride(0), "V": width, "cap": cap, "BLOCK_V": BLOCK}
    return Launch(_softcap_kernel, (cdiv(width, BLOCK), num_rows), {**arguments, "PDL": pdl}, options(4, pdl))


def embed(token_ids_T: Tensor, table_VD: Tensor, scale: float) -> Tensor:
    """Return table[ids] * scale, [T, D]. The caller has rounded `scale` to the table's dtype."""
    y_TD = torch.empty(token_ids_T.shape[0], table_VD.shape[1], dtype=table_VD.dtype, device=table_VD.device)
    if y_TD.shape[0]:
        describe_embed(token_ids_T, table_VD, scale, y_TD, uses_pdl(y_TD.device)).run()
    return y_TD


def _gate_times(gate_TN: Tensor, value_TN: Tensor, *, is_silu: bool) -> Tensor:
    num_tokens, size = gate_TN.shape
    y_TN = gate_TN.new_empty(gate_TN.shape)
    if num_tokens:
        types = y_TN.get_device(), gate_TN.dtype, value_TN.dtype
        run_prepared(
            ("gate_times", is_silu, size, types, gate_TN.stride(0), value_TN.stride(0)),
            (num_tokens, cdiv(size, _block(size))),
            (gate_TN, value_TN, y_TN),
            lambda: describe_gate_times(gate_TN, value_TN, y_TN, uses_pdl(y_TN.device), is_silu=is_silu),
        )
    return y_TN


def gelu_mul(gate_up_TF: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up. The columns are gate | up."""
    gate, up = gate_up_TF.chunk(2, -1)
    return gelu_gate(gate, up)


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """Return silu(gate) * up. The columns are gate | up. The MLPs of DFlash drafters use this."""
    gate, up = gate_up_TF.chunk(2, -1)
    return _gate_times(gate, up, is_silu=True)


def gelu_gate(gate_TP: Tensor, value_TP: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * value, for per-layer embeddings."""
    return _gate_times(gate_TP, value_TP, is_silu=False)


def ple_combine(context_TX: Tensor, embedded_TX: Tensor, weight_P: Tensor, scale: float, eps: float) -> Tensor:
    """Return the per-layer inputs [T, layers, P], (norm(context * scale) * weight + embedded) / sqrt(2)."""
    num_tokens, width = context_TX.shape
    y_TLP = context_TX.new_empty(num_tokens, width // weight_P.shape[0], weight_P.shape[0])
    if num_tokens:
        describe_ple(context_TX, embedded_TX, weight_P, scale, eps, y_TLP, uses_pdl(y_TLP.device)).run()
    return y_TLP


def softcap(logits_LV: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap) in float32. float32 logits may be overwritten."""
    if cap is None or logits_LV.shape[0] == 0:
        return logits_LV.float()
    y_LV = logits_LV if logits_LV.dtype == torch.float32 else torch.empty_like(logits_LV, dtype=torch.float32)
    describe_softcap(logits_LV, cap, y_LV, uses_pdl(y_LV.device)).run()
    return y_LV
