"""Workers run StepPlans. A `Runner` is a worker in the engine's process, and a `ProcessWorker` is a Runner in another one.

The engine uses only this interface once everything is built, so a worker may also be one of several ranks.

A ProcessWorker and its process (`worker_process.py`) exchange msgpack messages over a socket pair. Each message is prefixed by
its length. The process is told the name of the function that builds its Runner. Each plan is sent once. Results come back in
the order of the plans, and a plan may be sent before the result of the previous one has arrived.
"""

from __future__ import annotations

import os
import socket
import subprocess
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from culet.child import child_environment, python_command
from culet.errors import CuletError, WorkerDied, error_of
from culet.frames import LENGTH_BYTES, frame, frame_length
from culet.types import StepPlan, StepResult

STOP_LIMIT_S = 5.0  # time for the process to end by itself


class LaunchedStep(Protocol):
    """A step whose result is on its way."""

    def result(self) -> StepResult:
        """Wait for the step and return its result. Raise the error that made it fail, if any."""


class Worker(Protocol):
    """Runs steps in the order of their plans."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. The next one may be launched before its result is read."""

    def device_seconds(self) -> Mapping[str, float]:
        """Return the seconds that the device has spent verifying (`verify`) and proposing (`draft`) drafts since the start."""

    def close(self) -> None:
        """End everything that belongs to the worker. Steps in flight are dropped."""


# Messages


class Build(Struct, tag="build", frozen=True):
    """The first message. `builder` ("module:function") returns the Runner for these arguments."""

    builder: str
    arguments: dict[str, Any]


class RunStep(Struct, tag="step", frozen=True):
    plan: StepPlan


class Built(Struct, tag="built", frozen=True):
    """The Runner is ready for plans."""


class StepDone(Struct, tag="result", frozen=True):
    result: StepResult
    device_seconds: dict[str, float]


class WorkerFailed(Struct, tag="failed", frozen=True):
    """The build or a step failed. `kind` is the name of a class in culet.errors."""

    kind: str
    message: str
    hint: str = ""

    def error(self) -> CuletError:
        """Return the error that this message describes."""
        return error_of(self.kind, self.message, self.hint)


Command = Build | RunStep
Report = Built | StepDone | WorkerFailed
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def send_message(connection: socket.socket, message: Command | Report) -> None:
    """Send a message, prefixed by its length. Raise OSError if the other side is gone."""
    connection.sendall(frame(message))


def receive_message(connection: socket.socket) -> bytearray:
    """Wait for a message and return its bytes. Raise OSError if the other side is gone."""
    return _receive(connection, frame_length(_receive(connection, LENGTH_BYTES)))


def _receive(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the connection was closed")
        view = view[received:]
    return data


# The engine's side


class ProcessWorker:
    """A Runner in another process. Not thread-safe."""

    def __init__(self, builder: str, **arguments: Any) -> None:
        """Start the process and wait until its Runner is built by `builder` ("module:function").

        The arguments are plain data (numbers, strings, lists and dicts).
        """
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python_command("culet.runner.worker_process", str(theirs.fileno())),
                env=child_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C goes to this process, which then ends the other
            )
        self._end = weakref.finalize(self, _end, self._process, self._connection)  # also runs at exit
        self._in_flight: deque[_RemoteStep] = deque()  # oldest first
        self._device_seconds: dict[str, float] = {"verify": 0.0, "draft": 0.0}
        try:
            self._send(Build(builder, arguments))
            report = self._receive()
            if isinstance(report, WorkerFailed):
                raise report.error()
        except BaseException:
            self._end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def launch(self, plan: StepPlan) -> _RemoteStep:
        """Send a plan to the process."""
        self._send(RunStep(plan))
        step = _RemoteStep(self)
        self._in_flight.append(step)
        return step

    def device_seconds(self) -> Mapping[str, float]:
        """Return the seconds as of the last result."""
        return self._device_seconds

    def close(self) -> None:
        """End the process."""
        self._end()

    def take_report(self) -> None:
        """Wait for the next report and give it to the oldest step without one."""
        report = self._receive()
        if isinstance(report, StepDone):
            self._device_seconds = report.device_seconds
        self._in_flight.popleft().report = report

    def _send(self, command: Command) -> None:
        try:
            send_message(self._connection, command)
        except OSError as error:
            raise self._death() from error

    def _receive(self) -> Report:
        try:
            return report_decoder.decode(receive_message(self._connection))
        except OSError as error:
            raise self._death() from error

    def _death(self) -> WorkerDied:
        """End the process, and return the error that says how it ended."""
        self._end()
        code = self._process.returncode
        return WorkerDied(f"worker process {self.pid} exited unexpectedly with exit code {code}", hint="check its log")


class _RemoteStep:
    """A plan that was sent to a ProcessWorker's process."""

    def __init__(self, worker: ProcessWorker) -> None:
        self._worker = worker
        self.report: Report | None = None  # set when it arrives

    def result(self) -> StepResult:
        while self.report is None:
            self._worker.take_report()
        if isinstance(self.report, WorkerFailed):
            raise self.report.error()
        assert isinstance(self.report, StepDone)
        return self.report.result


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Close the connection, which ends the process. Kill the process if it takes too long."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def take_connection(descriptor: int) -> socket.socket:
    """Return the process's end of the connection. Processes that it starts do not inherit it."""
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)
