"""The quantised forms that weights have in memory. `kernels/eager/quantised.py` describes their tensors.

A form allocates the tensors of a weight, cuts them, and names the ops that read them. A source (`sources.py`) says where the
values are in a checkpoint.

Shapes: as in `base`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from culet.errors import CheckpointError
from culet.kernels.dispatch import FP8, INT4, INT8, NVFP4
from culet.kernels.types import Fp8Weight, Int4Weight, Int8Weight, Nvfp4Weight
from culet.layers.weight.base import Site

Held = Int4Weight | Int8Weight | Fp8Weight | Nvfp4Weight
BLOCK = 128  # rows and columns of an fp8 block
NVFP4_GROUP = 16
W = TypeVar("W", bound=NamedTuple)


def num_blocks(size: int) -> int:
    """Return the number of fp8 blocks along `size` rows or columns. The last one may be ragged."""
    return -(-size // BLOCK)


def cut_all(held: W, index: Any) -> W:
    """Return the same part of every tensor."""
    make: Any = type(held)
    return cast(W, make(*(None if tensor is None else tensor[index] for tensor in held)))


@dataclass(frozen=True)
class Form:
    """A quantised form. The kernels of a form are named after it, such as `int4_linear`."""

    name: ClassVar[str]

    def allocate(self, shape: tuple[int, ...], site: Site) -> Held:
        """Return unfilled tensors of a weight [..., out, in]."""
        raise NotImplementedError

    def operands(self, held: Held) -> tuple[Any, ...]:
        """Return the arguments of the kernels that follow the activations."""
        return held

    def rows(self, held: W, rows: slice) -> W:
        """Return some rows as views."""
        return cut_all(held, rows)

    def with_column_order(self, order: Tensor) -> Form | None:
        """Return the form for a weight whose columns are reordered, with smaller groups if need be. None if there is none."""
        return self


def _moves_groups(order: Tensor, group: int) -> bool:
    """Return whether `order` moves groups of columns as a whole."""
    runs = order.view(-1, group)
    first = runs[:, :1]
    return bool((first % group == 0).all()) and torch.equal(runs, first + torch.arange(group))


@dataclass(frozen=True)
class _Grouped(Form):
    group: int = 0  # columns that share a scale; 0 for all of them
    scale_dtype: torch.dtype | None = None  # None for that of the activations

    def num_groups(self, num_columns: int) -> int:
        group = self.group or num_columns
        if num_columns % group:
            raise CheckpointError(f"a weight has {num_columns} columns, which groups of {group} do not divide")
        return num_columns // group

    def with_column_order(self, order: Tensor) -> Form | None:
        if not self.group:
            return self
        smaller = [self.group, *(size for size in (64, 32) if size < self.group and self.group % size == 0)]
        return next((replace(self, group=size) for size in smaller if _moves_groups(order, size)), None)


@dataclass(frozen=True)
class Int4(_Grouped):
    """int4 with a scale per group of columns, and zero points or none."""

    name: ClassVar[str] = INT4
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

    def operands(self, held: Held) -> tuple[Any, ...]:
        assert isinstance(held, Int4Weight)
        return (*held, held.group)


@dataclass(frozen=True)
class Int8(_Grouped):
    """int8 with a scale per group of columns."""

    name: ClassVar[str] = INT8

    def allocate(self, shape: tuple[int, ...], site: Site) -> Int8Weight:
        groups = (*shape[:-1], self.num_groups(shape[-1]))
        return Int8Weight(
            torch.empty(shape, dtype=torch.int8, device=site.device),
            torch.empty(groups, dtype=self.scale_dtype or site.dtype, device=site.device),
        )


@dataclass(frozen=True)
class Fp8(Form):
    """e4m3 with a scale per row, or per block of 128 x 128."""

    name: ClassVar[str] = FP8
    has_blocks: bool = False

    def allocate(self, shape: tuple[int, ...], site: Site) -> Fp8Weight:
        *lead, num_rows, num_columns = shape
        scales = (*lead, num_blocks(num_rows), num_blocks(num_columns)) if self.has_blocks else (*lead, num_rows, 1)
        return Fp8Weight(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=site.device),
            torch.empty(scales, dtype=torch.float32, device=site.device),
        )

    def with_column_order(self, order: Tensor) -> Form | None:
        return None if self.has_blocks else self

    def rows(self, held: W, rows: slice) -> W:
        if not self.has_blocks:
            return cut_all(held, rows)
        weight, scale = held
        stop = rows.stop if rows.stop is not None else weight.shape[-2]
        assert rows.start % BLOCK == 0, "rows start with a block"
        assert stop % BLOCK == 0 or stop == weight.shape[-2], "rows end with a block"
        return cast(W, Fp8Weight(weight[rows], scale[rows.start // BLOCK : num_blocks(stop)]))


@dataclass(frozen=True)
class Nvfp4(Form):
    """e2m1 with an e4m3 scale per 16 columns and a float32 scale per projection."""

    name: ClassVar[str] = NVFP4

    def allocate(self, shape: tuple[int, ...], site: Site) -> Nvfp4Weight:
        *lead, num_columns = shape
        if num_columns % NVFP4_GROUP:
            raise CheckpointError(f"an nvfp4 weight has {num_columns} columns, expected a multiple of {NVFP4_GROUP}")
        return Nvfp4Weight(
            torch.empty(*lead, num_columns // 2, dtype=torch.uint8, device=site.device),
            torch.empty(*lead, num_columns // NVFP4_GROUP, dtype=torch.float8_e4m3fn, device=site.device),
            torch.empty(*lead, 1, dtype=torch.float32, device=site.device),
        )

    def with_column_order(self, order: Tensor) -> Form | None:
        return self if _moves_groups(order, NVFP4_GROUP) else None
