"""The parts of a draft round that are not layers of the drafter. Each takes one launch.

    newest_tokens   tokens[slot, length], the first token without KV
    keep_drafts     store drafts after the newest token
    begin_chain     positions and angles that all drafts of a chain share
    begin_blocks    ids, positions, KV addresses, visible keys, angles and embeddings of blocks of mask tokens
    join_taps       the target's hidden states at a drafter's taps, side by side
    keep_taps       the same hidden states, stored in a ring

Shapes: R sequences · K drafts per sequence · S slots · L tokens per slot · T tokens · P page table columns · D model ·
X joined taps · N places of a ring · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, cdiv, next_power_of_2
from culet.kernels.types import BlockShape, BlockStart, ChainStart, Rope

BLOCK = 128  # elements per program if a sequence has few elements
BLOCK_D = 1024
BLOCK_EMBEDDED = 256  # columns per program, for all tokens of a block
MAX_TAPS = 8  # per launch
MAX_WINDOWS = 2  # windows of layers that see both ways (sliding and full)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _newest_kernel(tokens, slots, lengths, newest, num_rows, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    enter(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    place = tl.load(slots + row, mask=inside, other=0) * width + tl.load(lengths + row, mask=inside, other=0)
    tl.store(newest + row, tl.load(tokens + place, mask=inside, other=0).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["num_all", "width"])
def _keep_drafts_kernel(
    tokens, slots, lengths, drafts, num_all, width, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Store the drafts of all rows, or token 0 for those below 0. `drafts` has them one after another."""
    enter(PDL)
    draft = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = draft < num_all
    row = draft // K
    place = tl.load(slots + row, mask=inside, other=0) * width + tl.load(lengths + row, mask=inside, other=0)
    kept = tl.load(drafts + draft, mask=inside, other=0)
    tl.store(tokens + place + 1 + draft % K, tl.maximum(kept, 0).to(tl.int32), mask=inside)


