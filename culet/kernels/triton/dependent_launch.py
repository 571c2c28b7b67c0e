"""What the fused kernels share: shared memory that fits, and chaining (programmatic dependent launch).

Chained, a kernel's programs start while the kernel before it still runs, and wait inside.
A chained kernel first does what needs no other kernel's output (a norm loads its weights), then calls `enter`: wait until the
kernel before has ended, then let the next one start. Since a kernel lets the next one start only after its own wait, whatever
was written two kernels ago is complete when a program starts. Kernels that are not ours (cuBLAS) may stand anywhere between.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from culet.kernels.triton.attention.tiles import SHARED_MEMORY, device_facts


@cache
def is_chained(device: torch.device) -> bool:
    """Whether launches on `device` are chained: sm_90 and later know how."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device` has Hopper's instructions, which no other architecture has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on `device`."""
    return SHARED_MEMORY[device_facts(device)[0]]


def stages_that_fit(wanted: int, bytes_per_stage: int, limit: int) -> int:
    """How many of the wanted pipeline stages fit the shared memory: tiles are measured where there is most of it."""
    return max(1, min(wanted, limit // bytes_per_stage))


def options(num_warps: int, is_pdl: bool) -> dict[str, Any]:
    """Launch options of a kernel, with or without chaining."""
    return {"num_warps": num_warps, "launch_pdl": True} if is_pdl else {"num_warps": num_warps}


@triton.jit
def enter(PDL: tl.constexpr):
    """Wait for the kernel before, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
