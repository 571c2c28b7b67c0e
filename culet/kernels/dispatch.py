"""Which kernels serve a device: the eager twins of `reference` on a CPU, our Triton kernels on a GPU.

An op is a public function of `reference`; a Triton module serves it by a function of the same name and parameters. Where no
Triton module has one, the eager twin serves on the GPU too, and the log says so.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import isfunction
from types import ModuleType

import torch

from culet.kernels import reference
from culet.log import logger
from culet.registry import lookup

EAGER, TRITON = "eager", "triton"
KERNELS = {"cpu": EAGER, "cuda": TRITON, "meta": EAGER}
TRITON_MODULES = ("norms", "qkv", "route", "moe", "pointwise", "linear")  # of culet.kernels.triton; the first that has an op
# Eager on purpose: a product that cuBLAS does best, and a write that only `prepare_qkv`'s twin needs.
EAGER_ON_GPU = frozenset({"head", "store"})


def for_device(device: torch.device | str) -> ModuleType:
    """The kernels that serve `device`, as a module."""
    kind = lookup("kernel device", torch.device(device).type, KERNELS)
    return reference if kind == EAGER else _triton_kernels()


def op_names() -> list[str]:
    """Every op, by name."""
    return [
        name
        for name, value in vars(reference).items()
        if isfunction(value) and value.__module__ == reference.__name__ and not name.startswith("_")
    ]


@cache
def _triton_kernels() -> ModuleType:
    modules = [import_module(f"culet.kernels.triton.{name}") for name in TRITON_MODULES]
    found = ModuleType("culet.kernels.on_gpu", "Every op as a GPU runs it.")
    without = []
    for name in op_names():
        twin = next((vars(module)[name] for module in modules if name in vars(module)), None)
        if twin is None and name not in EAGER_ON_GPU:
            without.append(name)
        setattr(found, name, twin or getattr(reference, name))
    if without:
        logger.warning("kernels: no Triton kernel for %s: torch serves, more slowly", ", ".join(without))
    return found
