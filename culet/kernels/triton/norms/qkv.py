"""Turn the merged projection into the inputs of attention. One launch does the norm per head, rope and the KV store.

    n = projected head / rms, q = rope(n * w), k = rope(n * w), v = n                 (columns nope | rot)

K=V layers have one projection with columns rot | nope. There v = n and k = rope(n * w), which turns the rot columns. A latent
row is v_rot | nope | k_rot, one per KV head, and queries include the key norm's weights for the nope columns.

A program handles one token and a few heads, either queries or KV heads. New KV is written to fresh tensors and to its
`kv_address`, which is page * page_tokens + offset, or -1 if it is not stored.

Shapes: T tokens · N query heads · G KV heads · M = N + G · H head size · R rotated dims · X all projected columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2, run_prepared
from culet.kernels.types import HeadShape, Rope


class StoreAddresses(NamedTuple):
    """The address of each token's new KV, page * page_tokens + offset, or -1 if it is not stored."""

    kv_address_T: Tensor


@triton.jit(do_not_specialize=["T"])
def _rope_kernel(
    positions, inv_freq, cos, sin, T, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):
    """Compute cos and signed sin [T, 2 * HALF] of position * frequency."""
    enter(PDL)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_H)
    inside = (tokens < T)[:, None] & (cols < HALF)[None, :]
    position = tl.load(positions + tokens, mask=tokens < T, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(inv_freq + cols, mask=cols < HALF, other=0.0)[None, :]
    c, s = tl.cos(angle), tl.sin(angle)
    offsets = tokens[:, None] * (2 * HALF) + cols[None, :]
    tl.store(cos + offsets, c, mask=inside)
    tl.store(cos + offsets + HALF, c, mask=inside)
    tl.store(sin + offsets, -s, mask=inside)
    tl.store(sin + offsets + HALF, s, mask=inside)


class _Parts(NamedTuple):
    """Both halves of the rotated columns of some heads, and their other columns. The last are unused if all are rotated."""

    first: Any
    second: Any
    nope: Any


@triton.jit
def _load_heads(
    base, heads, is_head,
    ROT: tl.constexpr, NOPE: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Load heads of the [.., H] rows at `base` in float32. Rotated columns begin at ROT, the others at NOPE."""
    half = tl.arange(0, R // 2)[None, :]
    rows = base + heads[:, None] * H
    first = tl.load(rows + ROT + half, mask=is_head[:, None], other=0.0).to(tl.float32)
    second = tl.load(rows + ROT + R // 2 + half, mask=is_head[:, None], other=0.0).to(tl.float32)
    plain = tl.arange(0, BLOCK_P)[None, :]
    nope = first
    if R < H:
        nope = tl.load(rows + NOPE + plain, mask=is_head[:, None] & (plain < H - R), other=0.0).to(tl.float32)
    return _Parts(first, second, nope)


@triton.jit
def _load_projected(
    base, heads, is_head, part_stride, NUM_PARTS: tl.constexpr,
    ROT: tl.constexpr, NOPE: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Load heads whose rows are the sum of NUM_PARTS rows, `part_stride` apart."""
    x = _load_heads(base, heads, is_head, ROT, NOPE, H, R, BLOCK_P)
    for part in tl.static_range(1, NUM_PARTS):
        y = _load_heads(base + part * part_stride, heads, is_head, ROT, NOPE, H, R, BLOCK_P)
        x = _Parts(x.first + y.first, x.second + y.second, x.nope + y.nope)
    return x


@triton.jit
def _inverse_rms(x, H: tl.constexpr, R: tl.constexpr, eps: tl.constexpr):
    """Return 1 / root mean square of each head, as a column."""
    squares = tl.sum(x.first * x.first, 1) + tl.sum(x.second * x.second, 1)
    if R < H:
        squares += tl.sum(x.nope * x.nope, 1)
    return tl.rsqrt(squares / H + eps)[:, None]


@triton.jit
def _scaled(x, scale):
    return _Parts(x.first * scale, x.second * scale, x.nope * scale)


@triton.jit
def _weighted(x, weight):
    return _Parts(x.first * weight.first, x.second * weight.second, x.nope * weight.nope)


@triton.jit
def _load_rope(cos, sin, token, half, R: tl.constexpr):
    """Load cos and sin of the token's angles, one per pair of rotated columns."""
    return tl.load(cos + token * R + half), tl.load(sin + token * R + R // 2 + half)


@triton.jit
def _as_stored(x, IS_FP8: tl.constexpr):
    """Round keys or values as in pages, so that attention reads the same fresh and stored KV."""
    if IS_FP8:
        x = x.to(tl.float8e4nv).to(tl.float32)
    return x


@triton.jit
def _all_as_stored(x, IS_FP8: tl.constexpr):
    return _Parts(_as_stored(x.first, IS_FP8), _as_stored(x.second, IS_FP8), _as_stored(x.nope, IS_FP8))


@triton.jit
def _turned(x, c, s, IS_FP8: tl.constexpr):
    """Apply rope to the rotated columns. With IS_FP8, round all columns to fp8 as in pages."""
    first = _as_stored(x.first * c - x.second * s, IS_FP8)
    second = _as_stored(x.second * c + x.first * s, IS_FP8)
    return _Parts(first, second, _as_stored(x.nope, IS_FP8))


@triton.jit
def _store_heads(
    rows, x, mask,
    ROT: tl.constexpr, NOPE: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Store heads at `rows`, with rotated columns from ROT on and the others from NOPE on."""
    half = tl.arange(0, R // 2)[None, :]
    plain = tl.arange(0, BLOCK_P)[None, :]
    tl.store(rows + ROT + half, x.first.to(rows.dtype.element_ty), mask=mask)
    tl.store(rows + ROT + R // 2 + half, x.second.to(rows.dtype.element_ty), mask=mask)
    if R < H:
        tl.store(rows + NOPE + plain, x.nope.to(rows.dtype.element_ty), mask=mask & (plain < H - R))


@triton.jit
def _store_latent(rows, k, v, mask, H: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr):
    """Store rows v_rot | nope | k_rot. The first H columns of a row are V and the last H are K."""
    _store_heads(rows, v, mask, 0, R, H, R, BLOCK_P)
    _store_heads(rows, k, mask, H, 0, R, R, BLOCK_P)  # as if the heads had rotated columns only


@triton.jit
def _prepare_queries(
    base, weight, cos, sin, q_out, token, half, heads, part_stride,
    N: tl.constexpr, H: tl.constexpr, R: tl.constexpr, eps: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr, NUM_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute queries for some heads of one token, whose projection begins at `base`."""
    ROT: tl.constexpr = H - R  # where rotated columns begin. The others begin at 0.
    is_head = heads < N
    if HEADS == 1:
        w = _load_heads(weight, heads, is_head, ROT, 0, H, R, BLOCK_P)
    enter(PDL)
    c, s = _load_rope(cos, sin, token, half, R)
    q = _load_projected(base, heads, is_head, part_stride, NUM_PARTS, ROT, 0, H, R, BLOCK_P)
    scale = _inverse_rms(q, H, R, eps)
    if HEADS > 1:
        w = _load_heads(weight, heads, is_head, ROT, 0, H, R, BLOCK_P)
    q = _Parts(q.first * scale * w.first, q.second * scale * w.second, q.nope * scale * w.nope)
    rows = q_out + (token * N + heads)[:, None] * H
    _store_heads(rows, _turned(q, c, s, False), is_head[:, None], ROT, 0, H, R, BLOCK_P)


@triton.jit
def _prepare_values(
    base, n, heads, is_head, part_stride,
    H: tl.constexpr, R: tl.constexpr, eps: tl.constexpr, K_EQ_V: tl.constexpr, NORM_V: tl.constexpr, IS_FP8: tl.constexpr,
    BLOCK_P: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Return values of some heads, from their own projection at `base` or from the keys' normed projection `n`."""
    if K_EQ_V:
        v = n
    else:
        v = _load_projected(base, heads, is_head, part_stride, NUM_PARTS, 0, R, H, R, BLOCK_P)
        if NORM_V:
            v = _scaled(v, _inverse_rms(v, H, R, eps))
    return _all_as_stored(v, IS_FP8)


@triton.jit
def _prepare_keys_values(
    base, weight, cos, sin, kv_addresses, planes, k_out, v_out, token, half, heads,
    part_stride, plane_stride, page_stride, head_stride, page_tokens,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, eps: tl.constexpr,
    K_EQ_V: tl.constexpr, IS_LATENT: tl.constexpr, NORM_V: tl.constexpr, IS_FP8: tl.constexpr, HAS_STORE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr, NUM_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute keys and values for some heads of one token, whose projection begins at `base`. HAS_STORE also stores them."""
    ROT: tl.constexpr = 0 if K_EQ_V else H - R  # where rotated and other columns begin in the projection
    NOPE: tl.constexpr = R if K_EQ_V else 0
    is_head = heads < G
    mask = is_head[:, None]
    is_stored = mask & HAS_STORE
    cache_rows = planes + heads[:, None].to(tl.int64) * head_stride
    if HEADS == 1:
        w = _load_heads(weight + N * H, heads, is_head, ROT, NOPE, H, R, BLOCK_P)
    enter(PDL)
    c, s = _load_rope(cos, sin, token, half, R)
    n = _load_projected(base + N * H, heads, is_head, part_stride, NUM_PARTS, ROT, NOPE, H, R, BLOCK_P)
    if HAS_STORE:
        address = tl.load(kv_addresses + token)
        is_stored = mask & (address >= 0)
        address = tl.maximum(address, 0)
        cache_rows += (address // page_tokens) * page_stride + (address % page_tokens) * WIDTH
    n = _scaled(n, _inverse_rms(n, H, R, eps))
    if HEADS > 1:
        w = _load_heads(weight + N * H, heads, is_head, ROT, NOPE, H, R, BLOCK_P)
    k = _turned(_weighted(n, w), c, s, IS_FP8)
    if IS_LATENT:
        v = _all_as_stored(n, IS_FP8)
        _store_latent(k_out + (token * G + heads)[:, None] * WIDTH, k, v, mask, H, R, BLOCK_P)
        if HAS_STORE:
            _store_latent(cache_rows, k, v, is_stored, H, R, BLOCK_P)
    else:
        offset = (token * G + heads)[:, None] * H
        k_rows, v_rows = k_out + offset, v_out + offset
        _store_heads(k_rows, k, mask, H - R, 0, H, R, BLOCK_P)
        if HAS_STORE:
            _store_heads(cache_rows, k, is_stored, H - R, 0, H, R, BLOCK_P)
        v = _prepare_values(
            base + (N + G) * H, n, heads, is_head, part_stride, H, R, eps, K_EQ_V, NORM_V, IS_FP8, BLOCK_P, NUM_PARTS
        )
        _store_heads(v_rows, v, mask, 0, R, H, R, BLOCK_P)
        if HAS_STORE:
            _store_heads(cache_rows + plane_stride, v, is_stored, 0, R, H, R, BLOCK_P)


@triton.jit
def _prepare_kernel(
    qkv, weight, cos, sin, kv_addresses, planes, q_out, k_out, v_out,
    qkv_stride, part_stride, plane_stride, page_stride, head_stride, page_tokens,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, eps: tl.constexpr,
    K_EQ_V: tl.constexpr, IS_LATENT: tl.constexpr, NORM_V: tl.constexpr, IS_FP8: tl.constexpr, HAS_STORE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr, NUM_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Prepare HEADS heads of one token. The first cdiv(N, HEADS) programs do queries. The others do keys and values.

    A program with one head loads its weights before the wait. A program with several loads them later, since it needs the
    registers. The projection is the sum of NUM_PARTS parts.
    """
    token = tl.program_id(1).to(tl.int64)
    half = tl.arange(0, R // 2)[None, :]
    base = qkv + token * qkv_stride
    NUM_Q: tl.constexpr = (N + HEADS - 1) // HEADS
    if tl.program_id(0) < NUM_Q:
        heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        _prepare_queries(
            base, weight, cos, sin, q_out, token, half, heads, part_stride, N, H, R, eps, HEADS, BLOCK_P, NUM_PARTS, PDL
        )
    else:
        heads = (tl.program_id(0) - NUM_Q) * HEADS + tl.arange(0, HEADS)
        _prepare_keys_values(
            base, weight, cos, sin, kv_addresses, planes, k_out, v_out, token, half, heads,
            part_stride, plane_stride, page_stride, head_stride, page_tokens, N, G, H, R, WIDTH, eps,
            K_EQ_V, IS_LATENT, NORM_V, IS_FP8, HAS_STORE, HEADS, BLOCK_P, NUM_PARTS, PDL,
        )  # fmt: skip


def describe_rope(positions_T: Tensor, inv_freq: Tensor, rope: Rope, pdl: bool) -> Launch:
    num_tokens, half = positions_T.shape[0], inv_freq.shape[0]
    arguments: dict[str, Any] = {"positions": positions_T, "inv_freq": inv_freq, "cos": rope.cos_T1R, "sin": rope.sin_T1R}
    arguments |= {"T": num_tokens, "HALF": half, "BLOCK_T": 4, "BLOCK_H": next_power_of_2(half), "PDL": pdl}
    return Launch(_rope_kernel, (cdiv(num_tokens, 4),), arguments, options(4, pdl))


# Up to this many tokens, a program has one head, for latency. Above it, a program has several, because starting a program costs
# more than its reads.
FEW_TOKENS = 64


def _heads_per_program(num_tokens: int, head_dim: int) -> int:
    return 1 if num_tokens <= FEW_TOKENS else max(1, 1024 // head_dim)


def _prepare_grid(num_tokens: int, heads: HeadShape) -> tuple[int, int]:
    per_program = _heads_per_program(num_tokens, heads.head_dim)
    return cdiv(heads.num_heads, per_program) + cdiv(heads.num_kv_heads, per_program), num_tokens


def describe_prepare(
    qkv_TX: Tensor,
    weight_MH: Tensor,
    rope: Rope,
    planes: Tensor | None,
    kv_address_T: Tensor | None,
    heads: HeadShape,
    outs: tuple[Tensor, Tensor, Tensor],
    pdl: bool,
) -> Launch:
    """Describe the launch. `outs` is (q, k, v), or (q, rows, rows) with latent rows. `qkv_TX` may be parts."""
    num_tokens = qkv_TX.shape[-2]
    num_parts, part_stride = (qkv_TX.shape[0], qkv_TX.stride(0)) if qkv_TX.dim() == 3 else (1, 0)
    size, rotated = heads.head_dim, heads.rotated_dims
    has_store = kv_address_T is not None and planes is not None
    per_program = _heads_per_program(num_tokens, size)
    arguments: dict[str, Any] = {
        "qkv": qkv_TX,
        "weight": weight_MH,
        "cos": rope.cos_T1R,
        "sin": rope.sin_T1R,
        "kv_addresses": kv_address_T if has_store else outs[0],
        "planes": planes if has_store else outs[0],
        "q_out": outs[0],
        "k_out": outs[1],
        "v_out": outs[2],
        "qkv_stride": qkv_TX.stride(-2),
        "part_stride": part_stride,
        "plane_stride": planes.stride(0) if has_store and planes is not None else 0,
        "page_stride": planes.stride(1) if has_store and planes is not None else 0,
        "head_stride": planes.stride(2) if has_store and planes is not None else 0,
        "page_tokens": planes.shape[3] if has_store and planes is not None else 1,
        "N": heads.num_heads,
        "G": heads.num_kv_heads,
        "H": size,
        "R": rotated,
        "WIDTH": size + rotated if heads.latent else size,
        "eps": heads.eps,
        "K_EQ_V": heads.k_eq_v,
        "IS_LATENT": heads.latent,
        "NORM_V": heads.norm_v,
        "IS_FP8": planes is not None and planes.dtype is torch.float8_e4m3fn,
        "HAS_STORE": has_store,
        "HEADS": per_program,
        "BLOCK_P": max(1, next_power_of_2(size - rotated)),
        "NUM_PARTS": num_parts,
        "PDL": pdl,
    }
    return Launch(_prepare_kernel, _prepare_grid(num_tokens, heads), arguments, options(1, pdl))


def rope(positions_T: Tensor, inv_freq: Tensor) -> Rope:
    """Return cos and signed sin of position * frequency. Call once per step for all layers of a kind."""
    shape = (positions_T.shape[0], 1, 2 * inv_freq.shape[0])
    cos, sin = (torch.empty(shape, dtype=torch.float32, device=positions_T.device) for _ in range(2))
    out = Rope(cos, sin)
    if positions_T.shape[0]:
        describe_rope(positions_T, inv_freq, out, uses_pdl(cos.device)).run()
    return out


def stores(kv_address_T: Tensor, page_tokens: int) -> StoreAddresses:
    """Convert KV addresses to the form that `prepare_qkv` takes. They stay unchanged, so the host does not wait.

    An address is page * page_tokens + offset, or -1 if the token is not stored.
    """
    return StoreAddresses(kv_address_T)


def prepare_q(q_TX: Tensor, weight_NH: Tensor, rope: Rope, heads: HeadShape, dtype: torch.dtype | None = None) -> Tensor:
    """Apply per-head norm, weight and rope to queries. Return [T, N, H] in `dtype` (default: q's). `q_TX` may be parts."""
    q = q_TX.new_empty(q_TX.shape[-2], heads.num_heads, heads.head_dim, dtype=dtype or q_TX.dtype)
    # A layer that reads another layer's KV has no KV heads, so no program writes the last two outputs.
    _prepare(q_TX, weight_NH, rope, None, None, heads, (q, q, q))
    return q


def prepare_qkv(
    qkv_TX: Tensor,
    weight_MH: Tensor,
    rope: Rope,
    planes: Tensor,
    where: StoreAddresses | None,
    heads: HeadShape,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as attention reads them, and store the new KV in its pages.

    `weight_MH` has a row for each query and key head. `planes` is [plane, page, G, token, width], in the activations' dtype or
    e4m3. The results are q [T, N, H], k and v [T, G, H]. In a latent layer, k and v are overlapping views. k and v are rounded
    as in pages. All are in `dtype`, by default that of `qkv_TX`, which may be parts [S, T, X].
    """
    num_tokens, size, num_kv = qkv_TX.shape[-2], heads.head_dim, heads.num_kv_heads
    dtype = dtype or qkv_TX.dtype
    q = qkv_TX.new_empty(num_tokens, heads.num_heads, size, dtype=dtype)
    if heads.latent:
        row = qkv_TX.new_empty(num_tokens, num_kv, size + heads.rotated_dims, dtype=dtype)
        outs, k, v = (q, row, row), row[..., heads.rotated_dims :], row[..., :size]
    else:
        k, v = qkv_TX.new_empty(num_tokens, num_kv, size, dtype=dtype), qkv_TX.new_empty(num_tokens, num_kv, size, dtype=dtype)
        outs = (q, k, v)
    _prepare(qkv_TX, weight_MH, rope, planes, None if where is None else where.kv_address_T, heads, outs)
    return q, k, v


def _prepare(
    qkv_TX: Tensor,
    weight_MH: Tensor,
    rope: Rope,
    planes: Tensor | None,
    kv_address_T: Tensor | None,
    heads: HeadShape,
    outs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Run the launch of `describe_prepare` if there are tokens."""
    q = outs[0]
    num_tokens = q.shape[0]
    if not num_tokens:
        return
    stored = () if planes is None or kv_address_T is None else (planes, kv_address_T)
    layout = None if planes is None else (planes.dtype, planes.stride(), planes.shape[3])
    types = q.get_device(), qkv_TX.dtype, q.dtype
    num_parts = qkv_TX.shape[0] if qkv_TX.dim() == 3 else 1
    run_prepared(
        ("prepare", types, heads, num_tokens <= FEW_TOKENS, num_parts, qkv_TX.stride(), layout, bool(stored)),
        _prepare_grid(num_tokens, heads),
        (qkv_TX, weight_MH, rope.cos_T1R, rope.sin_T1R, *stored, *dict.fromkeys(outs)),  # without duplicate outputs
        lambda: describe_prepare(qkv_TX, weight_MH, rope, planes, kv_address_T, heads, outs, uses_pdl(q.device)),
    )
