"""The base class of all modules with parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from culet.layers.weight.placement import Placement, StoredVector


class Layer(nn.Module):
    """A module whose call is its `forward`. It skips hooks, which cost 3 us per call. Layers have taps instead."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter | nn.Module):
            self.__dict__[name] = value  # nn.Module's own lookup takes 1 us, and a step does a thousand of them

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors in this layer and the layers below it."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.parameters(), *self.buffers()))

    def kernel_keys(self) -> list[tuple[object, ...]]:
        """Return the facts that decide which kernels are compiled for this layer and the layers below it."""
        return [module.own_kernel_key() for module in self.modules() if isinstance(module, Layer)]

    def own_kernel_key(self) -> tuple[object, ...]:
        """Return the class, which for a weight is its format, and the shapes of the layer's own parameters."""
        shapes = (tuple(parameter.shape) for parameter in self._parameters.values() if parameter is not None)
        return type(self).__name__, *shapes

    def placements(self) -> dict[str, Placement]:
        """Return the placements of all checkpoint tensors in this layer and the layers below it, by full name."""
        found: dict[str, Placement] = {}
        for module in self.modules():
            if isinstance(module, Layer):
                for name, placement in module.own_placements():
                    assert name not in found, f"{name} has more than one place"
                    found[name] = placement
        return found

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        """Yield the tensors that belong to this layer itself, with their placements."""
        for parameter in self._parameters.values():
            stored: StoredVector | None = getattr(parameter, "stored", None)
            if parameter is not None and stored is not None:
                yield stored.name, stored.place(parameter)
