"""Google's QAT for phones (`quant_method: gemma`): int2, int4 or int8 with a scale per row, and rounded activations.

Shapes: as in `base`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from culet.errors import CheckpointError
from culet.kernels.eager.quantised import pack_int4
from culet.kernels.types import Int4Weight, Int8Weight, QuantisedWeight
from culet.layers.weight.base import ExpertsLayout, ExpertStack, Matrix, MatrixLayout, Site, Table, TableLayout
from culet.layers.weight.joined import JoinedMatrix
from culet.layers.weight.placement import Placement
from culet.layers.weight.quantised.cut import Cut
from culet.layers.weight.quantised.forms import Int4, Int8, WeightForm
from culet.layers.weight.quantised.matrices import QuantisedMatrix, QuantisedTable
from culet.layers.weight.quantised.sources import Placed, piece, reorder, scalar_placement, scale_placement
from culet.parallel.reduce.parts import PartialSum


def _nibbles_of(stored: Tensor, num_bits: int) -> Tensor:
    """Return values of 2 or 4 bits, lowest bits first, as nibbles that stand for value + 8."""
    count, mask = 8 // num_bits, (1 << num_bits) - 1
    values = torch.stack([(stored >> (num_bits * index)) & mask for index in range(count)], -1).flatten(-2)
    return values + (8 - (1 << (num_bits - 1)))


@dataclass(frozen=True)
class MobileValues:
    """Packed values and a float32 scale per row. A table has other endings, and may have a scale per block of columns."""

    num_bits: int
    is_table: bool = False
    num_blocks: int = 1
    has_stacked_experts = False

    def placements(self, cut: Cut, held: QuantisedWeight) -> Placed:
        num_rows, num_columns = cut.shape
        values, scale = ("embedding_quantized", "embedding_scale") if self.is_table else ("weight", "weight_scale")
        if isinstance(held, Int8Weight):
            filled = piece(held.weight, cut, cut.columns, lambda value: reorder(value, cut))
            yield f"{cut.name}.{values}", Placement(cut.shape, (filled,), {"I8"})
        else:
            assert isinstance(held, Int4Weight)
            count = 8 // self.num_bits
            filled = piece(
                held.packed,
                cut,
                cut.columns_in(count),
                lambda value: pack_int4(reorder(_nibbles_of(value, self.num_bits), cut)),
            )
            yield f"{cut.name}.{values}", Placement((num_rows, num_columns // count), (filled,), {"U8"})
        yield f"{cut.name}.{scale}", scale_placement(held.scale, cut, self.num_blocks)


def round_range(x: Tensor, scale: Tensor) -> Tensor:
    """Return x rounded to 256 steps of `scale`. A scale of 0 changes nothing."""
    scale = scale.to(x.dtype)
    safe = torch.where(scale != 0, scale, torch.ones_like(scale))
    return torch.where(scale != 0, torch.clamp(torch.round(x / safe), -128.0, 127.0) * safe, x)


class RangedMatrix(Matrix):
    """One projection whose inputs and outputs are rounded to fixed ranges."""

    can_leave_sum = False

    def __init__(self, layout: MatrixLayout, site: Site, inner: QuantisedMatrix) -> None:
        super().__init__(layout, site)
        self.inner = inner
        self.input_scale = nn.Parameter(torch.empty(1, 1, device=site.device), requires_grad=False)
        self.output_scale = nn.Parameter(torch.empty(1, 1, device=site.device), requires_grad=False)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        (projection,) = self.layout.projections
        for name, target in (("input", self.input_scale), ("output", self.output_scale)):
            yield f"{projection.name}.{name}_activation_scale", scalar_placement(target)

    def linear(self, x_TD: Tensor) -> Tensor:
        return round_range(self.inner.linear(round_range(x_TD, self.input_scale)), self.output_scale)

    def linear_rows(self, x_TD: Tensor, rows: slice) -> Tensor:
        return round_range(self.inner.linear_rows(round_range(x_TD, self.input_scale), rows), self.output_scale)

    def linear_parts(self, x_TD: Tensor) -> PartialSum:
        return PartialSum(round_range(self.inner.linear_parts(round_range(x_TD, self.input_scale)), self.output_scale))


@dataclass(frozen=True)
class MobileFormat:
    """Makes the weights of one module of such a checkpoint."""

    num_bits: int
    num_blocks: int = 1  # of a table

    def form(self, group: int = 0) -> WeightForm:
        scale_dtype = None if group else torch.float32  # as stored
        return Int8(group, scale_dtype) if self.num_bits == 8 else Int4(group, scale_dtype)

    def matrix(self, layout: MatrixLayout, site: Site) -> Matrix:
        if len(layout.projections) > 1:  # each has its own ranges
            single = [replace(layout, projections=(projection,)) for projection in layout.projections]
            return JoinedMatrix(layout, site, [self.matrix(each, site) for each in single])
        return RangedMatrix(layout, site, QuantisedMatrix(layout, site, self.form(), MobileValues(self.num_bits)))

    def table(self, layout: TableLayout, site: Site) -> Table:
        group = layout.num_columns // self.num_blocks if self.num_blocks > 1 else 0
        return QuantisedTable(layout, site, self.form(group), MobileValues(self.num_bits, True, self.num_blocks))

    def experts(self, layout: ExpertsLayout, site: Site) -> ExpertStack:
        raise CheckpointError(f"{layout.name}: Google's QAT for phones has no experts")
