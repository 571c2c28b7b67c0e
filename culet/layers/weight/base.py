"""The interface of every weight, whatever its format.

A weight has one method for each op that reads it, named after the op. A format implements `linear` (or `embed` and `head`) and
as many fused ops as it has kernels for. The others fall back to the sequence of ops that they fuse. No code outside this
package and `kernels/` sees a weight's tensors or asks for its format.

Shapes: T tokens · D inputs · N outputs · V vocabulary · R sequences · K experts per token, or clusters · B target's width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from culet.kernels.dispatch import for_device
from culet.kernels.types import BlockShape, BlockStart, Candidates, HeadShape
from culet.layers.layer import Layer
from culet.layers.weight.placement import Placement
from culet.parallel.rank import ONLY_RANK, Rank
from culet.parallel.reduce.parts import AllReduce, PartialSum, join_parts


class Split(Enum):
    """How ranks share a weight."""

    NONE = auto()  # every rank holds all of it
    ROWS = auto()  # by outputs, so each rank computes some of them
    COLUMNS = auto()  # by inputs, so each rank computes a partial sum of all outputs


@dataclass(frozen=True)
class Projection:
    """A linear layer in a checkpoint. Projections with the same input are stacked into one matrix."""

    name: str  # without the ending, since a format adds `.weight` or the endings of its own tensors
    num_rows: int
    order: Tensor | None = None  # order of the rows within units; None keeps the stored order
    unit: int = 1  # number of rows that must stay on one rank, such as those of a head


@dataclass(frozen=True)
class MatrixLayout:
    """The projections that a matrix is merged from, and how ranks share it."""

    projections: tuple[Projection, ...]
    num_columns: int
    split: Split = Split.NONE
    column_order: Tensor | None = None  # order of the columns within units; None keeps the stored order
    column_unit: int = 1
    has_shared_columns: bool = False  # ranks may hold the same columns, because each weights its inputs

    def rows(self, projection: Projection, rank: Rank) -> slice:
        """Return the stored rows of a projection that `rank` holds."""
        is_split, num_rows = self.split is Split.ROWS, projection.num_rows
        return rank.share(num_rows, projection.unit, may_repeat=True) if is_split else slice(0, num_rows)

    def columns(self, rank: Rank) -> slice:
        """Return the stored columns that `rank` holds."""
        if self.split is not Split.COLUMNS:
            return slice(0, self.num_columns)
        return rank.share(self.num_columns, self.column_unit, may_repeat=self.has_shared_columns)


@dataclass(frozen=True)
class TableLayout:
    """An embedding table [V, D]. Its rows are multiplied by `scale` when they are looked up."""

    name: str
    num_rows: int
    num_columns: int
    scale: float = 1.0
    split: Split = Split.NONE

    def rows(self, rank: Rank) -> slice:
        """Return the stored rows that `rank` holds."""
        return rank.share(self.num_rows) if self.split is Split.ROWS else slice(0, self.num_rows)


@dataclass(frozen=True)
class ExpertsLayout:
    """Experts that are gated MLPs. The width of every expert is split between ranks."""

    name: str
    num_experts: int
    hidden_size: int
    width: int

    def width_of(self, rank: Rank) -> slice:
        """Return the part of every expert's width that `rank` holds."""
        return rank.share(self.width)


def local_order(order: Tensor | None, cut: slice) -> Tensor | None:
    """Return the part of `order` within `cut`, relative to the start of `cut`."""
    return None if order is None else order[cut] - cut.start


class Weight(Layer, ABC):
    """A weight of any format."""

    all_reduce: AllReduce | None = None  # adds its partial sums over all ranks, or None if there is nothing to add
    can_leave_sum: ClassVar[bool] = True  # False if the format changes the sum
    is_widened: bool = False  # True if many tokens are multiplied by a wider copy, made in each step

    def leave_sum(self) -> None:
        """Make products of this rank's part stay its own term of the sum. Their reader adds those of all ranks."""
        assert self.can_leave_sum
        self.all_reduce = None

    @abstractmethod
    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        """Yield the checkpoint tensors that the weight is loaded from, and the regions that its rank holds."""


