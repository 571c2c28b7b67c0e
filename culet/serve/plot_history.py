"""What the page's plots show: one sample a second of how the engine stands, for the last ten minutes.

The server keeps them, so that a page that is opened now shows what was before, and many pages cost as little as one.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from culet.serve.process.wire import Stats

PERIOD_S = 1.0
KEPT_SAMPLES = 600


class Sample(Struct, frozen=True):
    """The engine at one moment. Rates are over the time since the sample before."""

    time: float  # seconds since 1970
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_ms: float | None  # median of the requests that ended since the sample before
    running: int
    waiting: int
    kv_groups: dict[str, float]  # share of all pages that running sequences hold, by KV group
    kv_reusable: float  # share of all pages that only checkpoints hold
    tokens_per_verify: float | None  # emitted for each verify of drafts since the sample before, the bonus included


class LiveSamples:
    """The last samples."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._first_tokens_s: list[float] = []
        self._before: tuple[float, Stats] | None = None

    def note_first_token(self, seconds: float) -> None:
        """A request has ended whose first token took `seconds`."""
        self._first_tokens_s.append(seconds)

    def take(self, stats: Stats) -> None:
        """One more sample, of the engine as `stats` tells."""
        now, scheduler = self._clock(), stats.scheduler
        earlier, before = self._before or (now, stats)
        self._before = now, stats
        elapsed = max(now - earlier, 1e-3)
        if stats.num_generated_tokens < before.num_generated_tokens:
            before = stats  # the engine was started again: its counts begin anew
        times = self._first_tokens_s
        self._first_tokens_s = []
        recent = scheduler.counters.since(before.scheduler.counters)
        self._samples.append(
            Sample(
                time=now,
                output_tokens_per_s=(stats.num_generated_tokens - before.num_generated_tokens) / elapsed,
                prompt_tokens_per_s=(stats.num_prompt_tokens - before.num_prompt_tokens) / elapsed,
                ttft_ms=1e3 * statistics.median(times) if times else None,
                running=scheduler.num_running,
                waiting=scheduler.num_waiting,
                kv_groups={name: held / scheduler.num_pages for name, held in scheduler.num_held_pages.items()},
                kv_reusable=scheduler.num_resume_point_pages / scheduler.num_pages,
                tokens_per_verify=recent.tokens_per_verify or None,
            )
        )

    def since(self, moment: float) -> list[Sample]:
        """The samples taken after `moment`, oldest first."""
        return [sample for sample in self._samples if sample.time > moment]
