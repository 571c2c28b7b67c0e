"""Make the weights of a model.

To add a format, write a file like `plain.py` and its kernels. Then make `Weights.choose_format` return it for the weights that
a checkpoint stores in that format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from culet.kernels.dispatch import for_device
from culet.layers.weight.base import (
    ExpertsLayout,
    ExpertStack,
    Matrix,
    MatrixLayout,
    Projection,
    Site,
    Split,
    Table,
    TableLayout,
)
from culet.layers.weight.e4m3 import E4M3Table
from culet.layers.weight.joined import JoinedMatrix
from culet.layers.weight.placement import StoredVector
from culet.layers.weight.plain import PlainFormat, Router
from culet.layers.weight.tower_weights import Bias, Convolution, PositionTables, WindowConvolution
from culet.registry import lookup


class WeightFormat(Protocol):
    """How weights are stored and multiplied."""

    def matrix(self, layout: MatrixLayout, site: Site) -> Matrix: ...

    def table(self, layout: TableLayout, site: Site) -> Table: ...

    def experts(self, layout: ExpertsLayout, site: Site) -> ExpertStack: ...


_PLAIN = PlainFormat()
# Tables of narrower formats, by the name of the precision in the settings.
_NARROWER = {"fp8": E4M3Table}


def all_plain(name: str) -> WeightFormat:
    """Return the plain format, whatever the name of the weight."""
    return _PLAIN


def narrowed(table: Table, precision: str) -> Table:
    """Return the table in a narrower format. `table` itself does not change."""
    return lookup("weight precision", precision, _NARROWER)(table)


@dataclass(frozen=True)
class Weights(Site):
    """Makes unfilled weights on its device. `prefix` is prepended to their names in the checkpoint."""

    prefix: str = ""
    choose_format: Callable[[str], WeightFormat] = all_plain

    @property
    def ops(self) -> ModuleType:
        """The kernels for the device."""
        return for_device(self.device)

    def below(self, prefix: str) -> Weights:
        """Return a copy for the part of the model whose tensor names continue with `prefix`."""
        return replace(self, prefix=self.prefix + prefix)

    def matrix(self, *projections: Projection, num_columns: int, split: Split = Split.NONE) -> Matrix:
        """Make one matrix from projections [num_rows, num_columns] that have the same input."""
        return self.matrix_of(MatrixLayout(projections, num_columns, split))

    def matrix_of(self, layout: MatrixLayout) -> Matrix:
        """Make a matrix whose columns may be reordered."""
        named = tuple(replace(projection, name=self.prefix + projection.name) for projection in layout.projections)
        layout = replace(layout, projections=named)
        formats = [self.choose_format(projection.name) for projection in named]
        if all(each == formats[0] for each in formats):
            return formats[0].matrix(layout, self)
        single = [replace(layout, projections=(projection,)) for projection in named]
        parts = [each.matrix(alone, self) for each, alone in zip(formats, single, strict=True)]
        return JoinedMatrix(layout, self, parts)

    def router(self, name: str, num_experts: int, num_columns: int) -> Router:
        """Make a router, which is float32 in every format."""
        return Router(MatrixLayout((Projection(self.prefix + name, num_experts),), num_columns), self)

    def table(self, name: str, num_rows: int, num_columns: int, *, scale: float = 1.0, split: Split = Split.NONE) -> Table:
        layout = TableLayout(self.prefix + name, num_rows, num_columns, scale, split)
        return self.choose_format(layout.name).table(layout, self)

    def experts(self, name: str, num_experts: int, hidden_size: int, width: int) -> ExpertStack:
        layout = ExpertsLayout(self.prefix + name, num_experts, hidden_size, width)
        return self.choose_format(layout.name).experts(layout, self)

    def convolution(self, name: str, *shape: int) -> Convolution:
        return Convolution(self.prefix + name, shape, self)

    def window_convolution(self, name: str, num_channels: int, width: int) -> WindowConvolution:
        return WindowConvolution(self.prefix + name, (num_channels, 1, width), self)

    def bias(self, name: str, size: int) -> Bias:
        return Bias(self.prefix + name, (size,), self)

    def positions(self, name: str, *shape: int, axis: int) -> PositionTables:
        return PositionTables(self.prefix + name, shape, axis, self)

    def vector(self, name: str, *shape: int, order: Tensor | None = None) -> nn.Parameter:
        """Make norm weights or other small scales. They are float32 in every format, so that they add no rounding."""
        return self._small(name, torch.empty(shape, dtype=torch.float32, device=self.device), order)

    def token_ids(self, name: str, *shape: int) -> nn.Parameter:
        """Make token ids, stored as one row. They are int64, because a vocabulary of 262,144 needs more than 16 bits."""
        return self._small(name, torch.empty(*shape, dtype=torch.int64, device=self.device), None)

    def _small(self, name: str, memory: Tensor, order: Tensor | None) -> nn.Parameter:
        parameter = nn.Parameter(memory, requires_grad=False)
        parameter.stored = StoredVector(self.prefix + name, order)  # type: ignore[attr-defined]
        return parameter
