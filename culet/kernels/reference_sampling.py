"""Eager twins of what changes logits before a draw: biases of single tokens, and a grammar's bits of allowed tokens.

Shapes: R rows of logits · V vocabulary · X biased tokens · A rows with a mask · W words of 32 tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_bias(logits_RV: Tensor, rows_X: Tensor, tokens_X: Tensor, values_X: Tensor) -> Tensor:
    """logits[rows[x], tokens[x]] += values[x] in place; a token may be named more than once."""
    return logits_RV.index_put_((rows_X.long(), tokens_X.long()), values_X.to(logits_RV.dtype), accumulate=True)


def apply_bitmask(logits_RV: Tensor, bitmask_AW: Tensor, rows_A: Tensor | None = None) -> Tensor:
    """-inf in place for every token whose bit, t % 32 of word t // 32, is 0; tokens behind the last word have none.

    `bitmask_AW` (int32) has a line for each row of the logits, or for those that `rows_A` names.
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


def settle_draws(
    drawn_T: Tensor, ids_T: Tensor, begin_B1: Tensor, places_T: Tensor, tokens: Tensor, forced_1: Tensor, out_X: Tensor
) -> None:
    """Keep the draws of a step, and count the drafts that they agree with.

    Row r has the step's tokens `begin[r] .. begin[r + 1] - 1`: the newest token and its drafts, `ids_T`. Draws go to `places_T`
    of `tokens`, and to `out_X[:T]`; `out_X[T + r]` is how many drafts come before the first that its row did not draw, for as
    many rows as `out_X` has room for. `forced_1` at 0 or above is that number instead, for measurements.
    """
    num_tokens = drawn_T.shape[0]
    num_rows = out_X.shape[0] - num_tokens
    tokens[places_T] = drawn_T.to(tokens.dtype)
    out_X[:num_tokens] = drawn_T
    begin_R, count_R = begin_B1[:num_rows].long(), begin_B1.diff()[:num_rows].long()
    column_K = torch.arange(num_tokens, device=drawn_T.device)
    token_RK = (begin_R[:, None] + column_K).clamp(max=num_tokens - 1)
    is_draft_RK = column_K < (count_R - 1)[:, None]
    is_equal_RK = is_draft_RK & (drawn_T[token_RK] == ids_T[(token_RK + 1).clamp(max=num_tokens - 1)])
    agreed_R = is_equal_RK.long().cumprod(dim=-1).sum(dim=-1)
    forced_R = torch.minimum(forced_1.long(), (count_R - 1).clamp(min=0))
    out_X[num_tokens:] = torch.where(forced_1 >= 0, forced_R, agreed_R)


def begin_round(
    out_X: Tensor,
    begin_B1: Tensor,
    places_T: Tensor,
    positions_T: Tensor,
    width: int,
    last_TD: Tensor,
    into: tuple[Tensor, Tensor],
) -> None:
    """What a drafter begins with, from what `settle_draws` left: `into` is (facts [4, R], hidden states [R, D]).

    A row's facts are its slot, itself, the token that its newest one was drawn from, and the newest one's position; its hidden
    state is that token's. `places_T` and `positions_T` tell where each draw went, of slots that are `width` tokens wide.
    """
    facts_4R, hidden_RD = into
    num_tokens, num_rows = last_TD.shape[0], facts_4R.shape[1]
    # A row of no tokens pads the batch, and so does the last token then.
    source_R = (begin_B1[:num_rows] + out_X[num_tokens : num_tokens + num_rows]).clamp(max=num_tokens - 1)
    facts_4R[0] = places_T[source_R] // width
    facts_4R[1] = torch.arange(num_rows, device=facts_4R.device)
    facts_4R[2] = source_R
    facts_4R[3] = positions_T[source_R]
    hidden_RD.copy_(last_TD[source_R])
