"""Compiling kernels: once, in parallel, kept on disk; and a count of what was compiled and what was found there."""

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
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from queue import SimpleQueue
from typing import Any

from culet import env
from culet.errors import InternalError
from culet.line_process import LineProcess
from culet.log import logger
from culet.version import __version__

_MAX_WORKERS = 16
_COMPILE_LIMIT_S = 120.0  # for one kernel; the slowest take 3
_SILENT_WAIT_S = 1.0  # for another process that compiles into the same folder


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
            seconds = _compiled_elsewhere.pop(src.hash(), None) if _compiled_elsewhere else None
            self.found += seconds is None
            self.compiled += seconds is not None
            self.seconds += seconds or 0.0
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


_compiled_elsewhere: dict[str, float] = {}  # by name: seconds that a compiler process took, until the kernel is loaded


def cache_folder() -> Path:
    return Path(env.CACHE_DIR.get()).expanduser()


def use_disk_cache() -> CompileCount:
    """Keep compiled kernels under CULET_CACHE_DIR (TRITON_CACHE_DIR, where set, wins), and count from now on."""
    from triton import knobs

    settle_names()
    if "TRITON_CACHE_DIR" not in os.environ:
        knobs.cache.dir = str(cache_folder() / "triton")
    count = CompileCount()
    knobs.compilation.listener = count.listen
    return count


def settle_names() -> None:
    """Let every kernel find its name on disk, always in the same order.

    Triton names a kernel by its source and by what it calls, and the name depends on which of two kernels that call the same
    function was named first: another order, and a second start would compile some of them again.
    """
    import culet.kernels.triton as package

    for module in sorted(info.name for info in iter_modules(package.__path__)):
        for _, kernel in sorted(vars(import_module(f"{package.__name__}.{module}")).items()):
            getattr(kernel, "cache_key", None)  # worked out when it is asked for


class CompilerProcesses:
    """Processes that compile kernels into the cache on disk, one kernel at a time each.

    Threads would share Python's lock, under which three quarters of a compilation run: 16 of them are as fast as one.
    """

    def __init__(self, count: int | None = None) -> None:
        """Start them, by default one per core, and do not wait for it."""
        from triton import knobs

        self.count = count or _num_workers()
        self._free: SimpleQueue[LineProcess | None] = SimpleQueue()  # None: one that did not start, or broke
        self._is_closed = False
        self._first_line = json.dumps({"cache": knobs.cache.dir})
        for _ in range(self.count):
            threading.Thread(target=self._start, daemon=True).start()

    def compile(self, job: str) -> None:
        """Have one kernel compiled, and wait. Where that fails, it is not on disk afterwards, and no more."""
        process = self._free.get()
        if process is not None:
            try:
                answer = process.ask(job, _COMPILE_LIMIT_S)
                if answer["error"]:
                    logger.debug("a compiler process failed: %s", answer["error"])
                else:
                    _compiled_elsewhere[answer["name"]] = answer["seconds"]
            except OSError:
                process.end()
                process = None
        self._free.put(process)

    def close(self) -> None:
        """End them all."""
        self._is_closed = True
        for _ in range(self.count):
            process = self._free.get()
            if process is not None:
                process.end()

    def _start(self) -> None:
        process = None
        if not self._is_closed:
            try:
                process = LineProcess(["-m", "culet.kernels.compiler_process"], "compiles kernels", self._first_line)
            except InternalError as error:
                logger.warning("%s: kernels are compiled here instead, more slowly", error)
        self._free.put(process)


def _num_workers() -> int:
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0))))


_expected: list[CompilerProcesses] = []  # at most one lot: started ahead of the block that needs them, or by it


def expect_compiling() -> None:
    """Start the compiler processes now if nothing was ever compiled here: they take seconds, in which weights can be loaded.

    After `use_disk_cache`. The next `compile_ahead` takes them, and there has to be one.
    """
    if not _expected and not any((cache_folder() / "warm").glob("*")):
        _expected.append(CompilerProcesses())


@contextmanager
def compile_ahead(mark: Path | None = None) -> Iterator[None]:
    """Within, launches do not run: their kernels are compiled, several at a time, and ready when the block ends.

    One process at a time is within, of those that share a folder of kernels; the others wait, and find on disk what they have
    in common. `mark` is made at the end, so that whoever waited for these kernels sees it.
    """
    import torch
    from triton import knobs
    from triton.runtime._async_compile import AsyncCompileMode

    from culet.kernels.triton.launch import only_warm

    device = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(device)
    noted: list[tuple[str, str]] = []  # name and job of the kernel that Triton is about to submit
    # Triton loads the C function that launches a kernel as a module, and all of these have one name. Python keeps one such
    # module and fills it anew when a file is loaded again, so that a second thread could be given another kernel's function.
    loading = threading.Lock()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        """What Triton calls before it compiles a kernel."""
        job = {"module": fn.module, "kernel": fn.name, "capability": 10 * major + minor}
        noted[:] = [(fn.jit_function.__name__, json.dumps({**job, "specialization": compile["specialization_data"]}))]

    def make(job: str | None, find: Callable[[], Any]) -> Any:
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
            is_missing = key not in self.future_kernels and not _is_on_disk(key, name)
            if is_missing and not _expected:
                _expected.append(CompilerProcesses())
            return super().submit(key, partial(make, job if is_missing else None, compile_fn), finalize_fn)

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
    """Within, no other process is in such a block with the same folder; one that dies is out of it."""
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that cannot be written to, or a file system without locks: all compile at once
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "compiling.lock").open("a"))
            tell = threading.Timer(_SILENT_WAIT_S, logger.info, ("another process compiles kernels into %s: waiting", folder))
            tell.start()
            try:
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            finally:
                tell.cancel()
        yield


def _is_on_disk(key: str, name: str) -> bool:
    """Whether Triton's cache has the kernel of this key."""
    from triton.runtime.cache import get_cache_manager

    return bool(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(f"{name[:150]}.json"))


def mark_of(*facts: object) -> Path:
    """The file that says that every kernel for `facts` (a model's shape, a GPU) is on disk, in this version of the code."""
    import triton

    digest = hashlib.sha256(repr((__version__, triton.__version__, facts)).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return cache_folder() / "warm" / digest.hexdigest()[:24]
