"""Decode media in a few processes, each of which can be killed. No torch here: the processes load it.

Media come from clients, and decoders have bugs. So they run where they can take neither the server's memory nor its time, and a
process that hangs or dies costs one request. Processes start on demand and keep running.
"""

from __future__ import annotations

import threading

from culet.errors import BadRequest
from culet.frames import LENGTH_BYTES, frame, frame_length
from culet.line_process import ChildProcess, Deadline, Stopper
from culet.media.items import MediaItem, Medium
from culet.media.limits import MediaLimits
from culet.media.messages import Answer, Question, answers

_WORKER = "culet.media.decoding.worker"
_ATTEMPTS = 2


class DecoderProcess(ChildProcess):
    """A running decoder."""

    def __init__(self, limits: MediaLimits) -> None:
        super().__init__(_WORKER, "decodes media", bytes(frame(limits)))

    def ask(self, question: Question, data: bytes, limit_s: float) -> tuple[Answer, list[bytes]]:
        """Return the answer and the items' data. Raise TimeoutError, or another OSError if the process died."""
        deadline = self._deadline(limit_s)
        self._send(frame(question), deadline)
        self._send(data, deadline)
        return self._receive(deadline)

    def _receive(self, deadline: Deadline) -> tuple[Answer, list[bytes]]:
        answer = answers.decode(self._read(frame_length(self._read(LENGTH_BYTES, deadline)), deadline))
        return answer, [bytes(self._read(length, deadline)) for length in answer.lengths]

    def _read(self, num_bytes: int, deadline: Deadline) -> bytearray:
        buffer = bytearray(num_bytes)
        unread = memoryview(buffer)
        while unread:
            unread = unread[self._read_into(unread, deadline) :]
        return buffer


class DecoderPool:
    """The decoding processes. Thread-safe: at most `num_processes` callers work at a time, and the others wait."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self.num_replaced = 0  # processes that died, hung or were killed
        self._free = threading.Semaphore(limits.num_processes)
        self._lock = threading.Lock()
        self._idle: list[DecoderProcess] = []

    def decode(self, name: str, question: Question, data: bytes, stopper: Stopper | None = None) -> Medium:
        """Return the decoded medium. `name` says in errors which medium it is. `stopper` ends the work from another thread."""
        with self._free:
            answer, parts = self._ask(name, question, data, stopper or Stopper())
        if answer.problem:
            raise BadRequest(f"{name}: {answer.problem}", hint=answer.hint)
        items = tuple(
            MediaItem(question.kind, facts.key, facts.num_tokens, facts.shape, part)
            for facts, part in zip(answer.items, parts, strict=True)
        )
        return Medium(question.kind, items, answer.timestamps)

    def warm_up(self) -> None:
        """Start all processes now, so that the first media do not wait for them."""
        started = [self._take() for _ in range(self._limits.num_processes)]
        with self._lock:
            self._idle += started

    def close(self) -> None:
        """End the idle processes. The next medium starts a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _ask(self, name: str, question: Question, data: bytes, stopper: Stopper) -> tuple[Answer, list[bytes]]:
        """Ask a process. If it dies, ask another one, once: it may have been killed from outside."""
        limit_s = self._limits.time_limit_s
        for _ in range(_ATTEMPTS):
            if stopper.is_stopped:
                raise BadRequest(f"{name}: cancelled before it was decoded")
            process = self._take()
            try:
                with stopper.watch(process):
                    reply = process.ask(question, data, limit_s)
            except OSError as error:
                process.end()
                with self._lock:
                    self.num_replaced += 1
                if isinstance(error, TimeoutError):
                    problem = f"decoding was stopped after {limit_s:g} s"
                    raise BadRequest(f"{name}: {problem}", hint="send a smaller or simpler file") from None
            else:
                with self._lock:
                    self._idle.append(process)
                return reply
        raise BadRequest(f"{name}: the decoding process died", hint="send another file")

    def _take(self) -> DecoderProcess:
        """Return an idle process, or a new one."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                return DecoderProcess(self._limits)
            if process.is_alive:
                return process
            process.end()
            with self._lock:
                self.num_replaced += 1
