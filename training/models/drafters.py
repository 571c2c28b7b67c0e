"""The MTP assistant and the DFlash drafter for training: all positions of packed rows at once, in the form that serving uses.

MTP: with tokens 0 .. p in the cache and the newest at p + 1, the assistant's queries are at p and read the target's keys up to
p in every step of the chain. Step 1 gets the newest token and the target's hidden state at p, and proposes token p + 2. Step k
gets the token at p + k and its own hidden state. Each step is one causal pass over all p.

DFlash: with tokens 0 .. L - 1 in the cache and the newest at L, a block of the newest token and masks begins at L and reads
features of the context. Blocks at several positions (anchors) of a row are one pass.

Shapes: B rows · T tokens of a row · D the target's width · A anchors of a row · K tokens of a block · V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.model import KV, Block, Passed, Target, Turn, blocks_of, gain, linear, matrix, rms, rotate, turns
from training.models.shapes import GLOBAL, SLIDING, AssistantShape, DFlashShape, TargetShape


class Assistant(nn.Module):
    """Two layers over the target's KV, with their own head."""

    def __init__(self, shape: AssistantShape, target: TargetShape) -> None:
        super().__init__()
        self.shape, self.eps = shape, target.eps
        self.embedding = nn.Parameter(torch.randn(target.vocab_size, shape.hidden_size) * 0.02)
        self.pre = matrix(shape.hidden_size, 2 * target.hidden_size)
        self.post = matrix(target.hidden_size, shape.hidden_size)
        kinds = [SLIDING if letter == "s" else GLOBAL for letter in shape.pattern]
        self.blocks = nn.ModuleList(
            Block(
                hidden_size=shape.hidden_size,
                mlp_width=shape.mlp_width,
                num_heads=shape.num_heads,
                head_dim=target.head_dim if kind == SLIDING else target.global_head_dim,
                kind=kind,
                window=target.window,
                eps=target.eps,
                depth=len(kinds),
                owns_kv=False,
            )
            for kind in kinds
        )
        self.final_gain = gain(shape.hidden_size)
        self.final_constant = 4.0  # its logits have no cap and its embedding starts small

    def step(
        self, embedded_BTD: Tensor, hidden_BTD: Tensor, shared: dict[str, KV], turn: dict[str, Turn], first_BT: Tensor
    ) -> Tensor:
        """Run one step of the chain at every position. Return the state after the final norm."""
        x = linear(torch.cat((embedded_BTD, hidden_BTD), -1), self.pre)
        for block in blocks_of(self.blocks):
            x, _ = block(x, turn[block.kind], first_BT, shared[block.kind])
        return rms(x, self.final_gain * self.final_constant, self.eps)

    def next_hidden(self, state: Tensor) -> Tensor:
        return linear(state, self.post)

    def logits(self, state: Tensor) -> Tensor:
        return linear(state, self.embedding).float()


class DFlashLayer(nn.Module):
    """A pre-norm layer over context features and the block itself."""

    def __init__(self, shape: DFlashShape, hidden_size: int, kind: str) -> None:
        super().__init__()
        self.shape, self.kind = shape, kind
        self.q = matrix(shape.num_heads * shape.head_dim, hidden_size)
        self.k = matrix(shape.num_kv_heads * shape.head_dim, hidden_size)
        self.v = matrix(shape.num_kv_heads * shape.head_dim, hidden_size)
        self.o = matrix(hidden_size, shape.num_heads * shape.head_dim)
        self.gate, self.up = matrix(shape.mlp_width, hidden_size), matrix(shape.mlp_width, hidden_size)
        self.down = matrix(hidden_size, shape.mlp_width)
        self.q_gain, self.k_gain = gain(shape.head_dim), gain(shape.head_dim)
        self.input_gain, self.pre_mlp_gain = gain(hidden_size), gain(hidden_size)

    def keys_values(self, x: Tensor, turn: Turn) -> KV:
        """Return keys and values [..., positions, G, H] of features or of a block's normed states.

        `turn` has their positions.
        """
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        k = rms(linear(x, self.k).unflatten(-1, heads).float(), self.k_gain, self.shape.eps)
        return KV(rotate(k, turn, has_heads=True).to(x.dtype), linear(x, self.v).unflatten(-1, heads))

    def forward(self, x_BAKD: Tensor, features_BTD: Tensor, seen: Tensor, turn: Turn, block_turn: Turn) -> Tensor:
        """`seen` [B, A, K, T + K] says which keys of the context and of its own block a block's token sees."""
        shape = self.shape
        B, A, K, _ = x_BAKD.shape
        G, H, M = shape.num_kv_heads, shape.head_dim, shape.num_heads // shape.num_kv_heads
        T = features_BTD.shape[1]
        normed = rms(x_BAKD, self.input_gain, shape.eps)
        q = rms(linear(normed, self.q).unflatten(-1, (shape.num_heads, H)).float(), self.q_gain, shape.eps)
        q = rotate(q, block_turn, has_heads=True).to(x_BAKD.dtype).view(B, A, K, G, M, H)
        context, own = self.keys_values(features_BTD, turn), self.keys_values(normed, block_turn)
        to_context = torch.einsum("bakgmh,btgh->bgmakt", q, context.k)
        to_own = torch.einsum("bakgmh,bajgh->bgmakj", q, own.k)
        scores = torch.cat((to_context, to_own), -1) * H**-0.5
        weights = scores.float().masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).to(x_BAKD.dtype)
        out = torch.einsum("bgmakt,btgh->bakgmh", weights[..., :T], context.v)
        out = out + torch.einsum("bgmakj,bajgh->bakgmh", weights[..., T:], own.v)
        x = x_BAKD + linear(out.reshape(B, A, K, -1), self.o)
        normed = rms(x, self.pre_mlp_gain, shape.eps)
        return x + linear(F.silu(linear(normed, self.gate)) * linear(normed, self.up), self.down)


