"""Plain weights. Each is one tensor in the activations' dtype, stored as in published checkpoints (`name.weight`).

Shapes: as in `base`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from culet.errors import InternalError
from culet.kernels.dispatch import for_device
from culet.kernels.types import BlockShape, BlockStart, Candidates, ContextLayer, HeadShape
from culet.layers.weight.base import (
    ContextRows,
    ExpertsLayout,
    ExpertStack,
    Matrix,
    MatrixLayout,
    Site,
    Split,
    Table,
    TableLayout,
    begin_blocks_of,
    join_candidates,
    local_order,
)
from culet.layers.weight.placement import Piece, Placement, whole
from culet.parallel.reduce.parts import PartialSum, join_columns, join_parts


def empty_matrix(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Allocate an unfilled matrix [..., N, D].

    On a CPU, N is contiguous in memory. MKL is up to twice as fast that way for a handful of tokens (8 x 512 x 2048 takes
    0.23 ms instead of 0.51), and equally fast for one token or many.
    """
    if device.type == "cpu":
        memory = torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=device).transpose(-1, -2)
    else:
        memory = torch.empty(*shape, dtype=dtype, device=device)
    return nn.Parameter(memory, requires_grad=False)


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return `value` rounded to `dtype`."""
    return float(torch.tensor(value, dtype=dtype))


class PlainMatrix(Matrix):
    """A matrix in the activations' dtype."""

    def __init__(self, layout: MatrixLayout, site: Site) -> None:
        super().__init__(layout, site)
        cuts = [layout.rows(projection, site.rank) for projection in layout.projections]
        columns = layout.columns(site.rank)
        num_rows, num_columns = sum(cut.stop - cut.start for cut in cuts), columns.stop - columns.start
        self.tensor = empty_matrix(num_rows, num_columns, dtype=site.dtype, device=site.device)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        layout, begin = self.layout, 0
        columns = layout.columns(self.rank)
        for projection in layout.projections:
            rows = layout.rows(projection, self.rank)
            target = self.tensor[begin : begin + rows.stop - rows.start]
            begin += rows.stop - rows.start
            if layout.column_order is None:
                piece = Piece(target, (rows, columns), local_order(projection.order, rows))
            else:
                assert projection.order is None, "rows and columns cannot both be reordered"
                piece = Piece(target, (rows, columns), local_order(layout.column_order, columns), dim=1)
            yield f"{projection.name}.weight", Placement((projection.num_rows, layout.num_columns), (piece,))

    def linear(self, x_TD: Tensor) -> Tensor:
        return self.ops.linear(x_TD, self.tensor)

    def linear_rows(self, x_TD: Tensor, rows: slice) -> Tensor:
        return self.ops.linear(x_TD, self.tensor[rows])

    def linear_parts(self, x_TD: Tensor) -> PartialSum:
        return join_parts(self.ops.linear_parts(x_TD, self.tensor), self.all_reduce)

    def gated_linear(self, x_TD: Tensor) -> Tensor:
        return self.ops.gated_linear(x_TD, self.tensor)

    def linear_gelu_times(self, x_TD: Tensor, factor_TN: Tensor) -> Tensor:
        return self.ops.linear_gelu_times(x_TD, self.tensor, factor_TN)

    def residual_norm_linear(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        norms: tuple[Tensor | None, Tensor],
        eps: float,
        scalar: Tensor | None = None,
        gate: str = "",
    ) -> tuple[Tensor, Tensor]:
        return self.ops.residual_norm_linear(x_TD, delta_TD, norms, scalar, eps, self.tensor, gate)

    def embed_linear(self, found: Candidates | None, token_R: Tensor, hidden_RB: Tensor, table: Table) -> Tensor:
        if not isinstance(table, PlainTable) or table.is_shard:
            return super().embed_linear(found, token_R, hidden_RB, table)
        return self.ops.embed_linear(found, token_R, hidden_RB, table.tensor, table.scale, self.tensor)

    def store_context(
        self,
        feature_TD: Tensor,
        hidden_norm_D: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_address_T: Tensor,
        layers: Sequence[ContextRows],
        heads: HeadShape,
    ) -> None:
        plain = [
            ContextLayer(weight.tensor[first_row:], norm_GH, planes)
            for weight, first_row, norm_GH, planes in layers
            if isinstance(weight, PlainMatrix)
        ]
        if len(plain) < len(layers):
            super().store_context(feature_TD, hidden_norm_D, angles, kv_address_T, layers, heads)
        else:
            self.ops.store_context(feature_TD, hidden_norm_D, angles, kv_address_T, plain, heads)


