"""Eager twins of the parts of a draft round that are not layers of the drafter.

Shapes: R sequences · K drafts per sequence · S slots · L tokens per slot · B target model width · C candidates ·
T tokens (R times the block size for blocks) · P page table columns · X joined taps or projections · N places of a
ring · D model · V vocabulary · M clusters of tokens · J tokens per cluster · G KV heads · H head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from culet.kernels.eager.fused import capped_head, linear
from culet.kernels.eager.ops import embed, head, prepare_qkv, rms_norm, rope, stores
from culet.kernels.types import BlockShape, BlockStart, Candidates, ChainStart, ContextLayer, HeadShape


def newest_tokens(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor) -> Tensor:
    """Return the first token without KV, tokens[slot, length], int64 [R]."""
    place_R = torch.add(length_R, slot_R, alpha=tokens_SL.shape[1])
    return tokens_SL.view(-1).index_select(0, place_R).long()


def keep_drafts(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor, drafts_RK: Tensor) -> None:
    """Store drafts after the newest token, as tokens[slot, length + 1 + k] = drafts[r, k], or token 0 if that is below 0."""
    place_R = torch.add(length_R, slot_R, alpha=tokens_SL.shape[1])
    column_K = torch.arange(1, drafts_RK.shape[1] + 1, device=place_R.device)
    tokens_SL.view(-1).index_copy_(
        0, (place_R[:, None] + column_K).flatten(), drafts_RK.flatten().clamp(min=0).to(tokens_SL.dtype)
    )


def copy_suffix(tokens_SL: Tensor, slot_R: Tensor, length_R: Tensor, match_lens: tuple[int, int], drafts_RK: Tensor) -> None:
    """Overwrite the drafts (int64) of each sequence whose last tokens occurred before with what followed them.

    `match_lens` are the fewest and the most tokens that are compared. The longest match counts, and the latest of these. If
    the copy reaches the newest token, it starts over.
    """
    tokens = tokens_SL.cpu().numpy()  # numpy takes a fifth of the time for so few values
    for row, (slot, length) in enumerate(zip(slot_R.tolist(), length_R.tolist(), strict=True)):
        tokens_L = tokens[slot, : length + 1]
        end = _find_suffix(tokens_L, *match_lens)
        if end is not None:
            place_K = end + 1 + np.arange(drafts_RK.shape[1]) % (length - end)
            drafts_RK[row] = torch.from_numpy(tokens_L[place_K].astype(np.int64))


def _find_suffix(tokens_L: np.ndarray, least: int, most: int) -> int | None:
    """Return where the latest earlier match of the last tokens ends, or None if they did not occur before."""
    last = len(tokens_L) - 1
    # Most texts have few earlier places with the last token, so the tokens before it are compared only there.
    end_M = np.flatnonzero(tokens_L[least - 1 : -1] == tokens_L[-1]) + (least - 1)
    for back in range(1, min(most, last + 1)):
        longer_M = end_M[end_M >= back]
        longer_M = longer_M[tokens_L[longer_M - back] == tokens_L[last - back]]
        if not longer_M.size:
            if back < least:
                return None
            break
        end_M = longer_M
    return int(end_M[-1]) if end_M.size else None


def begin_chain(length_R: Tensor, is_ahead: bool, inv_freqs: Sequence[Tensor]) -> ChainStart:
    """Place each query at the last of its `length_R` keys. Rope uses that position, or the next one if `is_ahead`."""
    last_R = length_R - 1
    begin_R1 = torch.arange(length_R.shape[0] + 1, dtype=torch.int32, device=length_R.device)
    position_R = length_R if is_ahead else last_R
    return ChainStart(last_R, begin_R1, last_R.int(), [rope(position_R, inv_freq) for inv_freq in inv_freqs])


def embed_beside(token_R: Tensor, hidden_RB: Tensor, table_VB: Tensor, scale: float) -> Tensor:
    """Return table[token] * scale | hidden, [R, 2 B]. The caller has rounded `scale` to the table's dtype."""
    return torch.cat((embed(token_R, table_VB, scale), hidden_RB), dim=-1)


def embed_linear(
    candidates: Candidates | None, token_R: Tensor, hidden_RB: Tensor, table_VB: Tensor, scale: float, weight_DX: Tensor
) -> Tensor:
    """Return `embed_beside` @ weight^T, [R, D]. If there are candidates, first write the best ones to `token_R` (int64)."""
    if candidates is not None:
        pick_best(candidates, token_R)
    return linear(embed_beside(token_R, hidden_RB, table_VB, scale), weight_DX)


