"""Eager twins of the kernels of vision towers.

Shapes: T patches of all images · N heads · H head size · F MLP width · X all projected columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from culet.kernels.eager.ops import _as, _rms, _rotate
from culet.kernels.types import Rope


def patch_qkv(
    qkv_TX: Tensor, weight_2H: Tensor, rope: Rope, num_heads: int, eps: float, bounds_32: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [T, N, H] of patches. The columns are q | k | v.

    With n = projected head / rms, q = rope(n * weight[0]), k = rope(n * weight[1]) and v = n. Rope turns all columns. The
    projected values are first clamped to `bounds_32`, with a row each for q, k and v.
    """
    projected = qkv_TX.view(-1, 3, num_heads, weight_2H.shape[1])
    if bounds_32 is not None:
        projected = projected.float().clamp(bounds_32[:, 0, None, None], bounds_32[:, 1, None, None])
    normed = _rms(projected, eps)
    normed[:, :2].mul_(weight_2H[:, None])
    q, k = (_as(_rotate(normed[:, index], rope), qkv_TX.dtype) for index in (0, 1))
    return q, k, _as(normed[:, 2], qkv_TX.dtype)


def clipped_gelu_mul(gate_up_TX: Tensor, bounds_32: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up. The columns are gate | up. `bounds_32` are the bounds of gate, of up and of the product."""
    gate, up = (x.clamp(*bounds) for x, bounds in zip(gate_up_TX.float().chunk(2, -1), bounds_32[:2], strict=True))
    return _as(F.gelu(gate, approximate="tanh").mul_(up).clamp_(*bounds_32[2]), gate_up_TX.dtype)


def patch_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the attention of each image's patches over all patches of that image, [T, N, H]. Scores are not scaled.

    `lengths` are the numbers of patches of the images.
    """
    images = zip(*(x.transpose(0, 1).split(list(lengths), dim=1) for x in (q_TNH, k_TNH, v_TNH)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(q, k, v, scale=1.0) for q, k, v in images], dim=1).transpose(0, 1)
