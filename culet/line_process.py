"""Run work that may never finish in a separate Python process, which answers every question that it is sent.

A LineProcess gets lines and answers each with a line of JSON. Other forms of questions are subclasses of ChildProcess. The
caller sets a time limit and kills the process when it is exceeded. Nothing less can stop every template or grammar. The limit
counts the processor time of the process, so that a question is not refused because other programs use the processors. The
caller also limits the time that it waits in all: a process that does not read, because it was stopped or hangs, holds up nobody
for long.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from culet.child import child_environment, python_command
from culet.errors import InternalError

START_LIMIT_S = 60.0  # for the process to start, which depends on the machine and not on the question
_LOOK_S = 0.2  # how often to look whether a silent process was stopped
_PATIENCE = 6  # A caller waits this many times the time limit for a process that gets little processor time.
_READ_BYTES = 1 << 16
_PROCESSOR_CLOCK = 2  # Linux derives the clock of a process from its id and this kind.
_NICENESS = 10  # Clients decide how much work these processes have, so the engine and the web process come first.


class Killable(Protocol):
    """What works on a question: a process, or a connection."""

    def kill(self) -> None: ...


class Stopper:
    """Ends a question from another thread. The process that works on it is killed."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._lock = threading.Lock()
        self._process: Killable | None = None

    def stop(self) -> None:
        """Kill the process that works on the question, now or as soon as there is one."""
        with self._lock:
            self.is_stopped = True
            if self._process is not None:
                self._process.kill()

    @contextmanager
    def watch(self, process: Killable) -> Iterator[None]:
        """Let `stop` kill `process` while it works on the question."""
        with self._lock:
            if self.is_stopped:
                raise ConnectionAbortedError("the question was cancelled")
            self._process = process
        try:
            yield
        finally:
            with self._lock:
                self._process = None


class Deadline:
    """The time limit of a question to a process."""

    def __init__(self, process_id: int, limit_s: float, max_wait_s: float) -> None:
        """Start to count. `limit_s` is processor time, and `max_wait_s` is the longest wait."""
        self._process_id, self._limit_s = process_id, limit_s
        self._used_before_s = _processor_s(process_id)
        self._soonest = time.monotonic() + min(limit_s, max_wait_s)
        self._latest = time.monotonic() + max_wait_s

    def left_s(self) -> float:
        """Return how long to wait before asking again, or 0 if the time is over."""
        now = time.monotonic()
        if now < self._soonest:
            return self._soonest - now
        unused_s = self._limit_s - (_processor_s(self._process_id) - self._used_before_s)
        return max(0.0, min(unused_s, self._latest - now))


class ChildProcess(ABC):
    """A running program that answers questions. Not thread-safe, except for `kill`."""

    def __init__(self, module: str, purpose: str, first_message: bytes = b"") -> None:
        """Run a module of Culet as a program. Once started, it writes an answer, to `first_message` if there is one."""
        self._process = subprocess.Popen(
            python_command(module),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C must not reach it. It stays in this session, because Linux compares niceness only within one.
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        self.end = weakref.finalize(self, _end, self._process)  # also runs at exit
        deadline = self._deadline(START_LIMIT_S, START_LIMIT_S)
        try:
            self._send(first_message, deadline)
            self._receive(deadline)
        except OSError as error:  # includes TimeoutError
            self.end()
            raise InternalError(f"the process that {purpose} did not start: {error}") from error
        # Until now it had the usual priority, so that it starts in time on a busy machine.
        with suppress(OSError):  # it may have ended already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS))

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process. A thread that waits for its answer gets a ConnectionError. Call `end` afterwards."""
        self._process.kill()

    def _deadline(self, limit_s: float, max_wait_s: float | None = None) -> Deadline:
        return Deadline(self.process_id, limit_s, _PATIENCE * limit_s if max_wait_s is None else max_wait_s)

    @abstractmethod
    def _receive(self, deadline: Deadline) -> Any:
        """Return the next answer. Raise TimeoutError, or another OSError if the process died or was stopped."""

    def _send(self, message: bytes | bytearray, deadline: Deadline) -> None:
        unsent = memoryview(message)
        while unsent:
            try:
                unsent = unsent[os.write(self._input, unsent) :]
            except BlockingIOError:
                self._wait(self._input, select.POLLOUT, deadline)

    def _read_into(self, buffer: bytearray | memoryview, deadline: Deadline) -> int:
        """Wait for bytes of the answer, put as many as there are into `buffer`, and return their number."""
        self._wait(self._output, select.POLLIN, deadline)
        num_read = os.readv(self._output, [buffer])
        if num_read == 0:
            raise ConnectionError("the process exited unexpectedly")
        return num_read

    def _wait(self, descriptor: int, event: int, deadline: Deadline) -> None:
        """Wait until the pipe is ready. Unlike `select`, `poll` works with any number of open connections."""
        poll = select.poll()
        poll.register(descriptor, event)
        while True:
            left_s = deadline.left_s()
            if poll.poll(1000 * min(left_s, _LOOK_S)):
                return
            if self._is_stopped():
                raise ConnectionError("the process was stopped")
            if left_s <= 0:
                raise TimeoutError("no answer arrived in time")

    def _is_stopped(self) -> bool:
        """Return whether the process was stopped by a signal (SIGSTOP) and has not been continued."""
        try:
            found = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has ended
            return False
        return found is not None


class LineProcess(ChildProcess):
    """A program that answers each line with a line of JSON."""

    def __init__(self, module: str, purpose: str, first_line: str | None = None) -> None:
        """Run a module of Culet as a program. Once started, it writes a line, or answers `first_line`."""
        self._rest = b""
        self._buffer = bytearray(_READ_BYTES)
        super().__init__(module, purpose, b"" if first_line is None else _one_line(first_line.encode()))

    def ask(self, line: str | bytes, limit_s: float, max_wait_s: float | None = None) -> dict[str, Any]:
        """Send a line of JSON and return the answer.

        Raise TimeoutError, or another OSError if the process died or was stopped.
        """
        deadline = self._deadline(limit_s, max_wait_s)
        self._send(_one_line(line.encode() if isinstance(line, str) else line), deadline)
        return self._receive(deadline)

    def _receive(self, deadline: Deadline) -> dict[str, Any]:
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            pieces.append(bytes(memoryview(self._buffer)[: self._read_into(self._buffer, deadline)]))
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _processor_s(process_id: int) -> float:
    """Return the processor time of a process. Where the system cannot tell, all time counts."""
    try:
        return time.clock_gettime(~process_id << 3 | _PROCESSOR_CLOCK)
    except OSError:  # not Linux, or the process has ended
        return time.monotonic()


def _one_line(line: bytes) -> bytes:
    """Return `line` with a line break only at its end. In JSON, others can only be white space."""
    return line.replace(b"\n", b" ") + b"\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # raised if the dead process left bytes unread
                pipe.close()
    process.wait()
