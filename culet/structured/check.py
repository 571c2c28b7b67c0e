"""Check that a grammar compiles within limits on time and memory. No torch.

Most grammars compile in a millisecond or two. Some small ones never finish, such as an intersection of a few patterns, and
llguidance cannot be interrupted. Each grammar is therefore compiled first in a separate process with a memory limit, which is
killed if it takes too long. Only grammars that pass are compiled in the engine. Processes start on demand and keep running.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

from culet.errors import BadRequest, QueueFull
from culet.line_process import LineProcess
from culet.text.tokenizer import Tokenizer
from culet.types import GRAMMAR_FAULT, GrammarSpec

TIME_LIMIT_S = 5.0
MAX_BYTES = 2 << 30  # limit on a process's address space
MAX_PROCESSES = 2
MAX_VERDICTS = 4096  # grammars whose verdict is remembered
WAIT_LIMIT_S = 10.0  # longest wait for a free process
_ATTEMPTS = 2


class GrammarCheck:
    """Refuses grammars that cannot be used. Thread-safe. A call blocks until the check is done or a limit is reached."""

    def __init__(self, special_names: Sequence[str], *, time_limit_s: float = TIME_LIMIT_S) -> None:
        """Create a check. `special_names` are the special tokens that a grammar may name."""
        self.time_limit_s = time_limit_s
        self._names = list(special_names)
        self._free = threading.Semaphore(MAX_PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[LineProcess] = []
        self._verdicts: OrderedDict[str, str] = OrderedDict()  # key of a spec -> error, or "" if it compiles

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, *, time_limit_s: float = TIME_LIMIT_S) -> GrammarCheck:
        """Create a check for grammars that may name the tokenizer's special tokens."""
        names = [tokenizer.piece(token_id).decode() for token_id in sorted(tokenizer.special_ids)]
        return cls(names, time_limit_s=time_limit_s)

    def check(self, spec: GrammarSpec) -> None:
        """Raise BadRequest if the spec is not a valid grammar or takes too much time or memory to compile."""
        key = spec.key
        with self._lock:
            problem = self._verdicts.get(key)
        if problem is None:
            problem = self._ask(spec)
            with self._lock:
                self._verdicts[key] = problem
                while len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        if problem:
            raise BadRequest(f"{GRAMMAR_FAULT}{problem}")

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _ask(self, spec: GrammarSpec) -> str:
        if not self._free.acquire(timeout=WAIT_LIMIT_S):
            raise QueueFull("too many grammars are being compiled", hint="try again later")
        try:
            for _ in range(_ATTEMPTS):
                process = self._take_process()
                try:
                    problem = str(process.ask(json.dumps(asdict(spec)), self.time_limit_s)["error"])
                except TimeoutError:
                    process.end()
                    return f"the grammar is too complex: compiling it took more than {self.time_limit_s:g} s"
                except OSError:  # The process died. If the next one dies too, this grammar is the cause.
                    process.end()
                    continue
                with self._lock:
                    self._idle.append(process)
                return problem
            return "the grammar is too complex: compiling it took too much memory"
        finally:
            self._free.release()

    def _take_process(self) -> LineProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        first_line = json.dumps({"names": self._names, "max_bytes": MAX_BYTES})
        return LineProcess("culet.structured.check_worker", "compiles grammars", first_line)
