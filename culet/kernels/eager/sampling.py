"""Eager twins of the ops that change logits before a draw. They add biases of single tokens and apply a grammar's bitmask.

Shapes: R rows of logits · V vocabulary · X biased tokens · A rows with a mask · W words of 32 tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_bias(logits_RV: Tensor, rows_X: Tensor, tokens_X: Tensor, values_X: Tensor) -> Tensor:
    """Add values[x] to logits[rows[x], tokens[x]] in place. A token may occur more than once."""
    return logits_RV.index_put_((rows_X.long(), tokens_X.long()), values_X.to(logits_RV.dtype), accumulate=True)


def apply_bitmask(logits_RV: Tensor, bitmask_AW: Tensor, rows_A: Tensor | None = None) -> Tensor:
    """Set the logits of tokens whose bit is 0 or missing to -inf, in place. Token t has bit t % 32 of word t // 32.

    `bitmask_AW` (int32) has a line for each row of the logits, or for each row in `rows_A` if that is given.
    """
    width = logits_RV.shape[1]
    bits_AWB = bitmask_AW[..., None] >> torch.arange(32, dtype=torch.int32, device=bitmask_AW.device) & 1
    is_allowed_AV = bits_AWB.flatten(1).bool()[:, :width]
    is_allowed_AV = F.pad(is_allowed_AV, (0, width - is_allowed_AV.shape[1]))
    if rows_A is None:
        return logits_RV.masked_fill_(~is_allowed_AV, -torch.inf)
    rows_A = rows_A.long()
    logits_RV[rows_A] = logits_RV[rows_A].masked_fill(~is_allowed_AV, -torch.inf)
    return logits_RV
