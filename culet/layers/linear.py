"""Linear layers without bias, and where a checkpoint's tensors go in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from culet.kernels.dispatch import for_device


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor goes: into `target`, a view of a parameter, after `order` is applied along `dim`."""

    target: Tensor
    order: Tensor | None = None  # int64; None: as it comes
    dim: int = 0

    def fill(self, value: Tensor) -> None:
        """Copy `value`, converted to the target's device and dtype."""
        value = value.to(self.target.device)
        if self.order is not None:
            value = value.index_select(self.dim, self.order.to(value.device))
        self.target.copy_(value)


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An unfilled weight [..., out, in].

    On a CPU the memory runs along `out`: with a handful of rows MKL is up to twice as fast that way (8 x 512 x 2048:
    0.23 for 0.51 ms), with one row or many it is the same.
    """
    if device.type == "cpu":
        memory = torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=device).transpose(-1, -2)
    else:
        memory = torch.empty(*shape, dtype=dtype, device=device)
    return nn.Parameter(memory, requires_grad=False)


def empty_vector(*shape: int, device: torch.device) -> nn.Parameter:
    """Unfilled norm weights and other small scales: float32 in every model, so that they round nothing."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device), requires_grad=False)


class Layer(nn.Module):
    """A module whose call is its `forward`: no hooks, which cost 3 us a call and nobody uses here (layers have taps)."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter | nn.Module):
            self.__dict__[name] = value  # found at once: nn.Module's own search takes 1 us, a thousand times a step

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


class Linear(Layer):
    """y = x W^T. Several projections of one input are merged: the first's rows, then the next one's."""

    def __init__(self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = for_device(device)
        self.weight = empty_weight(out_features, in_features, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.ops.linear(x_TD, self.weight)

    def parts(self, x_TD: Tensor) -> Tensor:
        """The same for a kernel that can add up: maybe as parts [S, T, D], float32, of which it is the sum."""
        return self.ops.linear_parts(x_TD, self.weight)

    def rows(self, begin: int, end: int, order: Tensor | None = None) -> Placement:
        """The placement of a projection that fills rows `begin .. end - 1`."""
        return Placement(self.weight[begin:end], order)
