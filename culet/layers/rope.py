"""Rotary embedding: its frequencies, and orders of head dims that keep the rotated ones together."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def inverse_frequencies(theta: float, head_dim: int, rotated_dims: int, factor: float, device: torch.device) -> Tensor:
    """Return theta ** (-2 i / head_dim) / factor for each rotated pair i.

    The exponent is divided by the head dim, not by the number of rotated dims.
    """
    # Compute on the CPU for every device, because checkpoints were compared with its float32 powers.
    exponent = torch.arange(0, rotated_dims, 2, dtype=torch.float32) / head_dim
    return (1.0 / (theta**exponent) / factor).to(device)


def rotated_columns(head_dim: int, rotated_dims: int) -> Tensor:
    """Return the head dims that rope rotates: the first of each pair (i, i + head_dim / 2), then the second."""
    first = torch.arange(rotated_dims // 2)
    return torch.cat((first, first + head_dim // 2))


def plain_columns(head_dim: int, rotated_dims: int) -> Tensor:
    """Return the head dims that rope does not rotate."""
    plain = torch.ones(head_dim, dtype=torch.bool)
    plain[rotated_columns(head_dim, rotated_dims)] = False
    return plain.nonzero().squeeze(1)


@cache
def plain_first(head_dim: int, rotated_dims: int, num_heads: int = 1) -> Tensor:
    """Return the order `plain | rotated` for the dims of each head."""
    columns = torch.cat((plain_columns(head_dim, rotated_dims), rotated_columns(head_dim, rotated_dims)))
    return _in_each_head(columns, num_heads)


@cache
def rotated_first(head_dim: int, rotated_dims: int, num_heads: int = 1) -> Tensor:
    """Return the order `rotated | plain` for the dims of each head."""
    columns = torch.cat((rotated_columns(head_dim, rotated_dims), plain_columns(head_dim, rotated_dims)))
    return _in_each_head(columns, num_heads)


def _in_each_head(columns: Tensor, num_heads: int) -> Tensor:
    return (columns + columns.shape[0] * torch.arange(num_heads)[:, None]).flatten()
