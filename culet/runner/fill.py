"""Turn rows into a ForwardBatch, for a step of any shape.

Everything is computed with numpy on the host and sent to the device in one copy. Only the token ids are read on the device,
from the slots' buffer, since the last step's tokens may not have reached the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from culet.attention.batch import ForwardBatch, GroupBatch, InputRows, RowFacts
from culet.cache.spec import CacheLayout, KVGroup
from culet.kernels.host_transfer import PackedArrays
from culet.runner.media.step_media import StepMedia
from culet.types import Row

Ints = NDArray[np.int64]
_UNREAD = GroupBatch(*(torch.empty(0, dtype=torch.int64),) * 3)


def fill(
    rows: Sequence[Row],
    layout: CacheLayout,
    tokens_SL: Tensor,
    placeholder_P: Tensor,
    unread: KVGroup | None = None,
    media: StepMedia | None = None,
) -> ForwardBatch:
    """Return the batch of a step, on the device of `tokens_SL`, which holds the slots' tokens.

    Placeholders of media are embedded as token 0, as in transformers, whether or not they stand for something. Nothing in the
    step reads or writes the group `unread`, so its tables are left out. `media` says which tokens have rows of features, and
    which see a whole image.
    """
    facts_B4 = np.array([(row.slot, row.start, row.num_new, row.num_logits) for row in rows], dtype=np.int64).reshape(-1, 4)
    slot_B, start_B, new_B, logits_B = facts_B4.T
    begin_B1 = _offsets(new_B)
    row_T = np.repeat(np.arange(len(rows)), new_B)
    position_T = np.arange(begin_B1[-1]) + (start_B - begin_B1[:-1])[row_T]
    flat_T = slot_B[row_T] * tokens_SL.shape[1] + position_T
    logits_T = _last_of_rows(begin_B1, logits_B)
    tables = {group.index: _table(rows, group, row_T, position_T) for group in layout.groups if group is not unread}

    staged = PackedArrays()
    staged.add("flat", flat_T)
    staged.add("position", position_T)
    staged.add("begin", begin_B1.astype(np.int32))
    staged.add("context", start_B.astype(np.int32))
    staged.add("logits", logits_T)
    for index, (pages_BP, first_B, kv_address_T) in tables.items():
        staged.add(f"pages{index}", pages_BP)
        staged.add(f"first{index}", first_B)
        staged.add(f"kv_address{index}", kv_address_T)
    has_tail = logits_T.size < position_T.size
    tail_B = np.flatnonzero(logits_B)
    if has_tail:
        staged.add("tail_begin", _offsets(logits_B[tail_B]).astype(np.int32))
        staged.add("tail_context", (start_B + new_B - logits_B)[tail_B].astype(np.int32))
        staged.add("tail_row", tail_B)
    if media is not None:
        _stage_media(staged, media, layout, position_T)
    sent = staged.send(tokens_SL.device)

    token_ids_T = tokens_SL.view(-1).index_select(0, sent["flat"]).long()
    token_ids_T.masked_fill_(torch.isin(token_ids_T, placeholder_P), 0)
    input_rows = None if media is None or not media.rows else InputRows(sent["soft"], torch.cat(media.rows))
    groups = tuple(
        GroupBatch(sent[f"pages{index}"], sent[f"first{index}"], sent[f"kv_address{index}"], sent.get(f"visible{index}"))
        if index in tables
        else _UNREAD
        for index in range(len(layout.groups))
    )
    tail = None
    if has_tail:
        tail = _tail(sent, groups, token_ids_T, [rows[i] for i in tail_B.tolist()])
    return ForwardBatch(
        token_ids_T=token_ids_T,
        positions_T=sent["position"],
        row_begin_B1=sent["begin"],
        context_B=sent["context"],
        logits_index_L=sent["logits"],
        rows=_row_facts(rows, media),
        groups=groups,
        tail=tail,
        input_rows=input_rows,
    )


def _row_facts(rows: Sequence[Row], media: StepMedia | None) -> tuple[RowFacts, ...]:
    if media is None:
        return tuple(
            RowFacts(row.start, row.num_new, tuple([store_from <= row.start for store_from in row.store_from])) for row in rows
        )
    stored = [tuple([store_from <= row.start for store_from in row.store_from]) for row in rows]
    facts = zip(rows, stored, media.has_image, strict=True)
    return tuple(RowFacts(row.start, row.num_new, is_stored, not has_image) for row, is_stored, has_image in facts)


def _stage_media(staged: PackedArrays, media: StepMedia, layout: CacheLayout, position_T: Ints) -> None:
    """Stage the places of soft tokens, and the intervals of keys in groups that need them."""
    staged.add("soft", media.index_M)
    for group in layout.groups:
        visible_2T = media.visible(group, position_T)
        if visible_2T is not None:
            staged.add(f"visible{group.index}", visible_2T)


def _tail(sent: dict[str, Tensor], groups: tuple[GroupBatch, ...], token_ids_T: Tensor, rows: Sequence[Row]) -> ForwardBatch:
    """Return the step reduced to the tokens that need logits. Everything that they see is stored in pages."""
    index_L, row = sent["logits"], sent["tail_row"]
    is_stored = (True,) * len(groups)
    return ForwardBatch(
        token_ids_T=token_ids_T[index_L],
        positions_T=sent["position"][index_L],
        row_begin_B1=sent["tail_begin"],
        context_B=sent["tail_context"],
        logits_index_L=torch.arange(index_L.shape[0], device=index_L.device),
        rows=tuple(RowFacts(row.start + row.num_new - row.num_logits, row.num_logits, is_stored) for row in rows),
        groups=tuple(group if group is _UNREAD else _group_tail(group, row, index_L) for group in groups),
        tail=None,
    )


def _group_tail(group: GroupBatch, row: Tensor, index_L: Tensor) -> GroupBatch:
    visible_2T = None if group.visible_2T is None else group.visible_2T[:, index_L]
    return GroupBatch(group.pages_BP[row], group.first_B[row], group.kv_address_T[index_L], visible_2T)


def _offsets(counts_B: Ints) -> Ints:
    """Return 0 followed by the running sum."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts_B)))


