"""Add partial sums of split-K kernels and of ranks.

A product with a weight can arrive as parts that still have to be added:

- A split-K kernel may leave S float32 parts [S, T, D] to its reader, because adding them itself would cost a wait.
- If a weight is split by columns, each rank holds some of the columns, so its product is one term of the sum.
- If a table is split by rows, each rank embeds its own tokens, and its rows for other tokens are zero.

All kinds are handled here, between the product and the norm that follows. Attention's output projection, the MLP's down
projection, the experts and the per-layer projection all return a `PartialSum`. The kernels of the norm add its parts. With
several ranks, `join_parts` adds their terms, unless the weight leaves that to its reader (`Weight.leave_sum`). That reader is a
norm of `RankNorms`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NewType, Protocol

import torch
from torch import Tensor

from culet.kernels.types import PeerBuffers

# [T, D], or [S, T, D] if the reader has to add the S parts. It is one rank's term if the weight leaves the sum to its reader.
PartialSum = NewType("PartialSum", Tensor)


class AllReduce(Protocol):
    """Adds a tensor over all ranks. Every rank gets the same bits. The tensor's memory may be reused for the sum."""

    def __call__(self, part: Tensor, /) -> Tensor: ...

    def gather(self, part: Tensor, /) -> Tensor:
        """Return the tensors of all ranks, stacked in the order of their ranks."""

    def peers_for(self, num_tokens: int, num_columns: int) -> PeerBuffers | None:
        """Return the buffers for a sum that is fused with its reader. None if it is too large, or if that is not possible."""

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which this rank does not wait for the others. Sums and gathered tensors are meaningless."""


def join_parts(parts: Tensor, all_reduce: AllReduce | None) -> PartialSum:
    """Join this rank's `parts` with those of the others. If `all_reduce` is None, there are no others, so return them as is."""
    if all_reduce is None:
        return PartialSum(parts)
    return PartialSum(all_reduce(parts if parts.dim() == 2 else parts.sum(0)))


def join_columns(part_TC: Tensor, columns: slice, num_columns: int, all_reduce: AllReduce | None) -> Tensor:
    """Return all `num_columns` columns, of which this rank computed `columns`. If `all_reduce` is None, it computed all."""
    if all_reduce is None:
        return part_TC
    parts_RTC = all_reduce.gather(part_TC)
    assert parts_RTC.shape[0] * (columns.stop - columns.start) == num_columns, "ranks must have equal numbers of columns"
    return torch.cat(parts_RTC.unbind(0), dim=-1)


def join_shares(out_TNH: Tensor, lse_TN: Tensor, lse_RTN: Tensor) -> Tensor:
    """Weight attention over this rank's tokens, so that the sum over the ranks is attention over all tokens.

    `lse_TN` is the log of the sum of the exponentials of this rank's scores, and `lse_RTN` has those of all ranks that share
    the tokens. A rank without a visible token has -inf.
    """
    weight_TN = (lse_TN - lse_RTN.logsumexp(0)).exp()
    # A row that pads a batch may see no token on any rank, which gives inf - inf.
    return (out_TNH * weight_TN.masked_fill(lse_TN == -torch.inf, 0.0)[..., None]).to(out_TNH.dtype)
