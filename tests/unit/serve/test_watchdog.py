"""The watchdog counts only time in which the web process was listening."""

from __future__ import annotations

from dataclasses import dataclass

from culet.serve.process.client import EngineClient, State, TokenStream
from culet.serve.process.watchdog import PERIOD_S, Watchdog
from culet.types import FinishReason, TokenDelta
from tests.engine.scheduler.drive import make_request


@dataclass
class Engine:
    heard_at: float = 0.0
    has_work: bool = True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tick(watchdog: Watchdog, clock: Clock, seconds: float = PERIOD_S) -> float:
    clock.now += seconds
    watchdog.tick()
    return watchdog.silent_s


def test_silence_adds_up() -> None:
    clock = Clock()
    watchdog = Watchdog(Engine(), clock)
    assert [tick(watchdog, clock) for _ in range(3)] == [1, 2, 3]


def test_a_pause_of_this_process_counts_as_one_period() -> None:
    clock = Clock()
    watchdog = Watchdog(Engine(), clock)
    tick(watchdog, clock)
    assert tick(watchdog, clock, seconds=3600) == 2 * PERIOD_S


def test_a_message_ends_the_silence() -> None:
    """Messages that waited in the socket during a pause are read before the silence can reach any limit."""
    clock, engine = Clock(), Engine()
    watchdog = Watchdog(engine, clock)
    tick(watchdog, clock, seconds=3600)
    engine.heard_at = clock.now
    assert tick(watchdog, clock) == 0
    assert tick(watchdog, clock) == PERIOD_S


def test_an_idle_engine_may_be_silent() -> None:
    clock = Clock()
    watchdog = Watchdog(Engine(has_work=False), clock)
    assert tick(watchdog, clock) == 0


def test_a_client_that_reads_slowly_is_not_the_engines_silence() -> None:
    """The engine is done with its answer and has nothing to say, however long the client takes to read it."""
    engine, clock = EngineClient(), Clock()
    engine.heard_at = clock.now
    watchdog = Watchdog(engine, clock)
    stream = TokenStream(engine, make_request("a", [5, 6]))
    engine.take(stream)
    engine.state = State.READY
    assert tick(watchdog, clock) == PERIOD_S
    stream.put(TokenDelta("a", 0, (7,), finish_reason=FinishReason.STOP))
    assert tick(watchdog, clock) == 0
    engine.heard_at = clock.now = 300.0
    tick(watchdog, clock)
    engine.submit(make_request("b", [5, 6]))
    assert engine.heard_at != 300.0, "an idle engine's silence does not count against the next request"
