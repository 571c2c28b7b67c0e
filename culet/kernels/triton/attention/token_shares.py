"""Find a rank's own tokens on the GPU, if ranks share the tokens of a sequence. See `kernels/eager/token_shares.py`.

Shapes: T tokens of a step · B rows of a step.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from culet.kernels.triton.launch import Launch
from culet.kernels.types import TokenShare

_BLOCK = 256


@triton.jit(do_not_specialize=["num_tokens", "INDEX"])
def _addresses_kernel(
    ADDRESS, OWN, num_tokens, INDEX, COUNT: tl.constexpr, RUN: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(ADDRESS + token, mask=token < num_tokens, other=-1)
    known = tl.maximum(address, 0)
    page, offset = known // PAGE, known % PAGE
    run = offset // RUN
    own = page * (PAGE // COUNT) + run // COUNT * RUN + offset % RUN
    tl.store(OWN + token, tl.where((address >= 0) & (run % COUNT == INDEX), own, -1), mask=token < num_tokens)


@triton.jit
def _num_own(num_keys, INDEX, COUNT: tl.constexpr, RUN: tl.constexpr):
    """Return how many of the first `num_keys` tokens are this rank's own."""
    TURN: tl.constexpr = RUN * COUNT
    return num_keys // TURN * RUN + tl.minimum(tl.maximum(num_keys % TURN - INDEX * RUN, 0), RUN)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "INDEX"])
def _keys_kernel(
    LAST, ROW_BEGIN, VISIBLE, CONTEXT, num_tokens, num_rows, INDEX,
    COUNT: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = place < num_tokens
    last = tl.load(LAST + place, mask=is_token, other=0)
    tl.store(VISIBLE + place, tl.zeros([BLOCK], tl.int32), mask=is_token)
    tl.store(VISIBLE + num_tokens + place, (_num_own(last + 1, INDEX, COUNT, RUN) - 1).to(tl.int32), mask=is_token)
    is_row = place < num_rows
    begin = tl.load(ROW_BEGIN + place, mask=is_row, other=0)
    end = tl.load(ROW_BEGIN + place + 1, mask=is_row, other=0)
    last_of_row = tl.load(LAST + tl.maximum(end - 1, 0), mask=is_row, other=0)
    tl.store(CONTEXT + place, (_num_own(last_of_row + 1, INDEX, COUNT, RUN) - (end - begin)).to(tl.int32), mask=is_row)


def own_addresses_launch(kv_address_T: Tensor, own_T: Tensor, share: TokenShare) -> Launch:
    arguments: dict[str, Any] = {
        "ADDRESS": kv_address_T,
        "OWN": own_T,
        "num_tokens": kv_address_T.shape[0],
        "INDEX": share.part,
    }
    arguments |= {"COUNT": share.num_parts, "RUN": share.run, "PAGE": share.page_tokens, "BLOCK": _BLOCK}
    return Launch(_addresses_kernel, (triton.cdiv(kv_address_T.shape[0], _BLOCK),), arguments, {"num_warps": 4})


def own_keys_launch(last_T: Tensor, row_begin_B1: Tensor, visible_2T: Tensor, context_B: Tensor, share: TokenShare) -> Launch:
    num_tokens, num_rows = last_T.shape[0], context_B.shape[0]
    arguments: dict[str, Any] = {"LAST": last_T, "ROW_BEGIN": row_begin_B1, "VISIBLE": visible_2T, "CONTEXT": context_B}
    arguments |= {"num_tokens": num_tokens, "num_rows": num_rows, "INDEX": share.part}
    arguments |= {"COUNT": share.num_parts, "RUN": share.run, "BLOCK": _BLOCK}
    return Launch(_keys_kernel, (triton.cdiv(max(num_tokens, num_rows), _BLOCK),), arguments, {"num_warps": 4})


def own_addresses(kv_address_T: Tensor, share: TokenShare) -> Tensor:
    """Return the addresses in this rank's pages. Tokens that other ranks store get -1, and so do tokens that none stores."""
    own_T = torch.empty_like(kv_address_T)
    if kv_address_T.shape[0]:
        own_addresses_launch(kv_address_T, own_T, share).run()
    return own_T


def own_keys(last_T: Tensor, row_begin_B1: Tensor, share: TokenShare) -> tuple[Tensor, Tensor]:
    """Return the keys that each query sees among this rank's own, int32 [2, T], and the context of each row, int32."""
    visible_2T = torch.empty(2, last_T.shape[0], dtype=torch.int32, device=last_T.device)
    context_B = torch.empty(row_begin_B1.shape[0] - 1, dtype=torch.int32, device=last_T.device)
    own_keys_launch(last_T, row_begin_B1, visible_2T, context_B, share).run()
    return visible_2T, context_B
