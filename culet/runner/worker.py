"""Workers run StepPlans. A `Runner` is a worker in the engine's process. A `ProcessWorker` is a Runner in another process, or
one in each of several processes, the ranks of a model.

The engine uses only this interface once everything is built.

A ProcessWorker and its processes (`worker_process.py`) exchange msgpack messages over socket pairs. Each message is prefixed by
its length. A process receives the name of the function that builds its Runner. Each plan is encoded once and sent to every
process. Results come back in the order of the plans, and a plan may be sent before the result of the previous one has arrived.

Ranks live and die together. If one dies, hangs, or fails in a step, the others wait for it in a reduction, so all are ended.
A process that builds its Runner sends a sign of life every second, because there is no limit on how long a build may take. The
signs say how far it has come. If none makes progress any more, one of them hangs.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from culet.child import exit_error, start_bound_process
from culet.errors import CuletError, WorkerDied, error_of
from culet.frames import LENGTH_BYTES, FrameReader, frame, frame_length
from culet.kernels.compiling import CompileCount
from culet.limits import Limits
from culet.parallel.progress import Progress
from culet.types import StepPlan, StepResult

STOP_LIMIT_S = 5.0  # time for the processes to end by themselves
BUILD_LIMIT_S = 600.0  # in which some process must make progress
SIGN_PERIOD_S = 1.0  # between signs of life
_EXIT_LIMIT_S = 0.5  # time for a rank that closed its connection to be seen to have ended


_STUCK_HINT = (
    "check its log, where NCCL_DEBUG=INFO shows how GPUs find each other; "
    f"if the start is only slow, set --limits step_s to more than {BUILD_LIMIT_S:g}"
)


class LaunchedStep(Protocol):
    """A step whose result is on its way."""

    def result(self) -> StepResult:
        """Wait for the step and return its result. Raise the error that made it fail, if any."""


class Worker(Protocol):
    """Runs steps in the order of their plans."""

    @property
    def num_slabs(self) -> int:
        """The number of slabs in the KV cache."""

    @property
    def num_host_pages(self) -> int:
        """The number of host pages that plans may use by now. It may still grow."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. The next one may be launched before its result is read."""

    def device_seconds(self) -> Mapping[str, float]:
        """Return the seconds that the device has spent verifying (`verify`) and proposing (`draft`) drafts since the start."""

    @property
    def compile_count(self) -> CompileCount | None:
        """The kernels that were compiled and found since the start. None on a CPU."""

    def begin_serving(self) -> None:
        """Note that the startup has ended, so that a step waits for every kernel that is compiled from now on."""

    @property
    def descriptors(self) -> Sequence[int]:
        """The file descriptors that can be read as soon as a process of the worker has ended. Call `check` then."""

    def check(self) -> None:
        """Raise WorkerDied if a process of the worker has ended. Does not wait."""

    def close(self) -> None:
        """End everything that belongs to the worker. Steps in flight are dropped."""


# Messages


class Build(Struct, tag="build", frozen=True):
    """The first message. `builder` ("module:function") returns the Runner for these arguments."""

    builder: str
    arguments: dict[str, Any]


class RunStep(Struct, tag="step", frozen=True):
    plan: StepPlan


class BeginServing(Struct, tag="serving", frozen=True):
    """The startup has ended."""


class Building(Struct, tag="building", frozen=True):
    """A sign of life from a process that is still building its Runner."""

    progress: Progress


class Built(Struct, tag="built", frozen=True):
    """The Runner is ready for plans."""

    num_slabs: int
    compile_count: CompileCount | None


class StepDone(Struct, tag="result", frozen=True):
    result: StepResult
    device_seconds: dict[str, float]
    compile_count: CompileCount | None = None  # if it has changed since the last report
    num_host_pages: int = 0  # by now


class WorkerFailed(Struct, tag="failed", frozen=True):
    """The build or a step failed. `kind` is the name of a class in culet.errors."""

    kind: str
    message: str
    hint: str = ""

    def error(self) -> CuletError:
        """Return the error that this message describes."""
        return error_of(self.kind, self.message, self.hint)


Command = Build | RunStep | BeginServing
Report = Building | Built | StepDone | WorkerFailed
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


