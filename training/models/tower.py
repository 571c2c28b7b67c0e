"""The vision tower for training: an encoder over the patches of pictures, pooled to soft tokens and projected.

It is Gemma 4's tower without clip bounds and without standardising. Weights are kept as in `model.py`. The pictures of a batch
have one size, so nothing is padded. Patches are ordered soft token by soft token, so that pooling reads nine rows in a row.

Shapes: P pictures · T patches of a picture · M soft tokens of a picture · D tower · N heads · H head size · V values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.data.pictures.labels import NUM_CLASSES
from training.models.model import Target, Turn, gain, linear, matrix, rms, rotate
from training.models.shapes import TowerShape

_LEVEL = 0.00392156862745098  # 1 / 255, as serving multiplies pixels


class TowerLayer(nn.Module):
    """Attention over all patches of a picture, and a gated MLP. Both are normed before and after."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.eps = shape.num_heads, shape.head_dim, shape.eps
        size, heads = shape.hidden_size, shape.num_heads * shape.head_dim
        self.q, self.k, self.v, self.o = matrix(heads, size), matrix(heads, size), matrix(heads, size), matrix(size, heads)
        self.gate, self.up, self.down = matrix(shape.width, size), matrix(shape.width, size), matrix(size, shape.width)
        self.q_gain, self.k_gain = gain(shape.head_dim), gain(shape.head_dim)
        self.input_gain, self.post_attention_gain = gain(size), gain(size)
        self.pre_mlp_gain, self.post_mlp_gain = gain(size), gain(size)
        self.q_constant = shape.head_dim**-0.5
        self.post_constant = (2 * shape.num_layers) ** -0.5

    def forward(self, x_PTD: Tensor, by_column: Turn, by_row: Turn) -> Tensor:
        P, T, _ = x_PTD.shape
        normed = rms(x_PTD, self.input_gain, self.eps)
        projected = linear(normed, torch.cat((self.q, self.k, self.v))).view(P, T, 3, self.num_heads, self.head_dim)
        q, k, v = projected.float().unbind(2)
        q = _turned(rms(q, self.q_gain * self.q_constant, self.eps), by_column, by_row)
        k = _turned(rms(k, self.k_gain, self.eps), by_column, by_row)
        heads = [part.to(x_PTD.dtype).transpose(1, 2) for part in (q, k, rms(v, None, self.eps))]
        attended = F.scaled_dot_product_attention(*heads, scale=1.0).transpose(1, 2).flatten(2)
        x_PTD = x_PTD + rms(linear(attended, self.o), self.post_attention_gain * self.post_constant, self.eps)
        normed = rms(x_PTD, self.pre_mlp_gain, self.eps)
        gate, up = linear(normed, torch.cat((self.gate, self.up))).chunk(2, -1)
        mixed = linear(F.gelu(gate, approximate="tanh") * up, self.down)
        return x_PTD + rms(mixed, self.post_mlp_gain * self.post_constant, self.eps)


def _turned(x_PTNH: Tensor, by_column: Turn, by_row: Turn) -> Tensor:
    """Rotate the first half of each head by the patch's column and the second by its row."""
    first, second = x_PTNH.chunk(2, -1)
    return torch.cat((rotate(first, by_column, has_heads=True), rotate(second, by_row, has_heads=True)), -1)


class Tower(nn.Module):
    """The tower and the projection into the decoder's rows."""

    def __init__(self, shape: TowerShape, row_scale: float = 1.0) -> None:
        """`row_scale` is the size of the values in the decoder's rows, which the first rows of the tower have too."""
        super().__init__()
        self.shape, self.row_scale = shape, row_scale
        self.input = matrix(shape.hidden_size, 3 * shape.patch_size**2)
        # Positions that no training picture has stay zero.
        self.position_embedding = nn.Parameter(torch.zeros(2, shape.num_positions, shape.hidden_size))
        self.layers = nn.ModuleList(TowerLayer(shape) for _ in range(shape.num_layers))
        self.project = matrix(shape.out_size, shape.hidden_size)
        self.names = matrix(sum(NUM_CLASSES), shape.hidden_size)  # only for training

    def forward(self, pictures_PCHW: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows [P, M, out_size] of pictures, uint8 [P, 3, height, width]."""
        return self.projected(self.pooled(pictures_PCHW, dtype))

    def projected(self, pooled_PMD: Tensor) -> Tensor:
        return linear(pooled_PMD, self.project * self.row_scale)

    def named(self, pooled_PMD: Tensor) -> tuple[Tensor, ...]:
        """Return logits for what each soft token shows, [P, M, classes] for each kind of names."""
        return linear(pooled_PMD, self.names).float().split(NUM_CLASSES, -1)

    def pooled(self, pictures_PCHW: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the soft tokens before they are projected, [P, M, D]."""
        shape = self.shape
        patches_PTV, columns_T, rows_T = self.patches(pictures_PCHW)
        places = self.position_embedding[0][columns_T] + self.position_embedding[1][rows_T]
        x = linear(patches_PTV.to(dtype), self.input) + places.to(dtype)
        by_column, by_row = self._turn(columns_T), self._turn(rows_T)
        for layer in self.layers:
            x = layer(x, by_column, by_row)
        P, T, D = x.shape
        pooled = x.float().view(P, T // shape.pooling**2, shape.pooling**2, D).mean(2) * D**0.5
        return rms(pooled.to(dtype), None, shape.eps)

    def patches(self, pictures_PCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the values of all patches from -1 to 1, float32 [P, T, V], and the column and the row of each, [T]."""
        shape = self.shape
        P, C, height, width = pictures_PCHW.shape
        side, pooling = shape.patch_size, shape.pooling
        rows, columns = height // (side * pooling), width // (side * pooling)
        blocks = pictures_PCHW.view(P, C, rows, pooling, side, columns, pooling, side).permute(0, 2, 5, 3, 6, 4, 7, 1)
        values = 2 * (blocks.reshape(P, -1, side * side * C) * _LEVEL - 0.5)
        grid = torch.arange(rows * pooling * columns * pooling, device=values.device)
        grid = grid.view(rows, pooling, columns, pooling).transpose(1, 2).flatten()
        return values, grid % (columns * pooling), grid // (columns * pooling)

    def _turn(self, place_T: Tensor) -> Turn:
        half = self.shape.head_dim // 2
        exponent = torch.arange(0, half, 2, dtype=torch.float32, device=place_T.device) / half
        angle = place_T.float()[:, None] / self.shape.rope_theta**exponent
        return Turn(angle.cos(), angle.sin())


class Seer(nn.Module):
    """A decoder that sees: rows of the tower take the place of the soft tokens' embeddings."""

    def __init__(self, target: Target, tower: Tower) -> None:
        super().__init__()
        self.target, self.tower = target, tower

    def rows(self, ids_BT: Tensor, soft_BT: Tensor, features: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the decoder's input rows. `soft_BT` is the index of each soft token in `features` [..., D], or -1."""
        embedded = self.target.embed(ids_BT, dtype)
        seen = features.flatten(0, -2)[soft_BT.clamp(min=0)]
        return torch.where((soft_BT >= 0)[..., None], seen.to(dtype), embedded)


def row_scale(target: Target) -> float:
    """Return the root mean square of the decoder's input rows."""
    rows = target.embedding.detach().float() * target.embedding_scale
    return float(rows.square().mean().sqrt())
