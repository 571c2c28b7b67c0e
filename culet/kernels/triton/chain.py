"""Programmatic dependent launch: a kernel's programs start while the kernel before it still runs, and wait inside.

A chained kernel first does what needs no other kernel's output (it fetches weights), then calls `enter`: wait until the kernel
before has ended, then let the next one start. Since a kernel lets the next one start only after its own wait, whatever was
written two kernels ago is complete when a program starts, and may be read before `enter`. Kernels that are not ours
(cuBLAS) may stand anywhere between.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def is_chained(device: torch.device) -> bool:
    """Whether launches on `device` are chained: sm_90 and later know how."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def options(num_warps: int, is_pdl: bool) -> dict[str, Any]:
    """Launch options of a kernel, with or without chaining."""
    return {"num_warps": num_warps, "launch_pdl": True} if is_pdl else {"num_warps": num_warps}


@triton.jit
def enter(PDL: tl.constexpr):
    """Wait for the kernel before, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_rows(rows, begin, end, COLUMNS: tl.constexpr):
    """Ask the L2 for COLUMNS columns from `begin` on, none at or past `end`, of the rows that the column `rows` points at."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    LINES: tl.constexpr = triton.next_power_of_2((COLUMNS + LINE - 1) // LINE)
    at = begin + tl.arange(0, LINES) * LINE
    # Lines past the end are asked for as the last one: the instruction takes no mask.
    at = tl.minimum(at, end - 1)
    pointers = rows + at[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1
    )
