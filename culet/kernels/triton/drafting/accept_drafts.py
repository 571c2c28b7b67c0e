"""End a step on the GPU. Store draws, count accepted drafts, and prepare the inputs of the next draft round.

    accept_drafts   tokens[places[t]] = draws[t], accepted[row] = drafts before the first that differs from its draw
    begin_round     facts[:, r] = (slot, r, source, position), hidden[r] = last[source], where source = begin[r] + accepted[r]

Each takes one launch, so that the host is not needed between the target's logits and the drafter's first layer.

Shapes: T tokens of a step · B rows of a step · R rows that may draft · X = T + R · D model.
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
def _accept_drafts_kernel(
    drawn, ids, begin, places, tokens, forced, out, accepted, num_tokens, num_rows, width,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Accept the drafts of one row per program, including rows that pad the step."""
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
    num_accepted = tl.min(tl.where(is_draft & (token == draft), BLOCK, column), 0)
    forced_count = tl.load(forced).to(tl.int32)
    num_accepted = tl.where(forced_count >= 0, tl.minimum(forced_count, tl.maximum(count - 1, 0)), num_accepted)
    tl.store(out + num_tokens + row, num_accepted.to(tl.int64), mask=row < num_rows)
    slot = tl.load(places + first, mask=count > 0, other=0) // width
    tl.store(accepted + slot, num_accepted.to(tl.int32), mask=(count > 0) & (row < num_rows))


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "width"])
def _begin_round_kernel(
    out, begin, places, positions, last, facts, hidden, num_tokens, num_rows, width, D,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy a block of columns of one row's hidden state per program. The first program of a row also writes its facts."""
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


def describe_accept_drafts(
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
    # One row may have all tokens of the step. A step with few drafts has few tokens.
    arguments |= {"BLOCK": max(16, triton.next_power_of_2(num_tokens)), "PDL": pdl}
    return Launch(_accept_drafts_kernel, (num_rows,), arguments, options(1, pdl))


def describe_begin_round(
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
    return Launch(_begin_round_kernel, (num_rows, triton.cdiv(size, BLOCK_D)), arguments, options(4, pdl))


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
    """Store a step's draws in `tokens_SL` (int32) at `places_T` and in `out_X[:T]`, and count each row's accepted drafts.

    The counts are written to `out_X[T:]` by row and to `accepted_S` (int32) by slot.
    """
    into = out_X, accepted_S
    describe_accept_drafts(drawn_T, ids_T, begin_B1, places_T, tokens_SL, forced_1, into, uses_pdl(drawn_T.device)).run()


def begin_round(
    out_X: Tensor,
    begin_B1: Tensor,
    places_T: Tensor,
    positions_T: Tensor,
    width: int,
    last_TD: Tensor,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write the inputs of a draft round to `into`, which is (facts [4, R] (int64), hidden states [R, D])."""
    assert last_TD.is_contiguous(), "hidden states must be contiguous"
    describe_begin_round(out_X, begin_B1, places_T, positions_T, width, last_TD, into, uses_pdl(last_TD.device)).run()
