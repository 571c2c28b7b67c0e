"""GPU facts: names, capabilities, and that only one file states them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import culet
from culet import hardware
from culet.errors import ConfigError
from culet.hardware import ARCHS, GPUS, Gpu, arch_of, find_gpu, nearest_capability

PACKAGE = Path(culet.__file__).parent


def test_architectures():
    assert list(ARCHS) == ["cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert hardware.CAPABILITIES == (80, 86, 89, 90, 100, 120)
    assert {ARCHS[name].shared_bytes // 1024 for name in ("sm_86", "sm_89", "sm_120")} == {99}
    assert hardware.SHARED_BYTES == {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("h200", "sm_90"),
        ("H100", "sm_90"),
        ("RTX 4090", "sm_89"),
        ("rtx-3090", "sm_86"),
        ("a100", "sm_80"),
        ("A100-40GB", "sm_80"),
        ("b200", "sm_100"),
        ("rtx5090", "sm_120"),
        ("RTX_PRO_6000", "sm_120"),
        ("l40s", "sm_89"),
        ("cpu", "cpu"),
    ],
)
def test_gpus_by_name(name, arch):
    gpu = find_gpu(name)
    assert gpu.arch.name == arch
    assert gpu.memory_bytes > 1 << 30


def test_unknown_gpu_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'h300'") as caught:
        find_gpu("h300")
    assert "h200" in caught.value.hint
    assert "cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("capability", "name"),
    [(80, "sm_80"), (86, "sm_86"), (87, "sm_86"), (89, "sm_89"), (90, "sm_90"), (103, "sm_100"), (121, "sm_120")],
)
def test_arch_of_capability(capability, name):
    assert arch_of(capability).name == name
    assert f"sm_{nearest_capability(capability)}" == name


def test_unknown_architectures_assume_little():
    turing, thor = arch_of(75), arch_of(110)
    assert (turing.name, turing.has_bfloat16, turing.has_e4m3) == ("sm_75", False, False)
    assert (thor.name, thor.has_bfloat16, thor.shared_bytes) == ("sm_110", True, 48 * 1024)
    assert nearest_capability(110) == 100  # whose tiles fit


@pytest.mark.parametrize(
    ("capability", "hopper", "e4m3", "dependent"),
    [(80, False, False, False), (89, False, True, False), (90, True, True, True), (100, False, True, True)],
)
def test_features(capability, hopper, e4m3, dependent):
    found = hardware.is_hopper(capability), hardware.has_e4m3(capability), hardware.has_dependent_launch(capability)
    assert found == (hopper, e4m3, dependent)


def test_detect_asks_torch(monkeypatch: pytest.MonkeyPatch):
    import torch

    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 150 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert find_gpu("auto") == Gpu("NVIDIA H200", ARCHS["sm_90"], 150 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_gpu("auto").name == "cpu"


# A single source


def facts(source: str) -> Iterator[str]:
    """Yield the GPU facts in a file's code: numbers from the tables, architecture names, and queries to the driver."""
    numbers = {arch.shared_bytes for arch in ARCHS.values()} | {gpu.memory_bytes for gpu in GPUS.values()}
    rates = [arch.rates for arch in ARCHS.values()] + list(hardware.PEAKS.values())
    numbers |= {rate for entry in rates for rate in (entry.bytes_per_s, entry.flops_per_s)}
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "get_device_capability":
            yield f"line {node.lineno}: {node.attr}"
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool) and node.value > 1
            if is_number and node.value in numbers:
                yield f"line {node.lineno}: {node.value}"
            if isinstance(node.value, str) and re.search(r"\bsm_\d", node.value):
                yield f"line {node.lineno}: {node.value!r}"
        if isinstance(node, ast.Compare) and re.search("capability|device_facts", ast.unparse(node)):
            bounds = [leaf for side in node.comparators for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)]
            if bounds:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_nobody_else_states_gpu_facts():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        problems = list(facts(path.read_text(encoding="utf-8")))
        if name != "hardware.py" and problems:
            found[name] = problems
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "limit = 232_448",
        "rate = 4.2e12",
        "is_hopper = capability == 90",
        "is_new = torch.cuda.get_device_capability(device) >= (9, 0)",
        "message = f'needs sm_89, this is {name}'",
    ],
)
def test_the_rule_finds(source):
    assert list(facts(source))


def test_the_rule_leaves_prose():
    assert list(facts('"""On sm_90."""\nx = 1  # sm_80')) == []
