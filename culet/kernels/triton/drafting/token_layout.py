"""Begin a step on the GPU. One launch computes each token's position, id and KV address.

    start = start[row] + is_open[row] * accepted[slot],   position = start + token - begin[row],   id = tokens[slot, position]
    embedded id = 0 if id is a placeholder, otherwise id
    kv_address = page * page_tokens + position % page_tokens, per KV group

Shapes: T tokens of a step · B rows of a step · G KV groups · S slots · L tokens per slot ·
P placeholders of media.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, next_power_of_2
from culet.kernels.types import PageTables, PlannedRows, TokenLayout


@triton.jit(do_not_specialize=["width", "spare", "first_stride", "address_stride"])
def _token_layout_kernel(
    begin, start, slot, is_open, first, pages, facts, tokens, placeholders, accepted,
    ids, embedded_ids, positions, next_places, next_positions, kv_addresses, context, ring,
    width, spare, first_stride, address_stride,
    PLACEHOLDERS: tl.constexpr, GROUPS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lay out the tokens of one row per program."""
    enter(PDL)
    row = tl.program_id(0)
    first_token = tl.load(begin + row)
    count = tl.load(begin + row + 1) - first_token
    owner = tl.load(slot + row)
    is_real = owner != spare
    at = tl.load(start + row) + tl.load(is_open + row) * tl.load(accepted + owner)
    tl.store(context + row, at)
    column = tl.arange(0, BLOCK)
    is_token = column < count
    token, position = first_token + column, at + column
    place = owner.to(tl.int64) * width + position
    token_id = tl.load(tokens + place, mask=is_token, other=0).to(tl.int64)
    tl.store(ids + token, token_id, mask=is_token)
    for index in tl.static_range(PLACEHOLDERS):
        token_id = tl.where(token_id == tl.load(placeholders + index), 0, token_id)
    tl.store(embedded_ids + token, token_id, mask=is_token)
    tl.store(positions + token, position.to(tl.int64), mask=is_token)
    tl.store(next_places + token, place + 1, mask=is_token)
    tl.store(next_positions + token, position + 1, mask=is_token)
    for group in tl.static_range(GROUPS):
        columns, page_tokens = tl.load(facts + 3 * group + 1), tl.load(facts + 3 * group + 2)
        entry = (
            tl.load(facts + 3 * group) + row * columns + (position - tl.load(first + group * first_stride + row)) // page_tokens
        )
        page = tl.load(pages + entry, mask=is_token & is_real, other=0).to(tl.int64)
        address = tl.where(is_real, page * page_tokens + position % page_tokens, -1)
        tl.store(kv_addresses + group * address_stride + token, address, mask=is_token)
    if ROOM:
        tl.store(ring + token, owner.to(tl.int64) * ROOM + position % ROOM, mask=is_token)


def describe_token_layout(
    rows: PlannedRows,
    tables: PageTables,
    tokens_SL: Tensor,
    placeholder_P: Tensor,
    accepted_S: Tensor,
    room: int,
    into: TokenLayout,
    pdl: bool,
) -> Launch:
    num_rows = rows.start_B.shape[0]
    arguments: dict[str, Any] = {"begin": rows.begin_B1, "start": rows.start_B, "slot": rows.slot_B, "is_open": rows.is_open_B}
    arguments |= {"first": rows.first_GB, "pages": tables.pages_E, "facts": tables.facts_G3}
    arguments |= {"tokens": tokens_SL, "placeholders": placeholder_P, "accepted": accepted_S}
    arguments |= {"ids": into.token_ids_T, "embedded_ids": into.embedded_ids_T}
    arguments |= {"positions": into.positions_T, "next_places": into.next_places_T}
    arguments |= {
        "next_positions": into.next_positions_T,
        "kv_addresses": into.kv_address_GT,
        "context": into.context_B,
        "ring": into.ring_T,
    }
    arguments |= {"width": tokens_SL.shape[1], "spare": tokens_SL.shape[0] - 1}
    arguments |= {"first_stride": rows.first_GB.stride(0), "address_stride": into.kv_address_GT.stride(0)}
    arguments |= {
        "PLACEHOLDERS": placeholder_P.shape[0],
        "GROUPS": into.kv_address_GT.shape[0],
        "ROOM": room if into.ring_T is not None else 0,
    }
    arguments |= {"BLOCK": next_power_of_2(rows.most_tokens), "PDL": pdl}
    return Launch(_token_layout_kernel, (num_rows,), arguments, options(1, pdl))


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
    describe_token_layout(rows, tables, tokens_SL, placeholder_P, accepted_S, room, into, uses_pdl(tokens_SL.device)).run()
