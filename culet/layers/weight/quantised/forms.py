"""The quantised forms that weights have in memory. `kernels/eager/quantised.py` describes their tensors.

A form allocates the tensors of a weight and cuts them. A source (`sources.py`) says where the values are in a checkpoint.

Shapes: as in `base`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from culet import hardware
from culet.errors import CheckpointError
from culet.kernels.types import (
    FP8_BLOCK,
    NVFP4_GROUP,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nvfp4Weight,
    QuantisedWeight,
    part_of,
)
from culet.layers.weight.base import Site
from culet.layers.weight.quantised.scheme import sizes_in_memory


def num_blocks(size: int) -> int:
    """Return the number of fp8 blocks along `size` rows or columns. The last one may be ragged."""
    return -(-size // FP8_BLOCK)


@dataclass(frozen=True)
class WeightForm:
    """A quantised form."""

    def allocate(self, shape: tuple[int, ...], site: Site) -> QuantisedWeight:
        """Return unfilled tensors of a weight [..., out, in]."""
        raise NotImplementedError

    def rows(self, held: QuantisedWeight, rows: slice) -> QuantisedWeight:
        """Return some rows as views."""
        return part_of(held, rows)

    def is_widened(self, site: Site) -> bool:
        """Return whether many tokens are multiplied by a wider copy of a matrix."""
        return True

    def with_column_order(self, order: Tensor) -> WeightForm | None:
        """Return the form for a weight whose columns are reordered, or None. Its groups may be smaller."""
        return self


def _moves_groups(order: Tensor, group: int) -> bool:
    """Return whether `order` moves groups of columns as a whole."""
    runs = order.view(-1, group)
    first = runs[:, :1]
    return bool((first % group == 0).all()) and torch.equal(runs, first + torch.arange(group))


@dataclass(frozen=True)
class _Grouped(WeightForm):
    group: int = 0  # columns that share a scale; 0 for all of them
    scale_dtype: torch.dtype | None = None  # None for that of the activations

    def num_groups(self, num_columns: int) -> int:
        group = self.group or num_columns
        if num_columns % group:
            raise CheckpointError(f"a weight has {num_columns} columns, which groups of {group} do not divide")
        return num_columns // group

    def with_column_order(self, order: Tensor) -> WeightForm | None:
        if not self.group:
            return self
        sizes = (size for size in sizes_in_memory(self.group) if _moves_groups(order, size))
        return next((replace(self, group=size) for size in sizes), None)


@dataclass(frozen=True)
class Int4(_Grouped):
    """int4 with a scale per group of columns, and zero points or none."""

    has_zero: bool = False

    def allocate(self, shape: tuple[int, ...], site: Site) -> Int4Weight:
        *lead, num_columns = shape
        if num_columns % 8:
            raise CheckpointError(f"an int4 weight has {num_columns} columns, expected a multiple of 8")
        groups = (*lead, self.num_groups(num_columns))
        return Int4Weight(
            torch.empty(*lead, num_columns // 8, dtype=torch.int32, device=site.device),
            torch.empty(groups, dtype=self.scale_dtype or site.dtype, device=site.device),
            torch.empty(groups, dtype=torch.uint8, device=site.device) if self.has_zero else None,
        )


@dataclass(frozen=True)
class Int8(_Grouped):
    """int8 with a scale per group of columns."""

    def allocate(self, shape: tuple[int, ...], site: Site) -> Int8Weight:
        groups = (*shape[:-1], self.num_groups(shape[-1]))
        return Int8Weight(
            torch.empty(shape, dtype=torch.int8, device=site.device),
            torch.empty(groups, dtype=self.scale_dtype or site.dtype, device=site.device),
        )


@dataclass(frozen=True)
class Fp8(WeightForm):
    """e4m3 with a scale per row, or per block of 128 x 128."""

    has_blocks: bool = False

    def allocate(self, shape: tuple[int, ...], site: Site) -> Fp8Weight:
        *lead, num_rows, num_columns = shape
        scales = (*lead, num_blocks(num_rows), num_blocks(num_columns)) if self.has_blocks else (*lead, num_rows, 1)
        return Fp8Weight(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=site.device),
            torch.empty(scales, dtype=torch.float32, device=site.device),
        )

    def is_widened(self, site: Site) -> bool:
        return self.has_blocks or not hardware.multiplies_fp8(site.device)

    def with_column_order(self, order: Tensor) -> WeightForm | None:
        return None if self.has_blocks else self

    def rows(self, held: QuantisedWeight, rows: slice) -> QuantisedWeight:
        if not self.has_blocks:
            return part_of(held, rows)
        assert isinstance(held, Fp8Weight)
        weight, scale = held
        stop = rows.stop if rows.stop is not None else weight.shape[-2]
        assert rows.start % FP8_BLOCK == 0, "rows start with a block"
        assert stop % FP8_BLOCK == 0 or stop == weight.shape[-2], "rows end with a block"
        return Fp8Weight(weight[rows], scale[rows.start // FP8_BLOCK : num_blocks(stop)])


@dataclass(frozen=True)
class Nvfp4(WeightForm):
    """e2m1 with an e4m3 scale per 16 columns and a float32 scale per projection, which may be stored as a divisor."""

    has_divisor: bool = False

    def allocate(self, shape: tuple[int, ...], site: Site) -> Nvfp4Weight:
        *lead, num_columns = shape
        if num_columns % NVFP4_GROUP:
            raise CheckpointError(f"an nvfp4 weight has {num_columns} columns, expected a multiple of {NVFP4_GROUP}")
        return Nvfp4Weight(
            torch.empty(*lead, num_columns // 2, dtype=torch.uint8, device=site.device),
            torch.empty(*lead, num_columns // NVFP4_GROUP, dtype=torch.float8_e4m3fn, device=site.device),
            torch.empty(*lead, 1, dtype=torch.float32, device=site.device),
            torch.empty(*lead, 1, dtype=torch.float32, device=site.device) if self.has_divisor else None,
        )

    def with_column_order(self, order: Tensor) -> WeightForm | None:
        return self if _moves_groups(order, NVFP4_GROUP) else None
