"""Verify which drafts the target accepts.

At every drafted position, the target draws as it would without drafts. It uses the same random number, keyed by (seed, sample,
position), and penalties that count the drafts before the position. Drafts are accepted as long as they equal the draws. The
first draw that differs, or the one after the last draft, is the new token. So the output equals the output without a drafter
token for token, at any temperature, and the drafter's own distribution is not needed.
Shapes: G verified sequences · K drawn tokens, one per draft and one more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (drawn tokens [G, K], drafts [G, K], numbers of drafts [G]) -> how many drafts each sequence keeps, int64 [G]
Accept = Callable[[Tensor, Tensor, Tensor], Tensor]


def count_accepted(drawn_GK: Tensor, drafts_GK: Tensor, num_drafts_G: Tensor) -> Tensor:
    """Return how many drafts each sequence keeps, int64 [G]. Columns from `num_drafts_G` on are padding."""
    column_K = torch.arange(drawn_GK.shape[-1], device=drawn_GK.device)
    is_equal_GK = (drawn_GK == drafts_GK) & (column_K < num_drafts_G[:, None])
    return is_equal_GK.long().cumprod(dim=-1).sum(dim=-1)


def force_accepted(count: int) -> Accept:
    """Return an `Accept` for measurements. Each sequence keeps `count` drafts, or all if it has fewer.

    All the work of drafting and verifying is still done, but the output is nonsense.
    """

    def accept(drawn_GK: Tensor, drafts_GK: Tensor, num_drafts_G: Tensor) -> Tensor:
        return num_drafts_G.clamp(max=count)

    return accept
