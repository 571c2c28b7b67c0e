"""The loop of the engine process, run in a thread: what it reports when steps fail."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from culet.config import Config, ScheduleConfig
from culet.errors import WorkerDied
from culet.frames import FrameReader, frame
from culet.media.items import MediaItem, MediaKind
from culet.serve.process import engine as process_engine
from culet.serve.process.engine import Channel, EngineLoop, start_engine
from culet.serve.process.wire import (
    Command,
    Deltas,
    Failed,
    Refused,
    Report,
    Script,
    Start,
    Stats,
    Stop,
    Submit,
    report_decoder,
    submit_frames,
)
from culet.testing.fake_engine import FakeEngine
from culet.types import FinishReason, Request, TokenDelta
from tests.unit.serve.test_wire import make_request


class BrittleEngine(FakeEngine):
    """Fails at each step that has an error and ends all running requests, as the real engine does."""

    def __init__(self, errors: list[Exception | None]) -> None:
        super().__init__(Script(((10, 11),)), ScheduleConfig(max_num_seqs=4, max_queue_len=4))
        self.errors = errors

    def step(self) -> list[TokenDelta]:
        error = self.errors.pop(0) if self.errors and (self._running or self._waiting) else None
        if error is not None:
            for seq in [*self._running.values(), *self._waiting]:
                self._end(seq, FinishReason.ERROR)
                end = TokenDelta(seq.request.request_id, seq.sample, (), finish_reason=FinishReason.ERROR, error=str(error))
                self._deltas.append(end)
            raise error
        return super().step()


class OtherEnd:
    """The web process's end."""

    def __init__(self, engine: FakeEngine, **options: Any) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60)
        self._frames = FrameReader(report_decoder)
        self._reports: list[Report] = []
        self.code: int | None = None

        def run() -> None:
            with theirs:
                self.code = EngineLoop(engine, Channel(theirs), **options).run()

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def send(self, *commands: Command) -> None:
        self.send_bytes(b"".join(bytes(frame(command)) for command in commands))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def next(self) -> Report:
        """Return the next report other than Stats."""
        while True:
            while not self._reports:
                self._reports += self._frames.push(self._socket.recv(65536))
            report = self._reports.pop(0)
            if not isinstance(report, Stats):
                return report

    def close(self) -> None:
        self._socket.close()
        self.thread.join(120)


@pytest.fixture
def opened() -> Iterator[list[OtherEnd]]:
    ends: list[OtherEnd] = []
    yield ends
    for end in ends:
        end.close()


def test_a_failed_step_ends_only_its_requests(opened: list[OtherEnd]) -> None:
    end = OtherEnd(BrittleEngine([None, RuntimeError("broken")]))
    opened.append(end)
    end.send(Submit(make_request("a", max_tokens=9, n=2)))
    first, failed = end.next(), end.next()
    assert isinstance(first, Deltas)
    assert isinstance(failed, Deltas)
    assert {(delta.request_id, delta.sample, delta.finish_reason) for delta in failed.deltas} == {
        ("a", 0, FinishReason.ERROR),
        ("a", 1, FinishReason.ERROR),
    }
    assert "broken" in failed.deltas[0].error
    end.send(Submit(make_request("b", max_tokens=1)))
    answer = end.next()
    assert isinstance(answer, Deltas)
    assert answer.deltas[0].finish_reason is FinishReason.LENGTH
    end.send(Stop())
    end.thread.join(120)
    assert end.code == 0


@pytest.mark.parametrize(
    "errors", [[RuntimeError("broken")] * 3, [RuntimeError("CUDA error: an illegal memory access was encountered")]]
)
def test_an_engine_beyond_repair_ends(opened: list[OtherEnd], errors: list[Exception]) -> None:
    """The last failure is not reported as the end of its requests, because another engine may still answer them."""
    end = OtherEnd(BrittleEngine([*errors]))
    opened.append(end)
    for number in range(len(errors)):
        end.send(Submit(make_request(str(number))))
        if number < len(errors) - 1:
            failed = end.next()
            assert isinstance(failed, Deltas)
            assert failed.deltas[0].finish_reason is FinishReason.ERROR
    last = end.next()
    assert isinstance(last, Failed)
    assert last.kind == "WorkerDied"
    end.thread.join(120)
    assert end.code == 2


