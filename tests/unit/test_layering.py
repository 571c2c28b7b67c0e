"""The structure of the package: imports point one way without cycles, and folders stay small.

Every check reads every file. Typing-only and lazy imports count like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import culet

ROOT = Path(culet.__file__).parent
BASE = (
    *(
        "errors",
        "env",
        "log",
        "types",
        "config",
        "limits",
        "thinking",
        "registry",
        "line_process",
        "child",
        "frames",
        "hardware",
    ),
    "version",
)
MAX_MODULES = 13  # in one folder, besides __init__
MAX_OTHER_MODULES = 15  # the same for a folder of tests, training or benchmarks

# A package may import base, the packages listed here, and whatever those packages may import.
ALLOWED: dict[str, tuple[str, ...]] = {
    "base": (),
    "text": (),
    "media": (),
    "structured": ("text",),
    "kernels": (),
    "parallel": ("kernels",),
    "cache": ("kernels",),
    "attention": ("kernels", "cache"),
    "layers": ("parallel", "attention"),
    "models": ("layers", "media"),
    "sampling": ("kernels",),
    "drafters": ("models", "sampling"),
    "scheduler": ("cache",),
    "runner": ("models", "sampling", "drafters", "structured"),
    "engine": ("models", "scheduler", "runner", "text", "structured"),
    "serve": ("engine", "text", "structured"),
    "testing": ("models", "drafters", "serve"),
    "bench": ("engine", "attention", "kernels"),
}
ALLOWED["cli"] = tuple(ALLOWED)
ALLOWED["culet"] = ("engine",)  # culet/__init__.py exports LLM and SamplingParams, imported on first use

# Most of `cache` loads without torch. Only the pool holds tensors.
POOL = "culet.cache.pool"

# What a decoded image is. Requests and steps carry it, so it counts as base.
ITEMS = "culet.media.items"

# Packages and modules that load without torch.
TORCH_FREE_PACKAGES = ("text", "scheduler", "cli")
TORCH_FREE = (
    *("culet", *(f"culet.{name}" for name in BASE)),
    *(
        f"culet.media.{name}"
        for name in (
            "items",
            "spec",
            "limits",
            "messages",
            "sources",
            "fetch",
            "pool",
            "queue",
            "reader",
            "prompt",
            "parts",
            "local",
            "held",
        )
    ),
    *("culet.models.spec", "culet.models.checkpoint", "culet.models.variants", "culet.models.sizes"),
    "culet.models.towers.spec",
    *("culet.layers.weight.byte_sizes", "culet.layers.weight.quantised.scheme"),
    *("culet.drafters.mtp.spec", "culet.drafters.dflash.spec"),
    *("culet.drafters.base", "culet.drafters.mtp.plan", "culet.drafters.dflash.plan"),
    *("culet.attention.plan", "culet.attention.picture"),
    *("culet.cache.spec", "culet.cache.arena", "culet.cache.changes", "culet.cache.mirror", "culet.cache.prefix"),
    *("culet.structured.request_fields", "culet.structured.tool_grammar", "culet.structured.check", "culet.engine.requests"),
)


@cache
def modules() -> Mapping[str, Path]:
    """Return every module of the package by its dotted name."""
    paths = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(path: Path, name: str) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of each import from culet, anywhere in the file."""
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


# Packages


def package_of(name: str) -> str:
    """Return the table row for a module or for a name inside a module."""
    parts = name.split(".")
    if len(parts) == 1:
        return "culet"
    if name.startswith(ITEMS):
        return "base"
    if parts[1] in culet._LAZY:  # a name that `culet` exports counts as its own module
        return package_of(culet._LAZY[parts[1]])
    return "base" if parts[1] in BASE or parts[1] == "__version__" else parts[1]


def reachable(package: str) -> set[str]:
    """Return all packages that `package` may import."""
    return {package, "base"}.union(*({other} | reachable(other) for other in ALLOWED[package]))


def violations(name: str, path: Path) -> list[str]:
    package, problems = package_of(name), []
    allowed = reachable(package)
    if package == "scheduler" or (package == "cache" and name != POOL):
        allowed -= {"kernels"}
    for target, line in imports(path, name):
        if package == "scheduler" and target.startswith(POOL):
            problems.append(f"{name}:{line} imports {target}: the scheduler may not import torch")
        if package_of(target) not in allowed:
            problems.append(f"{name}:{line} imports {target}: {package} may import {', '.join(sorted(allowed))}")
    return problems


def test_every_package_is_in_the_table():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"base", "culet"} == set(ALLOWED)
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    assert files == set(BASE)


