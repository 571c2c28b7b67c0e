"""Start servers and the processes of Culet as forks of a process that has imported torch.

A server takes a second to import its packages. Engines, ranks, compilers and processes that decode media take three, and the
smaller ones a tenth or two, but there are hundreds of those. With `tests.forked`, each test process has a `Forker`, which was
forked before it had any threads, and so has each server that is started in this way. Without `tests.forked`, all of them are
ordinary processes, and so are those whose memory or start is tested.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

from jinja2 import Environment

import culet.child
import culet.line_process
from culet.text.template import BUILT_IN
from culet.text.template_worker import make_environment

# The modules that are forked, and what /proc/ID/comm says then, which has up to 15 characters.
_NAMES = {
    "culet.kernels.compiler_process": "forked-compiler",
    "culet.media.decoding.worker": "forked-decoder",
    "culet.runner.worker_process": "forked-rank",
    "culet.serve.markdown.worker": "forked-markdown",
    "culet.serve.process.engine": "forked-engine",
    "culet.structured.check_worker": "forked-grammar",
    "culet.text.template_worker": "forked-template",
}
# These limit their whole address space, of which a fork begins with gigabytes of torch's.
_LIMITED = ("culet.serve.markdown.worker", "culet.structured.check_worker", "culet.text.template_worker")
_MAX_MESSAGE_BYTES = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36

forker: Forker | None = None  # that of this process
_template: tuple[str, CodeType] | None = None  # the built-in chat template, and what Jinja compiles it to


class Forker:
    """A child process without threads that forks when asked to. The forks become children of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_MESSAGE_BYTES)
        if not os.fork():
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            ours.close()
            _serve(theirs)
        theirs.close()
        self._connection = ours

    def start(
        self, work: Callable[..., None], *arguments: Any, environment: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> Forked:
        """Call `work` in a fork whose open descriptors are /dev/null and these, by their numbers there."""
        task = work, arguments, dict(environment), list(descriptors), os.getcwd()
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the fork's own parent ends, and this process takes its place
            try:
                socket.send_fds(self._connection, [pickle.dumps(task)], list(descriptors.values()))
                process_id = int(self._connection.recv(100))
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return Forked(process_id)


class Forked(subprocess.Popen[bytes]):
    """A fork, with the methods of other child processes."""

    def __init__(self, process_id: int) -> None:
        self.args, self.pid, self.returncode = "fork", process_id, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock, self._sigint_wait_secs = True, threading.Lock(), 0.25


class _Subprocess(types.ModuleType):
    """The module `subprocess`, but modules of Culet are forked."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @staticmethod
    def Popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: N802
        is_module = command[3:4] == [culet.child._MAIN]
        if forker is None or not is_module or command[5] not in _NAMES:
            return subprocess.Popen(command, **options)
        module, arguments = command[5], command[6:]
        descriptors = {descriptor: descriptor for descriptor in options.get("pass_fds", ())}
        pipes = {number: os.pipe() for number, name in enumerate(("stdin", "stdout")) if options.get(name) == subprocess.PIPE}
        descriptors |= {number: pipe[number] for number, pipe in pipes.items()}
        with open(os.devnull, "w") as nothing:
            if options.get("stderr") == subprocess.DEVNULL:
                descriptors[2] = nothing.fileno()
            forked = forker.start(_run_module, module, arguments, environment=options["env"], descriptors=descriptors)
        for number, pipe in pipes.items():
            os.close(pipe[number])
        forked.stdin = os.fdopen(pipes[0][1], "wb") if 0 in pipes else None
        forked.stdout = os.fdopen(pipes[1][0], "rb") if 1 in pipes else None
        return forked


def compile_template() -> None:
    """Compile the built-in chat template for forks. It takes them longer than all else that they do when they start."""
    global _template
    source = BUILT_IN.read_text(encoding="utf-8")
    _template = source, make_environment().compile(source)


def _use_compiled_template() -> None:
    if _template is not None:
        (known, code), compile_ = _template, Environment.compile
        Environment.compile = lambda self, source: code if source == known else compile_(self, source)  # type: ignore


def install() -> None:
    """Fork the processes that this one starts. Call this before any thread is started."""
    global forker
    forker = Forker()
    culet.child.subprocess = culet.line_process.subprocess = _Subprocess("subprocess")  # type: ignore[assignment]


def runs_module(process_id: int | str, module: str) -> bool:
    """Return whether a process runs this module of Culet as its program."""
    folder = Path("/proc", str(process_id))
    return module.encode() in (folder / "cmdline").read_bytes() or (folder / "comm").read_text().strip() == _NAMES[module]


def children(process_id: int, module: str) -> list[int]:
    """Return the ids of a process's children that run this module. Threads and children may end meanwhile."""
    found = []
    for listed in Path("/proc", str(process_id), "task").glob("*/children"):  # each thread has its own
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                with suppress(OSError):
                    found += [child] if runs_module(child, module) else []
    return found


def _run_module(module: str, arguments: list[str]) -> None:
    os.setpgid(0, 0)
    _prctl(_PR_SET_NAME, _NAMES[module].encode())
    if module in _LIMITED:
        _raise_memory_limits()
    if module == "culet.text.template_worker":
        _use_compiled_template()
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # a new process has not imported it either, and runpy would warn
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _raise_memory_limits() -> None:
    """Let limits on the address space count from its present size."""
    inherited = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    set_limit = resource.setrlimit

    def set_further(kind: int, limits: tuple[int, int]) -> None:
        further = inherited if kind == resource.RLIMIT_AS else 0
        set_limit(kind, (limits[0] + further, limits[1] + further))

    resource.setrlimit = set_further


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _serve(connection: socket.socket) -> NoReturn:
    while True:
        message, received, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 8)
        if not message:
            os._exit(0)
        read_end, write_end = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            child = os.fork()
            if child:
                os.write(write_end, str(child).encode())
                os._exit(0)
            while os.getppid() == between:  # a signal at the parent's end must be that of the next parent
                time.sleep(0.001)
            _run(pickle.loads(message), received)
        os.waitpid(between, 0)
        connection.send(os.read(read_end, 100))
        for descriptor in (read_end, write_end, *received):
            os.close(descriptor)


