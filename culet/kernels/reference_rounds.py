"""Eager twins of what a drafting round does besides a drafter's layers: what it begins with, and what it leaves.

Shapes: R sequences · K proposals of each · S slots · L a slot's tokens · B the target's model width · C candidates ·
T = R * block tokens of all blocks · P table columns · X taps side by side · N places of rings · D model · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from culet.kernels.reference import Rope, embed, head, rms_norm, rope
from culet.kernels.reference_fused import capped_head


class Candidates(NamedTuple):
    """Scores among which the best token is; the first of equal ones counts."""

    scores_RC: Tensor
    ids_RC: Tensor | None  # int64; None: of token c is column c


class ChainStart(NamedTuple):
    """What all drafts of a chain share: one query a sequence, at its last key."""

    last_R: Tensor  # int64; position of the last key
    row_begin_R1: Tensor  # int32
    context_R: Tensor  # int32; the same as `last_R`
    ropes: list[Rope]  # by kind


class BlockShape(NamedTuple):
    """What is the same for all rounds of a drafter that guesses blocks."""

    size: int  # tokens of a block
    mask_token_id: int
    page_tokens: int
    spare_page: int | None  # that of rows which only pad a batch
    windows: tuple[int | None, ...]  # of the masks that are not causal; None: all keys


class BlockStart(NamedTuple):
    """Blocks row by row: the newest token, then masks at the positions after it."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slot_T: Tensor  # int64; where their KV goes; -1, nowhere, in rows that only pad the batch
    row_begin_R1: Tensor  # int32
    context_R: Tensor  # int32
    visible: list[Tensor]  # int32 [2, T] by window: first and last key that each token sees
    turn: Rope


def newest_tokens(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor) -> Tensor:
    """tokens[slot, length], int64 [R]: the token behind those whose KV exists."""
    place_R = torch.add(length_R, slot_R, alpha=tokens_SL.shape[1])
    return tokens_SL.view(-1).index_select(0, place_R).long()


def keep_drafts(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor, drafts_RK: Tensor) -> None:
    """tokens[slot, length + 1 + k] = drafts[r, k]: proposals go behind the newest token."""
    place_R = torch.add(length_R, slot_R, alpha=tokens_SL.shape[1])
    column_K = torch.arange(1, drafts_RK.shape[1] + 1, device=place_R.device)
    tokens_SL.view(-1).index_copy_(0, (place_R[:, None] + column_K).flatten(), drafts_RK.flatten().to(tokens_SL.dtype))


def begin_chain(length_R: Tensor, is_ahead: bool, inv_freqs: Sequence[Tensor]) -> ChainStart:
    """Queries at the last of `length_R` keys; their angles are those of that position, or of the next one (`is_ahead`)."""
    last_R = length_R - 1
    begin_R1 = torch.arange(length_R.shape[0] + 1, dtype=torch.int32, device=length_R.device)
    turned_R = length_R if is_ahead else last_R
    return ChainStart(last_R, begin_R1, last_R.int(), [rope(turned_R, one) for one in inv_freqs])


def embed_beside(token_R: Tensor, hidden_RB: Tensor, table_VB: Tensor, scale: float) -> Tensor:
    """table[token] * scale | hidden, [R, 2 B]. The caller has rounded `scale` to the table's dtype."""
    return torch.cat((embed(token_R, table_VB, scale), hidden_RB), dim=-1)


def embed_best(found: Candidates, hidden_RB: Tensor, table_VB: Tensor, scale: float, best_R: Tensor) -> Tensor:
    """`embed_beside` of the best candidates, which are kept in `best_R` (int64)."""
    pick_best(found, best_R)
    return embed_beside(best_R, hidden_RB, table_VB, scale)


def pick_best(found: Candidates, best_R: Tensor) -> None:
    """Keep the best candidate of each row in `best_R` (int64)."""
    if found.ids_RC is None:
        torch.argmax(found.scores_RC, dim=-1, out=best_R)
    else:
        best_R.copy_(found.ids_RC.gather(-1, found.scores_RC.argmax(dim=-1, keepdim=True)).squeeze(-1))


def head_candidates(x_RD: Tensor, table_VD: Tensor, scale_V: Tensor | None, cap: float | None) -> Candidates:
    """Candidates by cap * tanh(scale[v] * (x @ table[v]) / cap), among them the best token of each row.

    `scale_V` belongs to a table in e4m3, whose sums are float32; without a cap, or a scale, these are left away. The rows of
    `x_RD` may be [R, K, D].
    """
    x_RD = x_RD.flatten(0, -2)
    if scale_V is not None:
        return Candidates((x_RD.float() @ table_VD.float().t()) * scale_V, None)
    return Candidates(head(x_RD, table_VD) if cap is None else capped_head(x_RD, table_VD, cap), None)


def begin_blocks(
    newest_R: Tensor, length_R: Tensor, pages_RP: Tensor, first_R: Tensor, shape: BlockShape, inv_freq: Tensor
) -> BlockStart:
    """What a pass over blocks begins with; `pages_RP` and `first_R` are the drafter's own page tables."""
    size, device = shape.size, length_R.device
    position_RK = length_R[:, None] + torch.arange(size, device=device)
    ids_RK = torch.full_like(position_RK, shape.mask_token_id)
    ids_RK[:, 0] = newest_R
    column_RK = (position_RK - first_R[:, None]) // shape.page_tokens
    page_RK = pages_RP.gather(1, column_RK.clamp(max=pages_RP.shape[1] - 1)).long()
    slot_RK = page_RK * shape.page_tokens + position_RK % shape.page_tokens
    if shape.spare_page is not None:
        slot_RK = torch.where(page_RK == shape.spare_page, -1, slot_RK)
    positions_T = position_RK.flatten()
    begin_R1 = torch.arange(0, positions_T.shape[0] + 1, size, dtype=torch.int32, device=device)
    return BlockStart(
        ids_RK.flatten(),
        positions_T,
        slot_RK.flatten(),
        begin_R1,
        length_R.int(),
        [_visible(window, position_RK) for window in shape.windows],
        rope(positions_T, inv_freq),
    )


def _visible(window: int | None, position_RK: Tensor) -> Tensor:
    last_RK = position_RK[:, -1:].expand_as(position_RK)
    first_RK = torch.zeros_like(position_RK) if window is None else (position_RK - window + 1).clamp(min=0)
    return torch.stack((first_RK.flatten(), last_RK.flatten())).int()


def embed_norm(token_ids_T: Tensor, table_VD: Tensor, scale: float, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x = table[ids] * scale and rms_norm(x), both [T, D]."""
    x_TD = embed(token_ids_T, table_VD, scale)
    return x_TD, rms_norm(x_TD, weight_D, eps)


def join_taps(taps: Sequence[Tensor]) -> Tensor:
    """Taps [T, D] side by side: [T, X]."""
    return torch.cat(list(taps), -1)


def keep_taps(taps: Sequence[Tensor], ring_NX: Tensor, place_T: Tensor) -> None:
    """ring[place] = taps [T, D] side by side. Where two tokens have one place, either may stay."""
    ring_NX.index_copy_(0, place_T, join_taps(taps))
