"""What kernels ask about the device they run on. The answers are facts of `culet.hardware`."""

from __future__ import annotations

from functools import cache

import torch

from culet import hardware


@cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """(capability as the tile tables name it, multiprocessors). Triton's interpreter on a CPU assumes an H200."""
    if device.type != "cuda":
        return hardware.ASSUMED_CAPABILITY, hardware.ASSUMED_MULTIPROCESSORS
    capability = hardware.nearest_capability(hardware.capability_of(device))
    return capability, torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device` is a Hopper GPU, the only one that runs the Gluon kernels."""
    return device.type == "cuda" and hardware.is_hopper(hardware.capability_of(device))


@cache
def uses_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` may start while the one before still runs; see `dependent_launch`."""
    return device.type == "cuda" and hardware.has_dependent_launch(hardware.capability_of(device))


def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on `device`."""
    return hardware.SHARED_BYTES[device_facts(device)[0]]


def stages_that_fit(num_stages: int, bytes_per_stage: int, limit: int) -> int:
    """How many of `num_stages` pipeline stages fit into shared memory. Tiles are tuned on the GPU that has the most."""
    return max(1, min(num_stages, limit // bytes_per_stage))
