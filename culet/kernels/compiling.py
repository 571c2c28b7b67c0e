"""Compile kernels once, in parallel, into a disk cache. Count how many were compiled and how many were already there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from queue import SimpleQueue
from typing import Any

from culet import env, hardware
from culet.errors import InternalError
from culet.line_process import LineProcess
from culet.log import logger
from culet.version import __version__

_MAX_WORKERS = 16
_COMPILE_LIMIT_S = 120.0  # for one kernel. The slowest takes 3 s.
_SILENT_WAIT_S = 1.0  # before the log says that another process is compiling into the same folder


@dataclass
class CompileCount:
    """Count the kernels that were compiled and the kernels that were found on disk."""

    compiled: int = 0
    found: int = 0
    seconds: float = 0.0  # spent compiling, summed over all workers
    is_serving: bool = False
    while_serving: int = 0  # compiled after the startup

    def listen(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """Count one kernel. Triton calls this after each kernel."""
        seconds = _compiled_elsewhere.pop(src.hash(), None) if cache_hit else times.total / 1e6
        if seconds is None:
            self.found += 1
            return
        self.compiled += 1
        self.seconds += seconds
        if self.is_serving:
            self.while_serving += 1
            name = getattr(src, "name", "?")
            text = "kernel %s was compiled while serving, which took %.1f s: the rehearsal at startup missed it"
            logger.warning(text, name, seconds)

    def begin_serving(self) -> None:
        """From now on, count and warn about every compilation, because a step waits for it."""
        self.is_serving = True


# Seconds that a compiler process took, by source hash. An entry is removed when its kernel is loaded from disk.
_compiled_elsewhere: dict[str, float] = {}


def cache_folder() -> Path:
    return Path(env.CACHE_DIR.get()).expanduser()


def use_disk_cache() -> CompileCount:
    """Keep compiled kernels under CULET_CACHE_DIR, or under TRITON_CACHE_DIR if that is set. Start counting kernels."""
    from triton import knobs

    hash_kernels()
    if "TRITON_CACHE_DIR" not in os.environ:
        knobs.cache.dir = str(cache_folder() / "triton")
    count = CompileCount()
    knobs.compilation.listener = count.listen
    return count


@cache
def hash_kernels() -> None:
    """Hash all kernels in a fixed order, so that every process finds them on disk under the same names.

    Triton hashes a kernel's source, the functions it calls, and the constants that both use. But it reads the constants of a
    called function before it hashes that function, so the first of two callers to be hashed misses them. The names therefore
    depend on the order. With a different order, the next start would compile some kernels again.
    """
    import culet.kernels.triton as package

    for module in sorted(info.name for info in walk_packages(package.__path__, f"{package.__name__}.")):
        for _, kernel in sorted(vars(import_module(module)).items()):
            getattr(kernel, "cache_key", None)  # computed on first access


class CompilerProcesses:
    """Processes that compile kernels into the disk cache. Each compiles one kernel at a time.

    Threads would share Python's lock, which a compilation holds for three quarters of its time. 16 threads are no faster
    than one.
    """

    def __init__(self, count: int | None = None) -> None:
        """Start the processes without waiting for them. The default is one per core."""
        self.count = count or _num_workers()
        self._free: SimpleQueue[LineProcess | None] = SimpleQueue()  # None if the process failed or did not start
        self._is_closed = False
        for _ in range(self.count):
            threading.Thread(target=self._start, daemon=True).start()

    def compile(self, job: str) -> None:
        """Compile one kernel and wait for it. If this fails, the kernel is not on disk."""
        process = self._free.get()
        if process is not None:
            try:
                answer = process.ask(job, _COMPILE_LIMIT_S)
                if answer["error"]:
                    logger.debug("a compiler process failed: %s", answer["error"])
                else:
                    count_elsewhere(answer)
            except OSError:
                process.end()
                process = None
        self._free.put(process)

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for _ in range(self.count):
            process = self._free.get()
            if process is not None:
                process.end()

    def _start(self) -> None:
        process = None
        if not self._is_closed:
            try:
                process = start_compiler(has_launchers=True)
            except InternalError as error:
                logger.warning("compiling kernels in this process instead, which is slower: %s", error)
        self._free.put(process)


def start_compiler(*, has_launchers: bool) -> LineProcess:
    """Start a process that compiles kernels: for one architecture, or without launchers for any. See `compiler_process`."""
    first_line = json.dumps({"has_launchers": has_launchers})
    return LineProcess("culet.kernels.compiler_process", "compiles kernels", first_line)


def count_elsewhere(answer: dict[str, Any]) -> None:
    """Count a kernel as compiled, even though this process will find it on disk."""
    _compiled_elsewhere[answer["hash"]] = answer["seconds"]


def _num_workers() -> int:
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0))))


_expected: list[CompilerProcesses] = []  # at most one, started by `expect_compiling` or `compile_ahead`


def expect_compiling() -> None:
    """Start the compiler processes now if the disk cache is empty. They take seconds to start while the weights load.

    Call this after `use_disk_cache`. Call `compile_ahead` later, which uses the processes and ends them.
    """
    if not _expected and not any((cache_folder() / "warm").glob("*")):
        _expected.append(CompilerProcesses())


@contextmanager
def compile_ahead(mark: Path | None = None) -> Iterator[None]:
    """Compile the kernels of all launches in this block, several at a time, without running them.

    The kernels are ready when the block ends. Among processes that share a cache folder, only one is in this block at a time.
    The others wait, and then find the kernels they have in common on disk. The file `mark` is created at the end, for the
    processes that waited for these kernels.
    """
    import torch
    from triton import knobs
    from triton.runtime._async_compile import AsyncCompileMode

    from culet.kernels.triton.launch import only_warm

    device = torch.cuda.current_device()
    capability = hardware.capability_of(device)
    noted: list[tuple[str, str]] = []  # name and job of the kernel that Triton is about to submit
    # Triton loads the C function that launches a kernel as a module, and all these modules have the same name. Python keeps
    # one module and refills it when the next file is loaded, so a second thread could get another kernel's function.
    loading = threading.Lock()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        """Note the kernel's name and job. Triton calls this before it compiles a kernel."""
        job = {"cache": knobs.cache.dir, "module": fn.module, "kernel": fn.name, "capability": capability}
        noted[:] = [(fn.jit_function.__name__, json.dumps({**job, "specialization": compile["specialization_data"]}))]

    def load(job: str | None, find: Callable[[], Any]) -> Any:
        if job is not None:
            _expected[0].compile(job)
        kernel = find()
        torch.cuda.set_device(device)
        with loading:
            kernel._init_handles()
        return kernel

    class Mode(AsyncCompileMode):
        def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
            name, job = noted.pop()
            is_missing = key not in self.future_kernels and not is_on_disk(key, name)
            if is_missing and not _expected:
                _expected.append(CompilerProcesses())
            return super().submit(key, partial(load, job if is_missing else None, compile_fn), finalize_fn)

    hook_before = knobs.runtime.jit_cache_hook
    try:
        with _alone_in(Path(knobs.cache.dir)), ThreadPoolExecutor(_num_workers()) as pool:
            knobs.runtime.jit_cache_hook = note
            with Mode(pool), only_warm():
                yield
            if mark is not None:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
    finally:
        knobs.runtime.jit_cache_hook = hook_before
        while _expected:
            _expected.pop().close()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let only one process at a time into this block for `folder`. A process that dies releases it."""
    with ExitStack() as stack:
        with suppress(OSError):  # If the folder is read-only or the file system has no locks, all compile at once.
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "compiling.lock").open("a"))
            tell = threading.Timer(
                _SILENT_WAIT_S, logger.info, ("waiting for another process that is compiling kernels into %s", folder)
            )
            tell.start()
            try:
                fcntl.flock(file, fcntl.LOCK_EX)  # held until the file is closed
            finally:
                tell.cancel()
        yield


def is_on_disk(key: str, name: str) -> bool:
    """Return whether Triton's cache has the kernel with this key."""
    from triton.runtime.cache import get_cache_manager

    return bool(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(f"{name[:150]}.json"))


def mark_of(*facts: object) -> Path:
    """Return the path that exists if this version of the code compiled all kernels for `facts` (a model's shape, a GPU).

    The path depends on every file of the package, because code outside the kernels also decides which kernels are launched.
    """
    import triton

    digest = hashlib.sha256(repr((__version__, triton.__version__, facts)).encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return cache_folder() / "warm" / digest.hexdigest()[:24]