def test_imports_point_one_way():
    assert [problem for name, path in modules().items() for problem in violations(name, path)] == []


@pytest.mark.parametrize(
    ("name", "source", "is_allowed"),
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
        ("culet.runner.runner", "from culet.structured.compiler import GrammarCompiler", True),
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
        ("culet.text.output", "from culet.structured.request_fields import ResponseFormat", False),
        ("culet.serve.app", "from culet.testing.tiny import write_checkpoint", False),
    ],
)
def test_the_rule_itself(tmp_path: Path, name, source, is_allowed):
    path = tmp_path / f"{name.rpartition('.')[2]}.py"
    path.write_text(source)
    assert (violations(name, path) == []) == is_allowed


# Cycles between modules


def import_graph(paths: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports. `from package import name` counts as `package.name` if that is a module."""
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        targets = {target if target in paths else target.rpartition(".")[0] for target, _ in imports(path, name)}
        graph[name] = {target for target in targets if target in paths and target != name}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or indirectly (strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return groups


def test_there_are_no_import_cycles():
    assert cycles(import_graph(modules())) == []


def test_cycles_are_found(tmp_path: Path):
    sources = {
        "culet.a": "from culet.b import f",
        "culet.b": "def g():\n    from culet import c",
        "culet.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from culet.a import A",
        "culet.d": "import culet.a\nfrom culet import e",
        "culet.e": "",
    }
    paths = {name: tmp_path / f"{name.rpartition('.')[2]}.py" for name in sources}
    for name, path in paths.items():
        path.write_text(sources[name])
    assert cycles(import_graph(paths)) == [["culet.a", "culet.b", "culet.c"]]
    paths["culet.c"].write_text("from culet.e import A")
    assert cycles(import_graph(paths)) == []


# Folders


def large_folders(root: Path, most: int) -> dict[str, int]:
    """Return the folders under `root`, and `root` itself, with more than `most` modules besides __init__."""
    counts = Counter(path.parent for path in root.rglob("*.py") if path.name != "__init__.py")
    return {folder.relative_to(root.parent).as_posix(): count for folder, count in counts.items() if count > most}


def test_folders_are_small():
    assert large_folders(ROOT, MAX_MODULES) == {}


@pytest.mark.parametrize("name", ["tests", "training", "benchmarks"])
def test_other_folders_are_small(name):
    folder = ROOT.parent / name
    assert list(folder.rglob("*.py"))
    assert large_folders(folder, MAX_OTHER_MODULES) == {}


def test_large_folders_are_found(tmp_path: Path):
    (tmp_path / "some/inner").mkdir(parents=True)
    for name in ("__init__", "a", "b", "inner/__init__", "inner/a", "inner/b", "inner/c"):
        (tmp_path / f"some/{name}.py").touch()
    assert large_folders(tmp_path / "some", 3) == {}
    assert large_folders(tmp_path / "some", 2) == {"some/inner": 3}


# Loading without torch


def torch_free_modules() -> list[str]:
    """Return the modules that load without torch: those of the table, and the __init__ of every package."""
    whole = [name for name in modules() if len(name.split(".")) > 1 and name.split(".")[1] in TORCH_FREE_PACKAGES]
    packages = [name for name, path in modules().items() if path.name == "__init__.py"]
    return sorted({*TORCH_FREE, *whole, *packages})


def failures(names: list[str], refused: set[str]) -> str:
    """Import `names` in a fresh interpreter without the packages `refused`. Return the failures, one per line."""
    code = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError(f"{{name}} must not be imported here")
sys.meta_path.insert(0, Refuse())
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: {{error}}")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_torch_free_modules_load_without_torch():
    names = torch_free_modules()
    assert set(names) <= set(modules())
    assert failures(names, {"torch", "triton", "transformers"}) == ""


def test_the_planner_needs_no_other_heavy_package():
    """Everything that `culet plan` may import also loads without numpy and the libraries that read weights."""
    names = [name for name in torch_free_modules() if package_of(name) not in ("text", "structured", "engine")]
    heavy = {"torch", "numpy", "triton", "transformers", "safetensors", "tokenizers", "huggingface_hub", "llguidance"}
    assert failures(names, heavy) == ""


def test_each_torch_free_module_stands_alone():
    """Each module loads in a fresh interpreter, so that none depends on what another imported before."""
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); assert 'torch' not in sys.modules"
    for name in TORCH_FREE:
        process = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)
        assert process.returncode == 0, f"{name}: {process.stderr}"
