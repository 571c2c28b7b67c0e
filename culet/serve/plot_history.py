"""Keep the history that the web page plots, with one point per second for the last ten minutes.

The server keeps it, so a newly opened page shows the past, and many open pages cost as little as one.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from culet.serve.process.wire import Stats

PERIOD_S = 1.0
MAX_POINTS = 600


class PlotPoint(Struct, frozen=True):
    """The state of the engine at one moment. Rates and medians cover the time since the previous point."""

    time: float  # seconds since 1970
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_ms: float | None  # median over the requests that ended
    running: int
    waiting: int
    kv_groups: dict[str, float]  # share of all pages held by running sequences, per KV group
    kv_reusable: float  # share of all pages held only by resume points
    tokens_per_verify: float | None  # tokens per verify step, including the bonus token


class PlotHistory:
    """The latest points."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._points: deque[PlotPoint] = deque(maxlen=MAX_POINTS)
        self._first_tokens_s: list[float] = []
        self._previous: tuple[float, Stats] | None = None

    def add_first_token(self, seconds: float) -> None:
        """Add the time to first token of a request that has ended."""
        self._first_tokens_s.append(seconds)

    def record(self, stats: Stats) -> None:
        """Add a point for the state in `stats`."""
        now, scheduler = self._clock(), stats.scheduler
        previous_at, previous = self._previous or (now, stats)
        self._previous = now, stats
        elapsed = max(now - previous_at, 1e-3)
        if stats.num_generated_tokens < previous.num_generated_tokens or stats.num_prompt_tokens < previous.num_prompt_tokens:
            previous = stats  # an engine died, and its counts start over
        times, self._first_tokens_s = self._first_tokens_s, []
        recent = scheduler.counters.since(previous.scheduler.counters)
        self._points.append(
            PlotPoint(
                time=now,
                output_tokens_per_s=(stats.num_generated_tokens - previous.num_generated_tokens) / elapsed,
                prompt_tokens_per_s=(stats.num_prompt_tokens - previous.num_prompt_tokens) / elapsed,
                ttft_ms=1e3 * statistics.median(times) if times else None,
                running=scheduler.num_running,
                waiting=scheduler.num_waiting,
                kv_groups={name: held / scheduler.num_pages for name, held in scheduler.num_held_pages.items()},
                kv_reusable=scheduler.num_resume_point_pages / scheduler.num_pages,
                tokens_per_verify=recent.tokens_per_verify or None,
            )
        )

    def since(self, moment: float) -> list[PlotPoint]:
        """Return the points after `moment`, oldest first."""
        return [point for point in self._points if point.time > moment]
