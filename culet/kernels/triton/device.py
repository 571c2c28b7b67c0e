"""Properties of the device that kernels run on. They come from `culet.hardware`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from culet import hardware


@cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """Return (capability, number of multiprocessors).

    The capability is the one that the tile tables use. Triton's interpreter on a CPU assumes an H200.
    """
    if device.type != "cuda":
        return hardware.ASSUMED_CAPABILITY, hardware.ASSUMED_MULTIPROCESSORS
    capability = hardware.nearest_capability(hardware.capability_of(device))
    return capability, torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether `device` is a Hopper GPU. Only Hopper GPUs run the Gluon kernels."""
    return device.type == "cuda" and hardware.is_hopper(hardware.capability_of(device))


def can_bulk_copy(x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Return whether the bulk copy engine can fetch tokens and weights. Both are bfloat16, or a product cannot use them."""
    if not x_MK.is_cuda or not is_hopper(x_MK.device) or not x_MK.dtype == weight_NK.dtype == torch.bfloat16:
        return False
    matrices = x_MK, weight_NK
    return all(x.stride(1) == 1 and not x.stride(0) % 8 and not x.data_ptr() % 16 for x in matrices)


@cache
def uses_pdl(device: torch.device) -> bool:
    """Return whether kernels on `device` may start while the previous one is still running. See `dependent_launch`."""
    return device.type == "cuda" and hardware.has_dependent_launch(hardware.capability_of(device))


def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use on `device`."""
    return hardware.SHARED_BYTES[device_facts(device)[0]]


def stages_that_fit(num_stages: int, bytes_per_stage: int, limit: int) -> int:
    """Return how many of `num_stages` pipeline stages fit in shared memory. Tiles are tuned on the GPU that has the most."""
    return max(1, min(num_stages, limit // bytes_per_stage))
