"""The base class of everything that has parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from culet.layers.weight.placement import Placement, StoredVector


class Layer(nn.Module):
    """A module whose call is its `forward`: no hooks, which cost 3 us per call. Layers have taps instead."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter | nn.Module):
            self.__dict__[name] = value  # nn.Module's own lookup takes 1 us, a thousand times per step

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def placements(self) -> dict[str, Placement]:
        """Every checkpoint tensor that belongs here or in a layer below, by its full name."""
        found: dict[str, Placement] = {}
        for module in self.modules():
            if isinstance(module, Layer):
                for name, placement in module.own_placements():
                    assert name not in found, f"{name} has two places"
                    found[name] = placement
        return found

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        """The tensors that belong to this layer itself."""
        for parameter in self._parameters.values():
            stored: StoredVector | None = getattr(parameter, "stored", None)
            if parameter is not None and stored is not None:
                yield stored.name, stored.place(parameter)