class _RankProcess:
    """One of the processes, and the reports that have arrived from it."""

    def __init__(self, index: int, limit_s: float) -> None:
        self.index = index
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(limit_s)  # a process that hangs does not read either
        with theirs:
            self.process = start_bound_process("culet.runner.worker_process", theirs.fileno())
        self.reports: deque[Report] = deque()  # oldest first, without signs of life
        self.silent_s = 0.0  # how long this process has waited for its next report or sign of life
        self.progress = Progress()  # of its build
        self.compile_count: CompileCount | None = None
        self._frames = FrameReader(report_decoder)

    def receive(self) -> None:
        """Read what has arrived. Raise OSError if the process is gone."""
        data = self.connection.recv(1 << 20)
        if not data:
            raise ConnectionError("the connection was closed")
        self.silent_s = 0.0
        for report in self._frames.push(data):
            if isinstance(report, Building):
                self.progress = report.progress
                continue
            self.reports.append(report)
            if isinstance(report, Built | StepDone) and report.compile_count is not None:
                self.compile_count = report.compile_count


class ProcessWorker:
    """A Runner in another process, or one in each of several ranks. Not thread-safe."""

    def __init__(
        self,
        builder: str,
        *,
        num_ranks: int = 1,
        limit_s: float = Limits.step_s,
        build_limit_s: float = BUILD_LIMIT_S,
        **arguments: Any,
    ) -> None:
        """Start the processes. Wait until `builder` ("module:function") has built a Runner in each.

        A process counts as dead if it sends no sign of life for `limit_s` while it builds, or takes longer for a step. The
        start also fails if no process makes progress for `build_limit_s`.

        The arguments are plain data (numbers, strings, lists and dicts). With several ranks, `builder` also gets `rank_index`,
        and `meeting_file`, the path at which ranks find each other.
        """
        self._ranks: list[_RankProcess] = []
        self._end = weakref.finalize(self, _end, self._ranks)  # also runs at exit
        self._in_flight: deque[_RemoteStep] = deque()  # oldest first
        self._device_seconds: dict[str, float] = {"verify": 0.0, "draft": 0.0}
        self.num_host_pages = 0  # that all ranks have, as of their last results
        self._is_built = False
        self._cause: WorkerDied | None = None  # why all processes have been ended
        self._limit_s, self._build_limit_s = limit_s, build_limit_s
        with tempfile.TemporaryDirectory(prefix="culet-") as folder:
            try:
                for index in range(num_ranks):
                    self._ranks.append(_RankProcess(index, limit_s))  # at once, so that it is ended if the next one fails
                for rank in self._ranks:
                    own = {"rank_index": rank.index, "meeting_file": str(Path(folder) / "ranks")} if num_ranks > 1 else {}
                    self._send(rank, frame(Build(builder, arguments | own)))
                reports = self._receive()
                for report in reports:
                    if isinstance(report, WorkerFailed):
                        raise report.error()
                assert isinstance(reports[0], Built)
                self.num_slabs = reports[0].num_slabs
            except BaseException:
                self._end()
                raise
        self._is_built = True

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def launch(self, plan: StepPlan) -> _RemoteStep:
        """Send a plan to every process."""
        self._send_all(RunStep(plan))
        step = _RemoteStep(self)
        self._in_flight.append(step)
        return step

    def device_seconds(self) -> Mapping[str, float]:
        """Return the seconds of the first rank as of its last result."""
        return self._device_seconds

    @property
    def compile_count(self) -> CompileCount | None:
        """The count of the rank that compiled most. Ranks run the same kernels, and find on disk what another one compiled."""
        counts = [rank.compile_count for rank in self._ranks if rank.compile_count is not None]
        return max(counts, key=lambda count: (count.while_serving, count.compiled), default=None)

    def begin_serving(self) -> None:
        """Tell every process."""
        self._send_all(BeginServing())

    @property
    def descriptors(self) -> Sequence[int]:
        """The connections. A process that ends closes its own."""
        return [rank.connection.fileno() for rank in self._ranks]

    def check(self) -> None:
        """Raise WorkerDied if a process has ended. Reports that have arrived are kept for later."""
        self._read(0.0)

    def close(self) -> None:
        """End the processes."""
        self._end()

    def take_report(self) -> None:
        """Wait for the next report of every rank and give the first rank's to the oldest step without one."""
        reports = self._receive()
        first = reports[0]
        if len(reports) > 1:
            self._check_ranks(reports)
        if isinstance(first, StepDone):
            self._device_seconds = first.device_seconds
            self.num_host_pages = min(report.num_host_pages for report in reports if isinstance(report, StepDone))
        self._in_flight.popleft().report = first

    def _check_ranks(self, reports: Sequence[Report]) -> None:
        """Raise if ranks drew different tokens, which would go unnoticed otherwise."""
        done = [report.result for report in reports if isinstance(report, StepDone)]
        drawn = [[(each.slot, each.token_ids) for each in result.drawn] for result in done]
        differing = next((index for index, tokens in enumerate(drawn) if tokens != drawn[0]), None)
        if differing is not None:
            raise self._death(f"ranks 0 and {differing} drew different tokens", "this is a bug: please report it")

    def _send_all(self, command: Command) -> None:
        message = frame(command)
        for rank in self._ranks:
            self._send(rank, message)

    def _send(self, rank: _RankProcess, message: bytearray) -> None:
        try:
            rank.connection.sendall(message)
        except TimeoutError as error:
            raise self._silence(rank) from error
        except OSError as error:
            raise self._death() from error

    def _receive(self) -> list[Report]:
        """Wait for a report of every rank. Raise if a rank is gone or silent, or if one of several has failed in a step.

        If this process itself was stopped for a while, that says nothing about the ranks. So each wait counts as at most one
        period of silence.
        """
        for rank in self._ranks:
            rank.silent_s = 0.0
        stuck_s = 0.0  # how long no rank has made progress
        while waiting := [rank for rank in self._ranks if not rank.reports]:
            began, progress = time.monotonic(), [rank.progress for rank in self._ranks]
            for rank in waiting:
                if rank.silent_s > self._limit_s:
                    raise self._silence(rank)
            if stuck_s > self._build_limit_s and not self._is_built:
                raise self._death(self._describe_stuck(waiting), _STUCK_HINT)
            heard = self._read(SIGN_PERIOD_S)
            passed_s = min(time.monotonic() - began, SIGN_PERIOD_S)
            for rank in waiting:
                if rank not in heard:
                    rank.silent_s += passed_s
            stuck_s = 0.0 if progress != [rank.progress for rank in self._ranks] else stuck_s + passed_s
        return [rank.reports.popleft() for rank in self._ranks]

    def _read(self, wait_s: float) -> list[_RankProcess]:
        """Wait until some ranks send something, read it, and return these ranks. Raise if a rank is gone or has failed."""
        poll = select.poll()
        for rank in self._ranks:
            if rank.connection.fileno() < 0:
                raise self._death()
            poll.register(rank.connection, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1e3 * wait_s)}
        heard = [rank for rank in self._ranks if rank.connection.fileno() in ready]
        try:
            for rank in heard:
                rank.receive()
        except OSError as error:
            raise self._death() from error
        self._check_failures()
        return heard

    def _check_failures(self) -> None:
        """Raise if one of several ranks failed. The others may wait for it forever."""
        failed = [(rank.index, report) for rank in self._ranks for report in rank.reports if isinstance(report, WorkerFailed)]
        if not failed or len(self._ranks) == 1:
            return
        index, failure = failed[0]
        death = self._death(f"rank {index} failed: {failure.message}")
        raise death if self._is_built else failure.error()

    def _silence(self, rank: _RankProcess) -> WorkerDied:
        return self._death(f"rank {rank.index} has given no sign of life for {self._limit_s:g} s")

    def _describe_stuck(self, waiting: Sequence[_RankProcess]) -> str:
        """Say where each rank is. Several ranks wait for each other, so only a user can tell which one hangs."""
        places = ", ".join(f"rank {rank.index} is at: {rank.progress.part}" for rank in waiting)
        return f"no rank has made progress with its start for {self._build_limit_s:g} s ({places})"

    def _death(self, reason: str = "", hint: str = "check its log") -> WorkerDied:
        """End the processes, and return the error that says which one ended first, or else `reason`.

        Later calls return the same, because from then on all processes have ended.
        """
        if self._cause is None:
            self._cause = self._end_all(reason, hint)
        return WorkerDied(self._cause.message, hint=self._cause.hint)

    def _end_all(self, reason: str, hint: str) -> WorkerDied:
        deadline = time.monotonic() + _EXIT_LIMIT_S
        while not (ended := [rank for rank in self._ranks if rank.process.poll() is not None]):
            if time.monotonic() > deadline or not self._end.alive:
                break
            time.sleep(0.01)
        if len(self._ranks) > 1:
            for rank in self._ranks:
                rank.process.kill()  # it waits for the others and would not notice the end of its connection for a while
        self._end()
        if not ended and reason:
            return WorkerDied(reason, hint=hint)
        first = (ended or self._ranks)[0]
        whose = f"rank {first.index}'s " if len(self._ranks) > 1 else ""
        return exit_error(first.process, f"{whose}worker process", is_our_doing=not ended)


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


def _end(ranks: Sequence[_RankProcess]) -> None:
    """Close the connections, which ends the processes. Kill those that take too long."""
    for rank in ranks:
        with suppress(OSError):
            rank.connection.shutdown(socket.SHUT_RDWR)
        rank.connection.close()
    deadline = time.monotonic() + STOP_LIMIT_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()


def take_connection(descriptor: int) -> socket.socket:
    """Return the process's end of the connection. Processes that it starts do not inherit it."""
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)
