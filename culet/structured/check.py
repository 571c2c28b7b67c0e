"""Check that a grammar compiles within limits on time and memory. No torch.

Most grammars compile in a millisecond or two. Some small ones never finish, such as an intersection of a few patterns, and
llguidance cannot be interrupted. Each grammar is therefore compiled first in a separate process with a memory limit, which is
killed if it takes too long. The same process expands the schemas of tools to a grammar. Only grammars that pass are compiled in
the engine. Processes start on demand and keep running.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from msgspec import Raw

from culet.errors import BadRequest, QueueFull
from culet.line_process import LineProcess
from culet.log import logger
from culet.structured.tool_grammar import STRICT_HINT, ToolForm
from culet.text.tokenizer import Tokenizer
from culet.types import GrammarSpec

TIME_LIMIT_S = 5.0
MAX_BYTES = 2 << 30  # limit on a process's address space
MAX_PROCESSES = 2
MAX_VERDICTS = 4096  # grammars whose verdict is remembered
MAX_VERDICT_CHARS = 8 << 20  # limit on the text of the expanded grammars among them
_ATTEMPTS = 2
_FULL_SHARE = 0.9  # a grammar that had this share of the time limit and did not finish is too complex
_LENIENT_SHARE = 0.5  # of its time that a lenient form may use before its tools are compiled one by one
_ALONE_SHARE = 0.2  # of the time for all tools one by one, and for those together that compile
_ONE_SHARE = 0.1  # for one tool
_WHY_LATE = "the grammar was not checked in time, because other grammars were being compiled"

GrammarForm = GrammarSpec | ToolForm


@dataclass(frozen=True)
class Verdict:
    """What is known about a form: why it is refused, or the expanded grammar if it is a ToolForm.

    `field` is the part of a ToolForm that is at fault, as a field of the request. `free_tools` says why tools of a lenient form
    are not held to their schemas.
    """

    error: str = ""
    hint: str = ""
    text: str = ""
    field: str = ""
    is_late: bool = False
    free_tools: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def spec(self, form: GrammarForm) -> GrammarSpec:
        """Return the grammar of the form. Raise if it is refused. The error names the field of the request."""
        if self.error:
            raise BadRequest(f"{self.field or form.field}: {self.error}", hint=self.hint)
        if isinstance(form, GrammarSpec):
            return form
        return GrammarSpec("lark", self.text, form.is_strict, field="tools", free_tools=tuple(self.free_tools))


class Check:
    """A form that is being checked. Its time runs from its arrival."""

    def __init__(self, form: GrammarForm, key: str, deadline: float) -> None:
        self.form, self.key, self.deadline = form, key, deadline
        self.future: Future[Verdict]
        self._lock = threading.Lock()
        self._process: LineProcess | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Give up, because nobody waits for the result. Thread-safe."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()
        self.future.cancel()

    def ask(self, process: LineProcess, form: GrammarForm, limit_s: float, max_wait_s: float) -> dict[str, Any]:
        """Have the process check a form, which is this one or a part of it. Raise like LineProcess.ask."""
        with self._lock:
            if self._is_stopped:
                raise QueueFull(_WHY_LATE, hint="try again later")
            self._process = process
        try:
            return process.ask(_line(form), limit_s, max_wait_s)
        except OSError:
            if self._is_stopped:
                raise QueueFull(_WHY_LATE, hint="try again later") from None
            raise
        finally:
            with self._lock:
                self._process = None


class GrammarCheck:
    """Refuses grammars that cannot be used. Thread-safe."""

    def __init__(self, special_names: Sequence[str], *, time_limit_s: float = TIME_LIMIT_S, patience: float = 1.0) -> None:
        """Create a check. `special_names` are the special tokens that a grammar may name.

        `time_limit_s` counts processor time. On a busy machine, a check ends after `patience` times as long by the clock.
        """
        self.time_limit_s, self._patience = time_limit_s, patience
        self._names = list(special_names)
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, "grammar-check")  # each asks one process at a time
        self._lock = threading.Lock()
        self._idle: list[LineProcess] = []
        self._running: set[Check] = set()
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._num_chars = 0  # of the texts in the verdicts

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, *, time_limit_s: float = TIME_LIMIT_S, patience: float = 1.0) -> GrammarCheck:
        """Create a check for grammars that may name the tokenizer's special tokens."""
        names = [tokenizer.piece(token_id).decode() for token_id in sorted(tokenizer.special_ids)]
        return cls(names, time_limit_s=time_limit_s, patience=patience)

    def find(self, form: GrammarForm, key: str) -> GrammarSpec | None:
        """Return the grammar of a form that is known to be good, or None if it is not known. Raise if it is known to be bad.

        Never waits.
        """
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is None:
                return None
            self._verdicts.move_to_end(key)
        return verdict.spec(form)

    def check(self, form: GrammarForm) -> GrammarSpec:
        """Return the grammar of a form. Raise BadRequest if it is not valid, or if it takes too much time or memory.

        Blocks until this is known.
        """
        key = key_of(form)
        return self.find(form, key) or self.begin(form, key).future.result().spec(form)

    def begin(self, form: GrammarForm, key: str) -> Check:
        """Start to check a form. Its time limit includes the time it waits for a free process."""
        check = Check(form, key, time.monotonic() + self._patience * self.time_limit_s)
        check.future = self._threads.submit(self._run, check)
        return check

    def close(self) -> None:
        """Stop all checks and end the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            idle, self._idle = self._idle, []
            running = list(self._running)
        for check in running:
            check.stop()
        for process in idle:
            process.end()

    def _run(self, check: Check) -> Verdict:
        left_s = check.deadline - time.monotonic()
        if left_s <= 0:
            raise QueueFull(_WHY_LATE, hint="try again later")
        with self._lock:
            self._running.add(check)
        try:
            verdict = self._judge(check, left_s / self._patience)
        finally:
            with self._lock:
                self._running.discard(check)
        for name, why in verdict.free_tools.items():
            logger.warning("calls to %s are not checked against its schema; any arguments are allowed: %s", name, why)
        self._remember(check.key, verdict)
        return verdict

    def _judge(self, check: Check, limit_s: float) -> Verdict:
        form = check.form
        lenient = form if isinstance(form, ToolForm) and form.is_lenient else None
        verdict = self._ask(check, form, limit_s * (_LENIENT_SHARE if lenient else 1))
        if verdict.is_late and limit_s < _FULL_SHARE * self.time_limit_s:
            raise QueueFull(_WHY_LATE, hint="try again later")
        if lenient is None:
            return verdict
        return _hold_strict(lenient, self._free_costly(check, lenient, limit_s) if verdict.error else verdict)

    def _free_costly(self, check: Check, form: ToolForm, limit_s: float) -> Verdict:
        """Return the verdict on a lenient form that takes too much time or memory. Tools that do so alone are free in it."""
        free: dict[str, str] = {}
        tools = msgspec.json.decode(form.tools, type=list[Raw])
        begin = time.monotonic()
        for tool in tools:
            name = msgspec.json.decode(tool)["function"]["name"]
            if time.monotonic() - begin > _ALONE_SHARE * limit_s * self._patience:
                free[name] = "there was no time to compile its grammar"
                continue
            alone = self._ask(check, ToolForm(Raw(b"[%b]" % bytes(tool))), _ONE_SHARE * limit_s)
            if alone.error:
                free[name] = alone.error
        verdict = self._ask(check, msgspec.structs.replace(form, free=tuple(free)), _ALONE_SHARE * limit_s)
        if verdict.error:
            free = {msgspec.json.decode(tool)["function"]["name"]: verdict.error for tool in tools}
            verdict = self._ask(check, msgspec.structs.replace(form, free=tuple(free)), _ALONE_SHARE * limit_s)
        return dataclasses.replace(verdict, free_tools={**verdict.free_tools, **free})

    def _ask(self, check: Check, form: GrammarForm, limit_s: float) -> Verdict:
        """Return a process's verdict on a form. It is late if the form took more time than it had."""
        for _ in range(_ATTEMPTS):
            process = self._take_process()  # starting one takes no time from the grammar
            try:
                reply = check.ask(process, form, limit_s, max_wait_s=limit_s * self._patience)
            except TimeoutError:
                process.end()
                shown_s = limit_s if limit_s < _FULL_SHARE * self.time_limit_s else self.time_limit_s
                return Verdict(f"the grammar is too complex: compiling it took more than {shown_s:.2g} s", is_late=True)
            except OSError:  # The process died. If the next one dies too, this grammar is the cause.
                process.end()
                continue
            except QueueFull:
                process.end()
                raise
            with self._lock:
                self._idle.append(process)
            return Verdict(**reply)
        return Verdict("the grammar is too complex: compiling it took too much memory or nests too deeply")

    def _remember(self, key: str, verdict: Verdict) -> None:
        with self._lock:
            if key in self._verdicts:
                self._num_chars -= len(self._verdicts.pop(key).text)
            self._verdicts[key] = verdict
            self._num_chars += len(verdict.text)
            while len(self._verdicts) > MAX_VERDICTS or self._num_chars > MAX_VERDICT_CHARS:
                self._num_chars -= len(self._verdicts.popitem(last=False)[1].text)

    def _take_process(self) -> LineProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        first_line = json.dumps({"names": self._names, "max_bytes": MAX_BYTES})
        return LineProcess("culet.structured.check_worker", "compiles grammars", first_line)


def _hold_strict(form: ToolForm, verdict: Verdict) -> Verdict:
    """Return the verdict on a lenient form. It is an error if a strict tool would be free."""
    for index, tool in enumerate(msgspec.json.decode(form.tools) if verdict.free_tools else ()):
        why = verdict.free_tools.get(tool["function"]["name"])
        if why is not None and tool["function"].get("strict"):
            return Verdict(why, STRICT_HINT, field=f"tools[{index}]")
    return verdict


def _line(form: GrammarForm) -> str:
    return json.dumps(asdict(form)) if isinstance(form, GrammarSpec) else msgspec.json.encode(form).decode()


def key_of(form: GrammarForm) -> str:
    """Return a short key, equal for forms that have the same grammar."""
    return form.key if isinstance(form, GrammarSpec) else hashlib.sha256(msgspec.json.encode(form)).hexdigest()
