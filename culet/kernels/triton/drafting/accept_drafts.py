"""The end of a step on the GPU: draws are kept, drafts counted, and the drafter is given what it begins with.

A launch each, so that a round of drafts needs no word of the host between the target's logits and the drafter's first layer.
Shapes: T tokens of a step · B rows of it · R rows that may draft · X = T + R · D model.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch

BLOCK_D = 1024


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "width"])
def _settle_kernel(
    drawn, ids, begin, places, tokens, forced, out, accepted, num_tokens, num_rows, width,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row of the step, those that only pad it included."""
    enter(PDL)
    row = tl.program_id(0)
    first = tl.load(begin + row)
    count = tl.load(begin + row + 1) - first
    column = tl.arange(0, BLOCK)
    is_draw = column < count
    is_draft = column < count - 1
    token = tl.load(drawn + first + column, mask=is_draw, other=0)
    draft = tl.load(ids + first + column + 1, mask=is_draft, other=-1)
    tl.store(out + first + column, token, mask=is_draw)
    place = tl.load(places + first + column, mask=is_draw, other=0)
    tl.store(tokens + place, token.to(tl.int32), mask=is_draw)
    agreed = tl.min(tl.where(is_draft & (token == draft), BLOCK, column), 0)
    wanted = tl.load(forced).to(tl.int32)
    agreed = tl.where(wanted >= 0, tl.minimum(wanted, tl.maximum(count - 1, 0)), agreed)
    tl.store(out + num_tokens + row, agreed.to(tl.int64), mask=row < num_rows)
    slot = tl.load(places + first, mask=count > 0, other=0) // width
    tl.store(accepted + slot, agreed.to(tl.int32), mask=(count > 0) & (row < num_rows))


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "width"])
def _begin_kernel(
    out, begin, places, positions, last, facts, hidden, num_tokens, num_rows, width, D,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row and part of the hidden state."""
    enter(PDL)
    row = tl.program_id(0)
    source = tl.load(begin + row).to(tl.int64) + tl.load(out + num_tokens + row)
    source = tl.minimum(source, num_tokens - 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(last + source * D + column, mask=column < D, other=0.0)
    tl.store(hidden + row.to(tl.int64) * D + column, state, mask=column < D)
    if tl.program_id(1) == 0:
        tl.store(facts + row, tl.load(places + source) // width)
        tl.store(facts + num_rows + row, row.to(tl.int64))
        tl.store(facts + 2 * num_rows + row, source)
        tl.store(facts + 3 * num_rows + row, tl.load(positions + source).to(tl.int64))


def describe_settle(
    drawn_T: Tensor,
    ids_T: Tensor,
    begin_B1: Tensor,
    places_T: Tensor,
    tokens_SL: Tensor,
    forced_1: Tensor,
    into: tuple[Tensor, Tensor],
    pdl: bool,
) -> Launch:
    out_X, accepted_S = into
    num_tokens, num_rows = drawn_T.shape[0], begin_B1.shape[0] - 1
    arguments: dict[str, Any] = {
        "drawn": drawn_T,
        "ids": ids_T,
        "begin": begin_B1,
        "places": places_T,
        "tokens": tokens_SL,
        "forced": forced_1,
        "out": out_X,
        "accepted": accepted_S,
    }
    arguments |= {"num_tokens": num_tokens, "num_rows": out_X.shape[0] - num_tokens, "width": tokens_SL.shape[1]}
    # Any row has at most all tokens; a round of few drafts has few.
    arguments |= {"BLOCK": max(16, triton.next_power_of_2(num_tokens)), "PDL": pdl}
    return Launch(_settle_kernel, (num_rows,), arguments, options(1, pdl))


def describe_begin(
    out_X: Tensor,
    begin_B1: Tensor,
    places_T: Tensor,
    positions_T: Tensor,
    width: int,
    last_TD: Tensor,
    into: tuple[Tensor, Tensor],
    pdl: bool,
) -> Launch:
    facts_4R, hidden_RD = into
    (num_tokens, size), num_rows = last_TD.shape, facts_4R.shape[1]
    arguments: dict[str, Any] = {"out": out_X, "begin": begin_B1, "places": places_T, "positions": positions_T, "last": last_TD}
    arguments |= {"facts": facts_4R, "hidden": hidden_RD, "num_tokens": num_tokens, "num_rows": num_rows, "width": width}
    arguments |= {"D": size, "BLOCK": BLOCK_D, "PDL": pdl}
    return Launch(_begin_kernel, (num_rows, triton.cdiv(size, BLOCK_D)), arguments, options(4, pdl))


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
    """Keep a step's draws at `places_T` of `tokens_SL` (int32) and in `out_X[:T]`, and each row's accepted drafts behind them.

    `accepted_S` (int32) has the latter by slot.
    """
    into = out_X, accepted_S
    describe_settle(drawn_T, ids_T, begin_B1, places_T, tokens_SL, forced_1, into, uses_pdl(drawn_T.device)).run()


def begin_round(
    out_X: Tensor,
    begin_B1: Tensor,
    places_T: Tensor,
    positions_T: Tensor,
    width: int,
    last_TD: Tensor,
    into: tuple[Tensor, Tensor],
) -> None:
    """A drafter's facts [4, R] (int64) and hidden states [R, D] of the tokens that the newest ones were drawn from."""
    assert last_TD.is_contiguous(), "rows of hidden states follow each other"
    describe_begin(out_X, begin_B1, places_T, positions_T, width, last_TD, into, uses_pdl(last_TD.device)).run()