class Router(PlainMatrix):
    """The matrix that chooses experts. It is always float32, so that the choice does not depend on rounding."""

    def __init__(self, layout: MatrixLayout, site: Site) -> None:
        Matrix.__init__(self, layout, site)
        (projection,) = layout.projections
        memory = torch.empty(projection.num_rows, layout.num_columns, dtype=torch.float32, device=site.device)
        self.tensor = nn.Parameter(memory, requires_grad=False)

    def fold_in(self, scale_D: Tensor) -> None:
        """Multiply the columns by `scale_D`. Call once, after loading."""
        self.tensor.mul_(scale_D)

    def route(self, x_TD: Tensor, expert_scale_E: Tensor, top_k: int, eps: float) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of each token's experts."""
        return self.ops.route(x_TD, self.tensor, expert_scale_E, top_k, eps)


class PlainTable(Table):
    """A table in the activations' dtype. With several ranks, it may be a shard that holds some of the rows."""

    has_clusters = True

    def __init__(self, layout: TableLayout, site: Site) -> None:
        super().__init__()
        self.layout, self.ops = layout, for_device(site.device)
        self.rows = rows = layout.rows(site.rank)
        self.is_shard = layout.split is Split.ROWS and site.rank.size > 1
        self.all_reduce = site.all_reduce if self.is_shard else None
        memory = torch.empty(rows.stop - rows.start, layout.num_columns, dtype=site.dtype, device=site.device)
        self.tensor = nn.Parameter(memory, requires_grad=False)
        # The model was trained with the scale rounded to its precision, such as 39.25 for sqrt(1536) in bfloat16.
        self.scale = rounded(layout.scale, site.dtype)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        shape = self.layout.num_rows, self.layout.num_columns
        piece = Piece(self.tensor, (self.rows, slice(0, shape[1])))
        yield f"{self.layout.name}.weight", Placement(shape, (piece,))

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return self._embed(token_ids_T, self.tensor)

    def embed_columns(self, token_ids_T: Tensor, columns: slice) -> Tensor:
        return self._embed(token_ids_T, self.tensor[:, columns])

    def _embed(self, token_ids_T: Tensor, table_VD: Tensor) -> Tensor:
        if not self.is_shard:
            embedded_TD: Tensor = self.ops.embed(token_ids_T, table_VD, self.scale)
            return embedded_TD
        local_T = token_ids_T - self.rows.start
        is_own_T = (local_T >= 0) & (local_T < table_VD.shape[0])
        own_TD = self.ops.embed(local_T.where(is_own_T, 0), table_VD, self.scale)
        return join_parts(own_TD.masked_fill_(~is_own_T[:, None], 0.0), self.all_reduce)

    def head(self, x_LD: Tensor) -> Tensor:
        return join_columns(self.ops.head(x_LD, self.tensor), self.rows, self.layout.num_rows, self.all_reduce)

    def capped_head(self, x_LD: Tensor, cap: float | None) -> Tensor:
        return join_columns(self.ops.capped_head(x_LD, self.tensor, cap), self.rows, self.layout.num_rows, self.all_reduce)

    def head_candidates(self, x_RD: Tensor, cap: float | None) -> Candidates:
        found = self.ops.head_candidates(x_RD, self.tensor, None, cap)
        return join_candidates(found, self.rows.start, self.all_reduce)

    def cluster_candidates(self, x_RD: Tensor, ids_MJ: Tensor, chosen_RK: Tensor) -> Candidates:
        return self.ops.cluster_candidates(x_RD, self.whole_tensor("cluster_candidates"), ids_MJ, chosen_RK)

    def begin_blocks(
        self, newest_R: Tensor, length_R: Tensor, tables: tuple[Tensor, Tensor], shape: BlockShape, inv_freq: Tensor
    ) -> BlockStart:
        if self.is_shard:
            return begin_blocks_of(self, newest_R, length_R, tables, shape, inv_freq)
        return self.ops.begin_blocks(newest_R, length_R, tables, shape, inv_freq, (self.tensor, self.scale))

    def reorder_rows(self, order_V: Tensor) -> None:
        self.tensor.copy_(self.whole_tensor("reorder_rows")[order_V])

    def whole_tensor(self, op: str) -> Tensor:
        """Return the tensor for an op that needs every row. Raise if this rank does not hold all of them."""
        if self.is_shard:
            held = f"{self.rows.start} to {self.rows.stop - 1} of {self.layout.num_rows}"
            raise InternalError(
                f"{op} of {self.layout.name} needs every row, and this rank holds rows {held}",
                hint=f"{op} is not implemented for several ranks",
            )
        return self.tensor


