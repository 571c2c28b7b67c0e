"""Which part of the machine each engine gets: its GPUs, or its share of the CPU's threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from culet.config import Config
from culet.errors import ConfigError

_GPUS = Path("/proc/driver/nvidia/gpus")  # has one folder per GPU
_THREADS, _VISIBLE = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Place:
    """Where an engine runs."""

    config: Config
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that it gets in addition


def places(config: Config, num_engines: int, inherited: Mapping[str, str] = os.environ) -> list[Place]:
    """Return the place of each engine. A single engine chooses for itself."""
    if num_engines == 1:
        return [Place(config)]
    device = config.model.device
    gpus = [] if device == "cpu" else visible_gpus(inherited)
    if not gpus and not device.startswith("cuda"):
        threads = {} if _THREADS in inherited else {_THREADS: str(max(1, _num_cores() // num_engines))}
        return [Place(config, threads)] * num_engines
    if device.startswith("cuda:"):
        raise ConfigError(
            f"data-parallel-size: got {num_engines} engines, but --device {device} names a single GPU",
            hint=f"omit --device, and choose GPUs with {_VISIBLE}",
        )
    size = config.parallel.tensor_parallel_size
    if len(gpus) < num_engines * size:
        raise ConfigError(
            f"data-parallel-size: {num_engines} engines with {size} GPUs each need {num_engines * size} GPUs, "
            f"but {len(gpus)} were found",
            hint=f"use fewer engines, or --device cpu, or name the GPUs in {_VISIBLE}",
        )
    # With `auto`, an engine whose GPU cannot be used would fall back to the CPU.
    config = replace(config, model=replace(config.model, device="cuda"), given=config.given | {"device"})
    return [Place(config, {_VISIBLE: ",".join(gpus[index * size : (index + 1) * size])}) for index in range(num_engines)]


def visible_gpus(inherited: Mapping[str, str] = os.environ, folder: Path = _GPUS) -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES spells them. Does not load CUDA."""
    names = inherited.get(_VISIBLE)
    if names is not None:
        return [name.strip() for name in names.split(",") if name.strip() not in ("", "-1")]
    return [str(index) for index in range(len(list(folder.iterdir())))] if folder.is_dir() else []


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