def pick_best(candidates: Candidates, best_R: Tensor) -> None:
    """Write the best candidate of each row to `best_R` (int64)."""
    if candidates.ids_RC is None:
        torch.argmax(candidates.scores_RC, dim=-1, out=best_R)
    else:
        best_R.copy_(candidates.ids_RC.gather(-1, candidates.scores_RC.argmax(dim=-1, keepdim=True)).squeeze(-1))


def head_candidates(x_RD: Tensor, table_VD: Tensor, scale_V: Tensor | None, cap: float | None) -> Candidates:
    """Return candidates, including the best token of each row, scored by cap * tanh(scale[v] * (x @ table[v]) / cap).

    `scale_V` belongs to an e4m3 table, whose sums are float32. If the cap or the scale is None, that step is omitted. `x_RD`
    may also be [R, K, D].
    """
    x_RD = x_RD.flatten(0, -2)
    if scale_V is not None:
        return Candidates((x_RD.float() @ table_VD.float().t()) * scale_V, None)
    return Candidates(head(x_RD, table_VD) if cap is None else capped_head(x_RD, table_VD, cap), None)


def peaks(logits_RV: Tensor) -> Candidates:
    """Return candidates that include the best token of each row, given its logits."""
    return Candidates(logits_RV, None)


def cluster_candidates(z_RD: Tensor, table_VD: Tensor, ids_MJ: Tensor, chosen_RK: Tensor) -> Candidates:
    """Score the J tokens in each of a row's K clusters by z @ table, in float32. Table rows are in the order of `ids_MJ`."""
    (rows, size), (_, each) = z_RD.shape, ids_MJ.shape
    table_RCD = table_VD.view(-1, each, size)[chosen_RK].view(rows, -1, size)
    scores_RC = torch.bmm(table_RCD, z_RD[..., None]).squeeze(-1).float()
    return Candidates(scores_RC, ids_MJ[chosen_RK].view(rows, -1))


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
    pages_RP, first_R = tables
    size, device = shape.size, length_R.device
    position_RK = length_R[:, None] + torch.arange(size, device=device)
    ids_RK = torch.full_like(position_RK, shape.mask_token_id)
    ids_RK[:, 0] = newest_R
    column_RK = (position_RK - first_R[:, None]) // shape.page_tokens
    page_RK = pages_RP.gather(1, column_RK.clamp(max=pages_RP.shape[1] - 1)).long()
    kv_address_RK = page_RK * shape.page_tokens + position_RK % shape.page_tokens
    if shape.spare_page is not None:
        kv_address_RK = torch.where(page_RK == shape.spare_page, -1, kv_address_RK)
    ids_T, positions_T = ids_RK.flatten(), position_RK.flatten()
    begin_R1 = torch.arange(0, positions_T.shape[0] + 1, size, dtype=torch.int32, device=device)
    return BlockStart(
        ids_T,
        positions_T,
        kv_address_RK.flatten(),
        begin_R1,
        length_R.int(),
        [_visible(window, position_RK) for window in shape.windows],
        rope(positions_T, inv_freq),
        embed(ids_T, *embedding),
    )


def _visible(window: int | None, position_RK: Tensor) -> Tensor:
    last_RK = position_RK[:, -1:].expand_as(position_RK)
    first_RK = torch.zeros_like(position_RK) if window is None else (position_RK - window + 1).clamp(min=0)
    return torch.stack((first_RK.flatten(), last_RK.flatten())).int()


def join_taps(taps: Sequence[Tensor]) -> Tensor:
    """Concatenate taps [T, D] to [T, X]."""
    return torch.cat(list(taps), -1)


def store_context(
    feature_TD: Tensor,
    hidden_norm_D: Tensor,
    angles: tuple[Tensor, Tensor],
    kv_address_T: Tensor,
    layers: Sequence[ContextLayer],
    heads: HeadShape,
) -> None:
    """Store every layer's keys and values of norm(feature) * hidden_norm at `kv_address_T`, unless that is -1.

    `angles` is (positions [T], inverse frequencies). `heads` has no query heads.
    """
    normed_TD, cos_sin = rms_norm(feature_TD, hidden_norm_D, heads.eps), rope(*angles)
    where = stores(kv_address_T, layers[0].planes.shape[3])
    for weight_XD, norm_GH, planes in layers:
        prepare_qkv(linear(normed_TD, weight_XD), norm_GH, cos_sin, planes, where, heads)


def keep_taps(taps: Sequence[Tensor], ring_NX: Tensor, place_T: Tensor) -> None:
    """Store the joined taps [T, D] as ring[place]. If two tokens share a place, either may be stored."""
    ring_NX.index_copy_(0, place_T, join_taps(taps))
