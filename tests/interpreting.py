"""Run tests in Triton's interpreter.

Triton chooses the interpreter when kernels are imported, so the test file is run again in a separate process. That process
would take seconds to import torch. With `tests.forked` it is therefore a fork of a process that has already done so.
"""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ADDRESS = "CULET_TEST_INTERPRETER"  # environment variable: the name of the socket of `fork_interpreter`
SETTINGS = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
SETTINGS["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take seconds to load, and these tests use none
TIMEOUT_S = 1500


def run_interpreted(file: str, marked: str = "not slow") -> None:
    """Run the tests of `file` with these marks in the interpreter. Fail if any test fails or none runs."""
    arguments = ["-x", "-p", "no:cacheprovider", "-m", marked, file]
    status, output = _run_in_fork(arguments) if ADDRESS in os.environ else _run(arguments)
    assert status == 0, output[-6000:]
    assert " passed" in output


def _run(arguments: list[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", *arguments]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=os.environ | SETTINGS, **streams, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stdout


def _run_in_fork(arguments: list[str]) -> tuple[int, str]:
    with Client("\0" + os.environ[ADDRESS]) as connection:
        connection.send(arguments)
        assert connection.poll(TIMEOUT_S), "no answer from the interpreter"
        status, output = connection.recv()  # an EOFError if the fork crashed
        return status, output


def fork_interpreter() -> int:
    """Fork a process that runs what `run_interpreted` asks for. Return its id. Call this before any thread is started."""
    os.environ[ADDRESS] = f"culet-test-interpreter-{secrets.token_hex(8)}"
    with Listener("\0" + os.environ[ADDRESS], backlog=64) as listener:  # a name without a file, which Linux has
        process_id = os.fork()
        if not process_id:
            _serve_forks(listener)
    return process_id


def _serve_forks(listener: Listener) -> None:
    """Answer each request in a fork. The forks import kernels again, because these were not imported for the interpreter."""
    os.environ.update(SETTINGS)
    for name in list(sys.modules):
        if name.split(".")[0] in ("culet", "tests", "triton") and not name.startswith("triton._C"):
            del sys.modules[name]
    while True:
        with listener.accept() as connection:
            if not os.fork():
                try:
                    connection.send(_run_here(connection.recv()))
                finally:
                    os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _run_here(arguments: list[str]) -> tuple[int, str]:
    with tempfile.NamedTemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        status = int(pytest.main(arguments))
        sys.stdout.flush()
        return status, Path(file.name).read_text()


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