def _last_of_rows(begin_B1: Ints, logits_B: Ints) -> Ints:
    """Return the indices of each row's last `logits_B` tokens."""
    offsets = _offsets(logits_B)
    return np.arange(offsets[-1]) + np.repeat(begin_B1[1:] - logits_B - offsets[:-1], logits_B)


def _table(
    rows: Sequence[Row], group: KVGroup, row_T: Ints, position_T: Ints
) -> tuple[NDArray[np.int32], NDArray[np.int32], Ints]:
    """Return pages_BP, first_B and kv_address_T of one group."""
    index, size = group.index, group.page_tokens
    tables = [row.tables[index] for row in rows]
    count_B = np.array([len(table.pages) for table in tables], dtype=np.int64)
    first_B = np.array([table.first for table in tables], dtype=np.int64) * size
    pages_BP = np.zeros((len(rows), max(1, int(count_B.max(initial=0)))), dtype=np.int32)
    filled = np.arange(pages_BP.shape[1]) < count_B[:, None]
    pages_BP[filled] = np.fromiter(
        chain.from_iterable(table.pages for table in tables), dtype=np.int32, count=int(count_B.sum())
    )
    store_from_B = np.array([row.store_from[index] for row in rows], dtype=np.int64)
    is_stored_T = position_T >= store_from_B[row_T]
    # Tokens that are not stored may be before the table's first page, so their column is not looked up.
    column_T = np.where(is_stored_T, (position_T - first_B[row_T]) // size, 0)
    kv_address_T = np.where(is_stored_T, pages_BP[row_T, column_T] * np.int64(size) + position_T % size, -1)
    return pages_BP, first_B.astype(np.int32), kv_address_T