class DFlash(nn.Module):
    """The drafter. It uses the target's embedding and head."""

    def __init__(self, shape: DFlashShape, target: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = matrix(target.hidden_size, len(shape.taps) * target.hidden_size)
        self.hidden_gain, self.final_gain = gain(target.hidden_size), gain(target.hidden_size)
        kinds = [SLIDING if letter == "s" else GLOBAL for letter in shape.pattern]
        self.layers = nn.ModuleList(DFlashLayer(shape, target.hidden_size, kind) for kind in kinds)
        with torch.no_grad():  # the layers' contributions start small
            for layer in self.typed_layers:
                layer.o.mul_(0.3)
                layer.down.mul_(0.3)

    @property
    def typed_layers(self) -> list[DFlashLayer]:
        return cast(list[DFlashLayer], list(self.layers))

    def features(self, passed: Passed) -> Tensor:
        taps = torch.cat([passed.taps[tap] for tap in self.shape.taps], -1)
        return rms(linear(taps, self.fc), self.hidden_gain, self.shape.eps)

    def forward(self, target: Target, features_BTD: Tensor, newest_BA: Tensor, anchor_BA: Tensor, first_BA: Tensor) -> Tensor:
        """Return states [B, A, K, D] after the final norm, of blocks whose newest token is at `anchor_BA`."""
        shape = self.shape
        T, K, device = features_BTD.shape[1], shape.block_size, features_BTD.device
        table = turns(T + K, shape.head_dim, shape.head_dim, shape.rope_theta, device)
        position_BAK = anchor_BA[..., None] + torch.arange(K, device=device)
        block_turn = Turn(table.cos[position_BAK], table.sin[position_BAK])
        turn = Turn(table.cos[:T], table.sin[:T])
        ids = torch.full_like(position_BAK, shape.mask_token_id)
        ids[..., 0] = newest_BA
        x = target.embed(ids, features_BTD.dtype)
        seen = {kind: self._seen(kind, position_BAK, first_BA, T) for kind in (SLIDING, GLOBAL)}
        for layer in self.typed_layers:
            x = layer(x, features_BTD, seen[layer.kind], turn, block_turn)
        return rms(x, self.final_gain, shape.eps)

    def _seen(self, kind: str, position_BAK: Tensor, first_BA: Tensor, length: int) -> Tensor:
        """Return which keys each token of a block sees: the document's context before the anchor, and its own block."""
        B, A, K = position_BAK.shape
        device = position_BAK.device
        key_T = torch.arange(length, device=device)
        context = (key_T >= first_BA[..., None, None]) & (key_T < position_BAK[..., :1, None])
        block = torch.ones(K, K, dtype=torch.bool, device=device)
        if kind == SLIDING:
            context = context & (key_T > position_BAK[..., None] - self.shape.window)
            block = block.tril()
        return torch.cat((context.expand(B, A, K, length), block.expand(B, A, K, K)), -1)
