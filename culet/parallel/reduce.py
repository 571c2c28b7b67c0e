"""Add partial sums, from split-K kernels today and from ranks later.

A product with a weight can arrive as parts that still have to be added:

- A split-K kernel may leave S float32 parts [S, T, D] to its reader, because adding them itself would cost a wait.
- If a weight is split by columns, each rank holds some of the columns, so its product is one term of the sum.
- If a table is split by rows, each rank embeds its own tokens, and its rows for other tokens are zero.

All kinds are handled here, between the product and the norm that follows. Attention's output projection, the MLP's down
projection, the experts and the per-layer projection all return a `PartialSum`. The kernels of the norm add its parts. With
several ranks, the all-reduce goes into `join_parts`. A kernel that fuses all-reduce and norm replaces both the producer and
the reader of this type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NewType

from torch import Tensor

# [T, D], or [S, T, D] if the reader has to add the S parts.
PartialSum = NewType("PartialSum", Tensor)
# Adds a tensor [T, D] over all ranks.
AllReduce = Callable[[Tensor], Tensor]


def join_parts(parts: Tensor, all_reduce: AllReduce | None) -> PartialSum:
    """Join this rank's `parts` with those of the others. If `all_reduce` is None, there are no others, so return them as is."""
    if all_reduce is None:
        return PartialSum(parts)
    return PartialSum(all_reduce(parts if parts.dim() == 2 else parts.sum(0)))


def join_columns(part_TC: Tensor, columns: slice, num_columns: int, all_reduce: AllReduce | None) -> Tensor:
    """Return all `num_columns` columns, of which this rank computed `columns`. If `all_reduce` is None, it computed all.

    The columns of other ranks are zeros in the sum. An all-gather would move fewer bytes and belongs here.
    """
    if all_reduce is None:
        return part_TC
    whole_TN = part_TC.new_zeros(part_TC.shape[0], num_columns)
    whole_TN[:, columns] = part_TC
    return all_reduce(whole_TN)
