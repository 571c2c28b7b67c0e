"""Matrices that are made of other matrices: projections in different formats, and orders that a format cannot store."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from culet.layers.weight.base import Matrix, MatrixLayout, Site
from culet.layers.weight.placement import Placement


class JoinedMatrix(Matrix):
    """Projections with the same input that are multiplied one by one, because they differ in format."""

    def __init__(self, layout: MatrixLayout, site: Site, parts: list[Matrix]) -> None:
        super().__init__(layout, site)
        self.parts = nn.ModuleList(parts)
        self._parts = parts
        cuts = [layout.rows(projection, site.rank) for projection in layout.projections]
        self._num_rows = [cut.stop - cut.start for cut in cuts]

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        """Yield nothing, because the parts have their own placements."""
        return iter(())

    def linear(self, x_TD: Tensor) -> Tensor:
        return torch.cat([part.linear(x_TD) for part in self._parts], dim=-1)

    def linear_rows(self, x_TD: Tensor, rows: slice) -> Tensor:
        begin, end, _ = rows.indices(sum(self._num_rows))
        products, first = [], 0
        for part, num_rows in zip(self._parts, self._num_rows, strict=True):
            low, high = max(begin - first, 0), min(end - first, num_rows)
            if low < high:
                products.append(part.linear_rows(x_TD, slice(low, high)))
            first += num_rows
        return torch.cat(products, dim=-1)


class ReorderedMatrix(Matrix):
    """A matrix in its stored order. Its inputs and outputs are reordered at each product, because its format cannot be."""

    def __init__(self, layout: MatrixLayout, site: Site, inner: Matrix, rows: Tensor | None, columns: Tensor | None) -> None:
        super().__init__(layout, site)
        self.inner = inner
        self.row_order: Tensor | None
        self.column_order: Tensor | None
        self.register_buffer("row_order", None if rows is None else rows.to(site.device), persistent=False)
        self.register_buffer("column_order", None if columns is None else columns.to(site.device), persistent=False)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        """Yield nothing, because the inner matrix has its own placements."""
        return iter(())

    def _stored_order(self, x_TD: Tensor) -> Tensor:
        if self.column_order is None:
            return x_TD
        # Column i of the input belongs to stored column order[i].
        return torch.empty_like(x_TD).index_copy_(-1, self.column_order, x_TD)

    def linear(self, x_TD: Tensor) -> Tensor:
        y_TN = self.inner.linear(self._stored_order(x_TD))
        return y_TN if self.row_order is None else y_TN.index_select(-1, self.row_order)

    def linear_rows(self, x_TD: Tensor, rows: slice) -> Tensor:
        if self.row_order is None:
            return self.inner.linear_rows(self._stored_order(x_TD), rows)
        return self.linear(x_TD)[..., rows]
