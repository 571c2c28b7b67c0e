"""All facts about devices: architectures, shared memory, memory and FLOP rates, product names.

This module loads without torch. A compute capability is a single number, so 90 means sm_90.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from culet.errors import ConfigError

if TYPE_CHECKING:
    import torch

KIB, GIB = 1 << 10, 1 << 30

AMPERE, AMPERE_RTX, ADA, HOPPER, BLACKWELL, BLACKWELL_RTX = 80, 86, 89, 90, 100, 120


SMALL_GPU_BYTES = 40 << 30
SMALL_GPU_TOKENS = 2048  # in a step
SMALL_GPU_MEDIA_BYTES = 128 << 20  # of cached features, about 150 images of E2B and 40 of the 31B


@dataclass(frozen=True)
class Rates:
    """The rates that decoding reaches on a device. The draft length depends only on their ratios."""

    bytes_per_s: float
    flops_per_s: float
    layer_s: float  # seconds that a layer takes besides its memory traffic and arithmetic


@dataclass(frozen=True)
class Peaks:
    """The best rates measured on a GPU, with a large copy and a large bfloat16 matrix product."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


_RATES_8X = Rates(1.6e12, 250e12, 2e-5)


@dataclass(frozen=True)
class Arch:
    """A GPU architecture, or a CPU."""

    capability: int | None  # CUDA compute capability, or None for a CPU
    shared_bytes: int = 0  # the most shared memory that one block can have
    rates: Rates = _RATES_8X
    has_bfloat16: bool = True  # whether it multiplies bfloat16 in hardware

    @property
    def name(self) -> str:
        return "cpu" if self.capability is None else f"sm_{self.capability}"

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None

    @property
    def has_e4m3(self) -> bool:
        """Whether the device converts to fp8 (e4m3). On a CPU, torch does so."""
        return self.capability is None or has_e4m3(self.capability)


CPU = Arch(None, rates=Rates(1.0e10, 1.0e11, 2.5e-4), has_bfloat16=False)

# The rates of sm_90 were measured on an H200. The others come from public figures.
ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        CPU,
        Arch(AMPERE, 163 * KIB),
        Arch(AMPERE_RTX, 99 * KIB),
        Arch(ADA, 99 * KIB),
        Arch(HOPPER, 227 * KIB, Rates(4.0e12, 650e12, 1.3e-5)),
        Arch(BLACKWELL, 227 * KIB, Rates(6.5e12, 1300e12, 1.2e-5)),
        Arch(BLACKWELL_RTX, 99 * KIB, Rates(1.4e12, 300e12, 1.5e-5)),
    )
}
# Shared memory per block by capability, for every GPU architecture that the Triton kernels serve.
SHARED_BYTES: dict[int, int] = {arch.capability: arch.shared_bytes for arch in ARCHS.values() if arch.capability is not None}
CAPABILITIES = tuple(SHARED_BYTES)

# The capability and number of multiprocessors that kernels assume without a GPU. They are those of an H200.
ASSUMED_CAPABILITY, ASSUMED_MULTIPROCESSORS = HOPPER, 132


