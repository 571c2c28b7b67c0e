"""Compiling kernels: once, in parallel, kept on disk; and a count of what was compiled and what was found there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from culet import __version__, env
from culet.log import logger

_MAX_WORKERS = 16


@dataclass
class CompileCount:
    """Kernels that were compiled since counting began, and those that were found on disk."""

    compiled: int = 0
    found: int = 0
    seconds: float = 0.0  # spent compiling, by all workers together
    is_serving: bool = False

    def listen(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """What Triton calls after each kernel."""
        if cache_hit:
            self.found += 1
            return
        self.compiled += 1
        self.seconds += times.total / 1e6
        if self.is_serving:
            name = getattr(src, "name", "?")
            logger.warning(
                "kernel %s was compiled while serving, in %.1f s: the start has not foreseen it", name, times.total / 1e6
            )

    def begin_serving(self) -> None:
        """From now on every compilation is one too many, and is told."""
        self.is_serving = True


def cache_folder() -> Path:
    return Path(env.CACHE_DIR.get()).expanduser()


def use_disk_cache() -> CompileCount:
    """Keep compiled kernels under CULET_CACHE_DIR (TRITON_CACHE_DIR, where set, wins), and count from now on."""
    from triton import knobs

    _settle_names()
    if "TRITON_CACHE_DIR" not in os.environ:
        knobs.cache.dir = str(cache_folder() / "triton")
    count = CompileCount()
    knobs.compilation.listener = count.listen
    return count


def _settle_names() -> None:
    """Let every kernel find its name on disk, always in the same order.

    Triton names a kernel by its source and by what it calls, and the name depends on which of two kernels that call the same
    function was named first: another order, and a second start would compile some of them again.
    """
    import culet.kernels.triton as package

    for module in sorted(info.name for info in iter_modules(package.__path__)):
        for _, kernel in sorted(vars(import_module(f"{package.__name__}.{module}")).items()):
            getattr(kernel, "cache_key", None)  # worked out when it is asked for


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Within, launches do not run: their kernels are compiled, several at a time, and ready when the block ends."""
    import torch
    from triton.runtime._async_compile import AsyncCompileMode

    from culet.kernels.triton.launch import only_warm

    device = torch.cuda.current_device()

    def load(kernel: Any) -> None:
        # Each kernel has a launcher in C besides, which is compiled when the kernel is loaded.
        torch.cuda.set_device(device)
        kernel._init_handles()

    workers = max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(workers) as pool:
        mode = AsyncCompileMode(pool)
        with mode, only_warm():
            yield
        list(pool.map(load, [future.result() for future in mode.future_kernels.values()]))


def mark_of(*facts: object) -> Path:
    """The file that says that every kernel for `facts` (a model's shape, a GPU) is on disk, in this version of the code."""
    import triton

    digest = hashlib.sha256(repr((__version__, triton.__version__, facts)).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return cache_folder() / "warm" / digest.hexdigest()[:24]