@dataclass(frozen=True)
class Site:
    """The device and rank that hold a model's weights."""

    dtype: torch.dtype  # used for activations
    device: torch.device
    rank: Rank = ONLY_RANK
    all_reduce: AllReduce | None = None  # sums over all ranks; required if there are several

    def __post_init__(self) -> None:
        assert self.rank.size == 1 or self.all_reduce is not None, "partial sums of several ranks need an all-reduce"


class ContextRows(NamedTuple):
    """The weights of a drafter's layer for the keys and values of its context, and the pages that hold them."""

    weight: Matrix
    first_row: int  # first row of the keys, which the values follow
    norm_GH: Tensor
    planes: Tensor


class Matrix(Weight):
    """y = x W^T, without bias."""

    def __init__(self, layout: MatrixLayout, site: Site) -> None:
        super().__init__()
        self.layout, self.rank = layout, site.rank
        self.ops = for_device(site.device)
        self.all_reduce = site.all_reduce if layout.split is Split.COLUMNS else None

    @abstractmethod
    def linear(self, x_TD: Tensor) -> Tensor:
        """Return the product [T, N]."""

    @abstractmethod
    def linear_rows(self, x_TD: Tensor, rows: slice) -> Tensor:
        """Return the product with some rows of the weight."""

    def linear_parts(self, x_TD: Tensor) -> PartialSum:
        """Return the product for a reader that adds up parts."""
        return join_parts(self.linear(x_TD), self.all_reduce)

    def gated_linear(self, x_TD: Tensor) -> Tensor:
        """Return gelu_tanh(gate(x)) * up(x). The rows are gate, then up."""
        return self.ops.gelu_mul(self.linear(x_TD))

    def linear_gelu_times(self, x_TD: Tensor, factor_TN: Tensor) -> Tensor:
        """Return gelu_tanh(linear(x)) * factor."""
        return self.ops.gelu_gate(self.linear(x_TD), factor_TN)

    def residual_norm_linear(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        norms: tuple[Tensor | None, Tensor],
        eps: float,
        scalar: Tensor | None = None,
        gate: str = "",
    ) -> tuple[Tensor, Tensor]:
        """Return x' = (x + norm(delta) * norms[0]) * scalar, and the product with norm(x') * norms[1], gated by `gate`."""
        if delta_TD is not None:
            x_TD, _ = self.ops.residual_norm(x_TD, delta_TD, norms[0], scalar, None, eps)
        normed_TD = self.ops.rms_norm(x_TD, norms[1], eps)
        if gate == "gelu":
            return x_TD, self.gated_linear(normed_TD)
        return x_TD, self.ops.silu_mul(self.linear(normed_TD)) if gate else self.linear_parts(normed_TD)

    def embed_linear(self, found: Candidates | None, token_R: Tensor, hidden_RB: Tensor, table: Table) -> Tensor:
        """Return the product with table[token] and `hidden_RB` concatenated.

        With candidates, the best of them is first written to `token_R`.
        """
        if found is not None:
            self.ops.pick_best(found, token_R)
        return self.linear(torch.cat((table.embed(token_R), hidden_RB), dim=-1))

    def store_context(
        self,
        feature_TD: Tensor,
        hidden_norm_D: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_address_T: Tensor,
        layers: Sequence[ContextRows],
        heads: HeadShape,
    ) -> None:
        """Write every layer's keys and values for norm(feature) * hidden_norm. Call this on the first layer's weight."""
        normed_TD, turn = self.ops.rms_norm(feature_TD, hidden_norm_D, heads.eps), self.ops.rope(*angles)
        where = self.ops.stores(kv_address_T, layers[0].planes.shape[3])
        for weight, first_row, norm_GH, planes in layers:
            projected_TX = weight.linear_rows(normed_TD, slice(first_row, None))
            self.ops.prepare_qkv(projected_TX, norm_GH, turn, planes, where, heads)


