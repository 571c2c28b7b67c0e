"""Compile kernels for a GPU that is not present, to check that they fit it."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key

from culet.errors import InternalError
from culet.kernels.compiling import count_elsewhere, hash_kernels, is_on_disk, start_compiler
from culet.kernels.triton.launch import Launch
from culet.line_process import LineProcess

_LIMIT_S = 600.0  # for one kernel, even on a busy machine

_compiler: LineProcess | None = None


def compile_for(launch: Launch, capability: int) -> Any:
    """Return the kernel of `launch` compiled for `capability` (90 is sm_90). Its tensors may be on the meta device.

    A compiler process compiles the kernel, and this process loads it from the disk cache. If this process compiled it, kernels
    for other architectures could become wrong (see `compiler_process`).
    """
    hash_kernels()
    signature, constants, attributes = launch.specialization()
    kernel, target = launch.kernel, GPUTarget("cuda", capability, 32)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    backend = make_backend(target)
    key = get_cache_key(source, backend, backend.parse_options(launch.options), get_cache_invalidating_env_vars())
    if not is_on_disk(key, source.name):
        specialization = {
            "signature": signature,
            "constant_keys": [list(place) for place in constants],
            "constant_vals": list(constants.values()),
            "attrs_keys": [list(place) for place in attributes],
            "attrs_vals": list(attributes.values()),
            "options": launch.options,
        }
        job = {"cache": knobs.cache.dir, "module": kernel.__module__, "kernel": kernel.__name__, "capability": capability}
        answer = _find_compiler().ask(json.dumps({**job, "specialization": json.dumps(specialization)}), _LIMIT_S)
        if answer["error"]:
            raise InternalError(f"{source.name} does not compile for sm_{capability}: {answer['error']}")
        count_elsewhere(answer)
    return triton.compile(source, target=target, options=launch.options)


def _find_compiler() -> LineProcess:
    global _compiler
    if _compiler is None or not _compiler.is_alive:
        _compiler = start_compiler(has_launchers=False)
    return _compiler
