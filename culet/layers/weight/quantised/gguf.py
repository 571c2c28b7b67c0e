"""Blocks of GGUF files: Q4_0 and Q8_0, which are int4 and int8 with float16 scales for groups of 32, and Q6_K.

The slice of a stored tensor is its raw blocks, uint8 [rows, blocks * block bytes]. llama.cpp stores tables as Q6_K in files
whose matrices are Q4_0. These become plain weights, or are rounded by `--head-quantization`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from culet.errors import ConfigError
from culet.kernels.eager.quantised import pack_int4
from culet.kernels.types import Int4Weight, Int8Weight, QuantisedWeight
from culet.layers.weight.base import ExpertsLayout, ExpertStack, Matrix, MatrixLayout, Site, Table, TableLayout
from culet.layers.weight.placement import ConvertedPiece, Piece, Placement
from culet.layers.weight.plain import PlainExperts, PlainMatrix, PlainTable
from culet.layers.weight.quantised.block_types import BLOCK_SIZES, GROUP, SCALE_OFFSETS
from culet.layers.weight.quantised.cut import Cut
from culet.layers.weight.quantised.forms import Int4, Int8, WeightForm
from culet.layers.weight.quantised.matrices import QuantisedFormat
from culet.layers.weight.quantised.rounding import Rounded
from culet.layers.weight.quantised.sources import Placed, reorder

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_VALUES_AT_ONCE = 1 << 24  # bounds the float32 copies


def scales_of(raw: Tensor, kind: str) -> Tensor:
    """Return the float16 scale of each block, [..., blocks]."""
    offset = SCALE_OFFSETS[kind]
    blocks = raw.unflatten(-1, (-1, BLOCK_SIZES[kind][1]))
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)


@dataclass(frozen=True)
class Blocks:
    """Tensors of Q4_0 or Q8_0."""

    kind: str
    has_stacked_experts = True

    def placements(self, cut: Cut, held: QuantisedWeight) -> Placed:
        assert isinstance(held, Int4Weight | Int8Weight)
        target = held.packed if isinstance(held, Int4Weight) else held.weight
        cut.columns_in(GROUP)
        held_group = (cut.columns.stop - cut.columns.start) // held.scale.shape[-1]

        def convert(raw: Tensor) -> tuple[Tensor, Tensor]:
            raw = raw if cut.expert is None else raw[0]
            scale = reorder(scales_of(raw, self.kind), cut, held_group)
            rest = raw.unflatten(-1, (-1, BLOCK_SIZES[self.kind][1]))[..., 2:]
            if self.kind == "Q8_0":
                return reorder(rest.flatten(-2).contiguous().view(torch.int8), cut), scale
            return pack_int4(reorder(torch.cat((rest & 15, rest >> 4), -1).flatten(-2), cut)), scale

        region = (*cut.lead, cut.rows, cut.columns)
        piece = ConvertedPiece(target, region, convert=convert, more_targets=(held.scale,), is_rowwise=cut.is_rowwise)
        ending = ".weight" if cut.expert is None else ""
        yield f"{cut.name}{ending}", Placement(cut.stored_shape(*cut.shape), (piece,), {self.kind}, has_scales=True)


class BlockSlice:
    """A tensor of a GGUF file that can be read in part. Blocks are returned as they are, other values in their own type."""

    def __init__(self, raw: np.ndarray, shape: tuple[int, ...], kind: str) -> None:
        self._kind, self._shape = kind, shape
        self._block = values, size = BLOCK_SIZES[kind]
        self._rows = raw.reshape(*shape[:-1], shape[-1] // values * size)

    def __getitem__(self, region: Any) -> Tensor:
        cuts = list(region) if isinstance(region, tuple) else [region]
        if Ellipsis in cuts or not cuts:
            cuts = [slice(None)] * len(self._shape)
        cuts += [slice(None)] * (len(self._shape) - len(cuts))
        start, stop, _ = cuts[-1].indices(self._shape[-1])
        values, size = self._block
        part = self._rows[(*cuts[:-1], slice(start // values * size, stop // values * size))]
        found = torch.from_numpy(np.array(part, order="C"))
        return found.view(_PLAIN[self._kind]) if self._kind in _PLAIN else found


def dequantise_q6_k(raw: Tensor) -> Tensor:
    """Return the float32 values [..., 256 n] of blocks [..., 210 n].

    A block has 128 bytes of low nibbles, 64 of high pairs of bits, 16 int8 scales, and a float16 scale. Half a block is four
    runs of 32 values: two in the low nibbles of 64 bytes, and two in the high ones.
    """
    blocks = raw.unflatten(-1, (-1, 210))
    first, second = blocks[..., :128].unflatten(-1, (2, 2, 32)).unbind(-2)
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    runs = (first & 15, second & 15, first >> 4, second >> 4)
    values = torch.stack([run | ((high >> 2 * index & 3) << 4) for index, run in enumerate(runs)], -2).flatten(-3)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return ((values.float() - 32) * (scales_of(raw, "Q6_K").float()[..., None] * scales).repeat_interleave(16, -1)).flatten(-2)


def _dequantised(placement: Placement) -> Placement:
    """Return the placement of a plain weight for stored blocks."""

    def converted(piece: Piece) -> Piece:
        columns, size = piece.region[-1], BLOCK_SIZES["Q6_K"][0]
        if columns.start % size or columns.stop % size:
            held = f"{columns.start} to {columns.stop - 1} of {placement.shape[-1]}"
            problem = f"a rank would hold columns {held} of a Q6_K matrix, which are not whole blocks of {size}"
            raise ConfigError(problem, hint="use fewer GPUs for this file")

        if isinstance(piece, ConvertedPiece):

            def convert_again(raw: Tensor) -> tuple[Tensor, ...]:
                return piece.convert(dequantise_q6_k(raw))

            return replace(piece, convert=convert_again)

        def convert(raw: Tensor) -> tuple[Tensor]:
            rows = raw.flatten(0, -2).split(max(1, _VALUES_AT_ONCE // raw.shape[-1]))
            value = torch.cat([dequantise_q6_k(part).to(piece.target.dtype) for part in rows]).unflatten(0, raw.shape[:-1])
            return (value if piece.order is None else value.index_select(piece.dim, piece.order.to(value.device)),)

        is_rowwise = piece.order is None or piece.dim != 0
        return ConvertedPiece(piece.target, piece.region, convert=convert, is_rowwise=is_rowwise)

    return Placement(placement.shape, tuple(map(converted, placement.pieces)), {"Q6_K"}, has_scales=True)


class _Q6KMatrix(PlainMatrix):
    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        return ((name, _dequantised(placement)) for name, placement in super().own_placements())


class _Q6KTable(PlainTable):
    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        return ((name, _dequantised(placement)) for name, placement in super().own_placements())


class _Q6KExperts(PlainExperts):
    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        return ((name, _dequantised(placement)) for name, placement in super().own_placements())


@dataclass(frozen=True)
class Q6KFormat:
    """Makes plain weights from Q6_K blocks."""

    def matrix(self, layout: MatrixLayout, site: Site) -> Matrix:
        return _Q6KMatrix(layout, site)

    def table(self, layout: TableLayout, site: Site) -> Table:
        return _Q6KTable(layout, site)

    def experts(self, layout: ExpertsLayout, site: Site) -> ExpertStack:
        return _Q6KExperts(layout, site)


@dataclass(frozen=True)
class RoundedQ6K:
    """Q6_K blocks of a table that is rounded to another form while it is loaded."""

    has_stacked_experts = True

    def placements(self, cut: Cut, held: QuantisedWeight) -> Placed:
        for name, placement in Rounded().placements(cut, held):
            yield name, _dequantised(placement)


def block_format(kind: str) -> QuantisedFormat | Q6KFormat:
    """Return the format for tensors of this kind."""
    if kind == "Q6_K":
        return Q6KFormat()
    forms: dict[str, WeightForm] = {"Q4_0": Int4(GROUP, torch.float16), "Q8_0": Int8(GROUP, torch.float16)}
    return QuantisedFormat(forms[kind], Blocks(kind))
