"""The watchdog counts only time in which the web process was listening."""

from __future__ import annotations

from dataclasses import dataclass

from culet.serve.process.watchdog import PERIOD_S, Watchdog


@dataclass
class Engine:
    heard_at: float = 0.0
    num_in_flight: int = 1


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
    watchdog = Watchdog(Engine(num_in_flight=0), clock)
    assert tick(watchdog, clock) == 0
