"""The Gemma 4 decoder for training: whole packed rows, no cache, everything differentiable.

Weights are kept in float32 and cast to the activations' dtype where they are used. A norm's weight is a trained gain times a
constant, so that all gains start at 1 and share a learning rate. `export.py` writes the product.

Attention is three matrix products and a masked softmax. Fused training kernels do not support head dims of 256 and 512 well,
and with one KV head all query heads of a layer are rows of one product. A document in a packed row is a run of tokens.
`first_BT` is the index in the row of the first token that a token may see. Rope uses positions in the row, since only
distances matter.

Shapes: B rows · T tokens of a row · D model · N query heads · H head size · V vocabulary · F MLP width.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.shapes import GLOBAL, SLIDING, TargetShape

QUERY_CHUNK = 512  # queries of a global layer per product, which skips later keys


class Turn(NamedTuple):
    """cos and sin of each position, [T, rotated pairs], or of each row's positions, [B, T, rotated pairs]."""

    cos: Tensor
    sin: Tensor


class KV(NamedTuple):
    """Keys (normed and turned) and values (normed) of a layer with one KV head, [B, T, H]."""

    k: Tensor
    v: Tensor


class Passed(NamedTuple):
    """Results of a forward pass: hidden states after the final norm, tapped streams, and the KV to share."""

    hidden_BTD: Tensor
    taps: dict[int, Tensor]
    shared: dict[str, KV]  # the KV of the last layer of each kind


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) * weight, computed in float32 and rounded once."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def turns(length: int, head_dim: int, rotated_dims: int, theta: float, device: torch.device) -> Turn:
    """Return the rope of positions 0 .. length - 1."""
    inverse = 1.0 / theta ** (torch.arange(0, rotated_dims, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    return Turn(angle.cos().to(device), angle.sin().to(device))


def rotate(x: Tensor, turn: Turn, *, has_heads: bool) -> Tensor:
    """Rotate the first pairs (i, i + H/2) by `turn` and keep the other dims. x is [..., T, H] or [..., T, heads, H]."""
    half, pairs = x.shape[-1] // 2, turn.cos.shape[-1]
    cos, sin = turn.cos, turn.sin
    if has_heads:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x[..., :half], x[..., half:]
    a, b = first[..., :pairs], second[..., :pairs]
    turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
    if pairs == half:
        return torch.cat((turned_a, turned_b), -1)
    return torch.cat((turned_a, first[..., pairs:], turned_b, second[..., pairs:]), -1)


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.float().masked_fill(~visible, float("-inf")).softmax(-1).to(scores.dtype)


def attend_global(q_BTNH: Tensor, kv: KV, first_BT: Tensor) -> Tensor:
    """Return causal attention within documents, [B, T, N, H]."""
    B, T, N, H = q_BTNH.shape
    index_T = torch.arange(T, device=q_BTNH.device)
    outs = []
    for begin in range(0, T, QUERY_CHUNK):
        end = min(T, begin + QUERY_CHUNK)
        q = q_BTNH[:, begin:end].transpose(1, 2).reshape(B, N * (end - begin), H)
        scores = (q @ kv.k[:, :end].transpose(1, 2)).view(B, N, end - begin, end)
        query = index_T[begin:end, None]
        visible = (index_T[:end] <= query) & (index_T[:end] >= first_BT[:, begin:end, None])
        weights = masked_softmax(scores, visible[:, None]).view(B, N * (end - begin), end)
        outs.append((weights @ kv.v[:, :end]).view(B, N, end - begin, H).transpose(1, 2))
    return torch.cat(outs, 1)


def attend_sliding(q_BTNH: Tensor, kv: KV, first_BT: Tensor, window: int) -> Tensor:
    """Return causal attention over the last `window` tokens within documents. Blocks see themselves and the one before."""
    B, T, N, H = q_BTNH.shape
    W, C = window, T // window
    assert T % W == 0, f"rows of {T} tokens are not a multiple of the window of {W}"
    q = q_BTNH.view(B, C, W, N, H).transpose(2, 3).reshape(B * C, N * W, H)

    def with_previous(x_BTH: Tensor) -> Tensor:
        before = F.pad(x_BTH, (0, 0, W, 0))[:, :T]
        return torch.cat((before.view(B, C, W, H), x_BTH.view(B, C, W, H)), 2).view(B * C, 2 * W, H)

    scores = (q @ with_previous(kv.k).transpose(1, 2)).view(B, C, N, W, 2 * W)
    query = torch.arange(T, device=q.device).view(C, W, 1)
    key = (torch.arange(C, device=q.device)[:, None] - 1) * W + torch.arange(2 * W, device=q.device)
    key = key[:, None]
    visible = (key <= query) & (key > query - W) & (key >= first_BT.view(B, C, W, 1))
    weights = masked_softmax(scores, visible[:, :, None]).view(B * C, N * W, 2 * W)
    out = (weights @ with_previous(kv.v)).view(B, C, N, W, H)
    return out.transpose(2, 3).reshape(B, T, N, H)


def matrix(out_features: int, in_features: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(out_features, in_features) * in_features**-0.5)


def gain(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


class Block(nn.Module):
    """A decoder layer. With `owns_kv=False` (an assistant's layers) it has no key and value projections."""

    def __init__(
        self,
        *,
        hidden_size: int,
        mlp_width: int,
        num_heads: int,
        head_dim: int,
        kind: str,
        window: int,
        eps: float,
        depth: int,
        owns_kv: bool = True,
    ) -> None:
        super().__init__()
        self.kind, self.window, self.eps, self.num_heads, self.head_dim = kind, window, eps, num_heads, head_dim
        self.owns_kv = owns_kv
        self.q = matrix(num_heads * head_dim, hidden_size)
        if owns_kv:
            self.k = matrix(head_dim, hidden_size)
            self.k_gain = gain(head_dim)
            if kind == SLIDING:
                self.v = matrix(head_dim, hidden_size)
        self.o = matrix(hidden_size, num_heads * head_dim)
        self.q_gain = gain(head_dim)
        self.gate = matrix(mlp_width, hidden_size)
        self.up = matrix(mlp_width, hidden_size)
        self.down = matrix(hidden_size, mlp_width)
        self.input_gain, self.post_attention_gain = gain(hidden_size), gain(hidden_size)
        self.pre_mlp_gain, self.post_mlp_gain = gain(hidden_size), gain(hidden_size)
        self.scalar = gain(1)
        self.q_constant = head_dim**-0.5  # scores of unit size at the start
        self.post_constant = (2 * depth) ** -0.5  # the sum of all layers' outputs has unit size at the start

    def project(self, normed_BTD: Tensor, turn: Turn) -> tuple[Tensor, KV | None]:
        """Return queries [B, T, N, H], and keys and values if the layer has its own."""
        B, T, _ = normed_BTD.shape
        H, num_q = self.head_dim, self.num_heads * self.head_dim
        weights: list[Tensor] = [self.q, *([self.k] if self.owns_kv else []), *([self.v] if hasattr(self, "v") else [])]
        projected = linear(normed_BTD, torch.cat(weights))
        dtype = projected.dtype
        q = rms(projected[..., :num_q].view(B, T, -1, H).float(), self.q_gain * self.q_constant, self.eps)
        q = rotate(q, turn, has_heads=True).to(dtype)
        if not self.owns_kv:
            return q, None
        raw_k = projected[..., num_q : num_q + H].float()
        raw_v = projected[..., num_q + H :].float() if hasattr(self, "v") else raw_k
        k = rotate(rms(raw_k, self.k_gain, self.eps), turn, has_heads=False).to(dtype)
        return q, KV(k, rms(raw_v, None, self.eps).to(dtype))

    def attend(self, q_BTNH: Tensor, kv: KV, first_BT: Tensor) -> Tensor:
        if self.kind == GLOBAL:
            return attend_global(q_BTNH, kv, first_BT)
        return attend_sliding(q_BTNH, kv, first_BT, self.window)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the stream after this layer, from the attention output [..., N * H]."""
        post = self.post_constant
        x = x + rms(linear(attended, self.o), self.post_attention_gain * post, self.eps)
        normed = rms(x, self.pre_mlp_gain, self.eps)
        gate, up = linear(normed, torch.cat((self.gate, self.up))).chunk(2, -1)
        mixed = linear(F.gelu(gate, approximate="tanh") * up, self.down)
        return (x + rms(mixed, self.post_mlp_gain * post, self.eps)) * self.scalar.to(x.dtype)

    def forward(self, x_BTD: Tensor, turn: Turn, first_BT: Tensor, shared: KV | None = None) -> tuple[Tensor, KV]:
        """Return the stream after this layer and the KV it read, its own or `shared`."""
        q, own = self.project(rms(x_BTD, self.input_gain, self.eps), turn)
        kv = own if shared is None else shared
        assert kv is not None
        return self.finish(x_BTD, self.attend(q, kv, first_BT).flatten(2)), kv


def blocks_of(modules: nn.ModuleList) -> list[Block]:
    """Return the blocks, with their type."""
    return cast(list[Block], list(modules))


class Target(nn.Module):
    """The target model."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.02)
        self.blocks = nn.ModuleList(
            Block(
                hidden_size=shape.hidden_size,
                mlp_width=shape.mlp_width,
                num_heads=shape.num_heads,
                head_dim=shape.head_dim if kind == SLIDING else shape.global_head_dim,
                kind=kind,
                window=shape.window,
                eps=shape.eps,
                depth=shape.num_layers,
            )
            for kind in shape.kinds
        )
        self.final_gain = gain(shape.hidden_size)
        self.final_constant = 1.0
        # Checkpoint readers round this to the weights' precision, and 16 is exact in every format.
        self.embedding_scale = shape.hidden_size**0.5
        self._turns: dict[tuple[int, torch.device], dict[str, Turn]] = {}

    def turns(self, length: int, device: torch.device) -> dict[str, Turn]:
        """Return the rope of both kinds of layer for rows of `length` tokens."""
        key = (length, device)
        if key not in self._turns:
            local, wide = self.shape.head_dim, self.shape.global_head_dim
            self._turns[key] = {
                SLIDING: turns(length, local, local, 10_000.0, device),
                GLOBAL: turns(length, wide, 2 * int(0.25 * wide // 2), 1_000_000.0, device),
            }
        return self._turns[key]

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.embedding).to(dtype) * self.embedding_scale

    def forward(self, ids_BT: Tensor, first_BT: Tensor, dtype: torch.dtype, taps: tuple[int, ...] = ()) -> Passed:
        return self.pass_rows(self.embed(ids_BT, dtype), first_BT, taps)

    def pass_rows(self, x: Tensor, first_BT: Tensor, taps: tuple[int, ...] = ()) -> Passed:
        """Pass input rows [B, T, D], which are embeddings or what a tower has seen."""
        turn = self.turns(x.shape[1], x.device)
        tapped: dict[int, Tensor] = {}
        shared: dict[str, KV] = {}
        for index, block in enumerate(blocks_of(self.blocks)):
            x, shared[block.kind] = block(x, turn[block.kind], first_BT)
            if index in taps:
                tapped[index] = x
        return Passed(rms(x, self.final_gain, self.shape.eps), tapped, shared)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] in float32."""
        cap = self.shape.softcap
        return torch.tanh(linear(hidden, self.embedding).float() / cap) * cap


def next_token_loss(target: Target, hidden_LD: Tensor, goals_L: Tensor, weight_L: Tensor) -> Tensor:
    """Return the sum over tokens of weight * cross-entropy."""
    return (F.cross_entropy(target.logits(hidden_LD), goals_L, reduction="none") * weight_L).sum()
