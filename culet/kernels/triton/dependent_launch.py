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

# A trial: norms let the next kernel start before they wait themselves. Set CULET_EARLY_NORMS=1 to try it.
EARLY_NORMS = tl.constexpr(os.environ.get("CULET_EARLY_NORMS") == "1")


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
def enter_norm(PDL: tl.constexpr):
    """Do the same in a norm. With EARLY_NORMS, the next kernel may start at once, even before the previous one has finished.

    It then fetches weights while the previous linear layer ends. A kernel that follows a norm must therefore read nothing but
    constants before its own wait. That wait still covers all earlier kernels, because the norm waits for them too.
    """
    if PDL:
        if EARLY_NORMS:
            gdc_launch_dependents()
            gdc_wait()
        else:
            gdc_wait()
            gdc_launch_dependents()
