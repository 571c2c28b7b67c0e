"""Which module's kernels serve a device. Every module in the table offers the names and signatures of `reference`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from culet.registry import lookup

KERNELS = {
    "cpu": "culet.kernels.reference",
    "cuda": "culet.kernels.reference",
    "meta": "culet.kernels.reference",
}


def for_device(device: torch.device | str) -> ModuleType:
    """The kernels that serve `device`, as a module."""
    return import_module(lookup("kernel device", torch.device(device).type, KERNELS))
