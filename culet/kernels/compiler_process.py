"""Compile kernels into the disk cache in a separate process, without a GPU. `compiling` and `cross_compile` start it.

Each line of input is a JSON object. The first is {"has_launchers"}, which says whether to also build the C function that
launches each kernel. Every further line is {"cache", "module", "kernel", "capability", "specialization"}. These are Triton's
cache folder, the kernel, the GPU to compile for, and the data that Triton passes to its compile hooks. The answer to each line
has {"error"}, which is empty on success. If a kernel was compiled, its answer also has the hash of the source and the seconds
taken.

A process compiles for one architecture. Triton 3.6 chooses its fp8 conversions for the first kernel of a process and keeps
them. After a kernel for sm_90, kernels for sm_89 would get an instruction that sm_89 does not have. After a kernel for sm_89,
kernels for sm_90 would get slow conversions. Without launchers, the process compiles nothing itself but forks for each
architecture. A fork need not load torch again, which takes seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any, TextIO

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from culet.kernels.compiling import hash_kernels


def main() -> None:
    """Answer requests until stdin ends, which happens when Culet exits."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # keep compiler output out of the answers
    has_launchers = json.loads(sys.stdin.readline())["has_launchers"]
    # Kernels that are launched are stored without their intermediate representations, which every start would load.
    knobs.compilation.store_binary_only = has_launchers
    hash_kernels()
    _answer(answers, {"error": ""})
    if has_launchers:
        compile_jobs(sys.stdin, answers, has_launchers=True)
    else:
        _pass_on_jobs(sys.stdin, answers)


def compile_jobs(jobs: Iterable[str], answers: TextIO, *, has_launchers: bool) -> None:
    """Answer jobs for one architecture until there are no more."""
    capability = None
    for line in jobs:
        job = json.loads(line)
        capability = capability or job["capability"]
        try:
            if job["capability"] != capability:
                raise ValueError(f"this process compiles for sm_{capability}, not for sm_{job['capability']}")
            _answer(answers, _compile(job, has_launchers))
        except Exception as error:  # the caller decides what to do
            _answer(answers, {"error": f"{type(error).__name__}: {error}"})


def _pass_on_jobs(jobs: Iterable[str], answers: TextIO) -> None:
    """Have each job answered by the fork for its architecture."""
    forks: dict[int, TextIO] = {}
    for line in jobs:
        capability = json.loads(line)["capability"]
        if capability not in forks:
            forks[capability] = _fork()
        fork = forks[capability]
        fork.write(line)
        fork.flush()
        answer = fork.readline()
        if not answer:
            del forks[capability]
        answers.write(answer or '{"error": "the compiler crashed"}\n')
        answers.flush()


def _fork() -> TextIO:
    """Start a copy of this process that compiles for one architecture. Return a file for its jobs and answers.

    The copy ends when the file is closed, as it is when this process ends.
    """
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        with theirs.makefile("rw") as file:
            compile_jobs(file, file, has_launchers=False)
        os._exit(0)
    theirs.close()
    return ours.makefile("rw")


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _compile(job: dict[str, Any], has_launchers: bool) -> dict[str, Any]:
    """Compile one kernel and the C function that launches it, unless they are already on disk."""
    began = time.perf_counter()
    knobs.cache.dir = job["cache"]
    kernel = getattr(import_module(job["module"]), job["kernel"])
    given = json.loads(job["specialization"])
    constants = dict(zip(map(tuple, given["constant_keys"]), map(_constant, given["constant_vals"]), strict=True))
    attributes = dict(zip(map(tuple, given["attrs_keys"]), given["attrs_vals"], strict=True))
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in given["options"].items()}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, given["signature"], constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", job["capability"], 32), options=options)
    if has_launchers:
        with suppress(Exception):  # If the launcher cannot be built, the caller tries again and reports the error.
            CudaLauncher(source, compiled.metadata)
    return {"error": "", "hash": source.hash(), "seconds": time.perf_counter() - began}


def _constant(value: Any) -> Any:
    """Convert a constant from Triton's JSON to the value that the kernel receives."""
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(value["constexpr"])
    return tl.dtype(value) if isinstance(value, str) and tl.dtype.is_dtype(value) else value


if __name__ == "__main__":
    main()
