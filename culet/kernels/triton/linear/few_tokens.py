"""Linear layers for few tokens, as in decoding. Nearly all of the time goes to reading W.

    y[m, n]  = sum_k x[m, k] * W[n, k]                                     linear
    y[m, f]  = gelu(sum_k x[m, k] * W[f, k]) * sum_k x[m, k] * W[F + f, k]     gated_linear (W has gate rows, then up rows)
    y[m, n]  = gelu(sum_k x[m, k] * W[n, k]) * factor[m, n]                linear_gelu_times (per-layer embeddings)

Inputs and outputs are bfloat16 and sums are float32. There are two kernels. `_rows_kernel` multiplies and adds in registers,
with a few weight rows per program. It is for 1 to 4 tokens, and fine-grained enough for small matrices. `_tiles_kernel` passes
weight tiles to the tensor cores as the left operand, with tokens as columns (up to 32). It may split K over programs. The last
program to arrive sums the parts in a fixed order, unless the caller does (`linear_parts`). On Hopper, `hopper_stream` is faster
in steps that are replayed. `tiles` chooses the kernel and tile for a shape.

Shapes: M tokens · K inputs · N outputs · F gated outputs (W has 2F rows).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.beside_steps import is_beside_steps
from culet.kernels.cublaslt import product
from culet.kernels.replay import is_replayed
from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import can_bulk_copy, shared_bytes, stages_that_fit, uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2, run_prepared
from culet.kernels.triton.linear.epilogue import finish, store_sums
from culet.kernels.triton.linear.hopper_products import gated_product
from culet.kernels.triton.linear.hopper_stream import describe_stream
from culet.kernels.triton.linear.tiles import (
    GATED,
    GELU_TIMES,
    MAX_ARRIVALS,
    MAX_PARTS,
    PLAIN,
    SOFTCAP,
    Tile,
    choose_stream,
    choose_tile,
)
from culet.kernels.triton.norms.pointwise import gelu_gate, gelu_mul, softcap

MIN_COLUMNS = 16  # fewer tokens are padded to this many columns of a tensor core tile


@triton.jit
def _load_row(x, m: tl.constexpr, x_stride, M, k, cols, K: tl.constexpr, MASKED: tl.constexpr):
    """Load columns k + cols of token m in float32, with zeros past the last token."""
    if MASKED:
        row = tl.load(x + m * x_stride + k + cols, mask=(cols < K - k) & (m < M), other=0.0)
    elif m == 0:
        row = tl.load(x + k + cols)
    else:
        row = tl.load(x + m * x_stride + k + cols, mask=(cols >= 0) & (m < M), other=0.0)
    return row.to(tl.float32)[None, :]


@triton.jit
def _load_weights(w_ptrs, k, cols, K: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(w_ptrs + k, mask=(cols < K - k)[None, :], other=0.0, eviction_policy="evict_first")
    return tl.load(w_ptrs + k, eviction_policy="evict_first")


@triton.jit
def _rows_step(
    sums,
    w_tile,
    up_ptrs,
    x,
    x_stride,
    M,
    k,
    cols,
    K: tl.constexpr,
    NUM_M: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_UP: tl.constexpr,
):
    """Add columns k + cols to the sums. Four sums are for the weight rows and four for the up rows."""
    a0, a1, a2, a3, b0, b1, b2, b3 = sums
    w_tile = w_tile.to(tl.float32)
    x0 = _load_row(x, 0, x_stride, M, k, cols, K, MASKED)
    a0 += w_tile * x0
    if NUM_M >= 2:
        x1 = _load_row(x, 1, x_stride, M, k, cols, K, MASKED)
        a1 += w_tile * x1
    if NUM_M >= 4:
        x2 = _load_row(x, 2, x_stride, M, k, cols, K, MASKED)
        x3 = _load_row(x, 3, x_stride, M, k, cols, K, MASKED)
        a2 += w_tile * x2
        a3 += w_tile * x3
    if HAS_UP:
        up_tile = _load_weights(up_ptrs, k, cols, K, MASKED).to(tl.float32)
        b0 += up_tile * x0
        if NUM_M >= 2:
            b1 += up_tile * x1
        if NUM_M >= 4:
            b2 += up_tile * x2
            b3 += up_tile * x3
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    x,
    w,
    y,
    factor,
    softcap: tl.constexpr,
    M,
    N,
    x_stride,
    y_stride,
    factor_stride,
    K: tl.constexpr,
    NUM_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N weight rows by up to NUM_M tokens (1, 2 or 4), over all of K."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
    safe_rows = tl.where(rows < N, rows, 0).to(tl.int64)
    w_ptrs = w + safe_rows[:, None] * K + cols[None, :]
    up_ptrs = w_ptrs + tl.cast(N, tl.int64) * K  # The gate rows come first, then as many up rows.
    HAS_UP: tl.constexpr = EPILOGUE == 1
    WHOLE: tl.constexpr = K // BLOCK_K * BLOCK_K
    # Sums stay spread over K in registers until the end, so the loop needs no shuffles.
    zero = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    enter(PDL)
    for k in tl.range(0, WHOLE, BLOCK_K, num_stages=STAGES):
        tile = _load_weights(w_ptrs, k, cols, K, False)
        sums = _rows_step(sums, tile, up_ptrs, x, x_stride, M, k, cols, K, NUM_M, False, HAS_UP)
    if WHOLE < K:
        tile = _load_weights(w_ptrs, WHOLE, cols, K, True)
        sums = _rows_step(sums, tile, up_ptrs, x, x_stride, M, WHOLE, cols, K, NUM_M, True, HAS_UP)
    a0, a1, a2, a3, b0, b1, b2, b3 = sums
    _store_row(y, factor, tl.sum(a0, 1), tl.sum(b0, 1), 0, rows, M, N, y_stride, factor_stride, softcap, EPILOGUE)
    if NUM_M >= 2:
        _store_row(y, factor, tl.sum(a1, 1), tl.sum(b1, 1), 1, rows, M, N, y_stride, factor_stride, softcap, EPILOGUE)
    if NUM_M >= 4:
        _store_row(y, factor, tl.sum(a2, 1), tl.sum(b2, 1), 2, rows, M, N, y_stride, factor_stride, softcap, EPILOGUE)
        _store_row(y, factor, tl.sum(a3, 1), tl.sum(b3, 1), 3, rows, M, N, y_stride, factor_stride, softcap, EPILOGUE)


@triton.jit
def _store_row(
    y, factor, total, up, m: tl.constexpr, rows, M, N, y_stride, factor_stride, softcap: tl.constexpr, EPILOGUE: tl.constexpr
):
    mask = (rows < N) & (m < M)
    out = finish(total, up, factor, m * factor_stride + rows, mask, softcap, EPILOGUE)
    tl.store(y + m * y_stride + rows, out.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _tiles_kernel(
    x, w, y, factor, parts, arrivals, softcap: tl.constexpr, M, N, x_stride, y_stride, factor_stride, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, KEEP_PARTS: tl.constexpr,
    STAGES: tl.constexpr, EPILOGUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK_N weight rows, BLOCK_M tokens], over K or one of SPLIT_K parts of K.

    With KEEP_PARTS, y has a plane [M, N] for each part, and the caller sums the planes.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)
    safe_rows = tl.where(rows < N, rows, 0).to(tl.int64)
    w_ptrs = w + safe_rows[:, None] * K + cols[None, :]
    up_ptrs = w_ptrs + tl.cast(N, tl.int64) * K
    x_ptrs = x + tokens[None, :] * x_stride + cols[:, None]
    is_token = tokens < M
    part_k: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    begin = tl.program_id(1) * part_k
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    enter(PDL)
    for step in tl.range(0, part_k, BLOCK_K, num_stages=STAGES):
        k = begin + step
        if K % (BLOCK_K * SPLIT_K) == 0:
            w_tile = tl.load(w_ptrs + k, eviction_policy="evict_first")
            x_tile = tl.load(x_ptrs + k, mask=is_token[None, :], other=0.0)
        else:
            inside = cols < K - k
            w_tile = tl.load(w_ptrs + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(x_ptrs + k, mask=is_token[None, :] & inside[:, None], other=0.0)
        total = tl.dot(w_tile, x_tile, total)
        if EPILOGUE == 1:
            if K % (BLOCK_K * SPLIT_K) == 0:
                up_tile = tl.load(up_ptrs + k, eviction_policy="evict_first")
            else:
                inside = cols < K - k
                up_tile = tl.load(up_ptrs + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            up = tl.dot(up_tile, x_tile, up)
    store_sums(
        total, up, rows[:, None], tokens[None, :], y, factor, parts, arrivals + tl.program_id(0), M, N, y_stride, factor_stride,
        softcap, SPLIT_K, KEEP_PARTS, EPILOGUE,
    )  # fmt: skip


_workspaces: dict[tuple[torch.device, str], tuple[Tensor, Tensor]] = {}


def workspace(device: torch.device, user: str = "linear") -> tuple[Tensor, Tensor]:
    """Return the parts and arrival counters of `user` on `device`. They are allocated once.

    Launches that share it never overlap, and each one leaves the counters at zero.
    """
    if (device, user) not in _workspaces:
        parts = torch.empty(MAX_PARTS, dtype=torch.float32, device=device)
        _workspaces[device, user] = parts, torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)
    return _workspaces[device, user]


def describe(x_MK: Tensor, weight_NK: Tensor, out: Tensor, tile: Tile, epilogue: int = PLAIN, **extra: Any) -> Launch:
    """Describe the launch of `tile` for these tensors.

    `out` is [M, N], or float32 [split_k, M, N] if the parts of a split K are not summed. `extra` may have factor (GELU_TIMES),
    softcap (SOFTCAP), pdl and shared (bytes).
    """
    if tile.kernel == "stream":
        return describe_stream(x_MK, weight_NK, out, tile, epilogue, workspace=workspace(x_MK.device), **extra)
    num_tokens, size_k = x_MK.shape
    num_rows = out.shape[-1]
    keeps_parts = out.dim() == 3
    factor, softcap, pdl = extra.get("factor"), float(extra.get("softcap") or 1.0), bool(extra.get("pdl", False))
    common: dict[str, Any] = {
        "x": x_MK,
        "w": weight_NK,
        "y": out,
        "factor": x_MK if factor is None else factor,
        "softcap": softcap,
        "M": num_tokens,
        "N": num_rows,
        "x_stride": x_MK.stride(0),
        "y_stride": out.stride(-2),
        "factor_stride": 0 if factor is None else factor.stride(0),
        "K": size_k,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.num_stages,
        "EPILOGUE": epilogue,
        "PDL": pdl,
    }
    tiles = cdiv(num_rows, tile.block_n)
    if tile.kernel == "rows":
        assert num_tokens <= 4, f"the rows kernel supports 1 to 4 tokens, got {num_tokens}"
        common["NUM_M"] = 1 if num_tokens == 1 else 2 if num_tokens == 2 else 4
        return Launch(_rows_kernel, (tiles,), common, options(tile.num_warps, pdl))
    common["BLOCK_M"] = max(MIN_COLUMNS, next_power_of_2(num_tokens))
    common["SPLIT_K"] = tile.split_k
    common["KEEP_PARTS"] = keeps_parts
    rows_per_stage = common["BLOCK_M"] + tile.block_n * (2 if epilogue == GATED else 1)
    limit = int(extra.get("shared") or shared_bytes(x_MK.device))
    common["STAGES"] = stages_that_fit(tile.num_stages, rows_per_stage * tile.block_k * x_MK.element_size(), limit)
    is_joined = tile.split_k > 1 and not keeps_parts
    parts, arrivals = workspace(x_MK.device) if is_joined else (out, out)
    if is_joined:
        planes = tile.split_k * (2 if epilogue == GATED else 1)
        assert planes * common["BLOCK_M"] * num_rows <= MAX_PARTS, f"{tile} needs more workspace than is allocated"
        assert tiles <= MAX_ARRIVALS, f"{tile} needs more arrival counters than are allocated"
    return Launch(
        _tiles_kernel, (tiles, tile.split_k), {**common, "parts": parts, "arrivals": arrivals}, options(tile.num_warps, pdl)
    )


def _run(x_MK: Tensor, weight_NK: Tensor, out: Tensor, tile: Tile, epilogue: int, **extra: Any) -> Tensor:
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    if tile.kernel == "stream":
        describe(x_MK, weight_NK, out, tile, epilogue, pdl=uses_pdl(x_MK.device), **extra).run()
        return out
    factor, softcap = extra.get("factor"), extra.get("softcap")
    tensors: tuple[Tensor, ...] = (x_MK, weight_NK, out) if factor is None else (x_MK, weight_NK, out, factor)
    if tile.split_k > 1 and out.dim() == 2:
        tensors += workspace(x_MK.device)
    shapes = x_MK.shape, x_MK.stride(0), out.shape, out.stride(), None if factor is None else factor.stride(0)
    run_prepared(
        ("linear", x_MK.get_device(), x_MK.dtype, weight_NK.dtype, out.dtype, tile, epilogue, softcap, shapes),
        (cdiv(out.shape[-1], tile.block_n), tile.split_k if tile.kernel == "tiles" else 1),
        tensors,
        lambda: describe(x_MK, weight_NK, out, tile, epilogue, pdl=uses_pdl(x_MK.device), **extra),
    )
    return out


def _tile_for(x_MK: Tensor, weight_NK: Tensor, num_rows: int, epilogue: int) -> Tile | None:
    """Return the tile, or None if torch is faster, the kernels do not support the tensors, or a step may run meanwhile."""
    if is_beside_steps() or not x_MK.shape[0] or not weight_NK.is_contiguous() or x_MK.dim() != 2:
        return None
    if x_MK.is_cuda and x_MK.dtype != torch.bfloat16:
        return None  # Tensor cores would round float32 to tf32.
    shape = x_MK.shape[0], num_rows, x_MK.shape[1], epilogue
    tile = choose_stream(*shape) if is_replayed() and can_bulk_copy(x_MK, weight_NK) else None
    tile = tile or choose_tile(*shape)
    return None if tile.kernel == "cublas" else tile


def linear(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight^T, [M, N]."""
    tile = _tile_for(x_MK, weight_NK, weight_NK.shape[0], PLAIN)
    if tile is None:
        return by_cublas(x_MK, weight_NK)
    return _run(x_MK, weight_NK, x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0]), tile, PLAIN)


