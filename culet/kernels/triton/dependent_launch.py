"""Programmatic dependent launch. A kernel starts while the previous kernel is still running, and waits for it inside.

Such a kernel first does the work that needs no other kernel's output. A norm loads its weights, for example. It then calls
`enter`, which waits until the previous kernel has finished and then lets the next one start. A kernel lets the next one start
only after its own wait, so everything written two kernels ago is complete when a program starts. Other kernels (cuBLAS) may run
anywhere in between.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# A trial: some kernels let the next one start before they wait themselves. Set CULET_EARLY_START=1 to try it.
EARLY_START = tl.constexpr(os.environ.get("CULET_EARLY_START") == "1")


def options(num_warps: int, pdl: bool) -> dict[str, Any]:
    """Return the launch options of a kernel, with or without dependent launch."""
    return {"num_warps": num_warps, "launch_pdl": True} if pdl else {"num_warps": num_warps}


@triton.jit
def enter(PDL: tl.constexpr):
    """Wait for the previous kernel, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def enter_early(PDL: tl.constexpr):
    """Do the same. With EARLY_START, the next kernel may start at once, even before the previous one has finished.

    A linear layer then fetches its first weights while the kernels before it end. Only kernels that linear layers follow call
    this: norms, and the join of attention. What follows them must read nothing but constants before its own wait. That wait
    still covers all earlier kernels, because this kernel waits for them too.
    """
    if PDL:
        if EARLY_START:
            gdc_launch_dependents()
            gdc_wait()
        else:
            gdc_wait()
            gdc_launch_dependents()
