"""Types shared by kernels, their eager twins and the callers of both.

Shapes: T tokens of a step, row by row · B rows, including padding · P page table columns · G KV groups (in a `TokenLayout`)
or KV heads (elsewhere) · E entries of all page tables · H head size · R rotated dims, or rows that draft or draw ·
C candidates · D model · X projected columns · L rows of logits · K top tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

# Attention


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The pages of one layer and the page tables of the rows.

    `planes` is [plane, page, kv_head, token, width]. It has a K plane and a V plane of width H, or one latent plane whose
    first H columns are V and whose last H columns are K.
    """

    planes: Tensor
    pages_BP: Tensor  # int32. Column j of row b holds page_tokens positions, starting at first_B[b] + j * page_tokens.
    first_B: Tensor  # int32
    head_dim: int
    window: int | None = None  # number of keys a query sees, including its own, or None for all

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
        """Keys as [page, kv_head, token, H]."""
        return self.planes[0][..., self.width - self.head_dim :]

    @property
    def v_pages(self) -> Tensor:
        """Values as [page, kv_head, token, H]."""
        return self.planes[-1][..., : self.head_dim]


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The query tokens of each row and the keys that each token sees."""

    row_begin_B1: Tensor  # int32. Tokens row_begin[b] .. row_begin[b + 1] - 1 belong to row b. An empty row does nothing.
    context_B: Tensor  # int32, position of the row's first query token
    visible_2T: Tensor | None = None  # int32 (kv_lo, kv_hi) per query token, inclusive, or None for the text rule

    @property
    def num_rows(self) -> int:
        return self.context_B.shape[0]


class TokenShare(NamedTuple):
    """The tokens that one of several ranks stores. Runs of tokens go to the ranks in turn."""

    part: int  # number of this rank among them
    num_parts: int  # number of ranks
    run: int  # tokens per run
    page_tokens: int  # tokens that a page covers, a multiple of num_parts * run. Each rank stores an equal number of them.


class PeerBuffers(NamedTuple):
    """Memory of every rank that all ranks can reach, in which they exchange rows of a reduction.

    Every row has two places, used in turn, so that a rank may write its next row while others still read its last one.
    """

    rank: int  # number of this rank
    data: tuple[Tensor, ...]  # by rank, [2, rows, ranks, columns] with the terms of each rank
    arrived: tuple[Tensor, ...]  # by rank, int32 [2, rows, ranks], the turn of the term that each rank has written
    turn: Tensor  # int32 [rows], how often each row has been used. Only this rank's own.
    addresses: Tensor  # int64 [2 * ranks] on the device, of `data` and then of `arrived`
    is_pushed: bool  # a rank writes its terms to the buffers of all ranks. Otherwise it writes to its own, and all read it.


class Rope(NamedTuple):
    """The rotation of each token as cos and signed sin, float32 [T, 1, R]. Their halves are (c, c) and (-s, s)."""

    cos_T1R: Tensor
    sin_T1R: Tensor


@dataclass(frozen=True)
class HeadShape:
    """The heads of an attention layer and the order of their columns.

    Query and key columns are `nope | rot`. The dims without rope come first, then the R dims that rope rotates (all of them
    if R = H). With `k_eq_v`, one projection gives K and V. Its columns are `rot | nope`, and V keeps that order. With `latent`,
    both are stored once, as rows `v_rot | nope | k_rot`.
    """

    num_heads: int
    num_kv_heads: int  # projected KV heads. 0 in a layer that reads another layer's KV.
    head_dim: int
    rotated_dims: int
    k_eq_v: bool
    latent: bool
    eps: float
    norm_v: bool = True  # whether values are normed. True in Gemma, False in a DFlash drafter.


# Inputs and outputs of `lay_out_tokens` in a step of fixed shape


class PlannedRows(NamedTuple):
    """The rows of a step as the host planned them. Row b has the tokens `begin[b] .. begin[b + 1] - 1`. All are int32."""

    begin_B1: Tensor
    start_B: Tensor  # position of the first token. In an open row, the lowest position it can have.
    slot_B: Tensor  # slot of the sequence. Rows with the last slot pad the step.
    is_open_B: Tensor  # If 1, add the number of drafts accepted in the row's last step to `start_B`.
    first_GB: Tensor  # position of the first token in the row's page table, per KV group
    most_tokens: int  # largest number of tokens in a row


class PageTables(NamedTuple):
    """The page tables of all KV groups, one after another. All are int32."""

    pages_E: Tensor
    facts_G3: Tensor  # first entry of the group, number of entries per row, tokens per page


class TokenLayout(NamedTuple):
    """The position and addresses of each token in a step, and the context length of each row."""

    token_ids_T: Tensor  # int64
    embedded_ids_T: Tensor  # int64, the same with 0 for placeholders of media
    positions_T: Tensor  # int64
    next_places_T: Tensor  # int64, index of the following token among the tokens of all slots
    next_positions_T: Tensor  # int32
    kv_address_GT: Tensor  # int64, address of the token's KV in the group's memory, or -1 if it is not stored
    context_B: Tensor  # int32, number of tokens before the row's first
    ring_T: Tensor | None  # int64, place of the token's drafter features, or None if they are not kept


# Drafting


class Candidates(NamedTuple):
    """Scores of candidate tokens, which include the best token of each row. The first of equal scores wins."""

    scores_RC: Tensor
    ids_RC: Tensor | None  # int64. If None, column c is token c.


class ChainStart(NamedTuple):
    """The inputs that all drafts of a chain share. Each sequence has one query, at its last key."""

    last_R: Tensor  # int64, position of the last key
    row_begin_R1: Tensor  # int32
    context_R: Tensor  # int32, the same as `last_R`
    ropes: list[Rope]  # one per kind of layer


class BlockShape(NamedTuple):
    """The settings of a drafter that guesses blocks of tokens. They are the same in all rounds."""

    size: int  # tokens per block
    mask_token_id: int
    page_tokens: int
    spare_page: int | None  # page of the rows that pad the batch
    windows: tuple[int | None, ...]  # windows of the layers that see both ways. None means all keys.


class BlockStart(NamedTuple):
    """The inputs of a pass over blocks, row by row. A block is the newest token, then mask tokens at the positions after it."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    kv_address_T: Tensor  # int64, address of the token's KV, or -1 (not stored) in rows that pad the batch
    row_begin_R1: Tensor  # int32
    context_R: Tensor  # int32
    visible: list[Tensor]  # int32 [2, T] per window, the first and last key that each token sees
    rope: Rope
    x_TD: Tensor  # scaled embeddings of the tokens


