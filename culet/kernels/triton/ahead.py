"""Weights that the next kernels read, asked into the L2 cache while a kernel runs that leaves the memory idle.

Attention of a few rows waits for latencies more than for bytes, and so do the small products of per-layer embeddings. A small
kernel before them gets a few programs more, which ask for the weights that come next and end at once: nothing waits for what
they asked for, and where it has not come in time the reader fetches it itself. Results do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.chain import enter, is_chained

PIECE_BYTES: tl.constexpr = tl.constexpr(8192)  # what one thread asks for
LINE_BYTES: tl.constexpr = tl.constexpr(128)
LEAST_STRIPE = 256  # bytes of a row: less is not worth the asking
MAX_TOKENS = 128  # with more, products are bound by arithmetic
NUM_PROGRAMS = 64  # that ask


def weights_ahead(weights: Sequence[Tensor], num_bytes: int) -> Tensor | None:
    """Pieces (address, bytes) [I, 2] of up to `num_bytes` of `weights` in their order; None where nothing can be asked for.

    Of the first that does not fit whole, every row gives an equal part of its beginning. The weights must stay where they are.
    """
    if not weights or not is_chained(weights[0].device):
        return None
    left, pieces = num_bytes, []
    for weight in weights:
        rows, pitch = weight.shape[0], weight.stride(0) * weight.element_size()
        total = weight.numel() * weight.element_size()
        if not weight.is_contiguous() or weight.data_ptr() % 16 or pitch % 16:
            continue
        if total <= left:
            begin = torch.arange(0, total, PIECE_BYTES.value)
            pieces.append(torch.stack((weight.data_ptr() + begin, (total - begin).clamp(max=PIECE_BYTES.value)), 1))
            left -= total
            continue
        stripe = left // rows // 128 * 128
        if stripe >= LEAST_STRIPE:
            # A row's part in pieces, one column of pieces after the other.
            begin = torch.arange(0, stripe, PIECE_BYTES.value)
            address = weight.data_ptr() + begin[:, None] + pitch * torch.arange(rows)
            size = (stripe - begin).clamp(max=PIECE_BYTES.value)[:, None].expand_as(address)
            pieces.append(torch.stack((address.flatten(), size.flatten()), 1))
        break
    return torch.cat(pieces).to(weights[0].device) if pieces else None


def programs_for(ahead: Tensor | None, num_tokens: int) -> int:
    """Programs that ask for `ahead` in a step of `num_tokens` tokens; 0: none."""
    return NUM_PROGRAMS if ahead is not None and num_tokens <= MAX_TOKENS else 0


@triton.jit
def ask_ahead(pieces, num_pieces, program, num_programs, THREADS: tl.constexpr, PDL: tl.constexpr):
    """Ask for `program`'s share of the pieces. First wait for the kernel before, which may need all of the memory."""
    enter(PDL)
    for begin in range(0, num_pieces, num_programs * THREADS):
        index = begin + tl.arange(0, THREADS) * num_programs + program
        is_piece = index < num_pieces
        address = tl.load(pieces + 2 * index, mask=is_piece, other=0)
        size = tl.load(pieces + 2 * index + 1, mask=is_piece, other=0).to(tl.int32)
        for line in range(PIECE_BYTES // LINE_BYTES):
            tl.inline_asm_elementwise(
                """{
                .reg .pred is_inside;
                setp.ne.s32 is_inside, $2, 0;
                @is_inside prefetch.global.L2 [$1];
                mov.u32 $0, 0;
                }""",
                "=r,l,r",
                [address + line * LINE_BYTES, (line * LINE_BYTES < size).to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