class PlainExperts(ExpertStack):
    """All experts in two tensors: gate and up [E, 2F, D], and down [E, D, F]."""

    def __init__(self, layout: ExpertsLayout, site: Site) -> None:
        super().__init__()
        self.layout, self.rank = layout, site.rank
        self.ops, self.all_reduce = for_device(site.device), site.all_reduce
        num_experts, size = layout.num_experts, layout.hidden_size
        part = layout.width_of(site.rank)
        width = part.stop - part.start
        self.gate_up = empty_matrix(num_experts, 2 * width, size, dtype=site.dtype, device=site.device)
        self.down = empty_matrix(num_experts, size, width, dtype=site.dtype, device=site.device)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        layout, part = self.layout, self.layout.width_of(self.rank)
        width, every = part.stop - part.start, whole((layout.num_experts, layout.hidden_size))
        if width == layout.width:
            pieces: tuple[Piece, ...] = (Piece(self.gate_up, (every[0], slice(0, 2 * width), every[1])),)
        else:
            up = slice(layout.width + part.start, layout.width + part.stop)
            pieces = (
                Piece(self.gate_up[:, :width], (every[0], part, every[1])),
                Piece(self.gate_up[:, width:], (every[0], up, every[1])),
            )
        yield f"{layout.name}.gate_up_proj", Placement((layout.num_experts, 2 * layout.width, layout.hidden_size), pieces)
        down = Piece(self.down, (*every, part))
        yield f"{layout.name}.down_proj", Placement((layout.num_experts, layout.hidden_size, layout.width), (down,))

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> PartialSum:
        return join_parts(self.ops.experts(x_TD, weights_TK, experts_TK, self.gate_up, self.down), self.all_reduce)


class PerExpertPlain(PlainExperts):
    """Plain experts of a checkpoint that stores each expert's matrices by themselves, as quantised files do."""

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        layout, part = self.layout, self.layout.width_of(self.rank)
        width, every = part.stop - part.start, slice(0, layout.hidden_size)
        for expert in range(layout.num_experts):
            name, gate_up = f"{layout.name}.{expert}", self.gate_up[expert]
            for projection, target in (("gate_proj", gate_up[:width]), ("up_proj", gate_up[width:])):
                piece = Piece(target, (part, every))
                yield f"{name}.{projection}.weight", Placement((layout.width, layout.hidden_size), (piece,))
            down = Piece(self.down[expert], (every, part))
            yield f"{name}.down_proj.weight", Placement((layout.hidden_size, layout.width), (down,))


@dataclass(frozen=True)
class PlainFormat:
    """Makes plain weights."""

    def matrix(self, layout: MatrixLayout, site: Site) -> Matrix:
        return PlainMatrix(layout, site)

    def table(self, layout: TableLayout, site: Site) -> Table:
        return PlainTable(layout, site)

    def experts(self, layout: ExpertsLayout, site: Site) -> ExpertStack:
        return PlainExperts(layout, site)


@dataclass(frozen=True)
class PerExpertFormat(PlainFormat):
    """Makes plain weights from a checkpoint that stores each expert by itself."""

    def experts(self, layout: ExpertsLayout, site: Site) -> ExpertStack:
        return PerExpertPlain(layout, site)
