"""Which kernels serve a device: the eager twins on a CPU, our Triton kernels on a GPU.

An op is a public function of `reference` or one of the modules named after it; a Triton module serves it by a function of the
same name and parameters. Where no Triton module has one, the eager twin serves on the GPU too, and the log says so.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import isfunction
from types import ModuleType
from typing import Any

import torch

from culet.kernels.eager import draft_round, fixed_step, fused, ops, sampling
from culet.log import logger
from culet.registry import lookup

EAGER, TRITON = "eager", "triton"
KERNELS = {"cpu": EAGER, "cuda": TRITON, "meta": EAGER}
# Of culet.kernels.triton; the first that has an op serves it.
TRITON_MODULES = (
    *(
        "norms.residual",
        "norms.qkv",
        "norms.pointwise",
        "experts.route",
        "experts.expert_mlp",
        "linear.few_tokens",
        "sampling.masks",
    ),
    *("drafting.token_layout", "drafting.accept_drafts", "drafting.draft_head", "drafting.draft_round", "drafting.context_kv"),
    "linear.norm_linear",
)
# Eager on purpose: a product that cuBLAS does best, and a write that only `prepare_qkv`'s twin needs.
EAGER_ON_GPU = frozenset({"head", "store"})


def for_device(device: torch.device | str) -> ModuleType:
    """The kernels that serve `device`, as a module."""
    kind = lookup("kernel device", torch.device(device).type, KERNELS)
    return eager_kernels() if kind == EAGER else triton_kernels()


def eager_ops() -> dict[str, Any]:
    """Every op by name, as its eager twin."""
    return {
        name: value
        for module in (ops, fused, draft_round, sampling, fixed_step)
        for name, value in vars(module).items()
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


@cache
def eager_kernels() -> ModuleType:
    """Every op in plain torch."""
    found = ModuleType("culet.kernels.eager", "Every op in plain torch.")
    vars(found).update(eager_ops())
    return found


@cache
def triton_kernels() -> ModuleType:
    """Every op as a GPU runs it."""
    modules = [import_module(f"culet.kernels.triton.{name}") for name in TRITON_MODULES]
    found = ModuleType("culet.kernels.on_gpu", "Every op as a GPU runs it.")
    without = []
    for name, eager in eager_ops().items():
        twin = next((vars(module)[name] for module in modules if name in vars(module)), None)
        if twin is None and name not in EAGER_ON_GPU:
            without.append(name)
        setattr(found, name, twin or eager)
    if without:
        logger.warning("kernels: no Triton kernel for %s: torch serves, more slowly", ", ".join(without))
    return found
