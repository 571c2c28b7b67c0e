"""Whether a grammar can be compiled, within a limit that holds: in another process, which is ended when it takes too long.

Most grammars compile in a millisecond or two. Some small ones never end, an intersection of a few patterns for instance, and
the engine that compiles them heeds no call to stop. So each is compiled once in a process whose time and memory are bounded,
and only what came through is compiled where it is used. Processes start when they are needed and stay. No torch.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

from culet.errors import BadRequest, QueueFull
from culet.line_process import LineProcess
from culet.types import GRAMMAR_FAULT, GrammarSpec

TIME_LIMIT_S = 5.0
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
        self._idle: list[LineProcess] = []
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
                    problem = str(process.ask(json.dumps(asdict(spec)), self.time_limit_s)["error"])
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

    def _take(self) -> LineProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        first_line = json.dumps({"names": self._names, "max_bytes": MAX_BYTES})
        return LineProcess(["-m", "culet.structured.worker"], "compiles grammars", first_line)
