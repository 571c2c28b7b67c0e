"""Compiles kernels into the cache on disk, in a process of its own and without the GPU; run by `compiling.CompilerProcesses`.

One JSON object per line: the first {"cache": folder} of Triton's cache, every further one {"module", "kernel", "capability",
"specialization"}, the last as Triton writes it for its compile hooks. Each is answered by {"error": why not, or nothing}, and a
compiled one by the name and the seconds besides.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from culet.kernels.compiling import settle_names


def main() -> None:
    """Answer until stdin ends, which it does when Culet is gone."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # whatever a compiler prints is no answer
    setup = json.loads(sys.stdin.readline())
    knobs.cache.dir = setup["cache"]
    knobs.compilation.store_binary_only = True  # nobody reads the steps in between, and a start would load them all
    settle_names()
    _answer(answers, {"error": ""})
    for line in sys.stdin:
        try:
            _answer(answers, _compile(json.loads(line)))
        except Exception as error:  # whoever asked compiles it again, and tells
            _answer(answers, {"error": f"{type(error).__name__}: {error}"})


def _answer(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel and the C function that launches it, unless they are on disk."""
    began = time.perf_counter()
    kernel = getattr(import_module(job["module"]), job["kernel"])
    given = json.loads(job["specialization"])
    constants = dict(zip(map(tuple, given["constant_keys"]), map(_constant, given["constant_vals"]), strict=True))
    attributes = dict(zip(map(tuple, given["attrs_keys"]), given["attrs_vals"], strict=True))
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in given["options"].items()}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, given["signature"], constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", job["capability"], 32), options=options)
    with suppress(Exception):  # where the launcher cannot be built, whoever asked tries again, and tells
        CudaLauncher(source, compiled.metadata)
    return {"error": "", "name": source.hash(), "seconds": time.perf_counter() - began}


def _constant(value: Any) -> Any:
    """A constant as the kernel is given it, from Triton's own JSON of it."""
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(value["constexpr"])
    return tl.dtype(value) if isinstance(value, str) and tl.dtype.is_dtype(value) else value


if __name__ == "__main__":
    main()
