"""Run tests in Triton's interpreter.

Triton chooses the interpreter when kernels are imported, so the test file is run again in a separate process.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(file: str, marked: str = "not slow") -> None:
    """Run the tests of `file` with these marks in the interpreter. Fail if any test fails or none runs."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take seconds to load, and these tests use none
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", marked, file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


class _Scope:
    """What `_patch_lang` returns: it undoes the patches. Then the next launch patches again."""

    def __init__(self, scope: Any, patched: set[int]) -> None:
        self._scope, self._patched = scope, patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


def _patch_once_per_launch() -> None:
    """Make the interpreter faster: it patches triton.language in every call of a function, which takes longer than the call."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[int]()

    def patch_once(fn: Any) -> Any:
        if (key := id(fn.__globals__)) in patched:
            return None  # only a launch uses the scope, and it is the first to patch
        patched.add(key)
        return _Scope(patch(fn), patched)

    interpreter._patch_lang = patch_once


def _skip_overflow_checks() -> None:
    """Make the interpreter faster: it checks every operation of integers for overflow, but reports it only to debuggers."""
    from triton.language.semantic import TritonSemantic

    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None


def _describe_types_once() -> None:
    """Make the interpreter faster: it looks up and names the types of all values again and again."""
    from triton.language import core
    from triton.runtime import interpreter

    def start(self: Any, types: list[Any], fields: list[str] | None = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def name(self: Any) -> str:
        return "[" + ",".join(f"{field}:{kind}" for field, kind in zip(self.fields, self.types, strict=False)) + "]"

    look_up = interpreter._get_np_dtype
    look_up_once = functools.cache(look_up)
    core.tuple_type.__init__, core.tuple_type.name = start, property(name)
    interpreter._get_np_dtype = lambda kind: look_up(kind) if kind.scalar.is_ptr() else look_up_once(kind.scalar)


if INTERPRETED:
    _patch_once_per_launch()
    _skip_overflow_checks()
    _describe_types_once()
