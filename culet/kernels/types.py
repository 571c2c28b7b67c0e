"""Types that kernels, their eager twins and the callers of both share.

Shapes: T tokens of a step, row after row · B rows, padding included · P page table columns · G KV groups (of a `TokenLayout`),
else KV heads · E entries of all page tables · H head size · R rotated dims, or rows that draft or draw · C candidates ·
D model · X projected columns · L rows of logits · K top tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Attention


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The pages of one layer and the rows' page tables.

    `planes` is [plane, page, kv_head, token, width]: a K plane and a V plane of width H, or one latent plane whose first H
    columns are V and whose last H columns are K.
    """

    planes: Tensor
    pages_BP: Tensor  # int32; column j of row b holds the positions from first_B[b] + j * page_tokens on
    first_B: Tensor  # int32
    head_dim: int
    window: int | None = None  # keys a query sees, itself included; None: all

    @property
    def is_latent(self) -> bool:
        return self.planes.shape[0] == 1

    @property
    def num_kv_heads(self) -> int:
        return self.planes.shape[2]

    @property
    def page_tokens(self) -> int:
        return self.planes.shape[3]

    @property
    def width(self) -> int:
        return self.planes.shape[4]

    @property
    def k_pages(self) -> Tensor:
        """[page, kv_head, token, H]."""
        return self.planes[0][..., self.width - self.head_dim :]

    @property
    def v_pages(self) -> Tensor:
        """[page, kv_head, token, H]."""
        return self.planes[-1][..., : self.head_dim]


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Which query tokens belong to which row, and which keys each of them sees."""

    row_begin_B1: Tensor  # int32; tokens row_begin[b] .. row_begin[b + 1] - 1 belong to row b; an empty row does nothing
    context_B: Tensor  # int32; position of the row's first query token
    visible_2T: Tensor | None = None  # int32 (kv_lo, kv_hi) of each query token, both ends included; None: the text rule

    @property
    def num_rows(self) -> int:
        return self.context_B.shape[0]


class Rope(NamedTuple):
    """Rotation of each token: cos and signed sin, float32 [T, 1, R]; halves are (c, c) and (-s, s)."""

    cos_T1R: Tensor
    sin_T1R: Tensor


@dataclass(frozen=True)
class HeadShape:
    """Heads of an attention layer, and the order of their columns.

    Query and key columns are `nope | rot`: the dims without rope, then the R dims that rope rotates (all of them if R = H).
    With `k_eq_v` one projection gives K and V, its columns are `rot | nope`, and V keeps that order. With `latent` both are
    stored once, as rows `v_rot | nope | k_rot`.
    """

    num_heads: int
    num_kv_heads: int  # projected ones: 0 in a layer that reads another layer's KV
    head_dim: int
    rotated_dims: int
    k_eq_v: bool
    latent: bool
    eps: float
    norm_v: bool = True  # whether values are normed: in Gemma, but not in a DFlash drafter


# A step of fixed shape: what `lay_out_tokens` reads and writes


class PlannedRows(NamedTuple):
    """The rows of a step as the host planned them. Row b has the tokens `begin[b] .. begin[b + 1] - 1`. All int32."""

    begin_B1: Tensor
    start_B: Tensor  # position of the first token; of an open row, the lowest that it can be
    slot_B: Tensor  # the sequence's slot; rows of the last slot pad the step
    is_open_B: Tensor  # 1: add the number of drafts that the row's last step accepted to `start_B`
    first_GB: Tensor  # position of the first token in the row's page table, per KV group
    most_tokens: int  # of any row


class PageTables(NamedTuple):
    """The page tables of all KV groups, one after the other. All int32."""

    pages_E: Tensor
    facts_G3: Tensor  # where a group's entries begin, how many each row has, tokens of a page


class TokenLayout(NamedTuple):
    """Where each token of a step stands, and where each row begins."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    next_places_T: Tensor  # int64; where the token after it stands among all slots' tokens
    next_positions_T: Tensor  # int32
    kv_address_GT: Tensor  # int64; where its KV goes in a group's memory; -1: nowhere
    context_B: Tensor  # int32; tokens before a row's first
    ring_T: Tensor | None  # int64; where a drafter's features of the token are kept; None: nowhere


# Drafting


class Candidates(NamedTuple):
    """Scores of candidate tokens, including each row's best; of equal scores the first counts."""

    scores_RC: Tensor
    ids_RC: Tensor | None  # int64; None: column c is token c


class ChainStart(NamedTuple):
    """What all drafts of a chain share: one query per sequence, at its last key."""

    last_R: Tensor  # int64; position of the last key
    row_begin_R1: Tensor  # int32
    context_R: Tensor  # int32; the same as `last_R`
    ropes: list[Rope]  # by kind of layer


class BlockShape(NamedTuple):
    """What is the same for all rounds of a drafter that guesses blocks of tokens."""

    size: int  # tokens of a block
    mask_token_id: int
    page_tokens: int
    spare_page: int | None  # the page of rows that pad the batch
    windows: tuple[int | None, ...]  # of the layers that see both ways; None: all keys


class BlockStart(NamedTuple):
    """Blocks row by row: the newest token, then mask tokens at the positions after it."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    kv_address_T: Tensor  # int64; where their KV goes; -1 (nowhere) in rows that pad the batch
    row_begin_R1: Tensor  # int32
    context_R: Tensor  # int32
    visible: list[Tensor]  # int32 [2, T] by window: first and last key that each token sees
    turn: Rope
    x_TD: Tensor  # the tokens' scaled embedding


class ContextLayer(NamedTuple):
    """What turns features into context keys and values in one layer of a drafter, and where they are stored."""

    weight_XD: Tensor  # the keys' rows, then the values'
    norm_GH: Tensor  # float32; of keys
    planes: Tensor  # [plane, page, G, token, H]


# Sampling


class RowSettings(NamedTuple):
    """Sampling settings of R rows on the device; see `types.Sampling`."""

    temperature_R: Tensor  # float64; 0: the largest logit
    top_k_R: Tensor  # int32; 0: all
    top_p_R: Tensor  # float64
    min_p_R: Tensor  # float64
    seed_R: Tensor  # int64, the bits of an unsigned number
    sample_R: Tensor  # int32


class Ranked(NamedTuple):
    """Log-probabilities of the model's own distribution, as `sampling/logprobs.py` gives them."""

    chosen_L: Tensor
    top_LK: Tensor
    top_ids_LK: Tensor


class Penalties(NamedTuple):
    """The H rows of the logits that have penalties, and where their earlier tokens are."""

    rows_H: Tensor  # int32, rows of the logits
    slots_H: Tensor  # int32
    lengths_H: Tensor  # int32, tokens so far
    prompt_lens_H: Tensor  # int32
    repetition_H: Tensor  # float32
    frequency_H: Tensor  # float32
    presence_H: Tensor  # float32
