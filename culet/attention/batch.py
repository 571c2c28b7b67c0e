"""ForwardBatch: everything a forward pass needs to know about a step, besides weights and pages.

Shapes: T new tokens of all rows, row after row · B rows · P table columns · L tokens whose logits are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Host-side facts of a row, for backends that plan on the host."""

    start: int  # position of the first query token
    num_queries: int
    is_stored: tuple[bool, ...]  # per KV group: every key a query of this row sees can be read from pages
    is_text: bool = False  # `visible_2T`, where a step has one, says of this row only what the text rule does


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What one KV group needs in a step. Filled by runner/fill; read anew at every call, never kept by a backend."""

    pages_BP: Tensor  # int32; column j of row b holds positions from first_B[b] + j * page_tokens on; unused columns hold 0
    first_B: Tensor  # int32; position of the first token of column 0
    kv_address_T: Tensor  # int64; page * page_tokens + offset where a new token's KV goes; -1: it leaves none
    visible_2T: Tensor | None = None  # int32 (kv_lo, kv_hi) of each query token, both ends included; None: the text rule


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step as tensors. `tail` is the same step reduced to the tokens whose logits are needed, all keys in pages."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    row_begin_B1: Tensor  # int32; tokens row_begin[b] .. row_begin[b + 1] - 1 belong to row b
    context_B: Tensor  # int32; tokens of the row whose KV was there before this step (= position of its first token)
    logits_index_L: Tensor  # int64; which of the T tokens need logits
    rows: tuple[RowFacts, ...]
    groups: tuple[GroupBatch, ...]  # in the layout's order
    tail: ForwardBatch | None  # None where every token needs logits, so that the batch is its own tail

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]
