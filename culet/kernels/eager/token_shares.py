"""Eager twins of the kernels that find a rank's own tokens, if ranks share the tokens of a sequence (see `TokenShare`).

Shapes: T tokens of a step · B rows of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from culet.kernels.types import TokenShare


def own_addresses(kv_address_T: Tensor, share: TokenShare) -> Tensor:
    """Return the addresses in this rank's pages. Tokens that other ranks store get -1, and so do tokens that none stores.

    An address is page * page_tokens + offset. A rank's own page has page_tokens / num_parts tokens.
    """
    _, count, run, page_tokens = share
    page_T, offset_T = kv_address_T // page_tokens, kv_address_T % page_tokens
    run_T = offset_T // run
    own_T = page_T * (page_tokens // count) + run_T // count * run + offset_T % run
    return own_T.masked_fill_((kv_address_T < 0) | (run_T % count != share.part), -1)


def own_keys(last_T: Tensor, row_begin_B1: Tensor, share: TokenShare) -> tuple[Tensor, Tensor]:
    """Return the keys that each query sees among this rank's own, int32 [2, T], and the context of each row, int32.

    A query sees all keys up to `last_T`. Own keys are numbered in order. A query that sees none has the interval (0, -1). The
    context is such that context + query tokens is the number of own keys that the row's last query sees.
    """
    _, count, run, _ = share
    num_keys_T = last_T + 1
    turn = run * count
    own_T = num_keys_T // turn * run + (num_keys_T % turn - share.part * run).clamp(0, run)
    visible_2T = torch.stack((torch.zeros_like(own_T), own_T - 1)).int()
    num_queries_B = row_begin_B1.diff()
    last_B = (row_begin_B1[1:].long() - 1).clamp(min=0)  # an empty row reads any query and has no use for it
    context_B = visible_2T[1].index_select(0, last_B) + 1 - num_queries_B
    return visible_2T, context_B.int()
