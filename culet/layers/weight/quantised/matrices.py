"""Weights in quantised forms. A format is a form in memory (`forms.py`) and a source in the checkpoint (`sources.py`).

Shapes: as in `base`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from culet.errors import CheckpointError
from culet.kernels.dispatch import QUANTISED, for_device
from culet.kernels.types import FP8_BLOCK, BlockShape, BlockStart, Candidates, QuantisedWeight, part_of
from culet.layers.layer import Layer
from culet.layers.weight.base import (
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
)
from culet.layers.weight.joined import JoinedMatrix, ReorderedMatrix
from culet.layers.weight.placement import Placement
from culet.layers.weight.quantised.cut import Cut, cuts_of
from culet.layers.weight.quantised.forms import Fp8, WeightForm
from culet.layers.weight.quantised.sources import Source
from culet.parallel.reduce.parts import PartialSum, join_columns, join_parts


class Tensors(Layer):
    """The tensors of one quantised weight, and the ops that read it."""

    def __init__(self, form: WeightForm, shape: tuple[int, ...], site: Site) -> None:
        super().__init__()
        self.form = form
        self.held = form.allocate(shape, site)
        for name, tensor in zip(self.held._fields, self.held, strict=True):
            if tensor is not None:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.ops = for_device(site.device, QUANTISED)

    def own_kernel_key(self) -> tuple[object, ...]:
        """Return the form, and the shapes and types of the tensors."""
        facts = ((tuple(tensor.shape), str(tensor.dtype)) for tensor in self.held if tensor is not None)
        return type(self.held).__name__, *facts


class QuantisedMatrix(Matrix):
    """A matrix in one form. Its projections come from one source."""

    def __init__(self, layout: MatrixLayout, site: Site, form: WeightForm, source: Source) -> None:
        super().__init__(layout, site)
        self.source, self.is_widened = source, form.is_widened(site)
        cuts = list(cuts_of(layout, site.rank))
        columns = layout.columns(site.rank)
        self.tensors = Tensors(form, (cuts[-1][1].stop, columns.stop - columns.start), site)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        form, held = self.tensors.form, self.tensors.held
        for cut, rows in cuts_of(self.layout, self.rank):
            yield from self.source.placements(cut, form.rows(held, rows))

    def linear(self, x_TD: Tensor) -> Tensor:
        product: Tensor = self.tensors.ops.linear(x_TD, self.tensors.held)
        return product

    def linear_rows(self, x_TD: Tensor, rows: slice) -> Tensor:
        form = self.tensors.form
        if isinstance(form, Fp8) and form.has_blocks:
            return self.linear(x_TD)[..., rows]
        product: Tensor = self.tensors.ops.linear(x_TD, form.rows(self.tensors.held, rows))
        return product

    def linear_parts(self, x_TD: Tensor) -> PartialSum:
        return join_parts(self.tensors.ops.linear_parts(x_TD, self.tensors.held), self.all_reduce)

    def gated_linear(self, x_TD: Tensor) -> Tensor:
        gated: Tensor = self.tensors.ops.gated_linear(x_TD, self.tensors.held)
        return gated

    def linear_gelu_times(self, x_TD: Tensor, factor_TN: Tensor) -> Tensor:
        gated: Tensor = self.tensors.ops.linear_gelu_times(x_TD, self.tensors.held, factor_TN)
        return gated


class QuantisedTable(Table):
    """A quantised table. A lookup dequantises its rows, and the head uses the table as a matrix."""

    def __init__(self, layout: TableLayout, site: Site, form: WeightForm, source: Source) -> None:
        super().__init__()
        self.layout, self.source, self.dtype = layout, source, site.dtype
        self.scale, self.ops = layout.scale, for_device(site.device)
        self.own_rows = rows = layout.rows(site.rank)
        self.is_shard = layout.split is Split.ROWS and site.rank.size > 1
        self.all_reduce = site.all_reduce if self.is_shard else None
        self.tensors = Tensors(form, (rows.stop - rows.start, layout.num_columns), site)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        shape = self.layout.num_rows, self.layout.num_columns
        cut = Cut(self.layout.name, shape, self.own_rows, slice(0, shape[1]))
        yield from self.source.placements(cut, self.tensors.held)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return self.embed_columns(token_ids_T, slice(None))

    def embed_columns(self, token_ids_T: Tensor, columns: slice) -> Tensor:
        # As in the formats' reference implementations, a row is rounded before it is scaled.
        own_TD = self.tensors.ops.look_up(token_ids_T, self.tensors.held, self.own_rows.start, columns, self.scale, self.dtype)
        return join_parts(own_TD, self.all_reduce)

    def head(self, x_LD: Tensor) -> Tensor:
        logits = self.tensors.ops.linear(x_LD, self.tensors.held)
        return join_columns(logits, self.own_rows, self.layout.num_rows, self.all_reduce)

    def capped_head(self, x_LD: Tensor, cap: float | None) -> Tensor:
        logits = self.tensors.ops.capped_head(x_LD, self.tensors.held, cap)
        return join_columns(logits, self.own_rows, self.layout.num_rows, self.all_reduce)

    def head_candidates(self, x_RD: Tensor, cap: float | None) -> Candidates:
        found = self.ops.peaks(self.tensors.ops.capped_head(x_RD.flatten(0, -2), self.tensors.held, cap))
        return join_candidates(found, self.own_rows.start, self.all_reduce)

    def begin_blocks(
        self, newest_R: Tensor, length_R: Tensor, tables: tuple[Tensor, Tensor], shape: BlockShape, inv_freq: Tensor
    ) -> BlockStart:
        return begin_blocks_of(self, newest_R, length_R, tables, shape, inv_freq)


class QuantisedExperts(ExpertStack):
    """All experts in two stacks: gate and up [E, 2F, D], and down [E, D, F]. The two may differ in format."""

    def __init__(self, layout: ExpertsLayout, site: Site, gate_up: QuantisedFormat, down: QuantisedFormat) -> None:
        super().__init__()
        self.layout, self.rank, self.all_reduce = layout, site.rank, site.all_reduce
        self.sources = gate_up.source, down.source
        assert gate_up.source.has_stacked_experts == down.source.has_stacked_experts, "a checkpoint stores all experts alike"
        part = layout.width_of(site.rank)
        width = part.stop - part.start
        self.gate_up = Tensors(gate_up.form, (layout.num_experts, 2 * width, layout.hidden_size), site)
        self.down = Tensors(down.form, (layout.num_experts, layout.hidden_size, width), site)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        merged: dict[str, Placement] = {}
        for source, cut, held in self._cuts():
            for name, placement in source.placements(cut, held):
                before = merged.get(name)
                merged[name] = placement if before is None else replace(before, pieces=before.pieces + placement.pieces)
        yield from merged.items()

    def _cuts(self) -> Iterator[tuple[Source, Cut, QuantisedWeight]]:
        layout, part = self.layout, self.layout.width_of(self.rank)
        wide, narrow = self.sources
        width, size, count = part.stop - part.start, layout.hidden_size, layout.num_experts
        every = slice(0, size)
        for expert in range(count):
            gate_up, down = part_of(self.gate_up.held, expert), part_of(self.down.held, expert)
            gate, up = (self.gate_up.form.rows(gate_up, rows) for rows in (slice(0, width), slice(width, 2 * width)))
            if wide.has_stacked_experts:
                stacked = (2 * layout.width, size)
                below = slice(layout.width + part.start, layout.width + part.stop)
                of_expert = partial(Cut, expert=expert, num_experts=count)
                yield wide, of_expert(f"{layout.name}.gate_up_proj", stacked, part, every), gate
                yield wide, of_expert(f"{layout.name}.gate_up_proj", stacked, below, every), up
                yield narrow, of_expert(f"{layout.name}.down_proj", (size, layout.width), every, part), down
            else:
                yield wide, Cut(f"{layout.name}.{expert}.gate_proj", (layout.width, size), part, every), gate
                yield wide, Cut(f"{layout.name}.{expert}.up_proj", (layout.width, size), part, every), up
                yield narrow, Cut(f"{layout.name}.{expert}.down_proj", (size, layout.width), every, part), down

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> PartialSum:
        out = self.gate_up.ops.experts(x_TD, weights_TK, experts_TK, self.gate_up.held, self.down.held)
        return join_parts(out, self.all_reduce)


@dataclass(frozen=True)
class QuantisedFormat:
    """Makes weights of one form from one source."""

    form: WeightForm
    source: Source
    down: QuantisedFormat | None = None  # of the experts' down matrices, if they differ

    def matrix(self, layout: MatrixLayout, site: Site) -> Matrix:
        if isinstance(self.form, Fp8) and self.form.has_blocks:
            return self._block_matrix(layout, site)
        form: WeightForm | None = self.form
        if layout.column_order is not None:
            form = self.form.with_column_order(layout.column_order)
        return self._in_stored_order(layout, site) if form is None else QuantisedMatrix(layout, site, form, self.source)

    def _block_matrix(self, layout: MatrixLayout, site: Site) -> Matrix:
        """Make a matrix with fp8 blocks, which must not be cut: neither by an order nor where projections meet."""
        first = [layout.rows(projection, site.rank) for projection in layout.projections]
        if len(first) > 1 and any((rows.stop - rows.start) % FP8_BLOCK for rows in first):
            single = [replace(layout, projections=(projection,)) for projection in layout.projections]
            return JoinedMatrix(layout, site, [self.matrix(each, site) for each in single])
        if any(rows.start % FP8_BLOCK for rows in first):
            raise CheckpointError(
                f"{layout.projections[0].name}: fp8 blocks of {FP8_BLOCK} rows cannot be shared between ranks"
            )
        return self._in_stored_order(layout, site)

    def _in_stored_order(self, layout: MatrixLayout, site: Site) -> Matrix:
        cuts = list(cuts_of(layout, site.rank))
        plain = tuple(replace(projection, order=None) for projection in layout.projections)
        inner = QuantisedMatrix(replace(layout, projections=plain, column_order=None), site, self.form, self.source)
        column_order = cuts[0][0].column_order
        row_order = None
        if any(cut.row_order is not None for cut, _ in cuts):
            orders = [torch.arange(rows.stop - rows.start) if cut.row_order is None else cut.row_order for cut, rows in cuts]
            row_order = torch.cat([order + rows.start for order, (_, rows) in zip(orders, cuts, strict=True)])
        if row_order is None and column_order is None:
            return inner
        return ReorderedMatrix(layout, site, inner, row_order, column_order)

    def table(self, layout: TableLayout, site: Site) -> Table:
        if isinstance(self.form, Fp8) and self.form.has_blocks:
            problem = f"{layout.name}: a table in fp8 blocks of {FP8_BLOCK} x {FP8_BLOCK}, which Culet does not read"
            raise CheckpointError(problem, hint="use a checkpoint whose tables are bfloat16, or have one scale per row")
        return QuantisedTable(layout, site, self.form, self.source)

    def experts(self, layout: ExpertsLayout, site: Site) -> ExpertStack:
        down = self.down or self
        has_blocks = any(isinstance(each, Fp8) and each.has_blocks for each in (self.form, down.form))
        if has_blocks and layout.width % FP8_BLOCK:
            raise CheckpointError(
                f"{layout.name}: fp8 blocks of {FP8_BLOCK} x {FP8_BLOCK} do not divide experts of width {layout.width}",
                hint="use a checkpoint with one scale per channel, such as RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic",
            )
        return QuantisedExperts(layout, site, self, down)