def test_a_rank_that_dies_in_a_step_is_named(opened: list[OtherEnd], monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary says which rank it was and why, and the log says whose step it was."""
    lines: list[logging.LogRecord] = []
    monkeypatch.setattr(process_engine.logger, "handle", lines.append)
    death = WorkerDied("rank 1's worker process 7 exited unexpectedly with exit code -9", hint="it was killed")
    end = OtherEnd(BrittleEngine([death]), name="engine 1")
    opened.append(end)
    end.send(Submit(make_request("a")))
    last = end.next()
    assert isinstance(last, Failed)
    assert (last.message, last.hint) == (f"the engine stopped after a failed step: {death.message}", "it was killed")
    end.thread.join(120)
    assert [line.getMessage() for line in lines] == ["a step of engine 1 failed"]


def test_failures_with_tokens_in_between_do_not_add_up(opened: list[OtherEnd]) -> None:
    """Each cost its own requests, and the engine works."""
    end = OtherEnd(BrittleEngine([RuntimeError("broken"), None] * 5))
    opened.append(end)
    for number in range(10):
        end.send(Submit(make_request(str(number), max_tokens=1)))
        answer = end.next()
        assert isinstance(answer, Deltas)
        assert answer.deltas[0].finish_reason is (FinishReason.LENGTH if number % 2 else FinishReason.ERROR)


def test_a_rank_that_dies_while_the_engine_is_idle(opened: list[OtherEnd]) -> None:
    """Nobody has to ask for it to be noticed."""
    rank, connection = socket.socketpair()

    class OneRank(BrittleEngine):
        descriptors = (connection.fileno(),)

        def check(self) -> None:
            if select.select(self.descriptors, [], [], 0)[0]:
                raise WorkerDied("worker process 7 exited unexpectedly")

    with rank, connection:
        end = OtherEnd(OneRank([]))
        opened.append(end)
        end.send(Submit(make_request("a", max_tokens=1)))
        assert isinstance(end.next(), Deltas)
        rank.close()
        last = end.next()
        assert isinstance(last, Failed)
        assert (last.kind, last.message) == ("WorkerDied", "the engine stopped: worker process 7 exited unexpectedly")
        end.thread.join(120)
    assert end.code == 2


def test_running_out_of_memory_does_not_lose_the_device(opened: list[OtherEnd]) -> None:
    error = type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")
    end = OtherEnd(BrittleEngine([error]))
    opened.append(end)
    end.send(Submit(make_request("a")))
    assert isinstance(end.next(), Deltas)
    end.send(Submit(make_request("b", max_tokens=1)))
    answer = end.next()
    assert isinstance(answer, Deltas)
    assert answer.deltas[0].finish_reason is FinishReason.LENGTH


def test_a_full_queue_refuses(opened: list[OtherEnd]) -> None:
    end = OtherEnd(BrittleEngine([]))
    opened.append(end)
    end.send(Submit(make_request("first", max_tokens=10**9, n=8)), Submit(make_request("late")))
    while not isinstance(report := end.next(), Refused):
        pass
    assert (report.request_id, report.kind) == ("late", "QueueFull")


def test_the_loop_ends_with_the_other_side() -> None:
    end = OtherEnd(BrittleEngine([]))
    end.send(Submit(make_request("a", max_tokens=10**9)))
    end.next()
    end.close()
    assert not end.thread.is_alive()
    assert end.code == 0


def test_items_belong_to_the_next_request_and_arrive_in_turns(opened: list[OtherEnd], monkeypatch: pytest.MonkeyPatch) -> None:
    """Media that take longer to arrive than a step hold up no request that runs."""
    monkeypatch.setattr(process_engine, "_MAX_RECEIVED_BYTES", 1 << 16)
    added: list[Request] = []
    steps_before: list[int] = []

    class Noting(FakeEngine):
        num_steps = 0

        def add(self, request: Request) -> None:
            added.append(request)
            steps_before.append(self.num_steps)
            super().add(request)

        def step(self) -> list[TokenDelta]:
            self.num_steps += 1
            return super().step()

    end = OtherEnd(Noting(Script(((10,),)), ScheduleConfig()))
    opened.append(end)
    end.send(Submit(make_request("running", max_tokens=10**9)))
    end.next()
    items = tuple(MediaItem(MediaKind.IMAGE, bytes([n]) * 32, 9, (144, 144, 3), bytes(1 << 20)) for n in range(3))
    request = replace(make_request("seeing"), items=items)
    end.send_bytes(b"".join(submit_frames(request)))
    end.send(Submit(make_request("plain", max_tokens=1)))
    names = set()
    while "plain" not in names:
        report = end.next()
        assert isinstance(report, Deltas)
        names |= {delta.request_id for delta in report.deltas}
    assert [(entry.request_id, len(entry.items)) for entry in added] == [("running", 0), ("seeing", 3), ("plain", 0)]
    assert added[1].items == items
    assert steps_before[1] - steps_before[0] > 2  # 3 MB, of which the socket gives at most 1 MB at a time


@pytest.mark.parametrize(("step_s", "limit_s"), [(5, 60.0), (300, 300)])
def test_ranks_that_start_may_be_silent_for_a_minute(step_s: int, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the limit for a step is: they import libraries."""
    limits: list[float] = []

    def make(config: Config, *, rank_limit_s: float, num_engines: int) -> None:
        limits.append(rank_limit_s)
        raise WorkerDied("no rank")

    monkeypatch.setattr("culet.engine.engine.Engine", make)
    with pytest.raises(WorkerDied):
        start_engine(Start(Config(), step_s=step_s))
    assert limits == [limit_s]
