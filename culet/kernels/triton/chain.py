"""Programmatic dependent launch: a kernel's programs start while the kernel before it drains, and wait inside.

Every kernel that is launched so waits (`gdc_wait`) before it touches anything another kernel wrote; what it may do before
that is read weights. So the chain holds whatever mix of our kernels and others runs on the stream.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def is_chained(device: torch.device) -> bool:
    """Whether launches on `device` are chained: sm_90 and later know how."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def options(num_warps: int, is_pdl: bool) -> dict[str, Any]:
    """Launch options of a kernel, with or without chaining."""
    return {"num_warps": num_warps, "launch_pdl": True} if is_pdl else {"num_warps": num_warps}