def _run(task: tuple[Callable[..., None], Sequence[Any], dict[str, str], list[int], str], received: list[int]) -> NoReturn:
    """Do what a new Python process would do, and end as it would."""
    work, arguments, environment, wanted, folder = task
    code = 1
    try:
        _take_descriptors(dict(zip(wanted, received, strict=True)))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        # What the tests' collection left to be done at the end is not this process's to do.
        atexit._clear()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        work(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _take_descriptors(descriptors: dict[int, int]) -> None:
    """Keep these descriptors open, under these numbers, and nothing else."""
    first = max(*descriptors, *descriptors.values(), 9) + 1
    moved = {}
    for place, (number, descriptor) in enumerate(descriptors.items()):
        moved[number] = first + place
        os.dup2(descriptor, moved[number])
    if 0 not in descriptors:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
    begin = 3
    for number in [*sorted(number for number in descriptors if number > 2), os.sysconf("SC_OPEN_MAX")]:
        if begin < number:
            os.closerange(begin, number)
        begin = number + 1


def start_server(code: str, argument: str, log: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Fork a process that runs this code like `python -c`, with stderr in `log`. Return None if this process has no forker."""
    if forker is None:
        return None
    with open(os.devnull, "w") as nothing:
        streams = {1: nothing.fileno(), 2: log}
        return forker.start(_run_server, code, argument, environment=environment, descriptors=streams)


def _run_server(code: str, argument: str) -> None:
    install()
    sys.argv = ["-c", argument]
    exec(code, {"__name__": "__main__"})
