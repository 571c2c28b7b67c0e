"""Programmatic dependent launch. A kernel starts while the previous kernel is still running, and waits for it inside.

Such a kernel first does the work that needs no other kernel's output. A norm loads its weights, for example. It then calls
`enter`, which waits until the previous kernel has finished and then lets the next one start. A kernel lets the next one start
only after its own wait, so everything written two kernels ago is complete when a program starts. Other kernels (cuBLAS) may run
anywhere in between.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def options(num_warps: int, pdl: bool) -> dict[str, Any]:
    """Return the launch options of a kernel, with or without dependent launch."""
    return {"num_warps": num_warps, "launch_pdl": True} if pdl else {"num_warps": num_warps}


@triton.jit
def enter(PDL: tl.constexpr):
    """Wait for the previous kernel, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
