"""Choose the kernel for each op by device (eager twins on a CPU, Triton on a GPU) and by the format of the weight it reads.

An op is a public function of a module in `kernels/eager`. A Triton module implements it with a function of the same name and
parameters. If no Triton module does, the GPU also uses the eager twin, and a warning is logged.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import isfunction
from types import ModuleType
from typing import Any

import torch

from culet.kernels.eager import draft_round, fixed_step, fused, ops, ranks, sampling, token_shares, towers
from culet.log import logger
from culet.registry import lookup

EAGER, TRITON = "eager", "triton"
KERNELS = {"cpu": EAGER, "cuda": TRITON, "meta": EAGER}
# Modules of culet.kernels.triton. The first one that has an op is used for it.
TRITON_MODULES = (
    *(
        "norms.residual",
        "norms.qkv",
        "norms.pointwise",
        "norms.patches",
        "experts.route",
        "experts.expert_mlp",
        "linear.few_tokens",
        "sampling.masks",
    ),
    *("drafting.token_layout", "drafting.accept_drafts", "drafting.draft_head", "drafting.draft_round", "drafting.context_kv"),
    "drafting.copy_suffix",
    "linear.norm_linear",
    "attention.token_shares",
    "attention.hopper_patches",
)
# These are eager on purpose: cuBLAS is best at `head`, and only the eager twin of `prepare_qkv` calls `store`.
EAGER_ON_GPU = frozenset({"head", "store"})

# Weight formats. The tables above cover the ops that read a plain weight.
PLAIN, E4M3, QUANTISED = "plain", "e4m3", "quantised"
# Ops for all other formats. The keys are (format, op). The values are the modules of the eager twin and of the Triton kernel,
# or "" if there is no kernel yet, so that the GPU also uses the eager twin.
FORMAT_OPS: dict[tuple[str, str], tuple[str, str]] = {
    (E4M3, "head_candidates"): ("draft_round", "drafting.draft_head"),
    **{
        (QUANTISED, op): ("quantised", "quantised.linear")
        for op in ("linear", "linear_parts", "gated_linear", "linear_gelu_times", "capped_head")
    },
    (QUANTISED, "experts"): ("quantised", "quantised.experts"),
    (QUANTISED, "look_up"): ("quantised", "quantised.look_up"),
}


def for_device(device: torch.device | str, weight_format: str = PLAIN) -> ModuleType:
    """Return a module with the kernels for `device`. For formats other than plain, it has only the ops that read a weight."""
    kind = lookup("kernel device", torch.device(device).type, KERNELS)
    if weight_format != PLAIN:
        return format_kernels(weight_format, kind)
    return eager_kernels() if kind == EAGER else triton_kernels()


def eager_ops() -> dict[str, Any]:
    """Return the eager twin of every op, by name."""
    return {
        name: value
        for module in (ops, fused, draft_round, sampling, fixed_step, ranks, token_shares, towers)
        for name, value in vars(module).items()
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


@cache
def eager_kernels() -> ModuleType:
    """Return a module with every op in plain torch."""
    table = ModuleType("culet.kernels.eager", "Every op in plain torch.")
    vars(table).update(eager_ops())
    return table


@cache
def triton_kernels() -> ModuleType:
    """Return a module with every op as a GPU runs it."""
    modules = [import_module(f"culet.kernels.triton.{name}") for name in TRITON_MODULES]
    table = ModuleType("culet.kernels.on_gpu", "Every op as a GPU runs it.")
    missing = []
    for name, eager in eager_ops().items():
        kernel = next((vars(module)[name] for module in modules if name in vars(module)), None)
        if kernel is None and name not in EAGER_ON_GPU:
            missing.append(name)
        setattr(table, name, kernel or eager)
    if missing:
        logger.warning("kernels without a Triton version run in torch, which is slower: %s", ", ".join(missing))
    return table


@cache
def format_kernels(weight_format: str, kind: str) -> ModuleType:
    """Return a module with the ops that read weights of one format."""
    table = ModuleType(f"culet.kernels.{weight_format}", f"Ops that read {weight_format} weights.")
    for (name, op), modules in FORMAT_OPS.items():
        if name == weight_format:
            is_triton = kind == TRITON and modules[1] != ""
            module = f"culet.kernels.triton.{modules[1]}" if is_triton else f"culet.kernels.eager.{modules[0]}"
            setattr(table, op, getattr(import_module(module), op))
    return table
