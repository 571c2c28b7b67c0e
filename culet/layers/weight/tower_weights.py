"""Weights of towers other than matrices: convolutions, biases and tables of positions.

They are small and stay in the activations' dtype in every format. Every rank holds all of them.

Shapes: T frames or patches · N outputs · D tower · W frames that a frame sees.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from culet.layers.weight.base import Site, Weight
from culet.layers.weight.placement import Piece, Placement, whole


class TowerWeight(Weight):
    """A weight that is stored as it is read."""

    def __init__(self, name: str, shape: tuple[int, ...], site: Site) -> None:
        super().__init__()
        self.name = name
        self.tensor = nn.Parameter(torch.empty(shape, dtype=site.dtype, device=site.device), requires_grad=False)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        shape = tuple(self.tensor.shape)
        yield self.name, Placement(shape, (Piece(self.tensor, whole(shape)),))


class Convolution(TowerWeight):
    """A convolution over two dimensions, without bias [out, in, height, width]."""

    def convolve(self, x: Tensor, *, stride: int, padding: int) -> Tensor:
        """Return the channels [1, out, ...] of x [1, in, ...]."""
        return F.conv2d(x, self.tensor, stride=stride, padding=padding)


class WindowConvolution(TowerWeight):
    """A convolution over a frame and those before it, each channel by itself [D, 1, W]."""

    def sum_windows(self, x_TWD: Tensor) -> Tensor:
        """Return the weighted sum [T, D] of the float32 frames that each frame sees: itself, the one before it, and so on."""
        # The last weight of the convolution belongs to the frame itself.
        weight_WD = self.tensor[:, 0].flip(-1).t().float()
        return torch.einsum("twd,wd->td", x_TWD, weight_WD)


class Bias(TowerWeight):
    """What is added to the outputs of a matrix [N]."""

    def add_to(self, y_TN: Tensor) -> Tensor:
        """Add the bias in place."""
        return y_TN.add_(self.tensor)


class PositionTables(TowerWeight):
    """A table for columns and one for rows. `axis` is the dimension of size 2 that tells them apart."""

    def __init__(self, name: str, shape: tuple[int, ...], axis: int, site: Site) -> None:
        super().__init__(name, shape, site)
        assert shape[axis] == 2, "one table for columns and one for rows"
        self.axis = axis

    def embed(self, x_T: Tensor, y_T: Tensor) -> Tensor:
        """Return the embedding [T, D] of each position: that of its column plus that of its row."""
        of_columns, of_rows = self.tensor.unbind(self.axis)
        return of_columns[x_T].add_(of_rows[y_T])
