"""Run work that may never finish in a separate Python process, which answers each line with a line of JSON.

The caller sets a time limit and kills the process when it is exceeded. Nothing less can stop every template or grammar.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
import weakref
from contextlib import suppress
from typing import Any

from culet.child import child_environment, python_command
from culet.errors import InternalError

START_LIMIT_S = 60.0  # for the process to start, which depends on the machine and not on the question


class LineProcess:
    """A running program. `ask` sends one line and waits for one line. Not thread-safe."""

    def __init__(self, module: str, purpose: str, first_line: str | None = None) -> None:
        """Run a module of Culet as a program. Once started, it writes a line, or answers `first_line`."""
        self._process = subprocess.Popen(
            python_command(module),
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach it
        )
        self._rest = b""
        self.end = weakref.finalize(self, _end, self._process)  # also runs at exit
        try:
            if first_line is not None:
                self._send(first_line)
            self._receive(START_LIMIT_S)
        except OSError as error:  # includes TimeoutError
            self.end()
            raise InternalError(f"the process that {purpose} did not start: {error}") from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the program from another thread. `ask` then raises, and its caller calls `end`."""
        self._process.kill()

    def ask(self, line: str, limit_s: float) -> dict[str, Any]:
        """Send a line and return the answer. Raise TimeoutError, or another OSError if the process died."""
        self._send(line)
        return self._receive(limit_s)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        source = self._process.stdout.fileno()
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            if not select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("no answer arrived in time")
            piece = os.read(source, 1 << 20)
            if not piece:
                raise ConnectionError("the process exited unexpectedly")
            pieces.append(piece)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # raised if the dead process left bytes unread
                pipe.close()
    process.wait()
