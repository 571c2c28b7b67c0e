"""The gated MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from culet.kernels.dispatch import for_device
from culet.layers.linear import Layer, Linear, Placement


class MLP(Layer):
    """down(gelu_tanh(gate(x)) * up(x)), gate and up merged."""

    def __init__(self, hidden_size: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = for_device(device)
        self.width = width
        self.gate_up = Linear(2 * width, hidden_size, dtype=dtype, device=device)
        self.down = Linear(hidden_size, width, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Maybe as parts: see `Linear.parts`."""
        return self.down.parts(self.ops.gated_linear(x_TD, self.gate_up.weight))

    def placements(self, prefix: str) -> Iterator[tuple[str, Placement]]:
        yield f"{prefix}gate_proj.weight", self.gate_up.rows(0, self.width)
        yield f"{prefix}up_proj.weight", self.gate_up.rows(self.width, 2 * self.width)
        yield f"{prefix}down_proj.weight", Placement(self.down.weight)
