"""Eager twins of the kernels that add up rows of several ranks.

Shapes: T tokens · D model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from culet.kernels.eager.ops import residual_norm, rms_norm, sum_norms
from culet.kernels.types import PeerBuffers


def residual_norm_of_ranks(
    x_TD: Tensor,
    deltas: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    scalar: Tensor | None,
    next_weights: tuple[Tensor, ...],
    eps: float,
    peers: PeerBuffers,
) -> tuple[Tensor, ...]:
    """Return x' = (x + norm(delta) * weight) * scalar and norm(x') * w for each of `next_weights`. delta is the ranks' sum.

    `deltas` has this rank's term of delta, which may be parts [S, T, D]. If it has two, delta is the sum of their norms, and
    `weights` has the weights of these two norms first. Its last element is the weight of delta's norm. Terms are rounded to
    the type of x before they are added in float32.

    This twin does not wait. The terms of the other ranks must already be in `peers`, or it must not matter.
    """
    num_tokens, size = x_TD.shape
    terms = torch.cat([delta if delta.dim() == 2 else delta.sum(0) for delta in deltas], dim=1).to(x_TD.dtype)
    turn_T = peers.turn[:num_tokens] + 1
    place, row = (turn_T & 1).long(), torch.arange(num_tokens, device=x_TD.device)
    for buffer in peers.data if peers.is_pushed else peers.data[peers.rank : peers.rank + 1]:
        buffer[place, row, peers.rank, : terms.shape[1]] = terms
    for arrived in peers.arrived:
        arrived[place, row, peers.rank] = turn_T
    peers.turn[:num_tokens] = turn_T
    total = torch.zeros_like(terms, dtype=torch.float32)
    for peer in range(len(peers.data)):
        buffer = peers.data[peers.rank if peers.is_pushed else peer]
        total += buffer[place, row, peer, : terms.shape[1]].float()
    sums = total.split(size, dim=1)
    delta_TD = sums[0]
    if len(sums) == 2:
        delta_TD = sum_norms(sums[0], sums[1], weights[0], weights[1], eps).to(x_TD.dtype)
    x_TD, _ = residual_norm(x_TD, delta_TD, weights[-1], scalar, None, eps)
    return x_TD, *(rms_norm(x_TD, weight_D, eps) for weight_D in next_weights)
