"""Files and functions of the package, including GPU kernels, are short enough to read in one sitting."""

from __future__ import annotations

import ast
from pathlib import Path

import culet

ROOT = Path(culet.__file__).parent
FILE_LINES = 500
FUNCTION_LINES = 80
FILES = sorted(ROOT.rglob("*.py"))


def long_functions(source: str) -> list[str]:
    """Return the names and lengths, without decorators, of functions that are too long."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                problems.append(f"{node.name} has {length} lines")
    return problems


def test_the_rule_itself() -> None:
    line = "        pass\n"
    assert long_functions("@cut\ndef short():\n" + line * (FUNCTION_LINES - 1)) == []
    assert long_functions("class A:\n    async def long():\n" + line * FUNCTION_LINES) == ["long has 81 lines"]


def test_files_and_functions_are_short() -> None:
    problems = {}
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        num_lines = len(source.splitlines())
        found = long_functions(source) + ([f"it has {num_lines} lines"] if num_lines > FILE_LINES else [])
        if found:
            problems[path.relative_to(ROOT).as_posix()] = found
    assert problems == {}
