"""The process of a `ProcessWorker`. It builds a Runner and runs the plans that it receives.

The main thread launches plans as they arrive. A second thread waits for their results and sends them, so that a plan that
arrives in the meantime is launched at once. While the Runner is being built, another thread sends signs of life.

Like the engine process, this one ignores SIGINT and SIGTERM, so that running requests can end first.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from msgspec import structs

from culet import registry
from culet.child import end_with_connection, end_with_parent
from culet.errors import CuletError, as_culet_error, error_parts
from culet.kernels.compiling import CompileCount
from culet.log import logger
from culet.parallel.progress import progress
from culet.runner.worker import (
    SIGN_PERIOD_S,
    BeginServing,
    Build,
    Building,
    Built,
    LaunchedStep,
    Report,
    RunStep,
    StepDone,
    Worker,
    WorkerFailed,
    command_decoder,
    receive_message,
    send_message,
    take_connection,
)


@dataclass(frozen=True)
class _Launched:
    """A step in flight, with the clock's state at its launch, or the reason why it could not be launched."""

    step: LaunchedStep | Exception
    device_seconds: Mapping[str, float]
    num_host_pages: int

    def report(self) -> Report:
        try:
            if isinstance(self.step, Exception):
                raise self.step
            return StepDone(self.step.result(), dict(self.device_seconds), num_host_pages=self.num_host_pages)
        except Exception as error:
            return _failed(error)


def main(descriptor: int) -> None:
    """Run plans until the connection is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    connection = take_connection(descriptor)
    end_with_connection(connection)
    with suppress(OSError):
        command = command_decoder.decode(receive_message(connection))
        assert isinstance(command, Build), "the first message must say what to build"
        try:
            with _signs_of_life(connection):
                worker: Worker = registry.load(command.builder)(**command.arguments)
        except Exception as error:
            send_message(connection, _failed(error))
            return
        send_message(connection, Built(worker.num_slabs, worker.compile_count))
        _run(connection, worker)


@contextmanager
def _signs_of_life(connection: socket.socket) -> Iterator[None]:
    """Send signs of life until the block ends. A stopped process sends none."""
    done = threading.Event()

    def send() -> None:
        with suppress(OSError):  # the other side is gone, and this process will end soon
            while not done.wait(SIGN_PERIOD_S):
                send_message(connection, Building(progress()))

    thread = threading.Thread(target=send, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()  # so that the next message is not mixed with a sign


def _run(connection: socket.socket, worker: Worker) -> None:
    launched: queue.SimpleQueue[_Launched] = queue.SimpleQueue()
    arguments = connection, launched, worker
    threading.Thread(target=_send_reports, args=arguments, daemon=True).start()
    while True:
        command = command_decoder.decode(receive_message(connection))
        if isinstance(command, BeginServing):
            worker.begin_serving()
            continue
        assert isinstance(command, RunStep), "there is only one process to build"
        step: LaunchedStep | Exception
        try:
            step = worker.launch(command.plan)
        except Exception as error:
            step = error
        launched.put(_Launched(step, worker.device_seconds(), worker.num_host_pages))


def _failed(error: Exception) -> WorkerFailed:
    """Return the report of an error. The traceback goes to the log, since only the message is sent."""
    if not isinstance(error, CuletError):
        logger.error("worker: %s: %s", type(error).__name__, error, exc_info=error)
    return WorkerFailed(*error_parts(as_culet_error(error)))


def _send_reports(connection: socket.socket, launched: queue.SimpleQueue[_Launched], worker: Worker) -> None:
    """Send the result of each step in order, and the count of compiled kernels when it has changed."""
    sent: CompileCount | None = None
    try:
        while True:
            report = launched.get().report()
            count = worker.compile_count
            if isinstance(report, StepDone) and count is not None and count != sent:
                sent = replace(count)  # `count` itself goes on
                report = structs.replace(report, compile_count=sent)
            send_message(connection, report)
    except OSError:
        os._exit(0)  # the other side is gone


if __name__ == "__main__":
    main(int(sys.argv[1]))