@dataclass(frozen=True)
class Link:
    """How the GPUs of a machine are connected, and its rate in one direction, from data sheets."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True)
class Gpu:
    """A device to plan for."""

    name: str
    arch: Arch
    memory_bytes: int
    link: Link | None = None  # to other GPUs of the machine, or None if it is not known


PCIE_4, PCIE_5 = Link("PCIe 4 x16", 32e9), Link("PCIe 5 x16", 64e9)
NVLINK_3, NVLINK_4, NVLINK_5 = Link("NVLink 3", 300e9), Link("NVLink 4", 450e9), Link("NVLink 5", 900e9)


def _gpu(name: str, capability: int, gib: float, link: Link) -> Gpu:
    return Gpu(name, ARCHS[f"sm_{capability}"], int(gib * GIB), link)


# Memory as CUDA reports it, rounded down. It is less than the advertised size.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", AMPERE, 79.1, NVLINK_3),
        _gpu("a100-40gb", AMPERE, 39.3, NVLINK_3),
        _gpu("a40", AMPERE_RTX, 44.3, PCIE_4),
        _gpu("rtx3090", AMPERE_RTX, 23.6, PCIE_4),
        _gpu("rtx4070", ADA, 11.6, PCIE_4),
        _gpu("rtx4080", ADA, 15.6, PCIE_4),
        _gpu("l4", ADA, 22.0, PCIE_4),
        _gpu("l40s", ADA, 44.3, PCIE_4),
        _gpu("rtx4090", ADA, 23.5, PCIE_4),
        _gpu("h100", HOPPER, 79.1, NVLINK_4),
        _gpu("h200", HOPPER, 139.7, NVLINK_4),
        _gpu("b200", BLACKWELL, 178.3, NVLINK_5),
        _gpu("rtx5090", BLACKWELL_RTX, 31.3, PCIE_5),
        _gpu("rtxpro6000", BLACKWELL_RTX, 94.9, PCIE_5),
    )
}

# Measured, not taken from data sheets. The key is a part of the GPU name that the driver reports.
PEAKS: dict[str, Peaks] = {"H200": Peaks(4.2e12, 790e12)}


def find_peaks(gpu_name: str) -> Peaks | None:
    """Return the measured peaks of a GPU, or None if it was not measured."""
    return next((peaks for name, peaks in PEAKS.items() if name in gpu_name), None)


def find_gpu(name: str) -> Gpu:
    """Return the device called `name`.

    A name is one of `GPUS`, `cpu` (this machine's CPU), or `auto` (this machine's GPU, or its CPU if it has none).
    """
    key = _plain(name)
    if key == "auto":
        return detect()
    if key == "cpu":
        return Gpu("cpu", _this_cpu(), _cpu_memory())
    for gpu in GPUS.values():
        if _plain(gpu.name) == key:
            return gpu
    raise ConfigError(f"unknown GPU: {name!r}", hint=f"use one of: auto, cpu, {', '.join(GPUS)}")


def _plain(name: str) -> str:
    """Normalise a name, so that RTX 4090, rtx-4090 and rtx4090 are equal."""
    return name.lower().translate(str.maketrans("", "", " _-"))


def detect(device: str = "cuda") -> Gpu:
    """Return the GPU behind `device`, or this machine's CPU if torch finds no GPU. Imports torch."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return find_gpu("cpu")
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, arch_of(10 * properties.major + properties.minor), properties.total_memory)


def capability_of(device: torch.device | int | None = None) -> int:
    """Return the compute capability of a CUDA device (default: the current one). Imports torch."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def arch_of(capability: int) -> Arch:
    """Return the newest known architecture with the same major version that is not newer than `capability`.

    If there is none, return an architecture that assumes little.
    """
    known = [number for number in CAPABILITIES if number // 10 == capability // 10 and number <= capability]
    if known:
        return ARCHS[f"sm_{max(known)}"]
    return Arch(capability, shared_bytes=48 * KIB, has_bfloat16=capability >= AMPERE)


def nearest_capability(capability: int) -> int:
    """Return the newest known capability that is not newer. A GPU uses the tiles of that capability."""
    return max(known for known in CAPABILITIES if known <= capability)


def is_hopper(capability: int) -> bool:
    """Return whether the GPU has Hopper's matrix instructions (wgmma), which no other architecture has."""
    return capability // 10 == HOPPER // 10


def has_e4m3(capability: int) -> bool:
    """Return whether the GPU converts to and from fp8 (e4m3)."""
    return capability >= ADA


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether a device has tensor cores for fp8."""
    return device.type == "cuda" and has_e4m3(capability_of(device))


def has_dependent_launch(capability: int) -> bool:
    """Return whether a kernel may start while the one before it still runs (programmatic dependent launch)."""
    return capability >= HOPPER


def _this_cpu() -> Arch:
    """Return the architecture of this machine's CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return Arch(None, rates=CPU.rates, has_bfloat16={"avx512bw", "avx512vl", "avx512dq"} <= words or "bf16" in words)


def _cpu_memory() -> int:
    """Return the size of this machine's memory in bytes."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * GIB  # unknown on this system, and only `plan --gpu cpu` uses it
