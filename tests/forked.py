"""Run pytest in several processes that are forked after one collection: `python -m tests.forked -n 4 ...`.

Each process of xdist imports torch, transformers and every test file, which takes it longer than most files' tests. Here one
process collects the tests first, and the others are its forks, so they find all modules imported. Otherwise this is
`python -m pytest` with xdist. If a process crashes, xdist replaces it by one that is not forked.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import signal
import sys

import pytest
from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO

from tests import forking
from tests.interpreting import fork_interpreter


class _Fork:
    """A fork of this process that waits for xdist's commands, with the methods that execnet expects."""

    waiting: list[_Fork] = []  # noqa: RUF012 (forks that xdist has not taken yet)

    def __init__(self) -> None:
        (self.read_end, child_write), (child_read, self.write_end) = os.pipe(), os.pipe()
        self.process_id = os.fork()
        if not self.process_id:
            for fork in (*self.waiting, self):  # otherwise their pipes would stay open after this process has ended
                os.close(fork.read_end)
                os.close(fork.write_end)
            self._serve(child_read, child_write)
        os.close(child_read)
        os.close(child_write)
        self.waiting.append(self)

    def _serve(self, read_end: int, write_end: int) -> None:
        """Do what execnet's own processes do: run the line of code that they are sent."""
        os.dup2(read_end, 0)
        os.dup2(write_end, 1)
        os.close(read_end)
        os.close(write_end)
        forking.install()
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        try:
            exec(gateway_io.popen_bootstrapline, {"__name__": "__main__"})
            atexit._run_exitfuncs()
        finally:
            os._exit(0)  # the rest of this program is the first process's

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process_id, 0)[1])

    def kill(self) -> None:
        os.kill(self.process_id, 9)


class _ForkedIO(Popen2IO):
    """The pipes to a fork, in place of those to a new process."""

    def __init__(self, fork: _Fork, execmodel: ExecModel) -> None:
        super().__init__(os.fdopen(fork.write_end, "wb"), os.fdopen(fork.read_end, "rb"), execmodel=execmodel)
        self.wait, self.kill = fork.wait, fork.kill


def main() -> int:
    arguments = sys.argv[1:]
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-n", type=int, required=True)
    num_processes = parser.parse_known_args(arguments)[0].n
    if sys.platform != "linux":
        return int(pytest.main(arguments))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main([*arguments, "-n", "0", "--collect-only", "-qq"])  # the forks report what is wrong
    forking.compile_template()
    interpreter = fork_interpreter()
    for _ in range(num_processes):
        _Fork()
    start = gateway_io.Popen2IOMaster

    def take(args: list[str], execmodel: ExecModel) -> Popen2IO:
        return _ForkedIO(_Fork.waiting.pop(), execmodel) if _Fork.waiting else start(args, execmodel)

    gateway_io.Popen2IOMaster = take  # type: ignore[assignment, misc]
    try:
        return int(pytest.main(arguments))
    finally:
        os.kill(interpreter, signal.SIGKILL)
        os.waitpid(interpreter, 0)


if __name__ == "__main__":
    sys.exit(main())
