"""Imports point one way only, typing and lazy ones included, and what must not load torch does not."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import culet

ROOT = Path(culet.__file__).parent
BASE = ("errors", "env", "log", "types", "config", "registry", "line_process", "hardware")

# A part may import base, what stands here, and what those may import.
ALLOWED: dict[str, tuple[str, ...]] = {
    "base": (),
    "text": (),
    "structured": ("text",),
    "kernels": (),
    "parallel": (),
    "cache": ("kernels",),
    "attention": ("kernels", "cache"),
    "layers": ("parallel", "attention"),
    "models": ("layers",),
    "sampling": ("kernels", "parallel", "structured"),
    "drafters": ("models", "sampling"),
    "scheduler": ("cache",),
    "runner": ("models", "sampling", "drafters"),
    "engine": ("models", "scheduler", "runner", "text", "structured"),
    "serve": ("engine", "text", "structured"),
    "testing": ("models", "serve"),
    "bench": ("engine", "attention", "kernels"),
}
ALLOWED["cli"] = tuple(ALLOWED)
ALLOWED["culet"] = ("engine",)  # the package's own __init__ hands LLM and SamplingParams out, on first use
# Files that may not use all that their part may.
KERNELS_IN_CACHE = ("culet.cache.pool",)
TORCH_IN_CACHE = ("culet.cache.pool",)

TORCH_FREE = (
    *("culet", *(f"culet.{name}" for name in BASE)),
    *("culet.models.spec", "culet.models.checkpoint", "culet.models.variants", "culet.models.sizes"),
    *("culet.drafters.mtp.spec", "culet.drafters.dflash.spec"),
    *("culet.drafters.base", "culet.drafters.mtp.plan", "culet.drafters.dflash.plan"),
    *("culet.attention.plan", "culet.attention.picture"),
    *("culet.cache.spec", "culet.cache.arena", "culet.cache.prefix"),
)


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, name: str) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each import of culet's own, wherever it stands in the file."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] == "culet")
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*above, source] if source else above)
            if source.split(".")[0] == "culet":
                yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)


def part_of(name: str) -> str:
    """The part of the table that a module, or a name within it, belongs to."""
    parts = name.split(".")
    if len(parts) == 1:
        return "culet"
    if parts[1] in culet._LAZY:  # a name that `culet` hands out stands for where it comes from
        return part_of(culet._LAZY[parts[1]])
    return "base" if parts[1] in BASE or parts[1] == "__version__" else parts[1]


def reachable(part: str) -> set[str]:
    """All that `part` may import."""
    found = {part, "base"}
    for other in ALLOWED[part]:
        found |= {other} | reachable(other)
    return found


def violations(name: str, path: Path) -> list[str]:
    part, problems = part_of(name), []
    for target, line in imports(path, name):
        other = part_of(target)
        allowed = reachable(part)
        if part == "cache" and name not in KERNELS_IN_CACHE:
            allowed -= {"kernels"}
        if part == "scheduler":
            allowed -= {"kernels"}
        if part == "scheduler" and target.startswith(TORCH_IN_CACHE):
            problems.append(f"{name}:{line} imports {target}: the scheduler may use the torch-free part of cache")
        if other not in allowed:
            problems.append(f"{name}:{line} imports {target}: {part} may import {', '.join(sorted(allowed))}")
    return problems


def test_every_package_is_in_the_table():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"base", "culet"} == set(ALLOWED)
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    assert files == set(BASE)


def test_imports_point_one_way():
    assert [problem for name, path in modules().items() for problem in violations(name, path)] == []


@pytest.mark.parametrize(
    ("name", "source", "is_fine"),
    [
        ("culet.kernels.norm", "from culet.errors import UserError", True),
        ("culet.kernels.norm", "from culet.cache.spec import KVSpec", False),
        ("culet.kernels.norm", "def f():\n    from culet import cache", False),
        ("culet.attention.triton", "from culet.kernels.attention import run", True),
        (
            "culet.attention.triton",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from culet.models.spec import ModelSpec",
            False,
        ),
        ("culet.attention.triton", "from ..models import spec", False),
        ("culet.attention.triton", "from .batch import ForwardBatch", True),
        ("culet.cache.pool", "from culet.kernels import copy", True),
        ("culet.cache.arena", "from culet.kernels import copy", False),
        ("culet.scheduler.scheduler", "from culet.cache.spec import CacheLayout", True),
        ("culet.scheduler.scheduler", "from culet.cache.pool import Pool", False),
        ("culet.scheduler.scheduler", "from culet.cache import pool", False),
        ("culet.scheduler.scheduler", "import culet.runner.runner", False),
        ("culet.runner.runner", "from culet.scheduler.scheduler import Scheduler", False),
        ("culet.runner.runner", "from culet.cache.pool import Pool", True),
        ("culet.models.spec", "from culet.cache.spec import KVSpec", True),
        ("culet.engine.engine", "from culet.serve.app import app", False),
        ("culet.engine.engine", "from culet import __version__, env", True),
        ("culet.engine.engine", "from culet import LLM, SamplingParams", True),
        ("culet.models.spec", "from culet import LLM", False),
        ("culet.models.spec", "from culet import SamplingParams", True),
        ("culet.models.spec", "import culet", False),
        ("culet.cli.main", "from culet.engine.llm import LLM", True),
        ("culet.errors", "from culet.models.spec import ModelSpec", False),
        ("culet.sampling.sampler", "from culet.models.spec import ModelSpec", False),
    ],
)
def test_the_rule_itself(tmp_path: Path, name, source, is_fine):
    path = tmp_path / f"{name.rpartition('.')[2]}.py"
    path.write_text(source)
    assert (violations(name, path) == []) == is_fine


# What loads without torch


def torch_free_modules() -> list[str]:
    """The modules that must load on a machine without torch; all of scheduler and cli are among them."""
    whole = [name for name in modules() if name.split(".")[1:2] in (["scheduler"], ["cli"])]
    packages = [name for name, path in modules().items() if path.name == "__init__.py"]
    return sorted({*TORCH_FREE, *whole, *packages})


def test_torch_free_modules_load_without_torch():
    names = torch_free_modules()
    assert set(names) <= set(modules())
    code = f"""
import importlib, sys
HEAVY = {{"torch", "numpy", "triton", "transformers", "safetensors", "tokenizers", "huggingface_hub"}}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ImportError(f"{{name}} must not be imported here")
sys.meta_path.insert(0, Refuse())
failed = []
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{{name}}: {{error}}")
print("\\n".join(failed))
sys.exit(bool(failed))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


def test_each_torch_free_module_stands_alone():
    """Each in a fresh interpreter, so that none leans on what another imported before."""
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); assert 'torch' not in sys.modules"
    for name in TORCH_FREE:
        process = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)
        assert process.returncode == 0, f"{name}: {process.stderr}"
