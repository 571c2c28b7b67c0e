"""Which kernel serves an op: by device (eager twins on a CPU, Triton on a GPU) and by format of the weight that it reads.

An op is a public function of a module in `kernels/eager`. A Triton module serves it with a function of the same name and
parameters. Where no Triton module does, the eager twin also serves on the GPU, with a warning in the log.
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
# Modules of culet.kernels.triton; the first that has an op serves it.
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
# Eager on purpose: a product that cuBLAS does best, and a write that only the eager twin of `prepare_qkv` needs.
EAGER_ON_GPU = frozenset({"head", "store"})

# Formats of weights. Ops that read a plain weight are in the tables above.
PLAIN, E4M3 = "plain", "e4m3"
# The ops of every other format: (format, op) -> the modules of its eager twin and of its Triton kernel.
FORMAT_OPS: dict[tuple[str, str], tuple[str, str]] = {
    (E4M3, "head_candidates"): ("draft_round", "drafting.draft_head"),
}


def for_device(device: torch.device | str, weight_format: str = PLAIN) -> ModuleType:
    """The kernels that serve `device`, as a module. For another format than plain: only the ops that read a weight."""
    kind = lookup("kernel device", torch.device(device).type, KERNELS)
    if weight_format != PLAIN:
        return format_kernels(weight_format, kind)
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
    table = ModuleType("culet.kernels.eager", "Every op in plain torch.")
    vars(table).update(eager_ops())
    return table


@cache
def triton_kernels() -> ModuleType:
    """Every op as a GPU runs it."""
    modules = [import_module(f"culet.kernels.triton.{name}") for name in TRITON_MODULES]
    table = ModuleType("culet.kernels.on_gpu", "Every op as a GPU runs it.")
    missing = []
    for name, eager in eager_ops().items():
        kernel = next((vars(module)[name] for module in modules if name in vars(module)), None)
        if kernel is None and name not in EAGER_ON_GPU:
            missing.append(name)
        setattr(table, name, kernel or eager)
    if missing:
        logger.warning("kernels: no Triton kernel for %s; torch serves, more slowly", ", ".join(missing))
    return table


@cache
def format_kernels(weight_format: str, kind: str) -> ModuleType:
    """The ops that read a weight of one format."""
    table = ModuleType(f"culet.kernels.{weight_format}", f"Ops that read {weight_format} weights.")
    for (name, op), modules in FORMAT_OPS.items():
        if name == weight_format:
            module = f"culet.kernels.{kind}.{modules[kind == TRITON]}"
            setattr(table, op, getattr(import_module(module), op))
    return table
