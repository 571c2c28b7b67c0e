"""Describe where the tensors of a checkpoint go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# Types of stored tensors, by their names in a safetensors header.
FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
INTEGERS = frozenset({"I32", "I64"})
E4M3_TYPES = frozenset({"F8_E4M3"})
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
# Random values are first rounded to this dtype, so that a float32 model has the same weights as its bfloat16 twin.
_DRAWN_DTYPE = torch.bfloat16


class Sliceable(Protocol):
    """A stored tensor that can be read in part: a Tensor, or a slice of a safetensors file."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


@dataclass(frozen=True)
class Piece:
    """A region of a stored tensor, and the memory it fills after `order` is applied along `dim`."""

    target: Tensor
    region: tuple[slice, ...]
    order: Tensor | None = None  # int64; None keeps the stored order
    dim: int = 0

    def fill(self, value: Tensor) -> None:
        """Copy the values of the region to the target, converting device and dtype.

        A copy to a GPU may still be under way when this returns.
        """
        if self.order is None and value.dtype is self.target.dtype:
            self.target.copy_(value, non_blocking=True)  # straight to the device, which needs no memory for a second copy
            return
        value = value.to(self.target.device, non_blocking=True)
        if self.order is not None:
            value = value.index_select(self.dim, self.order.to(value.device))
        self.target.copy_(value)

    def split(self, num_rows: int) -> Iterator[Piece]:
        """Yield pieces of at most `num_rows` rows that together fill the target, or this piece if it needs all its rows."""
        if not self.region:  # a scalar
            yield self
            return
        rows, *rest = self.region
        if (self.order is not None and self.dim == 0) or rows.stop - rows.start <= num_rows:
            yield self
            return
        for start in range(rows.start, rows.stop, num_rows):
            stop = min(start + num_rows, rows.stop)
            target = self.target[start - rows.start : stop - rows.start]
            yield replace(self, target=target, region=(slice(start, stop), *rest))


@dataclass(frozen=True)
class ConvertedPiece(Piece):
    """A region of a stored tensor that fills one or more tensors after a conversion, such as from floats to int4 and scales."""

    convert: Callable[[Tensor], tuple[Tensor, ...]] = lambda value: (value,)
    more_targets: tuple[Tensor, ...] = ()
    is_rowwise: bool = False  # a row of every target needs only that row of the region

    def fill(self, value: Tensor) -> None:
        """Convert the values of the region, and copy the results to the targets."""
        results = self.convert(value.to(self.target.device, non_blocking=True))
        for target, result in zip((self.target, *self.more_targets), results, strict=True):
            target.copy_(result)

    def split(self, num_rows: int) -> Iterator[Piece]:
        """Yield pieces of at most `num_rows` rows, or this piece if its conversion needs the whole region."""
        if not self.is_rowwise:
            yield self
            return
        first = self.region[0].start
        for part in super().split(num_rows):
            rows = slice(part.region[0].start - first, part.region[0].stop - first)
            yield replace(self, target=part.target, region=part.region, more_targets=tuple(t[rows] for t in self.more_targets))


@dataclass(frozen=True)
class Placement:
    """The destination of one stored tensor. A rank reads only the regions that it holds."""

    shape: tuple[int, ...]  # shape of the whole stored tensor
    pieces: tuple[Piece, ...]
    types: Collection[str] = FLOATS  # stored types that can be read
    has_scales: bool = False  # it holds scales, which must be finite. That is checked before anything is loaded.
    is_divisor: bool = False  # the values divide, so they must not be 0
    is_flat: bool = False  # dimensions of size 1 may be missing from the stored shape, or there may be more of them

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a stored tensor may have this shape."""
        return shape == self.shape or (self.is_flat and _without_ones(shape) == _without_ones(self.shape))

    @property
    def target(self) -> Tensor:
        """The memory of a placement with exactly one piece."""
        (piece,) = self.pieces
        return piece.target

    def fill(self, stored: Sliceable) -> None:
        for piece in self.pieces:
            piece.fill(stored[piece.region])

    def empty(self, device: torch.device) -> Tensor:
        """Allocate memory for random values of the whole stored tensor."""
        return torch.empty(self.shape, dtype=_DRAWN_DTYPE if self.types == FLOATS else torch.int64, device=device)


def _without_ones(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def whole(shape: Iterable[int]) -> tuple[slice, ...]:
    """Return the region that covers a whole tensor."""
    return tuple(slice(0, size) for size in shape)


@dataclass(frozen=True)
class StoredVector:
    """The name and order of a small parameter (norm weights, scales, token orders) in a checkpoint.

    Every rank holds all of it.
    """

    name: str
    order: Tensor | None = None

    def place(self, parameter: nn.Parameter) -> Placement:
        target = parameter if parameter.is_floating_point() else parameter.view(-1)
        piece = Piece(target, whole(target.shape), self.order)
        return Placement(tuple(target.shape), (piece,), FLOATS if parameter.is_floating_point() else INTEGERS)
