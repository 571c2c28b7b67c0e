"""Quantise plain weights to fp8 or int4 while they are loaded, tensor by tensor, by rounding to nearest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from culet.kernels.eager.quantised import pack_int4
from culet.kernels.types import Fp8Weight, Int4Weight, QuantisedWeight
from culet.layers.weight.base import ExpertsLayout, ExpertStack, Matrix, MatrixLayout, Site, Table, TableLayout
from culet.layers.weight.placement import ConvertedPiece, Placement
from culet.layers.weight.plain import PlainFormat, rounded
from culet.layers.weight.quantised.cut import Cut
from culet.layers.weight.quantised.forms import Fp8, Int4, WeightForm
from culet.layers.weight.quantised.matrices import QuantisedFormat
from culet.layers.weight.quantised.scheme import rounding_of
from culet.layers.weight.quantised.sources import Placed, Source, reorder, reorder_rows
from culet.registry import lookup

INT4_GROUP = rounding_of("int4").scheme.group
_E4M3_MAX = 448.0
_INT4_MAX = 7.5  # as in compressed-tensors, the largest value of a group lies between the steps 7 and 8
_MIN_SCALE = 1e-12  # used for a group of zeros
_VALUES_AT_ONCE = 1 << 24  # bounds the float32 copies


def round_fp8(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values of [out, in] and bfloat16 scales [out, 1]. With these scales, a checkpoint stores the same values."""
    wide = wide.float()
    scale = (wide.abs().amax(-1, keepdim=True) / _E4M3_MAX).clamp_(min=_MIN_SCALE).to(torch.bfloat16)
    return (wide / scale.float()).clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def round_int4(wide: Tensor, group: int = INT4_GROUP) -> tuple[Tensor, Tensor]:
    """Return packed int4 values of [out, in] and bfloat16 scales [out, in / group]."""
    grouped = wide.float().unflatten(-1, (-1, group))
    scale = (grouped.abs().amax(-1) / _INT4_MAX).clamp_(min=_MIN_SCALE).to(torch.bfloat16)
    nibbles = (grouped / scale.float()[..., None]).round_().clamp_(-8, 7).add_(8).flatten(-2)
    return pack_int4(nibbles), scale


def _in_row_chunks(wide: Tensor) -> list[Tensor]:
    return list(wide.split(max(1, _VALUES_AT_ONCE // max(1, wide.shape[-1]))))


@dataclass(frozen=True)
class Rounded:
    """Plain stored values, which are rounded after they are read. The experts of a layer are stored in one tensor."""

    has_stacked_experts = True

    def placements(self, cut: Cut, held: QuantisedWeight) -> Placed:
        if isinstance(held, Int4Weight):
            targets, columns = (held.packed, held.scale), cut.columns
            cut.columns_in(held.group)  # raises if a rank would cut a group
        else:
            assert isinstance(held, Fp8Weight)
            # A scale belongs to a whole row, so that it does not depend on the number of ranks.
            targets, columns = (held.weight.view(torch.uint8), held.scale), slice(0, cut.shape[1])

        def convert(value: Tensor) -> tuple[Tensor, Tensor]:
            value = value if cut.expert is None else value[0]
            if isinstance(held, Int4Weight):
                parts = [round_int4(part, held.group) for part in _in_row_chunks(reorder(value, cut))]
            else:
                pairs = [round_fp8(part) for part in _in_row_chunks(reorder_rows(value, cut))]
                parts = [(reorder_columns(part.view(torch.uint8)[:, cut.columns], cut), scale) for part, scale in pairs]
            return torch.cat([part for part, _ in parts]), torch.cat([scale for _, scale in parts])

        ending = ".weight" if cut.expert is None else ""
        region, more = (*cut.lead, cut.rows, columns), (targets[1],)
        piece = ConvertedPiece(targets[0], region, convert=convert, more_targets=more, is_rowwise=cut.is_rowwise)
        yield f"{cut.name}{ending}", Placement(cut.stored_shape(*cut.shape), (piece,))


def reorder_columns(value: Tensor, cut: Cut) -> Tensor:
    """Apply the order of the columns."""
    return value if cut.column_order is None else value.index_select(1, cut.column_order.to(value.device))


@dataclass(frozen=True)
class RoundedFormat(PlainFormat):
    """Makes matrices and experts that are rounded while they are loaded. Tables stay plain."""

    precision: str  # fp8 or int4
    source: Source = Rounded()

    @property
    def _quantised(self) -> QuantisedFormat:
        forms: dict[str, WeightForm] = {"fp8": Fp8(), "int4": Int4(INT4_GROUP)}
        return QuantisedFormat(lookup("quantization", self.precision, forms), self.source)

    def matrix(self, layout: MatrixLayout, site: Site) -> Matrix:
        fits = rounding_of(self.precision).fits(layout.num_columns)
        return self._quantised.matrix(layout, site) if fits else super().matrix(layout, site)

    def experts(self, layout: ExpertsLayout, site: Site) -> ExpertStack:
        rounding = rounding_of(self.precision)
        fits = rounding.fits(layout.width) and rounding.fits(layout.hidden_size)
        return self._quantised.experts(layout, site) if fits else super().experts(layout, site)


@dataclass(frozen=True)
class RoundedHead(RoundedFormat):
    """Makes a table, or the matrix of a head, that is rounded while it is loaded."""

    def table(self, layout: TableLayout, site: Site) -> Table:
        # As in a plain table, embeddings are multiplied by the rounded scale that the model was trained with.
        return self._quantised.table(replace(layout, scale=rounded(layout.scale, site.dtype)), site)


def stored_parts(wide: Tensor, precision: str) -> dict[str, Tensor]:
    """Return the tensors that a compressed-tensors checkpoint stores for a matrix, by ending."""
    round_part = round_int4 if precision == "int4" else round_fp8
    parts = [round_part(part) for part in _in_row_chunks(wide)]
    values = torch.cat([value.view(torch.uint8) for value, _ in parts]).view(parts[0][0].dtype)
    scale = torch.cat([scale for _, scale in parts])
    if precision == "int4":
        return {"weight_packed": values, "weight_scale": scale, "weight_shape": torch.tensor(wide.shape)}
    return {"weight": values, "weight_scale": scale}