def by_cublas(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight^T with a kernel of cuBLAS."""
    y_MN = product(x_MK, weight_NK)
    return F.linear(x_MK, weight_NK) if y_MN is None else y_MN


def linear_parts(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return `linear` as [M, N], or as float32 parts [S, M, N] that the caller sums if K is split over programs.

    Summing the parts here would add 1 to 2 us of waiting to a kernel that takes 4 to 16 us.
    """
    tile = _tile_for(x_MK, weight_NK, weight_NK.shape[0], PLAIN)
    if tile is None or tile.split_k == 1:
        return linear(x_MK, weight_NK)
    shape = (tile.split_k, x_MK.shape[0], weight_NK.shape[0])
    return _run(x_MK, weight_NK, torch.empty(shape, dtype=torch.float32, device=x_MK.device), tile, PLAIN)


def gated_linear(x_MK: Tensor, gate_up_NK: Tensor) -> Tensor:
    """Return gelu_tanh(x @ gate^T) * (x @ up^T), [M, F]. The weight's rows are gate, then up."""
    num_rows = gate_up_NK.shape[0] // 2
    tile = _tile_for(x_MK, gate_up_NK, num_rows, GATED)
    if tile is not None:
        return _run(x_MK, gate_up_NK, x_MK.new_empty(x_MK.shape[0], num_rows), tile, GATED)
    y_MF = gated_product(x_MK, gate_up_NK)
    return gelu_mul(by_cublas(x_MK, gate_up_NK)) if y_MF is None else y_MF


def linear_gelu_times(x_MK: Tensor, weight_NK: Tensor, factor_MN: Tensor) -> Tensor:
    """Return gelu_tanh(x @ weight^T) * factor, [M, N]. Per-layer embeddings use it as their gate."""
    tile = _tile_for(x_MK, weight_NK, weight_NK.shape[0], GELU_TIMES)
    if tile is None:
        return gelu_gate(F.linear(x_MK, weight_NK), factor_MN)
    return _run(x_MK, weight_NK, x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0]), tile, GELU_TIMES, factor=factor_MN)


def capped_head(x_LD: Tensor, table_VD: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x @ table^T / cap), [L, V] float32. If `cap` is None, logits are not capped.

    This kernel does not round the logits before the cap.
    """
    tile = _tile_for(x_LD, table_VD, table_VD.shape[0], SOFTCAP)
    if tile is None:
        return softcap(F.linear(x_LD, table_VD), cap)
    out = torch.empty(x_LD.shape[0], table_VD.shape[0], dtype=torch.float32, device=x_LD.device)
    return _run(x_LD, table_VD, out, tile, PLAIN if cap is None else SOFTCAP, softcap=cap)
