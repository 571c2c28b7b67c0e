"""Say which part of a stored matrix a weight holds, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from culet.errors import ConfigError
from culet.layers.weight.base import MatrixLayout, local_order
from culet.parallel.rank import Rank


@dataclass(frozen=True)
class Cut:
    """A region of a stored matrix [out, in], or of matrix `expert` in a stack of them."""

    name: str  # without the ending
    shape: tuple[int, int]  # of the whole stored matrix
    rows: slice
    columns: slice
    row_order: Tensor | None = None  # relative to the region, as the next one
    column_order: Tensor | None = None
    expert: int | None = None
    num_experts: int = 0

    @property
    def is_rowwise(self) -> bool:
        """Whether a row of memory needs only that row of the region."""
        return self.row_order is None and self.expert is None

    @property
    def lead(self) -> tuple[slice, ...]:
        """The part of a region that selects the expert."""
        return () if self.expert is None else (slice(self.expert, self.expert + 1),)

    def columns_in(self, unit: int) -> slice:
        """Return the columns in units of several, such as those of a group or a packed word."""
        start, stop = self.columns.start, self.columns.stop
        if start % unit or (stop % unit and stop != self.shape[1]):
            raise ConfigError(
                f"{self.name}: a rank would hold columns {start} to {stop - 1}, which are not whole groups of {unit}",
                hint="use fewer GPUs for this checkpoint",
            )
        return slice(start // unit, -(-stop // unit))

    def stored_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of the stored tensor, given that of one expert."""
        return shape if self.expert is None else (self.num_experts, *shape)


def cuts_of(layout: MatrixLayout, rank: Rank) -> Iterator[tuple[Cut, slice]]:
    """Yield the cut of each projection, and the rows of the merged matrix that it fills."""
    begin, columns = 0, layout.columns(rank)
    for projection in layout.projections:
        rows = layout.rows(projection, rank)
        cut = Cut(
            projection.name,
            (projection.num_rows, layout.num_columns),
            rows,
            columns,
            local_order(projection.order, rows),
            local_order(layout.column_order, columns),
        )
        end = begin + rows.stop - rows.start
        yield cut, slice(begin, end)
        begin = end
