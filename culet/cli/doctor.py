"""`culet doctor`: report facts about this machine for bug reports."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from culet import env
from culet.version import __version__

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "msgspec", "click", "rich")
_GIB = 1 << 30

Section = dict[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Report versions, devices, memory and settings, for bug reports.

    \b
    Examples:
      culet doctor
      culet doctor --json
      culet doctor > environment.txt
    """
    sections = examine()
    if as_json:
        click.echo(json.dumps(sections, indent=2))
        return
    for name, facts in sections.items():
        click.echo(f"{name}:")
        for key, value in facts.items():
            click.echo(f"  {key:<24} {_line(value)}")


def examine() -> dict[str, Section]:
    """Return every section of the report. A section that fails contains its error, and the others still run."""
    parts = {
        "culet": _culet,
        "packages": _packages,
        "cpu": _cpu,
        "gpu": _gpu,
        "models": _models,
        "environment": _environment,
    }
    report: dict[str, Section] = {}
    for name, examine_part in parts.items():
        try:
            report[name] = examine_part()
        except Exception as error:  # the report should show a broken driver or package
            report[name] = {"failed": f"{type(error).__name__}: {error}"}
    return report


def _line(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _culet() -> Section:
    return {
        "version": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }


def _packages() -> Section:
    found: Section = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _cpu() -> Section:
    import torch

    from culet.engine.memory import cpu_has_bfloat16, free_cpu_memory, total_cpu_memory

    return {
        "name": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16 units": cpu_has_bfloat16(),
        "memory": f"{total_cpu_memory() / _GIB:.1f} GiB",
        "free memory": f"{free_cpu_memory() / _GIB:.1f} GiB",
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> Section:
    import torch

    if not torch.cuda.is_available():
        return {"cuda": False, "built for cuda": torch.version.cuda}
    facts: Section = {"cuda": True, "built for cuda": torch.version.cuda}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        facts[f"cuda:{index}"] = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
        )
    return facts


def _models() -> Section:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    names = sorted(entry.name.removeprefix("models--").replace("--", "/") for entry in cache.glob("models--*gemma-4*"))
    return {"hub cache": str(cache), "gemma 4 models there": ", ".join(names) or None}


def _environment() -> Section:
    return {
        variable.name: os.environ.get(variable.name, f"not set (default {variable.default!r})") for variable in env.VARIABLES
    }
