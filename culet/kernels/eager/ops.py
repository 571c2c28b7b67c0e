"""Eager twins of the basic kernels, in plain torch on any device. The GPU kernels are tested against them.

Arithmetic is float32. Each function rounds once, at its end, to the dtype of the activations.

Shapes: T tokens · D model · M heads of q (and k) · N query heads · G KV heads · H head size · R rotated dims ·
X all projected columns · F MLP width · E experts · K experts per token · P per-layer width · V vocabulary · S stored tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from culet.kernels.types import HeadShape, Rope

PLE_SCALE = 2.0**-0.5


class StoreRows(NamedTuple):
    """Token `token_S` is stored in row `offset_S` of page `page_S`. `token_S` is None if all tokens are stored."""

    token_S: Tensor | None
    page_S: Tensor
    offset_S: Tensor


@lru_cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def _rms(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x ** 2) + eps) over the last dim, as a new float32 tensor."""
    # This makes fewer and cheaper calls than F.rms_norm, which makes six on a CPU. It takes 13 instead of 21 us on 384 columns.
    x = x.float()
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_constant(eps, x.device), size, size, value=1.0 / x.shape[-1]).rsqrt_()


def _rms_weighted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms(x, eps).mul_(weight)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x.to(dtype), without the cost of a call if x already has that dtype."""
    return x if x.dtype is dtype else x.to(dtype)


def _as_stored(x: Tensor, planes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert float32 keys or values to `dtype`, rounded as in pages, so that attention reads the same fresh and stored KV."""
    return _as(x.to(planes.dtype) if planes.dtype is torch.float8_e4m3fn else x, dtype)


def embed(token_ids_T: Tensor, table_VD: Tensor, scale: float) -> Tensor:
    """Return table[ids] * scale, [T, D]. The caller has rounded `scale` to the table's dtype."""
    return table_VD.index_select(0, token_ids_T).mul_(scale)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight. The factor is the weight itself, not 1 + weight."""
    return _as(_rms_weighted(x_TD, weight_D, eps), x_TD.dtype)


def _summed(parts: Tensor) -> Tensor:
    """Return [T, D], the sum of the parts if the tensor is [S, T, D]."""
    return parts if parts.dim() == 2 else parts.sum(0)


def residual_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor | None, scalar: Tensor | None, next_weight_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return x' = (x + norm(delta) * weight) * scalar and the next block's input, norm(x') * next_weight.

    The second is None if `next_weight_D` is None. If `weight_D` is None, delta is not normed, as in decoders that norm only
    before their blocks. delta may be parts [S, T, D], which are summed.
    """
    delta_TD = _summed(delta_TD)
    total = delta_TD.float() + x_TD if weight_D is None else _rms_weighted(delta_TD, weight_D, eps).add_(x_TD)
    if scalar is not None:
        total.mul_(scalar)
    x_TD = _as(total, x_TD.dtype)
    # The next norm reads the rounded stream, as all later ops do.
    return x_TD, None if next_weight_D is None else rms_norm(x_TD, next_weight_D, eps)


def sum_norms(a_TD: Tensor, b_TD: Tensor, weight_a_D: Tensor, weight_b_D: Tensor, eps: float) -> Tensor:
    """Return norm(a) * weight_a + norm(b) * weight_b, the dense MLP plus the experts before their norm. `a_TD` may be parts."""
    return _as(_rms_weighted(_summed(a_TD), weight_a_D, eps).add_(_rms_weighted(b_TD, weight_b_D, eps)), b_TD.dtype)


