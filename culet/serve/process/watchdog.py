"""Measure how long an engine has been silent while it has work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

PERIOD_S = 1.0


class Heard(Protocol):
    """What the watchdog reads of an engine client."""

    heard_at: float

    @property
    def has_work(self) -> bool: ...


class Watchdog:
    """Adds up the time in which this process listened and a busy engine sent nothing. Call `tick` once per period.

    Time in which this process did not run (SIGSTOP, a suspended VM, a blocked event loop) says nothing about the engine. So a
    tick adds one period at most, however late it comes. After a pause, the messages that wait in the socket are read before
    the next ticks can add up to the limit.
    """

    def __init__(self, engine: Heard, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._heard_at, self._ticked_at = engine.heard_at, clock()
        self.silent_s = 0.0

    def tick(self) -> None:
        now, heard_at = self._clock(), self._engine.heard_at
        is_silent = self._engine.has_work and heard_at == self._heard_at
        self.silent_s = self.silent_s + min(now - self._ticked_at, PERIOD_S) if is_silent else 0.0
        self._heard_at, self._ticked_at = heard_at, now
