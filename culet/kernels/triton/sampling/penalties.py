"""Apply repetition, frequency and presence penalties on the GPU. Only the tokens of a history are touched.

    seen (prompt or output):    logit / repetition if it is above 0, else logit * repetition
    drawn c > 0 times before:   logit - frequency * c - presence

The first launch counts the tokens of each history. The second takes each count once and penalises its token.

Shapes: R rows of logits · H rows with penalties · V vocabulary · S slots · L tokens per slot.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.dependent_launch import enter, options
from culet.kernels.triton.device import uses_pdl
from culet.kernels.triton.launch import Launch
from culet.kernels.types import Penalties


@triton.jit
def _count_kernel(tokens, slots, lengths, prompt_lens, counts, tokens_stride, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Set counts[h, token] to 2 * its occurrences in the output, + 1 if it is in the prompt. Counts must start at zero."""
    enter(PDL)
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = at < tl.load(lengths + row)
    token = tl.load(tokens + tl.load(slots + row).to(tl.int64) * tokens_stride + at, mask=seen, other=0)
    is_output = at >= tl.load(prompt_lens + row)
    tl.atomic_add(counts + row * V + token, 2, mask=seen & is_output)
    tl.atomic_or(counts + row * V + token, 1, mask=seen & ~is_output)


@triton.jit
def _penalise_kernel(
    tokens,
    slots,
    lengths,
    rows,
    counts,
    logits,
    repetition,
    frequency,
    presence,
    tokens_stride,
    logits_stride,
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Penalise each token of a history once. The program that swaps its count for zero does it."""
    enter(PDL)
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = at < tl.load(lengths + row)
    token = tl.load(tokens + tl.load(slots + row).to(tl.int64) * tokens_stride + at, mask=seen, other=0)
    count = tl.atomic_xchg(counts + row * V + token, 0, mask=seen)
    mine = seen & (count != 0)
    pointers = logits + tl.load(rows + row).to(tl.int64) * logits_stride + token
    value = tl.load(pointers, mask=mine, other=0.0)
    factor = tl.load(repetition + row)
    value = tl.where(value > 0, value / factor, value * factor)
    number = (count >> 1).to(tl.float32)
    value = value - tl.load(frequency + row) * number - tl.where(number > 0, tl.load(presence + row), 0.0)
    tl.store(pointers, value, mask=mine)


def describe_penalise(
    logits_RV: Tensor, tokens_SL: Tensor, penalties: Penalties, max_len: int, counts_HV: Tensor, pdl: bool
) -> list[Launch]:
    block, width = 256, logits_RV.shape[1]
    grid = (triton.cdiv(max_len, block), penalties.rows_H.shape[0])
    common: dict[str, Any] = {
        "tokens": tokens_SL,
        "slots": penalties.slots_H,
        "lengths": penalties.lengths_H,
        "counts": counts_HV,
    }
    common |= {"tokens_stride": tokens_SL.stride(0), "V": width, "BLOCK": block, "PDL": pdl}
    second = {"rows": penalties.rows_H, "logits": logits_RV, "logits_stride": logits_RV.stride(0)}
    second |= {"repetition": penalties.repetition_H, "frequency": penalties.frequency_H, "presence": penalties.presence_H}
    return [
        Launch(_count_kernel, grid, {**common, "prompt_lens": penalties.prompt_lens_H}, options(4, pdl)),
        Launch(_penalise_kernel, grid, {**common, **second}, options(4, pdl)),
    ]


def penalise(logits_RV: Tensor, tokens_SL: Tensor, penalties: Penalties, max_len: int, counts_HV: Tensor) -> None:
    """Apply repetition, frequency and presence penalties to float32 logits, in place.

    `counts_HV` is int32 scratch memory that is zero before and after. No history is longer than `max_len`.
    """
    if penalties.rows_H.shape[0] and max_len:
        for launch in describe_penalise(logits_RV, tokens_SL, penalties, max_len, counts_HV, uses_pdl(logits_RV.device)):
            launch.run()
