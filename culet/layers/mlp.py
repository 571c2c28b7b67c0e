"""The gated MLP."""

from __future__ import annotations

from torch import Tensor

from culet.layers.layer import Layer
from culet.layers.weight.base import Projection, Split
from culet.layers.weight.weights import Weights
from culet.parallel.reduce.parts import PartialSum


class MLP(Layer):
    """down(gelu_tanh(gate(x)) * up(x)), with gate and up merged into one matrix."""

    def __init__(self, hidden_size: int, width: int, weights: Weights) -> None:
        super().__init__()
        self.width = width
        gate, up = Projection("gate_proj", width), Projection("up_proj", width)
        self.gate_up = weights.matrix(gate, up, num_columns=hidden_size, split=Split.ROWS)
        self.down = weights.matrix(Projection("down_proj", hidden_size), num_columns=width, split=Split.COLUMNS)

    def forward(self, x_TD: Tensor) -> PartialSum:
        return self.down.linear_parts(self.gate_up.gated_linear(x_TD))
