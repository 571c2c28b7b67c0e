"""Rotary embedding: frequencies, and the order of head dims that keeps the rotated ones together."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_frequencies(theta: float, head_dim: int, rotated_dims: int, factor: float, device: torch.device) -> Tensor:
    """theta ** (-2 i / head_dim) / factor for each rotated pair i; the exponent is over the head dim, not the rotated ones."""
    # Made on the CPU on every device: its float32 powers are the ones checkpoints were compared with.
    exponent = torch.arange(0, rotated_dims, 2, dtype=torch.float32) / head_dim
    return (1.0 / (theta**exponent) / factor).to(device)


def rotated_columns(head_dim: int, rotated_dims: int) -> Tensor:
    """Head dims that rope turns: the first of each pair (i, i + head_dim / 2), then the second ones."""
    first = torch.arange(rotated_dims // 2)
    return torch.cat((first, first + head_dim // 2))


def plain_columns(head_dim: int, rotated_dims: int) -> Tensor:
    """Head dims that rope leaves alone."""
    plain = torch.ones(head_dim, dtype=torch.bool)
    plain[rotated_columns(head_dim, rotated_dims)] = False
    return plain.nonzero().squeeze(1)


def all_heads(columns: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """One head's column order repeated for `num_heads` heads that lie one after the other."""
    return (columns + head_dim * torch.arange(num_heads)[:, None]).flatten()