class ContextLayer(NamedTuple):
    """The weights that turn features into context keys and values in one drafter layer, and the pages that store them."""

    weight_XD: Tensor  # rows of the keys, then rows of the values
    norm_GH: Tensor  # float32, norm weight of the keys
    planes: Tensor  # [plane, page, G, token, H]


# Sampling


class RowSettings(NamedTuple):
    """Sampling settings of R rows on the device. See `types.Sampling`."""

    temperature_R: Tensor  # float64. 0 takes the largest logit.
    top_k_R: Tensor  # int32. 0 means all tokens.
    top_p_R: Tensor  # float64
    min_p_R: Tensor  # float64
    seed_R: Tensor  # int64, the bits of an unsigned number
    sample_R: Tensor  # int32


class Ranked(NamedTuple):
    """Log-probabilities of the model's own distribution, as in `sampling/logprobs.py`."""

    chosen_L: Tensor
    top_LK: Tensor
    top_ids_LK: Tensor


class Penalties(NamedTuple):
    """The H rows of the logits that have penalties, and the location of their earlier tokens."""

    rows_H: Tensor  # int32, rows of the logits
    slots_H: Tensor  # int32
    lengths_H: Tensor  # int32, number of tokens so far
    prompt_lens_H: Tensor  # int32
    repetition_H: Tensor  # float32
    frequency_H: Tensor  # float32
    presence_H: Tensor  # float32


# Quantised weights, one class for each form. `kernels/eager/quantised.py` describes their tensors.
FP8_BLOCK = 128  # rows and columns that share a scale, if scales are not per row
NVFP4_GROUP = 16  # columns that share a scale


class Int4Weight(NamedTuple):
    """The tensors of an int4 weight."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None

    @property
    def group(self) -> int:
        """The number of columns that share a scale."""
        return self.packed.shape[-1] * 8 // self.scale.shape[-1]


class Int8Weight(NamedTuple):
    """The tensors of an int8 weight."""

    weight: Tensor
    scale: Tensor


class Fp8Weight(NamedTuple):
    """The tensors of an fp8 weight."""

    weight: Tensor
    scale: Tensor


class Nvfp4Weight(NamedTuple):
    """The tensors of an nvfp4 weight."""

    packed: Tensor
    scale: Tensor
    global_scale: Tensor  # multiplies the scales of groups
    divisor: Tensor | None = None  # what a file stores if it divides by its global scale, which is then its reciprocal


QuantisedWeight = Int4Weight | Int8Weight | Fp8Weight | Nvfp4Weight


def part_of(weight: QuantisedWeight, index: int | slice | Tensor) -> QuantisedWeight:
    """Return the same part of every tensor, such as some rows, or the matrix of one expert."""
    parts: Any = (None if tensor is None else tensor[index] for tensor in weight)
    return type(weight)(*parts)
