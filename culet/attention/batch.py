"""Define ForwardBatch, which holds everything that a forward pass needs for a step, except weights and pages.

Shapes: T new tokens of all rows, row after row · B rows · P table columns · L tokens whose logits are needed · M tokens with
precomputed input rows · D model.

If several ranks share the tokens of a KV group, `own_share` turns a batch into that of one rank. Its keys are then counted
among the tokens that this rank stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from culet.cache.spec import RUN_TOKENS, KVGroup
from culet.kernels.dispatch import for_device
from culet.kernels.types import TokenShare

INPUT_ROW_TOKEN = 0  # the token id that per-layer embeddings look up at positions with a precomputed input row


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Host-side facts about a row, for backends that plan on the host."""

    start: int  # position of the first query token
    num_queries: int
    is_stored: tuple[bool, ...]  # whether pages hold every key that this row's queries see, by KV group
    is_text: bool = False  # the row follows the text rule, even if the step has a `visible_2T`


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """A step's data for one KV group. `runner/fill` fills it. Backends read it at every call and never keep it."""

    pages_BP: Tensor  # int32. Column j of row b holds positions from first_B[b] + j * page_tokens on. Unused columns hold 0.
    first_B: Tensor  # int32, position of the first token of column 0
    kv_address_T: Tensor  # int64, page * page_tokens + offset of a new token's KV, or -1 if it is not stored
    visible_2T: Tensor | None = None  # int32 (kv_lo, kv_hi) of each query token, inclusive, or None for the text rule
    context_B: Tensor | None = None  # int32, own keys that a row's last query sees - its queries, if ranks share the tokens


@dataclass(frozen=True, slots=True)
class InputRows:
    """Precomputed rows, such as image and audio features, that replace the embeddings of marked tokens."""

    index_M: Tensor  # int64, indices of the marked tokens among the T tokens
    rows_MD: Tensor  # in the activations' dtype, used unchanged, without an embedding's scale


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step as tensors. `tail` is the same step reduced to the tokens whose logits are needed, with all keys in pages."""

    token_ids_T: Tensor  # int64, as they are embedded: 0 for placeholders of media
    positions_T: Tensor  # int64
    row_begin_B1: Tensor  # int32. Tokens row_begin[b] .. row_begin[b + 1] - 1 belong to row b.
    context_B: Tensor  # int32, number of the row's tokens whose KV existed before this step (= position of its first token)
    logits_index_L: Tensor  # int64, indices of the tokens that need logits
    rows: tuple[RowFacts, ...]
    groups: tuple[GroupBatch, ...]  # in the layout's order
    tail: ForwardBatch | None  # None if every token needs logits, so that the batch is its own tail
    input_rows: InputRows | None = None  # the tail uses those of its batch

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]


def own_share(batch: ForwardBatch, groups: Sequence[KVGroup], rank_index: int) -> ForwardBatch:
    """Return `batch` as rank `rank_index` sees it. It is the same unless ranks share the tokens of a group."""
    shared = {group.index: _share_of(group, rank_index) for group in groups if group.spec.token_shares > 1}
    if not shared:
        return batch
    own = [_own(batch, group, shared.get(index)) for index, group in enumerate(batch.groups)]
    tail = None if batch.tail is None else own_share(batch.tail, groups, rank_index)
    return replace(batch, groups=tuple(own), tail=tail)


def _share_of(group: KVGroup, rank_index: int) -> TokenShare:
    shares = group.spec.token_shares
    return TokenShare(rank_index % shares, shares, RUN_TOKENS, group.page_tokens)


def _own(batch: ForwardBatch, group: GroupBatch, share: TokenShare | None) -> GroupBatch:
    if share is None:
        return group
    ops = for_device(batch.positions_T.device)
    # Without a window, a query sees every key up to its own position, or up to the end of its image.
    last_T = batch.positions_T if group.visible_2T is None else group.visible_2T[1].long()
    visible_2T, context_B = ops.own_keys(last_T, batch.row_begin_B1, share)
    return GroupBatch(group.pages_BP, group.first_B, ops.own_addresses(group.kv_address_T, share), visible_2T, context_B)