def rope(positions_T: Tensor, inv_freq: Tensor) -> Rope:
    """Return cos and signed sin of position * frequency. Call once per step for all layers of a kind."""
    angle = positions_T.float()[:, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    return Rope(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def _rotate(x_TMR: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (i, i + R/2) by its token's angle."""
    return torch.addcmul(x_TMR * rope.cos_T1R, x_TMR.roll(x_TMR.shape[-1] // 2, -1), rope.sin_T1R)


def _rotate_last(x_TMH: Tensor, rope: Rope) -> Tensor:
    """Rotate the last R of the columns `nope | rot`. x may be overwritten."""
    nope = x_TMH.shape[-1] - rope.cos_T1R.shape[-1]
    if nope == 0:
        return _rotate(x_TMH, rope)
    x_TMH[..., nope:] = _rotate(x_TMH[..., nope:], rope)
    return x_TMH


def stores(kv_address_T: Tensor, page_tokens: int) -> StoreRows | None:
    """Convert KV addresses to the form that `prepare_qkv` takes. Return None if no token is stored.

    An address is page * page_tokens + offset, or -1 if the token is not stored.
    """
    token_S = None
    if bool((kv_address_T < 0).any()):
        token_S = torch.nonzero(kv_address_T >= 0).squeeze(1)
        kv_address_T = kv_address_T[token_S]
    if kv_address_T.numel() == 0:
        return None
    return StoreRows(token_S, kv_address_T // page_tokens, kv_address_T % page_tokens)


def prepare_q(q_TX: Tensor, weight_NH: Tensor, rope: Rope, heads: HeadShape, dtype: torch.dtype | None = None) -> Tensor:
    """Apply per-head norm, weight and rope to queries. Return [T, N, H] in `dtype` (default: q's). `q_TX` may be parts."""
    dtype, q_TX = dtype or q_TX.dtype, _summed(q_TX)
    q = _rms(q_TX.view(-1, heads.num_heads, heads.head_dim), heads.eps).mul_(weight_NH)
    return _as(_rotate_last(q, rope), dtype)


def prepare_qkv(
    qkv_TX: Tensor,
    weight_MH: Tensor,
    rope: Rope,
    planes: Tensor,
    where: StoreRows | None,
    heads: HeadShape,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as attention reads them, and store the new KV in its pages.

    With n = projected head / rms, q = rope(n * weight), k = rope(n * weight) and v = n (or as projected). `weight_MH` has a
    row for each query and key head. In a latent layer, the query rows include the key norm's weights for the `nope` columns,
    and those columns are 1 in the key rows. `planes` is [plane, page, G, token, width], in the activations' dtype or e4m3.

    The results are q [T, N, H], k and v [T, G, H]. In a latent layer, k and v are overlapping views. k and v are rounded as in
    pages. All are in `dtype`, by default that of `qkv_TX`, which may be parts [S, T, X].
    """
    num_q, num_qk, size, rotated = heads.num_heads, heads.num_heads + heads.num_kv_heads, heads.head_dim, heads.rotated_dims
    dtype, qkv_TX = dtype or qkv_TX.dtype, _summed(qkv_TX)
    normed = _rms(qkv_TX.view(qkv_TX.shape[0], -1, size), heads.eps)
    scaled = normed[:, :num_qk] * weight_MH
    if heads.k_eq_v:
        q = _rotate_last(scaled[:, :num_q], rope)
        k_rot = _rotate(scaled[:, num_q:, :rotated], rope)
        if heads.latent:
            row = _as_stored(torch.cat((normed[:, num_q:], k_rot), -1), planes, dtype)
            k, v = row[..., rotated:], row[..., :size]
            new = row[:, None]
        else:
            k = _as_stored(torch.cat((scaled[:, num_q:, rotated:], k_rot), -1), planes, dtype)
            v = _as_stored(normed[:, num_q:], planes, dtype)
            new = torch.stack((k, v), 1)
    else:
        qk = _rotate_last(scaled, rope)
        values = (normed if heads.norm_v else qkv_TX.view(normed.shape))[:, num_qk:]
        q, k, v = qk[:, :num_q], _as_stored(qk[:, num_q:], planes, dtype), _as_stored(values, planes, dtype)
        new = torch.stack((k, v), 1)
    store(planes, new, where)
    return _as(q, dtype), k, v


def store(planes: Tensor, new_TPGW: Tensor, where: StoreRows | None) -> None:
    """Write rows [T, plane, G, width] to their pages. `planes` is [plane, page, G, token, width]."""
    if where is not None:
        if where.token_S is not None:
            new_TPGW = new_TPGW[where.token_S]
        planes[:, where.page_S, :, where.offset_S] = _as(new_TPGW, planes.dtype)


def gelu_mul(gate_up_TF: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up. The columns are gate | up."""
    gate, up = gate_up_TF.float().chunk(2, -1)
    return _as(F.gelu(gate, approximate="tanh").mul_(up), gate_up_TF.dtype)


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """Return silu(gate) * up. The columns are gate | up. The MLPs of DFlash drafters use this."""
    gate, up = gate_up_TF.float().chunk(2, -1)
    return _as(F.silu(gate).mul_(up), gate_up_TF.dtype)


def gelu_gate(gate_TP: Tensor, value_TP: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * value, for per-layer embeddings."""
    return _as(F.gelu(gate_TP.float(), approximate="tanh").mul_(value_TP), gate_TP.dtype)


def ple_combine(context_TX: Tensor, embedded_TX: Tensor, weight_P: Tensor, scale: float, eps: float) -> Tensor:
    """Return the per-layer inputs [T, layers, P], (norm(context * scale) * weight + embedded) / sqrt(2)."""
    shape = (-1, weight_P.shape[0])
    context = _rms_weighted(context_TX.float().mul(scale).unflatten(-1, shape), weight_P, eps)
    return context.add_(embedded_TX.unflatten(-1, shape)).mul_(PLE_SCALE).to(context_TX.dtype)


def route(x_TD: Tensor, router_ED: Tensor, expert_scale_E: Tensor, top_k: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the weights [T, K] (float32) and ids [T, K] of each token's experts.

    `router_ED` is float32 and includes the router's scale and D ** -0.5. A softmax over the chosen logits equals a softmax
    over all of them, restricted to the chosen ones and renormalised. The experts' own scales are applied after it.
    """
    chosen = F.linear(_rms(x_TD, eps), router_ED).topk(top_k, dim=-1)
    return torch.softmax(chosen.values, -1).mul_(expert_scale_E[chosen.indices]), chosen.indices


def experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """Return the sum over a token's experts of weight * down(gelu_tanh(gate(x)) * up(x)), [T, D]."""
    num_tokens, top_k = experts_TK.shape
    assigned = experts_TK.flatten()
    order = assigned.argsort(stable=True)
    counts = torch.bincount(assigned, minlength=gate_up_EFD.shape[0]).tolist()
    rows = x_TD[order // top_k]
    out = torch.empty(num_tokens * top_k, x_TD.shape[1], dtype=torch.float32, device=x_TD.device)
    parts = []
    for expert, part in enumerate(rows.split(counts)):
        if part.shape[0]:
            parts.append(F.linear(gelu_mul(F.linear(part, gate_up_EFD[expert])), down_EDF[expert]).float())
    if parts:
        out[order] = torch.cat(parts)
    return out.view(num_tokens, top_k, -1).mul_(weights_TK[..., None]).sum(1).to(x_TD.dtype)


def head(x_LD: Tensor, table_VD: Tensor) -> Tensor:
    """Return x @ table^T, [L, V] in the activations' dtype."""
    if x_LD.device.type == "cpu" and 2 < x_LD.shape[0] <= 32:
        # Lookups need a row-major table, and the product is up to twice as fast with it on the left. 8 x 256 x 8192 took 0.66
        # instead of 1.15 ms.
        return torch.mm(table_VD, x_LD.t()).t().contiguous()
    return F.linear(x_LD, table_VD)


def softcap(logits_LV: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap) in float32. float32 logits may be overwritten."""
    logits_LV = logits_LV.float()
    return logits_LV if cap is None else logits_LV.div_(cap).tanh_().mul_(cap)
