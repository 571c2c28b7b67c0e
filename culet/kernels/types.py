"""What a step of fixed shape is laid out from and into; see `lay_out_tokens`.

Shapes: B rows, those that pad the step included · T tokens of it · G groups of KV · E entries of all page tables.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PlannedRows(NamedTuple):
    """The rows of a step, as the host has planned them. Row b has the tokens `begin[b] .. begin[b + 1] - 1`. All int32."""

    begin_B1: Tensor
    start_B: Tensor  # position of the first token; of an open row the least it can be
    slot_B: Tensor  # whose tokens they are; the last slot's rows pad the step
    is_open_B: Tensor  # 1: the drafts that its last row accepted come on top of `start_B`
    first_GB: Tensor  # position of the first token that is in its page tables
    most_tokens: int  # that any row has


class PageTables(NamedTuple):
    """The page tables of all groups, one after the other. All int32."""

    pages_E: Tensor
    facts_G3: Tensor  # where a group's entries begin, how many a row has, tokens of a page


class TokenLayout(NamedTuple):
    """What follows for each token of a step, and for each row."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    next_places_T: Tensor  # int64; where the token after it stands among all slots' tokens
    next_positions_T: Tensor  # int32
    kv_address_GT: Tensor  # int64; where its KV goes in a group; -1: nowhere
    context_B: Tensor  # int32; tokens before a row's first
    ring_T: Tensor | None  # int64; where a drafter's features of it are kept, if they are
