"""Where the values of quantised weights are in a checkpoint: compressed-tensors and ModelOpt.

A source yields the placements of one matrix. `held` are views of the memory that the matrix fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from culet.kernels.eager.quantised import pack_int4, unpack_int4
from culet.kernels.types import FP8_BLOCK, NVFP4_GROUP, Fp8Weight, Int4Weight, Int8Weight, Nvfp4Weight, QuantisedWeight
from culet.layers.weight.placement import E4M3_TYPES, FLOATS, ConvertedPiece, Piece, Placement
from culet.layers.weight.quantised.cut import Cut
from culet.layers.weight.quantised.forms import num_blocks

Placed = Iterator[tuple[str, Placement]]
Convert = Callable[[Tensor], Tensor]


class Source(Protocol):
    """Knows which stored tensors fill a matrix."""

    @property
    def has_stacked_experts(self) -> bool:
        """Whether the experts of a layer are one tensor [E, out, in]. Otherwise each has its own."""
        ...

    def placements(self, cut: Cut, held: QuantisedWeight) -> Placed: ...


def reorder(value: Tensor, cut: Cut, column_unit: int = 1) -> Tensor:
    """Apply the orders of `cut` to rows and columns. A column of `value` stands for `column_unit` columns of the matrix."""
    if cut.row_order is not None:
        value = value.index_select(0, cut.row_order.to(value.device))
    if cut.column_order is not None:
        value = value.index_select(1, cut.column_order[::column_unit].to(value.device) // column_unit)
    return value


def piece(target: Tensor, cut: Cut, columns: slice, convert: Convert, *, rows: slice | None = None) -> Piece:
    """Return a piece that reads rows and columns of one matrix, and passes them to `convert`."""
    region = (*cut.lead, rows or cut.rows, columns)

    def fill(value: Tensor) -> tuple[Tensor]:
        return (convert(value if cut.expert is None else value[0]),)

    return ConvertedPiece(target, region, convert=fill, is_rowwise=cut.is_rowwise and rows is None)


def scale_placement(target: Tensor, cut: Cut, num_groups: int, types: frozenset[str] = FLOATS) -> Placement:
    """Place scales [out, groups]. In memory, groups may be smaller, with repeated scales."""
    group, held_group = cut.shape[1] // num_groups, (cut.columns.stop - cut.columns.start) // target.shape[-1]
    columns = slice(0, 1) if num_groups == 1 else cut.columns_in(group)

    def convert(value: Tensor) -> Tensor:
        if num_groups == 1:
            return reorder_rows(value.reshape(-1, 1), cut)
        return reorder(value if group == held_group else value.repeat_interleave(group // held_group, 1), cut, held_group)

    shape = cut.stored_shape(cut.shape[0], num_groups)
    return Placement(shape, (piece(target, cut, columns, convert),), types, has_scales=True)


def reorder_rows(value: Tensor, cut: Cut) -> Tensor:
    """Apply the order of the rows."""
    return value if cut.row_order is None else value.index_select(0, cut.row_order.to(value.device))


def _unpack_rows(packed: Tensor, num_rows: int) -> Tensor:
    """Unpack nibbles that are packed along rows: [out / 8, groups] int32 to [out, groups] uint8."""
    return unpack_int4(packed.t().contiguous()).t()[:num_rows]


@dataclass(frozen=True)
class PackedInt4:
    """compressed-tensors `pack-quantized` with 4 bits."""

    group: int  # 0 for one scale per row
    has_zero: bool
    has_stacked_experts = False

    def placements(self, cut: Cut, held: QuantisedWeight) -> Placed:
        assert isinstance(held, Int4Weight)
        num_rows, num_columns = cut.shape
        num_groups = num_columns // self.group if self.group else 1

        def values(packed: Tensor) -> Tensor:
            if cut.column_order is None:
                return reorder_rows(packed, cut)
            return pack_int4(reorder(unpack_int4(packed), cut))

        packed = piece(held.packed, cut, cut.columns_in(8), values)
        yield f"{cut.name}.weight_packed", Placement((num_rows, num_columns // 8), (packed,), {"I32"})
        yield f"{cut.name}.weight_scale", scale_placement(held.scale, cut, num_groups)
        if held.zero is not None:
            yield f"{cut.name}.weight_zero_point", self._zero(cut, held.zero, num_groups)

    def _zero(self, cut: Cut, target: Tensor, num_groups: int) -> Placement:
        columns = slice(0, 1) if num_groups == 1 else cut.columns_in(self.group)
        repeats = target.shape[-1] // (columns.stop - columns.start)
        held_group = (cut.columns.stop - cut.columns.start) // target.shape[-1]

        def zeros(packed: Tensor) -> Tensor:
            value = _unpack_rows(packed, cut.shape[0])[cut.rows].repeat_interleave(repeats, 1)
            return reorder_rows(value, cut) if num_groups == 1 else reorder(value, cut, held_group)

        packed_rows = -(-cut.shape[0] // 8)
        filled = piece(target, cut, columns, zeros, rows=slice(0, packed_rows))
        return Placement((packed_rows, num_groups), (filled,), {"I32"})


def _signed_bytes(packed: Tensor) -> Tensor:
    """Return the bytes of int32 words minus 128, as int8."""
    return (packed.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)


@dataclass(frozen=True)
class PackedInt8:
    """compressed-tensors `pack-quantized` with 8 bits, or `int-quantized`, whose values are not packed."""

    group: int
    is_packed: bool = True
    has_stacked_experts = False

    def placements(self, cut: Cut, held: QuantisedWeight) -> Placed:
        assert isinstance(held, Int8Weight)
        num_rows, num_columns = cut.shape
        if self.is_packed:
            packed = piece(held.weight, cut, cut.columns_in(4), lambda value: reorder(_signed_bytes(value), cut))
            yield f"{cut.name}.weight_packed", Placement((num_rows, num_columns // 4), (packed,), {"I32"})
        else:
            plain = piece(held.weight, cut, cut.columns, lambda value: reorder(value, cut))
            yield f"{cut.name}.weight", Placement(cut.shape, (plain,), {"I8"})
        yield f"{cut.name}.weight_scale", scale_placement(held.scale, cut, num_columns // self.group if self.group else 1)


@dataclass(frozen=True)
class StoredFp8:
    """e4m3 values with their scales, as compressed-tensors and ModelOpt store them."""

    scales: str  # channel, tensor or block
    has_stacked_experts = False

    def placements(self, cut: Cut, held: QuantisedWeight) -> Placed:
        assert isinstance(held, Fp8Weight)
        values = piece(held.weight.view(torch.uint8), cut, cut.columns, lambda value: reorder(value.view(torch.uint8), cut))
        yield f"{cut.name}.weight", Placement(cut.shape, (values,), E4M3_TYPES)
        yield f"{cut.name}.weight_scale", self._scale(cut, held.scale)

    def _scale(self, cut: Cut, target: Tensor) -> Placement:
        if self.scales == "block":
            assert cut.row_order is None, "blocks keep the stored order"
            assert cut.column_order is None, "blocks keep the stored order"
            rows = slice(cut.rows.start // FP8_BLOCK, num_blocks(cut.rows.stop))
            blocks = piece(target, cut, cut.columns_in(FP8_BLOCK), lambda value: value, rows=rows)
            return Placement((num_blocks(cut.shape[0]), num_blocks(cut.shape[1])), (blocks,), has_scales=True)
        if self.scales == "tensor":
            return scalar_placement(target)

        # The stored shape is [out, 1] or [out], so the whole tensor is read.
        def rows_of(value: Tensor) -> tuple[Tensor]:
            return (reorder_rows(value.reshape(-1, 1)[cut.rows], cut),)

        return Placement((cut.shape[0], 1), (ConvertedPiece(target, WHOLE, convert=rows_of),), has_scales=True, is_flat=True)


WHOLE: tuple[slice, ...] = (...,)  # type: ignore[assignment]  # the region that covers a tensor of any shape


def scalar_placement(target: Tensor, divisor: Tensor | None = None) -> Placement:
    """Place a stored scalar, [] or [1], into all of `target`. With a `divisor`, place it there, and its reciprocal here."""

    def expand(value: Tensor) -> tuple[Tensor, ...]:
        scalar = value.float().reshape(1, 1).expand(target.shape)
        return (scalar,) if divisor is None else (scalar.reciprocal(), scalar)

    more = () if divisor is None else (divisor,)
    piece = ConvertedPiece(target, WHOLE, convert=expand, more_targets=more)
    return Placement((), (piece,), has_scales=True, is_divisor=divisor is not None, is_flat=True)


@dataclass(frozen=True)
class StoredNvfp4:
    """e2m1 values. compressed-tensors stores a global scale that divides, ModelOpt one that multiplies."""

    is_modelopt: bool
    has_stacked_experts = False

    def placements(self, cut: Cut, held: QuantisedWeight) -> Placed:
        assert isinstance(held, Nvfp4Weight)
        assert self.is_modelopt == (held.divisor is None)
        num_rows, num_columns = cut.shape

        def values(packed: Tensor) -> Tensor:
            if cut.column_order is None:
                return reorder_rows(packed, cut)
            pairs = reorder(torch.stack((packed & 15, packed >> 4), -1).flatten(-2), cut).unflatten(-1, (-1, 2))
            return pairs[..., 0] | pairs[..., 1] << 4

        packed = piece(held.packed, cut, cut.columns_in(2), values)
        ending = "weight" if self.is_modelopt else "weight_packed"
        yield f"{cut.name}.{ending}", Placement((num_rows, num_columns // 2), (packed,), {"U8"})
        scale = scale_placement(held.scale, cut, num_columns // NVFP4_GROUP, E4M3_TYPES)
        yield f"{cut.name}.weight_scale", scale
        if self.is_modelopt:
            yield f"{cut.name}.weight_scale_2", scalar_placement(held.global_scale)
        else:
            yield f"{cut.name}.weight_global_scale", scalar_placement(held.global_scale, held.divisor)
