"""Linear layers of towers. Those of E2B and E4B clamp their input and output to bounds that the checkpoint stores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from culet.layers.layer import Layer
from culet.layers.weight.base import Projection
from culet.layers.weight.weights import Weights

_ENDINGS = ("input_min", "input_max", "output_min", "output_max")


class Bounds(NamedTuple):
    """The range that values are clamped to."""

    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.low) or math.isfinite(self.high)


UNBOUNDED = Bounds(-math.inf, math.inf)


class TowerLinear(Layer):
    """One or several projections of the same input, in one matrix: y = clamp(clamp(x) W^T).

    Each projection keeps its own four bounds. They are clamped to one by one only where they differ.
    """

    def __init__(self, projections: Sequence[Projection], num_columns: int, weights: Weights, *, is_clipped: bool) -> None:
        super().__init__()
        self.dtype = weights.dtype
        stored = [Projection(f"{each.name}.linear", each.num_rows, each.order, each.unit) for each in projections]
        self.matrix = weights.matrix(*stored, num_columns=num_columns)
        ends = torch.tensor([each.num_rows for each in projections]).cumsum(0).tolist()
        self.parts = [slice(end - each.num_rows, end) for each, end in zip(projections, ends, strict=True)]
        names = [f"{each.name}.{ending}" for each in projections for ending in _ENDINGS] if is_clipped else []
        self._bounds = [weights.vector(name) for name in names]
        for name, bound in zip(names, self._bounds, strict=True):
            self.register_parameter(name.replace(".", "_"), bound)
        # By projection, known after loading. Empty if nothing is clamped.
        self.inputs: list[Bounds] = []
        self.outputs: list[Bounds] = []

    def finish(self) -> None:
        """Read the bounds, rounded to the activations' precision. Call once, after loading."""
        if not self._bounds:
            return
        values = torch.stack(tuple(self._bounds)).to(self.dtype).tolist()
        rows = [values[index : index + 4] for index in range(0, len(values), 4)]
        inputs, outputs = [Bounds(*row[:2]) for row in rows], [Bounds(*row[2:]) for row in rows]
        self.inputs = inputs if any(each.is_finite for each in inputs) else []
        self.outputs = outputs if any(each.is_finite for each in outputs) else []

    def linear(self, x_TD: Tensor, *, is_clamped: bool = False) -> Tensor:
        """Return the products of all projections, side by side [T, N]. If `is_clamped`, `x_TD` is within `inputs` already."""
        y_TN = self.products(x_TD, is_clamped=is_clamped)
        for bounds, rows in zip(self.outputs, self.parts, strict=bool(self.outputs)):
            y_TN[:, rows].clamp_(*bounds)
        return y_TN

    def products(self, x_TD: Tensor, *, is_clamped: bool = False) -> Tensor:
        """Return `linear` for a reader that clamps it to `outputs`."""
        if is_clamped or not self.inputs:
            return self.matrix.linear(x_TD)
        if len(set(self.inputs)) == 1:
            return self.matrix.linear(x_TD.clamp(*self.inputs[0]))
        pairs = zip(self.inputs, self.parts, strict=True)
        return torch.cat([self.matrix.linear_rows(x_TD.clamp(*bounds), rows) for bounds, rows in pairs], -1)


class Projector(Layer):
    """The last step of every tower: a norm without weights, and a projection into the decoder's rows."""

    def __init__(self, name: str, num_columns: int, out_size: int, eps: float, weights: Weights) -> None:
        super().__init__()
        self.ops, self.eps = weights.ops, eps
        self.matrix = weights.matrix(Projection(f"{name}.embedding_projection", out_size), num_columns=num_columns)
        self.ones: Tensor
        self.register_buffer("ones", torch.ones(num_columns, device=weights.device), persistent=False)

    def forward(self, x_MD: Tensor) -> Tensor:
        return self.matrix.linear(self.ops.rms_norm(x_MD, self.ones, self.eps))
