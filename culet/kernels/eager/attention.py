"""Eager twins of the attention kernels, in float32. They have the same names and signatures as the kernels.

out[t, j] = sum_k softmax_k(q[t, j] . K[k, g]) V[k, g] over the keys kv_lo[t] <= k <= kv_hi[t], where g = j // (N / G).
Scores are not scaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from culet.kernels.types import PagedKV, RaggedRows

MAX_SCORES = 1 << 28  # float32 scores in memory at once. Longer rows are computed in pieces.


def decode_attention(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    *,
    max_queries: int,
    out_TNH: Tensor | None = None,
    lse_TN: Tensor | None = None,
    **_launch: Any,
) -> Tensor:
    """Return the attention of every row with 1 to `max_queries` query tokens. All keys are in pages.

    If `lse_TN` is given, it gets the log of the sum of exponentials of each query's scores, float32. Rows of which no query
    sees a key (context + query tokens = 0) are not written, and neither are other rows.
    """
    out_TNH = torch.zeros_like(q_TNH) if out_TNH is None else out_TNH
    for row, (begin, end, start) in enumerate(_spans(rows)):
        if 0 < end - begin <= max_queries and start + end - begin > 0:
            _attend(row, q_TNH, kv, rows, None, out_TNH, lse_TN)
    return out_TNH


def prefill_attention(
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    tiles_X5: Tensor,
    *,
    fresh: tuple[Tensor, Tensor] | None = None,
    out_TNH: Tensor | None = None,
    lse_TN: Tensor | None = None,
    **_launch: Any,
) -> Tensor:
    """Return the attention of the rows listed in the first column of `tiles_X5`.

    Keys from the row's first query token on come from `fresh` (k_TGH, v_TGH of the same T tokens). Earlier keys come from
    pages. Without `fresh`, all keys come from pages. If `lse_TN` is given, it gets the log of the sum of exponentials of each
    query's scores, float32.
    """
    out_TNH = torch.zeros_like(q_TNH) if out_TNH is None else out_TNH
    for row in sorted(set(tiles_X5[:, 0].tolist())):
        _attend(row, q_TNH, kv, rows, fresh, out_TNH, lse_TN)
    return out_TNH


def visible_keys(kv: PagedKV, rows: RaggedRows, num_tokens: int) -> Tensor:
    """Return the first and last key that each query token sees, int64 [2, T], from the rows' intervals or the text rule."""
    if rows.visible_2T is not None:
        return rows.visible_2T.long()
    positions_T = torch.zeros(num_tokens, dtype=torch.long, device=rows.context_B.device)
    for begin, end, start in _spans(rows):
        positions_T[begin:end] = torch.arange(start, start + end - begin, device=positions_T.device)
    lo_T = torch.zeros_like(positions_T) if kv.window is None else (positions_T - kv.window + 1).clamp(min=0)
    return torch.stack((lo_T, positions_T))


def _spans(rows: RaggedRows) -> list[tuple[int, int, int]]:
    """Return (first token, end token, position of the first token) for each row."""
    begins = rows.row_begin_B1.tolist()
    return list(zip(begins[:-1], begins[1:], rows.context_B.tolist(), strict=True))


def _attend(
    row: int,
    q_TNH: Tensor,
    kv: PagedKV,
    rows: RaggedRows,
    fresh: tuple[Tensor, Tensor] | None,
    out_TNH: Tensor,
    lse_TN: Tensor | None,
) -> None:
    begin, end, start = _spans(rows)[row]
    length = start + end - begin
    visible_2T = visible_keys(kv, rows, q_TNH.shape[0])[:, begin:end]
    lowest = int(visible_2T[0].min())
    stored = length if fresh is None else start
    k_KGH, v_KGH = _from_pages(kv, row, lowest, stored)
    if fresh is not None:
        skip = max(0, lowest - start)
        k_KGH = torch.cat((k_KGH, fresh[0][begin + skip : end].float()))
        v_KGH = torch.cat((v_KGH, fresh[1][begin + skip : end].float()))
    num_heads, num_kv_heads = q_TNH.shape[1], kv.num_kv_heads
    position_K = torch.arange(lowest, length, device=q_TNH.device)
    piece = max(1, MAX_SCORES // (num_heads * max(1, length - lowest)))
    for part in range(begin, end, piece):
        stop = min(end, part + piece)
        q_tGMH = q_TNH[part:stop].float().unflatten(1, (num_kv_heads, -1))
        s_GtMK = torch.einsum("tgmh,kgh->gtmk", q_tGMH, k_KGH)
        seen_2t = visible_2T[:, part - begin : stop - begin, None]
        seen_tK = (position_K >= seen_2t[0]) & (position_K <= seen_2t[1])
        s_GtMK = s_GtMK.masked_fill(~seen_tK[None, :, None], -torch.inf)
        # A query that sees no key has an output of 0.
        p_GtMK = s_GtMK.softmax(-1).masked_fill(~seen_tK.any(-1)[None, :, None, None], 0.0)
        if lse_TN is not None:
            lse_TN[part:stop] = s_GtMK.logsumexp(-1).transpose(0, 1).flatten(1)
        out_TNH[part:stop] = torch.einsum("gtmk,kgh->tgmh", p_GtMK, v_KGH).flatten(1, 2).to(out_TNH.dtype)


def _from_pages(kv: PagedKV, row: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Read K and V of positions begin .. end - 1 from the pages of a row, each float32 [key, G, H]."""
    position = torch.arange(begin, max(begin, end), device=kv.planes.device)
    offset = position - int(kv.first_B[row])
    page = kv.pages_BP[row, torch.div(offset, kv.page_tokens, rounding_mode="floor")].long()
    place = offset % kv.page_tokens
    return kv.k_pages[page, :, place].float(), kv.v_pages[page, :, place].float()