@triton.jit
def _store_rope(position, inv_freq, cos, sin, rows, is_row, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """Store cos and signed sin of position * frequency in rows [.., 2 * HALF]."""
    column = tl.arange(0, BLOCK_H)
    inside = is_row[:, None] & (column < HALF)[None, :]
    angle = position.to(tl.float32)[:, None] * tl.load(inv_freq + column, mask=column < HALF, other=0.0)[None, :]
    c, s = tl.cos(angle), tl.sin(angle)
    offsets = rows[:, None] * (2 * HALF) + column[None, :]
    tl.store(cos + offsets, c, mask=inside)
    tl.store(cos + offsets + HALF, c, mask=inside)
    tl.store(sin + offsets, -s, mask=inside)
    tl.store(sin + offsets + HALF, s, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _chain_kernel(
    lengths, last, begin, context, inv_freq_a, cos_a, sin_a, inv_freq_b, cos_b, sin_b, num_rows, IS_AHEAD: tl.constexpr,
    HALF_A: tl.constexpr, HALF_B: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Process BLOCK_R rows. Store their positions and angles for the first kind of layer, or their angles for the second."""
    enter(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    length = tl.load(lengths + row, mask=is_row, other=1)
    position = length if IS_AHEAD else length - 1
    if tl.program_id(1) == 0:
        tl.store(last + row, length - 1, mask=is_row)
        tl.store(context + row, (length - 1).to(tl.int32), mask=is_row)
        tl.store(begin + row, row, mask=row <= num_rows)
        _store_rope(position, inv_freq_a, cos_a, sin_a, row, is_row, HALF_A, BLOCK_A)
    else:
        _store_rope(position, inv_freq_b, cos_b, sin_b, row, is_row, HALF_B, BLOCK_B)


@triton.jit(do_not_specialize=["num_rows", "mask_id", "spare_page", "num_columns", "pages_stride"])
def _blocks_kernel(
    newest, lengths, pages, firsts, inv_freq, table,
    ids, positions, kv_addresses, begin, context, visible_a, visible_b, cos, sin, x,
    num_rows, mask_id, spare_page, num_columns, pages_stride, page_tokens, table_stride,
    SIZE: tl.constexpr, WINDOW_A: tl.constexpr, WINDOW_B: tl.constexpr, NUM_VISIBLE: tl.constexpr,
    HALF: tl.constexpr, D: tl.constexpr, scale: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store some columns of one block's embedding, or everything else about the block.

    A window of 0 sees all keys. `spare_page` is -1 if there is no spare page.
    """
    enter(PDL)
    row = tl.program_id(0)
    number = tl.arange(0, BLOCK_K)
    is_token = number < SIZE
    token = row * SIZE + number
    token_id = tl.where(number == 0, tl.load(newest + row), mask_id)
    if tl.program_id(1) > 0:
        d = (tl.program_id(1) - 1) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = is_token[:, None] & (d < D)[None, :]
        embedded = tl.load(table + token_id[:, None] * table_stride + d[None, :], mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(x + token.to(tl.int64)[:, None] * D + d[None, :], embedded.to(x.dtype.element_ty), mask=inside)
        return
    length = tl.load(lengths + row)
    position = length + number
    tl.store(ids + token, token_id, mask=is_token)
    tl.store(positions + token, position, mask=is_token)
    column = tl.minimum((position - tl.load(firsts + row)) // page_tokens, num_columns - 1)
    page = tl.load(pages + row.to(tl.int64) * pages_stride + column, mask=is_token, other=0).to(tl.int64)
    address = tl.where(page == spare_page, -1, page * page_tokens + position % page_tokens)
    tl.store(kv_addresses + token, address, mask=is_token)
    tl.store(begin + row, row * SIZE)
    tl.store(begin + num_rows, num_rows * SIZE)  # Every program stores the same value.
    tl.store(context + row, length.to(tl.int32))
    last = (length + SIZE - 1 + number * 0).to(tl.int32)
    if NUM_VISIBLE >= 1:
        _store_visible(visible_a, position, last, token, is_token, num_rows * SIZE, WINDOW_A)
    if NUM_VISIBLE >= 2:
        _store_visible(visible_b, position, last, token, is_token, num_rows * SIZE, WINDOW_B)
    _store_rope(position, inv_freq, cos, sin, token, is_token, HALF, BLOCK_H)


@triton.jit
def _store_visible(visible, position, last, token, is_token, num_tokens, WINDOW: tl.constexpr):
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    tl.store(visible + token, first.to(tl.int32), mask=is_token)
    tl.store(visible + num_tokens + token, last, mask=is_token)


@triton.jit
def _copy_tap(tap, to, token, column, inside, stride):
    tl.store(to + column, tl.load(tap + token * stride + column, mask=inside), mask=inside)


@triton.jit
def _taps_kernel(
    tap_0, tap_1, tap_2, tap_3, tap_4, tap_5, tap_6, tap_7, places, out, tap_stride, out_stride,
    D: tl.constexpr, NUM_TAPS: tl.constexpr, HAS_PLACES: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy some columns of all taps of one token."""
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < D
    place = token
    if HAS_PLACES:
        place = tl.load(places + token)
    to = out + place * out_stride
    _copy_tap(tap_0, to, token, column, inside, tap_stride)
    if NUM_TAPS > 1:
        _copy_tap(tap_1, to + D, token, column, inside, tap_stride)
    if NUM_TAPS > 2:
        _copy_tap(tap_2, to + 2 * D, token, column, inside, tap_stride)
    if NUM_TAPS > 3:
        _copy_tap(tap_3, to + 3 * D, token, column, inside, tap_stride)
    if NUM_TAPS > 4:
        _copy_tap(tap_4, to + 4 * D, token, column, inside, tap_stride)
    if NUM_TAPS > 5:
        _copy_tap(tap_5, to + 5 * D, token, column, inside, tap_stride)
    if NUM_TAPS > 6:
        _copy_tap(tap_6, to + 6 * D, token, column, inside, tap_stride)
    if NUM_TAPS > 7:
        _copy_tap(tap_7, to + 7 * D, token, column, inside, tap_stride)


def describe_newest(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor, newest_R: Tensor, pdl: bool) -> Launch:
    num_rows = newest_R.shape[0]
    arguments: dict[str, Any] = {"tokens": tokens_SL, "slots": slot_R, "lengths": length_R, "newest": newest_R}
    arguments |= {"num_rows": num_rows, "width": tokens_SL.shape[1], "BLOCK": BLOCK, "PDL": pdl}
    return Launch(_newest_kernel, (cdiv(num_rows, BLOCK),), arguments, options(4, pdl))


def describe_keep_drafts(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor, drafts_RK: Tensor, pdl: bool) -> Launch:
    num_all = drafts_RK.numel()
    arguments: dict[str, Any] = {"tokens": tokens_SL, "slots": slot_R, "lengths": length_R, "drafts": drafts_RK}
    arguments |= {"num_all": num_all, "width": tokens_SL.shape[1], "K": drafts_RK.shape[1], "BLOCK": BLOCK, "PDL": pdl}
    return Launch(_keep_drafts_kernel, (cdiv(num_all, BLOCK),), arguments, options(4, pdl))


def describe_chain(length_R: Tensor, is_ahead: bool, inv_freqs: Sequence[Tensor], out: ChainStart, pdl: bool) -> Launch:
    """Describe the launch for one or two kinds of layers."""
    num_rows, block_r = length_R.shape[0], 4
    (inv_freq_a, rope_a), (inv_freq_b, rope_b) = [*zip(inv_freqs, out.ropes, strict=True)] * (3 - len(inv_freqs))
    arguments: dict[str, Any] = {"lengths": length_R, "last": out.last_R, "begin": out.row_begin_R1, "context": out.context_R}
    arguments |= {"inv_freq_a": inv_freq_a, "cos_a": rope_a.cos_T1R, "sin_a": rope_a.sin_T1R}
    arguments |= {"inv_freq_b": inv_freq_b, "cos_b": rope_b.cos_T1R, "sin_b": rope_b.sin_T1R}
    half_a, half_b = inv_freq_a.shape[0], inv_freq_b.shape[0]
    arguments |= {"num_rows": num_rows, "IS_AHEAD": is_ahead, "HALF_A": half_a, "HALF_B": half_b, "BLOCK_R": block_r}
    arguments |= {"BLOCK_A": next_power_of_2(half_a), "BLOCK_B": next_power_of_2(half_b), "PDL": pdl}
    # `begin` has one more element than there are rows.
    return Launch(_chain_kernel, (cdiv(num_rows + 1, block_r), len(inv_freqs)), arguments, options(4, pdl))


def describe_blocks(
    newest_R: Tensor,
    length_R: Tensor,
    tables: tuple[Tensor, Tensor],
    shape: BlockShape,
    inv_freq: Tensor,
    embedding: tuple[Tensor, float],
    out: BlockStart,
    pdl: bool,
) -> Launch:
    (num_rows,), (half,), (pages_RP, first_R), (table_VD, scale) = length_R.shape, inv_freq.shape, tables, embedding
    size, block_d = table_VD.shape[1], min(BLOCK_EMBEDDED, next_power_of_2(table_VD.shape[1]))
    windows, visible = [window or 0 for window in shape.windows], [*out.visible, *[out.context_R] * MAX_WINDOWS]
    arguments: dict[str, Any] = {"newest": newest_R, "lengths": length_R, "pages": pages_RP, "firsts": first_R}
    arguments |= {"inv_freq": inv_freq, "ids": out.ids_T, "positions": out.positions_T, "kv_addresses": out.kv_address_T}
    arguments |= {"begin": out.row_begin_R1, "context": out.context_R, "visible_a": visible[0], "visible_b": visible[1]}
    arguments |= {"cos": out.rope.cos_T1R, "sin": out.rope.sin_T1R, "num_rows": num_rows, "mask_id": shape.mask_token_id}
    arguments |= {"spare_page": -1 if shape.spare_page is None else shape.spare_page, "num_columns": pages_RP.shape[1]}
    arguments |= {"pages_stride": pages_RP.stride(0), "page_tokens": shape.page_tokens, "SIZE": shape.size}
    arguments |= {"WINDOW_A": [*windows, 0][0], "WINDOW_B": [*windows, 0, 0][1], "NUM_VISIBLE": len(windows), "HALF": half}
    arguments |= {"BLOCK_K": next_power_of_2(shape.size), "BLOCK_H": next_power_of_2(half), "PDL": pdl, "x": out.x_TD}
    arguments |= {"table": table_VD, "table_stride": table_VD.stride(0), "D": size, "scale": scale, "BLOCK_D": block_d}
    return Launch(_blocks_kernel, (num_rows, 1 + cdiv(size, block_d)), arguments, options(4, pdl))


def describe_taps(taps: Sequence[Tensor], place_T: Tensor | None, out_NX: Tensor, pdl: bool) -> Launch:
    """Describe a launch that copies up to MAX_TAPS taps of the same stride to the first columns of `out_NX`."""
    num_tokens, size = taps[0].shape
    block = min(BLOCK_D, next_power_of_2(size))
    arguments: dict[str, Any] = {f"tap_{index}": taps[min(index, len(taps) - 1)] for index in range(MAX_TAPS)}
    arguments |= {"places": out_NX if place_T is None else place_T, "out": out_NX, "tap_stride": taps[0].stride(0)}
    arguments |= {"out_stride": out_NX.stride(0), "D": size, "NUM_TAPS": len(taps), "HAS_PLACES": place_T is not None}
    arguments |= {"BLOCK_D": block, "PDL": pdl}
    return Launch(_taps_kernel, (num_tokens, cdiv(size, block)), arguments, options(4 if block == BLOCK_D else 1, pdl))


def newest_tokens(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor) -> Tensor:
    """Return the first token without KV, tokens[slot, length], int64 [R]."""
    newest_R = torch.empty_like(length_R)
    if newest_R.shape[0]:
        describe_newest(tokens_SL, slot_R, length_R, newest_R, uses_pdl(newest_R.device)).run()
    return newest_R


def keep_drafts(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor, drafts_RK: Tensor) -> None:
    """Store drafts after the newest token, as tokens[slot, length + 1 + k] = drafts[r, k], or token 0 if that is below 0.

    `tokens_SL` is int32.
    """
    if drafts_RK.numel():
        describe_keep_drafts(tokens_SL, slot_R, length_R, drafts_RK.contiguous(), uses_pdl(tokens_SL.device)).run()


def _empty_rope(num_tokens: int, inv_freq: Tensor) -> Rope:
    cos, sin = (inv_freq.new_empty(num_tokens, 1, 2 * inv_freq.shape[0]) for _ in range(2))
    return Rope(cos, sin)


def begin_chain(length_R: Tensor, is_ahead: bool, inv_freqs: Sequence[Tensor]) -> ChainStart:
    """Place each query at the last of its `length_R` keys. Rope uses that position, or the next one if `is_ahead`."""
    num_rows, pdl = length_R.shape[0], uses_pdl(length_R.device)
    begin_R1, context_R = (length_R.new_empty(count, dtype=torch.int32) for count in (num_rows + 1, num_rows))
    ropes = [_empty_rope(num_rows, inv_freq) for inv_freq in inv_freqs]
    start = ChainStart(torch.empty_like(length_R), begin_R1, context_R, ropes)
    for first in range(0, len(inv_freqs), 2):  # a launch handles two kinds of layers
        part = slice(first, first + 2)
        describe_chain(length_R, is_ahead, inv_freqs[part], start._replace(ropes=ropes[part]), pdl).run()
    return start


def begin_blocks(
    newest_R: Tensor,
    length_R: Tensor,
    tables: tuple[Tensor, Tensor],
    shape: BlockShape,
    inv_freq: Tensor,
    embedding: tuple[Tensor, float],
) -> BlockStart:
    """Return the inputs of a pass over blocks.

    `tables` is (pages [R, P], position of each row's first page) for the drafter's KV group. `embedding` is
    (table [V, D], scale).
    """
    assert len(shape.windows) <= MAX_WINDOWS, (
        f"at most {MAX_WINDOWS} windows of layers that see both ways are supported, got {len(shape.windows)}"
    )
    num_rows = length_R.shape[0]
    num_tokens = num_rows * shape.size
    ids_T, positions_T, kv_address_T = (length_R.new_empty(num_tokens) for _ in range(3))
    begin_R1, context_R = (length_R.new_empty(count, dtype=torch.int32) for count in (num_rows + 1, num_rows))
    visible = [length_R.new_empty(2, num_tokens, dtype=torch.int32) for _ in shape.windows]
    rope = _empty_rope(num_tokens, inv_freq)
    x_TD = embedding[0].new_empty(num_tokens, embedding[0].shape[1])
    start = BlockStart(ids_T, positions_T, kv_address_T, begin_R1, context_R, visible, rope, x_TD)
    if num_rows:
        pdl = uses_pdl(length_R.device)
        describe_blocks(newest_R, length_R, tables, shape, inv_freq, embedding, start, pdl).run()
    return start


def join_taps(taps: Sequence[Tensor]) -> Tensor:
    """Concatenate taps [T, D] to [T, X]."""
    num_tokens, size = taps[0].shape
    out_TX = taps[0].new_empty(num_tokens, len(taps) * size)
    _copy_taps(taps, None, out_TX)
    return out_TX


def keep_taps(taps: Sequence[Tensor], ring_NX: Tensor, place_T: Tensor) -> None:
    """Store the joined taps [T, D] as ring[place]. If two tokens share a place, either may be stored."""
    _copy_taps(taps, place_T, ring_NX)


def _copy_taps(taps: Sequence[Tensor], place_T: Tensor | None, out_NX: Tensor) -> None:
    num_tokens, size = taps[0].shape
    if len({tap.stride() for tap in taps}) > 1 or taps[0].stride(1) != 1:
        taps = [tap.contiguous() for tap in taps]
    for first in range(0, len(taps) if num_tokens else 0, MAX_TAPS):
        part = taps[first : first + MAX_TAPS]
        describe_taps(part, place_T, out_NX[:, first * size :], uses_pdl(out_NX.device)).run()
