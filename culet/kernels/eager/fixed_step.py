"""Eager twins of the first and last kernels of a fixed-shape step. They lay out tokens, store draws and count accepted drafts.

Shapes: T tokens of a step · B rows of a step · R rows that may draft · X = T + R · S slots · L tokens per slot · G KV groups ·
D model · P placeholders of media.
"""

from __future__ import annotations

import torch
from torch import Tensor

from culet.kernels.types import PageTables, PlannedRows, TokenLayout


def lay_out_tokens(
    rows: PlannedRows,
    tables: PageTables,
    tokens_SL: Tensor,
    placeholder_P: Tensor,
    accepted_S: Tensor,
    room: int,
    into: TokenLayout,
) -> None:
    """Compute the positions and KV addresses of a step's tokens and read their ids. `room` is the size of each slot's ring."""
    num_tokens, num_rows = into.token_ids_T.shape[0], rows.start_B.shape[0]
    spare, width = tokens_SL.shape[0] - 1, tokens_SL.shape[1]
    slot_B = rows.slot_B.long()
    start_B = rows.start_B.long() + rows.is_open_B * accepted_S[slot_B]
    into.context_B.copy_(start_B)
    token_T = torch.arange(num_tokens, device=start_B.device)
    row_T = torch.searchsorted(rows.begin_B1[1:].long(), token_T, right=True)
    position_T = start_B[row_T] + token_T - rows.begin_B1[row_T]
    place_T = slot_B[row_T] * width + position_T
    into.token_ids_T.copy_(tokens_SL.view(-1)[place_T])
    into.embedded_ids_T.copy_(into.token_ids_T.masked_fill(torch.isin(into.token_ids_T, placeholder_P), 0))
    into.positions_T.copy_(position_T)
    into.next_places_T.copy_(place_T + 1)
    into.next_positions_T.copy_(position_T + 1)
    is_padding_T = slot_B[row_T] == spare
    for group, (begin, columns, page_tokens) in enumerate(tables.facts_G3.tolist()):
        column_T = ((position_T - rows.first_GB[group, :num_rows][row_T]) // page_tokens).masked_fill(is_padding_T, 0)
        kv_address_T = tables.pages_E[begin + row_T * columns + column_T].long() * page_tokens + position_T % page_tokens
        into.kv_address_GT[group, :num_tokens] = kv_address_T.masked_fill(is_padding_T, -1)
    if into.ring_T is not None:
        into.ring_T.copy_(slot_B[row_T] * room + position_T % room)


def accept_drafts(
    drawn_T: Tensor,
    ids_T: Tensor,
    begin_B1: Tensor,
    places_T: Tensor,
    tokens_SL: Tensor,
    forced_1: Tensor,
    out_X: Tensor,
    accepted_S: Tensor,
) -> None:
    """Store the draws of a step and count the drafts that they accept.

    Row r has the tokens `begin[r] .. begin[r + 1] - 1` of the step, which are the newest token and its drafts. Their ids are in
    `ids_T`. Draws are written to `tokens_SL` at `places_T`, and to `out_X[:T]`. The accepted drafts of a row are those before
    the first draft that differs from its draw. Their number is written to `out_X[T + r]`, for as many rows as fit in `out_X`,
    and to `accepted_S` at the row's slot. If `forced_1` is 0 or more, it replaces that number. Benchmarks use this.
    """
    num_tokens = drawn_T.shape[0]
    num_rows = out_X.shape[0] - num_tokens
    tokens_SL.view(-1)[places_T] = drawn_T.to(tokens_SL.dtype)
    out_X[:num_tokens] = drawn_T
    begin_R, count_R = begin_B1[:num_rows].long(), begin_B1.diff()[:num_rows].long()
    column_K = torch.arange(num_tokens, device=drawn_T.device)
    token_RK = (begin_R[:, None] + column_K).clamp(max=num_tokens - 1)
    is_draft_RK = column_K < (count_R - 1)[:, None]
    is_equal_RK = is_draft_RK & (drawn_T[token_RK] == ids_T[(token_RK + 1).clamp(max=num_tokens - 1)])
    num_equal_R = is_equal_RK.long().cumprod(dim=-1).sum(dim=-1)
    forced_R = torch.minimum(forced_1.long(), (count_R - 1).clamp(min=0))
    out_X[num_tokens:] = torch.where(forced_1 >= 0, forced_R, num_equal_R)
    has_tokens_R = count_R > 0
    slot_R = places_T[begin_R[has_tokens_R]] // tokens_SL.shape[1]
    accepted_S[slot_R] = out_X[num_tokens:][has_tokens_R].to(accepted_S.dtype)


def begin_round(
    out_X: Tensor,
    begin_B1: Tensor,
    places_T: Tensor,
    positions_T: Tensor,
    width: int,
    last_TD: Tensor,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write the inputs of a draft round to `into`, which is (facts [4, R], hidden states [R, D]). Call after `accept_drafts`.

    A row's facts are its slot, its row number, the token that its newest token was drawn from, and the newest token's
    position. Its hidden state is that of the token it was drawn from. `places_T` and `positions_T` are the place and position
    of each draw. A slot has `width` tokens.
    """
    facts_4R, hidden_RD = into
    num_tokens, num_rows = last_TD.shape[0], facts_4R.shape[1]
    # A row without tokens pads the batch. It uses the last token, which is also padding.
    source_R = (begin_B1[:num_rows] + out_X[num_tokens : num_tokens + num_rows]).clamp(max=num_tokens - 1)
    facts_4R[0] = places_T[source_R] // width
    facts_4R[1] = torch.arange(num_rows, device=facts_4R.device)
    facts_4R[2] = source_R
    facts_4R[3] = positions_T[source_R]
    hidden_RD.copy_(last_TD[source_R])
