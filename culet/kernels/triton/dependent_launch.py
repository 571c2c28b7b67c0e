"""Programmatic dependent launch: a kernel starts while the kernel before it still runs, and waits inside.

Such a kernel first does what needs no other kernel's output (a norm loads its weights), then calls `enter`: wait until the
kernel before has finished, then let the next one start. A kernel lets the next one start only after its own wait, so whatever
was written two kernels ago is complete when a program starts. Other kernels (cuBLAS) may run anywhere in between.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def options(num_warps: int, pdl: bool) -> dict[str, Any]:
    """Launch options of a kernel, with or without dependent launch."""
    return {"num_warps": num_warps, "launch_pdl": True} if pdl else {"num_warps": num_warps}


@triton.jit
def enter(PDL: tl.constexpr):
    """Wait for the kernel before, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
