"""Eager twins of the kernels of vision towers.

Shapes: T patches of all images · N heads · H head size · X all projected columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from culet.kernels.eager.ops import _as, _rms, _rotate
from culet.kernels.types import Rope


def patch_qkv(qkv_TX: Tensor, weight_2H: Tensor, rope: Rope, num_heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [T, N, H] of patches. The columns are q | k | v.

    With n = projected head / rms, q = rope(n * weight[0]), k = rope(n * weight[1]) and v = n. Rope turns all columns.
    """
    size = weight_2H.shape[1]
    normed = _rms(qkv_TX.view(-1, 3, num_heads, size), eps)
    normed[:, :2].mul_(weight_2H[:, None])
    q, k = (_as(_rotate(normed[:, index], rope), qkv_TX.dtype) for index in (0, 1))
    return q, k, _as(normed[:, 2], qkv_TX.dtype)


def patch_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the attention of each image's patches over all patches of that image, [T, N, H]. Scores are not scaled.

    `lengths` are the numbers of patches of the images. Neighbours of one size are one batch.
    """
    out, begin = torch.empty_like(q_TNH), 0
    for length, images in groupby(lengths):
        end = begin + length * len(list(images))
        q, k, v = (x[begin:end].unflatten(0, (-1, length)).transpose(1, 2) for x in (q_TNH, k_TNH, v_TNH))
        attended = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        out[begin:end].unflatten(0, (-1, length)).copy_(attended.transpose(1, 2))
        begin = end
    return out
