"""Whether a grammar can be compiled, within a limit that holds: in another process, which is ended when it takes too long.

Most grammars compile in a millisecond or two. Some small ones never end, an intersection of a few patterns for instance, and
the engine that compiles them heeds no call to stop. So each is compiled once in a process whose time and memory are bounded,
and only what came through is compiled where it is used. Processes start when they are needed and stay. No torch.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from culet.errors import BadRequest, InternalError, QueueFull
from culet.types import GRAMMAR_FAULT, GrammarSpec

TIME_LIMIT_S = 5.0
START_LIMIT_S = 60.0
MAX_BYTES = 2 << 30  # of a process's address space
MAX_PROCESSES = 2
MAX_KNOWN = 4096  # grammars that are remembered as good or bad
WAIT_LIMIT_S = 10.0  # for a process to be free
_TRIALS = 2


class GrammarCheck:
    """Says of grammars whether they may be used. Safe to call from several threads; a call blocks up to the limits."""

    def __init__(self, special_names: Sequence[str], *, time_limit_s: float = TIME_LIMIT_S) -> None:
        """`special_names` are the special tokens that a grammar may name."""
        self.time_limit_s = time_limit_s
        self._names = list(special_names)
        self._free = threading.Semaphore(MAX_PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._known: OrderedDict[str, str] = OrderedDict()  # key of a spec -> what is wrong with it, or nothing

    def check(self, spec: GrammarSpec) -> None:
        """Refuse what is no grammar, or takes too long or too much memory to compile."""
        key = spec.key
        with self._lock:
            problem = self._known.get(key)
        if problem is None:
            problem = self._ask(spec)
            with self._lock:
                self._known[key] = problem
                while len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        if problem:
            raise BadRequest(f"{GRAMMAR_FAULT}{problem}")

    def close(self) -> None:
        """End the processes that wait for work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _ask(self, spec: GrammarSpec) -> str:
        if not self._free.acquire(timeout=WAIT_LIMIT_S):
            raise QueueFull("too many grammars are being compiled", hint="try again later")
        try:
            for _ in range(_TRIALS):
                process = self._take()
                try:
                    problem = process.ask(json.dumps(asdict(spec)), self.time_limit_s)
                except TimeoutError:
                    process.end()
                    return f"stopped compiling after {self.time_limit_s:g} s; it is too complex"
                except OSError:  # it died: by this grammar, if the next one does so too
                    process.end()
                    continue
                with self._lock:
                    self._idle.append(process)
                return problem
            return "too complex: compiling it took too much memory"
        finally:
            self._free.release()

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        return _Process(self._names)


class _Process:
    """A running grammar_worker; `ask` sends one line and waits for one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "culet.sampling.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us alone
        )
        self.end = weakref.finalize(self, _end_process, self._process)  # also at exit
        try:
            self.ask(json.dumps({"names": list(names), "max_bytes": MAX_BYTES}), START_LIMIT_S)
        except OSError as error:
            self.end()
            raise InternalError(f"the process that compiles grammars did not start: {error}") from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: str, limit_s: float) -> str:
        """What is wrong, or nothing. Raises TimeoutError, or another OSError where the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        source = self._process.stdout.fileno()
        answer = b""
        while not answer.endswith(b"\n"):
            if not select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("no answer in time")
            piece = os.read(source, 1 << 16)
            if not piece:
                raise ConnectionError("the process ended")
            answer += piece
        return str(json.loads(answer)["error"])


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # unsent bytes to a dead process
                pipe.close()
    process.wait()
