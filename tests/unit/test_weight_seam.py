"""The seam of weights: only `layers/weight` and `kernels/` know a weight's format, and multiply by one.

Every check reads every file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from tests.unit.test_layering import ROOT, modules

WEIGHT_CODE = ("layers/weight", "kernels/")
FORMATS = ("bfloat16", "float16", "half", "int8", "int4", "uint4", "float8", "float4")  # prefixes of torch's dtype names
STORED_FORMAT = re.compile(r"B?F\d+(_E\dM\d)?|[IU]\d+")  # names in safetensors headers, such as BF16 and F8_E4M3
NAMED_FORMAT = re.compile(
    r"int\d|uint4|(nv|mx)?fp\d(_e\dm\d)?|w\d+a\d+(_\w+)?", re.IGNORECASE
)  # names such as "int4" and "NVFP4"
MULTIPLYING = ("linear", "bilinear", "embedding", "conv")  # prefixes of torch's functions that take a weight
# Other code that names such a dtype, and its meaning there.
NOT_WEIGHTS = {
    "attention/triton.py": "queries: the Hopper kernels need bfloat16",
    "bench/attention_cases.py": "inputs of attention kernels",
    "bench/kernels.py": "inputs of attention kernels",
    "bench/timing.py": "a buffer that flushes the L2 cache",
    "cache/pool.py": "the KV cache",
    "engine/resolve.py": "activations: the setting --dtype",
    "testing/random_dflash.py": "a checkpoint that is written to disk",
    "testing/tiny.py": "a checkpoint that is written to disk",
}
# Other code that has the name of a format as a string, and its meaning there.
NOT_CHOICES = {
    "cache/spec.py": "the KV cache: the setting --kv-cache-dtype",
    "config.py": "the values that settings may have",
    "models/quantised/config.py": "words in the quantization_config of a file",
}


def named_formats(source: str) -> Iterator[str]:
    """Yield where a file names a weight's dtype.

    That is a dtype such as torch.int8, a stored type such as "BF16", a cast such as x.half(), or weight.dtype.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and STORED_FORMAT.fullmatch(node.value):
            yield f"{node.lineno}: {node.value!r}"
        if not isinstance(node, ast.Attribute):
            continue
        value = node.value
        if isinstance(value, ast.Name) and value.id == "torch" and node.attr.startswith(FORMATS):
            yield f"{node.lineno}: torch.{node.attr}"
        elif node.attr in ("bfloat16", "half"):
            yield f"{node.lineno}: .{node.attr}"
        elif node.attr in ("dtype", "element_size", "itemsize") and _is_weight(value):
            yield f"{node.lineno}: {ast.unparse(node)}"


def format_strings(source: str) -> Iterator[str]:
    """Yield where a file has the name of a format as a string, such as "int4" or f"int{bits}"."""
    for node in ast.walk(ast.parse(source)):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "4" for part in node.values)
        if NAMED_FORMAT.fullmatch(text):
            yield f"{node.lineno}: {ast.unparse(node)}"


def products(source: str) -> Iterator[str]:
    """Yield where a file calls a function of torch that takes a weight, such as F.conv2d(x, weight)."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith(MULTIPLYING):
            continue
        if ast.unparse(node.value) in ("F", "functional", "nn.functional", "torch.nn.functional", "torch"):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _is_weight(node: ast.expr) -> bool:
    """Return whether an expression names a weight, such as `weight`, `layer.up_weight` or `self.weights[0]`."""
    is_element = isinstance(node, ast.Subscript)
    while isinstance(node, ast.Subscript):
        node = node.value
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.endswith(("weight", "weights") if is_element else "weight")


def test_only_weights_and_kernels_name_a_weights_dtype():
    problems = {}
    for path in modules().values():
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(WEIGHT_CODE) and place not in NOT_WEIGHTS:
            problems[place] = list(named_formats(path.read_text(encoding="utf-8")))
    assert {place: lines for place, lines in problems.items() if lines} == {}


def test_only_weights_and_kernels_choose_by_the_name_of_a_format():
    found = _outside_weights(format_strings)
    assert {place: lines for place, lines in found.items() if place not in NOT_CHOICES} == {}
    assert set(NOT_CHOICES) <= set(found), "an exception that is not needed"


def test_only_weights_and_kernels_multiply_by_a_weight():
    assert _outside_weights(products) == {}


def _outside_weights(problems: Callable[[str], Iterator[str]]) -> dict[str, list[str]]:
    """Return what `problems` finds, by module, except in the code of weights and kernels."""
    places = {path.relative_to(ROOT).as_posix(): path for path in modules().values()}
    others = {place: path for place, path in places.items() if not place.startswith(WEIGHT_CODE)}
    found = {place: list(problems(path.read_text(encoding="utf-8"))) for place, path in others.items()}
    return {place: lines for place, lines in found.items() if lines}


def test_the_exceptions_name_no_weight():
    """A module with an exception may name a dtype but may not read a weight's own."""
    for place in NOT_WEIGHTS:
        lines = list(named_formats((ROOT / place).read_text(encoding="utf-8")))
        assert lines, f"{place} needs no exception"
        assert [line for line in lines if "weight" in line] == [], place


@pytest.mark.parametrize(
    ("source", "is_named"),
    [
        ("x.to(torch.bfloat16)", True),
        ("torch.empty(3, dtype=torch.float8_e4m3fn)", True),
        ("scale = torch.finfo(torch.int8).max", True),
        ("y = x.half()", True),
        ("if layer.weight.dtype == dtype: pass", True),
        ("size = self.weights[0].element_size()", True),
        ("up_weight.dtype", True),
        ('sizes = {"BF16": 2}', True),
        ("if stored.dtype in ('F8_E4M3', 'other'): pass", True),
        ("header['I8']", True),
        ("name = 'E4B'", False),
        ('"""Some checkpoints store BF16."""', False),
        ("x.to(torch.float32)", False),
        ("torch.zeros(8, dtype=torch.uint8)", False),  # raw bytes
        ("hidden_TD.dtype", False),
        ("weight.num_bytes", False),
        ("weights.dtype", False),  # code that makes weights knows the activations' dtype
    ],
)
def test_the_guard_itself(source, is_named):
    assert bool(list(named_formats(source))) == is_named


@pytest.mark.parametrize(
    ("source", "is_named"),
    [
        ('if scheme.kind == "int4": pass', True),
        ("if precision in ('fp8', 'auto'): pass", True),
        ('bits = {"nvfp4": 4}', True),
        ('kind = f"int{bits}"', True),
        ('match kind:\n    case "int8": pass', True),
        ('algorithm = "W4A16_NVFP4"', True),
        ('cache = "fp8_e4m3"', True),
        ('"""int4"""', True),
        ('"""Weights may be int4 or fp8."""', False),
        ('hint = "use --quantization fp8 or int4"', False),
        ('hint = f"use {name}-fp8"', False),
        ('type = "int"', False),
        ("scheme.column_unit", False),
    ],
)
def test_the_guard_of_names(source, is_named):
    assert bool(list(format_strings(source))) == is_named


@pytest.mark.parametrize(
    ("source", "is_product"),
    [
        ("y = F.conv2d(x, conv)", True),
        ("y = torch.nn.functional.linear(x, w)", True),
        ("y = torch.conv1d(x, w)", True),
        ("y = self.matrix.linear(x)", False),
        ("y = self.embedding(x)", False),
        ("y = F.layer_norm(x, norm.shape, norm)", False),
    ],
)
def test_the_guard_of_products(source, is_product):
    assert bool(list(products(source))) == is_product
