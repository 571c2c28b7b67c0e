"""Where partial sums meet: split-K kernels today, ranks later.

A product with a weight can arrive as parts that still have to be added:

- A split-K kernel may leave S float32 parts [S, T, D] to its reader, because adding them itself would cost a wait.
- Of a weight that is split by columns, each rank holds some columns, so its product is one term of the sum.

Both meet here, between the product and the norm that follows: attention's output projection, the MLP's down projection, the
experts and the per-layer projection all return a `PartialSum`. The kernels of the norm add its parts. With several ranks,
`join_parts` is where the all-reduce goes; a kernel that fuses all-reduce and norm replaces both ends of this type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NewType

from torch import Tensor

# [T, D], or [S, T, D] where the reader has to add the S parts.
PartialSum = NewType("PartialSum", Tensor)
# Adds up a tensor [T, D] over all ranks.
AllReduce = Callable[[Tensor], Tensor]


def join_parts(parts: Tensor, all_reduce: AllReduce | None) -> PartialSum:
    """`parts` of this rank, joined with those of the others. None: there are no others, and the parts stay as they are."""
    if all_reduce is None:
        return PartialSum(parts)
    return PartialSum(all_reduce(parts if parts.dim() == 2 else parts.sum(0)))
