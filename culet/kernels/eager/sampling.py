"""Eager twins of the ops that change logits before a draw: biases of single tokens, and a grammar's bitmask.

Shapes: R rows of logits · V vocabulary · X biased tokens · A rows with a mask · W words of 32 tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_bias(logits_RV: Tensor, rows_X: Tensor, tokens_X: Tensor, values_X: Tensor) -> Tensor:
    """logits[rows[x], tokens[x]] += values[x] in place; a token may occur more than once."""
    return logits_RV.index_put_((rows_X.long(), tokens_X.long()), values_X.to(logits_RV.dtype), accumulate=True)


def apply_bitmask(logits_RV: Tensor, bitmask_AW: Tensor, rows_A: Tensor | None = None) -> Tensor:
    """Set logits to -inf in place where a token's bit (t % 32 of word t // 32) is 0, or where it has no bit.

    `bitmask_AW` (int32) has a line for each row of the logits, or for the rows in `rows_A`.
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
