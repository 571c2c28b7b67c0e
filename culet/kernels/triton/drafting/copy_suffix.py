"""Find the last tokens of each sequence earlier in the same sequence, and copy what followed them. It takes two launches.

The length of a sequence is known only on the device, so the search is split among a fixed number of programs. Each finds its
best match, and the second kernel picks the best of these.

Shapes: R sequences · K drafts per sequence · S slots · L tokens per slot · P programs per sequence.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch, next_power_of_2

BLOCK = 1024  # positions that a program compares at a time
NUM_PARTS = 32  # programs per sequence


@triton.jit(do_not_specialize=["width"])
def _search_kernel(
    tokens, slots, lengths, best, width, MIN_LEN: tl.constexpr, MAX_LEN: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the best match among every NUM_PARTS-th block of positions, as match length * 2^32 + position of its end, or -1."""
    enter(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    own = tokens + tl.load(slots + row) * width
    found = tl.full((BLOCK,), -1, tl.int64)
    for first in range(part * BLOCK, length.to(tl.int32), NUM_PARTS * BLOCK):
        end = first + tl.arange(0, BLOCK)
        is_same = end < length
        match_len = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(MAX_LEN):
            is_same = is_same & (end >= back)
            earlier = tl.load(own + end - back, mask=is_same, other=-1)
            is_same = is_same & (earlier == tl.load(own + length - back, mask=length >= back, other=-1))
            match_len += is_same.to(tl.int64)
        found = tl.maximum(found, tl.where(match_len >= MIN_LEN, match_len * 4294967296 + end, -1))
    tl.store(best + row * NUM_PARTS + part, tl.max(found, 0))


@triton.jit(do_not_specialize=["width", "drafts_stride"])
def _copy_kernel(
    tokens, slots, lengths, best, drafts, width, drafts_stride, K: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy what followed the best match of one sequence. If the copy reaches the newest token, it starts over."""
    enter(PDL)
    row = tl.program_id(0)
    found = tl.max(tl.load(best + row * NUM_PARTS + tl.arange(0, NUM_PARTS)), 0)
    end = found % 4294967296
    period = tl.maximum(tl.load(lengths + row) - end, 1)
    number = tl.arange(0, BLOCK_K)
    inside = (number < K) & (found >= 0)
    token = tl.load(tokens + tl.load(slots + row) * width + end + 1 + number % period, mask=inside, other=0)
    tl.store(drafts + row.to(tl.int64) * drafts_stride + number, token.to(tl.int64), mask=inside)


def describe_search(
    tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor, match_lens: tuple[int, int], best_RP: Tensor, pdl: bool
) -> Launch:
    arguments: dict[str, Any] = {"tokens": tokens_SL, "slots": slot_R, "lengths": length_R, "best": best_RP}
    arguments |= {"width": tokens_SL.shape[1], "MIN_LEN": match_lens[0], "MAX_LEN": match_lens[1]}
    arguments |= {"NUM_PARTS": NUM_PARTS, "BLOCK": BLOCK, "PDL": pdl}
    return Launch(_search_kernel, (slot_R.shape[0], NUM_PARTS), arguments, options(4, pdl))


def describe_copy(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor, best_RP: Tensor, drafts_RK: Tensor, pdl: bool) -> Launch:
    num_rows, num_drafts = drafts_RK.shape
    arguments: dict[str, Any] = {"tokens": tokens_SL, "slots": slot_R, "lengths": length_R, "best": best_RP}
    arguments |= {"drafts": drafts_RK, "width": tokens_SL.shape[1], "drafts_stride": drafts_RK.stride(0), "K": num_drafts}
    arguments |= {"NUM_PARTS": NUM_PARTS, "BLOCK_K": next_power_of_2(num_drafts), "PDL": pdl}
    return Launch(_copy_kernel, (num_rows,), arguments, options(1, pdl))


def copy_suffix(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor, match_lens: tuple[int, int], drafts_RK: Tensor) -> None:
    """Overwrite the drafts (int64) of each sequence whose last tokens occurred before with what followed them.

    `match_lens` are the fewest and the most tokens that are compared. The longest match counts, and the latest of these.
    """
    if drafts_RK.numel():
        best_RP, pdl = length_R.new_empty(length_R.shape[0], NUM_PARTS), uses_pdl(length_R.device)
        describe_search(tokens_SL, slot_R, length_R, match_lens, best_RP, pdl).run()
        describe_copy(tokens_SL, slot_R, length_R, best_RP, drafts_RK, pdl).run()
