"""The engine: requests in, new tokens out, one step at a time.

A step is schedule -> launch -> result -> apply. On a GPU the next step is scheduled and launched before the result of this one
is awaited. The engine knows neither text nor transport: its caller calls `step` while `has_work`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from culet.cache.spec import CacheLayout
from culet.config import Config
from culet.engine.build import build_parts, finish_start
from culet.runner.worker import LaunchedStep
from culet.scheduler.stats import SchedulerStats
from culet.types import FinishReason, Request, TokenDelta

COMPILE_WAIT_S = 0.02  # at a time, so that cancels and new requests are noticed


class Engine:
    """A loaded model that answers requests. Not thread-safe: one caller drives it."""

    def __init__(self, config: Config, *, progress: bool = True) -> None:
        parts = build_parts(config, progress=progress)
        setup = parts.setup
        self.config = setup.config
        self.spec, self.defaults = setup.spec, setup.checkpoint.defaults
        self.device, self.dtype = setup.device, setup.dtype
        self.plan, self.draft_plan = setup.plan, setup.draft_plan
        self.tokenizer, self.chat_template = parts.tokenizer, parts.chat_template
        self.rules = parts.rules  # what requests are checked against and completed with
        self.max_model_len = parts.rules.max_model_len
        self._scheduler, self._worker, self._grammars = parts.scheduler, parts.worker, parts.grammars
        self._in_flight: deque[LaunchedStep] = deque()  # steps that were launched and not yet applied, oldest first
        self._max_in_flight = setup.max_in_flight
        finish_start(parts, self.add, self.step)
        self.start_times = parts.times
        self.kernels_compiled = parts.num_compiled

    @property
    def layout(self) -> CacheLayout:
        """How the KV cache is divided into pages."""
        return self._scheduler.layout

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request. One with a grammar starts when the grammar is compiled; call `check_grammar` first."""
        if request.grammar is None:
            self._scheduler.add(request)
            return
        self._scheduler.add(request, held=True)
        if self._grammars.submit(request):
            self._scheduler.release(request.request_id)

    def check_grammar(self, request: Request) -> None:
        """Refuse a request whose grammar cannot be compiled within the limits. Waits for the answer."""
        if request.grammar is not None:
            self._grammars.check(request.grammar)

    def prepare_grammars(self) -> None:
        """Index the vocabulary now. Otherwise the first grammar stops the engine for about 3 s."""
        self._grammars.prepare()

    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL) -> None:
        """End a request, or one sample of it; `step` reports the end. Unknown ids are ignored: the request may have ended."""
        self._scheduler.cancel(request_id, sample, reason)

    # The loop

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> SchedulerStats:
        """Counts of the scheduler and seconds of the device, since the start."""
        seconds = self._worker.device_seconds()
        return replace(
            self._scheduler.stats(),
            verify_seconds=seconds.get("verify", 0.0),
            draft_seconds=seconds.get("draft", 0.0),
        )

    def step(self) -> list[TokenDelta]:
        """Run one step and return its new tokens, and the ends of requests that were cancelled or timed out.

        With look-ahead the next step is launched before this one's result is awaited, so the device always has work.
        """
        for request_id, error in self._grammars.done():
            if error:
                self._scheduler.cancel(request_id, reason=FinishReason.ERROR, error=error)
            self._scheduler.release(request_id)
        try:
            while len(self._in_flight) < self._max_in_flight and (plan := self._scheduler.schedule()) is not None:
                self._in_flight.append(self._worker.launch(plan))
            result = self._in_flight.popleft().result() if self._in_flight else None
        except BaseException as error:
            # What the pages hold is unknown now: every request ends, and the engine is ready for new ones.
            self._in_flight.clear()
            self._scheduler.fail(f"{type(error).__name__}: {error}")
            self._scheduler.deltas()
            self._grammars.forget()
            raise
        if result is not None:
            self._scheduler.apply(result)
        else:
            self._grammars.wait(COMPILE_WAIT_S)  # there is nothing else to do
        return self._scheduler.deltas()

    def close(self) -> None:
        """Release the worker. The engine cannot be used afterwards."""
        self._worker.close()