class Table(Weight):
    """Rows that are looked up by token id. As the head, a table scores all tokens with x @ table^T."""

    scale: float  # rows are multiplied by this when they are looked up
    has_clusters: ClassVar[bool] = False  # it has `cluster_candidates` and `reorder_rows`

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return the scaled rows of the tokens. Each rank returns all of them, whichever rank holds them."""
        raise self._no_kernel("embed")

    def embed_columns(self, token_ids_T: Tensor, columns: slice) -> Tensor:
        """Return some columns of the scaled rows."""
        raise self._no_kernel("embed_columns")

    def head(self, x_LD: Tensor) -> Tensor:
        """Return the logits [L, V]. Each rank returns all of them."""
        raise self._no_kernel("head")

    def capped_head(self, x_LD: Tensor, cap: float | None) -> Tensor:
        """Return cap * tanh(logits / cap) in float32. With None, the logits are not capped."""
        raise self._no_kernel("capped_head")

    def head_candidates(self, x_RD: Tensor, cap: float | None) -> Candidates:
        """Return candidates that include the most likely token of each row. The rows may be [R, K, D]."""
        raise self._no_kernel("head_candidates")

    def cluster_candidates(self, x_RD: Tensor, ids_MJ: Tensor, chosen_RK: Tensor) -> Candidates:
        """Return the tokens in each row's chosen clusters with their logits. The table's rows are ordered like `ids_MJ`."""
        raise self._no_kernel("cluster_candidates")

    def begin_blocks(
        self, newest_R: Tensor, length_R: Tensor, tables: tuple[Tensor, Tensor], shape: BlockShape, inv_freq: Tensor
    ) -> BlockStart:
        """Start a pass over blocks. Return the scaled rows of the newest token and of the masks, and their positions."""
        raise self._no_kernel("begin_blocks")

    def reorder_rows(self, order_V: Tensor) -> None:
        """Move row order[i] to index i."""
        raise self._no_kernel("reorder_rows")

    def _no_kernel(self, op: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no kernel for {op}")


def begin_blocks_of(
    table: Table, newest_R: Tensor, length_R: Tensor, tables: tuple[Tensor, Tensor], shape: BlockShape, inv_freq: Tensor
) -> BlockStart:
    """Start a pass over blocks with a table that the op cannot read, because it is quantised or a shard.

    The op gets a plain table of only the rows that it needs: the newest tokens, then the mask.
    """
    ids = torch.cat((newest_R, torch.full_like(newest_R[:1], shape.mask_token_id)))
    num_rows, device = newest_R.shape[0], newest_R.device
    small, embedding = shape._replace(mask_token_id=num_rows), (table.embed(ids), 1.0)
    ops = for_device(device)
    start: BlockStart = ops.begin_blocks(torch.arange(num_rows, device=device), length_R, tables, small, inv_freq, embedding)
    return start._replace(ids_T=ids[start.ids_T])


def join_candidates(found: Candidates, first_row: int, all_reduce: AllReduce | None) -> Candidates:
    """Return the best candidate of each rank, whose tokens start at `first_row`. With one rank, return its candidates."""
    if all_reduce is None:
        return found
    best = found.scores_RC.max(dim=-1)
    ids = best.indices if found.ids_RC is None else found.ids_RC.gather(-1, best.indices[..., None])[..., 0]
    # Scores and token ids travel together. float32 holds ids of up to 2 ** 24 exactly, far more than a vocabulary has.
    both = all_reduce.gather(torch.stack((best.values.float(), (ids + first_row).float())))
    scores, tokens = both.movedim(0, -1)
    return Candidates(scores, tokens.long())


class ExpertStack(Weight):
    """The gate, up and down matrices of all experts."""

    @abstractmethod
    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> PartialSum:
        """Return the weighted sum of each token's experts."""
