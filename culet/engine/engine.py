"""The engine, which takes requests and returns new tokens one step at a time.

A step is schedule -> launch -> result -> apply. On a GPU, the next step is scheduled and launched before the engine waits for
the result of this one. The engine knows nothing about text or transport. Its caller calls `step` while `has_work` is true.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from culet.cache.prefix import PrefixCache
from culet.cache.spec import CacheLayout
from culet.config import Config
from culet.engine.start.parts import build_parts, finish_start
from culet.engine.start.worker import MakeWorker
from culet.errors import BadRequest
from culet.limits import Limits
from culet.runner.worker import LaunchedStep
from culet.scheduler.stats import SchedulerStats
from culet.types import FinishReason, GrammarSpec, Request, TokenDelta

COMPILE_WAIT_S = 0.02  # short, so that cancels and new requests are noticed


class Engine:
    """A loaded model that answers requests. Not thread-safe: a single caller must drive it."""

    def __init__(
        self,
        config: Config,
        *,
        progress: bool = True,
        make_worker: MakeWorker | None = None,
        rank_limit_s: float = Limits.step_s,
        num_engines: int = 1,
    ) -> None:
        """Build an engine. Its steps run in this process, in ranks, or on the worker that `make_worker` makes.

        A rank that takes longer than `rank_limit_s` for a step counts as dead. On a CPU, `num_engines` share the memory.
        """
        parts = build_parts(
            config, progress=progress, make_worker=make_worker, rank_limit_s=rank_limit_s, num_engines=num_engines
        )
        setup = parts.setup
        self.config = setup.config
        self.spec, self.defaults = setup.spec, setup.checkpoint.defaults
        self.device, self.dtype = setup.device, setup.dtype
        self.plan, self.draft_plan = setup.plan, setup.draft_plan
        self.tokenizer, self.chat_template, self.media = parts.tokenizer, parts.chat_template, parts.media
        self.rules = parts.rules  # checks requests and fills in their defaults
        self.max_model_len = parts.rules.max_model_len
        self._scheduler, self._worker, self._grammars = parts.scheduler, parts.worker, parts.grammars
        self._in_flight: deque[LaunchedStep] = deque()  # steps launched but not yet applied, oldest first
        self._max_in_flight = setup.max_in_flight
        finish_start(parts, self.add, self.step)
        self.start_times = parts.times
        count = parts.worker.compile_count
        self.kernels_compiled = 0 if count is None else count.compiled  # during the start

    @property
    def layout(self) -> CacheLayout:
        """The layout of the KV cache: how it is divided into pages."""
        return self._scheduler.layout

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """The resume points, or None if prefix caching is off."""
        return self._scheduler.page_allocator.prefix

    @property
    def descriptors(self) -> Sequence[int]:
        """The file descriptors that can be read as soon as a rank has ended. Call `check` then."""
        return self._worker.descriptors

    def check(self) -> None:
        """Raise WorkerDied if a rank has ended. `step` does so too."""
        self._worker.check()

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request. If it has a grammar, call `check_grammar` first. It then starts once the grammar is compiled."""
        if request.media and self._scheduler.features is None:
            hint = "use a checkpoint that has towers, and start without --language-model-only"
            raise BadRequest("media: no tower for images, video or audio is loaded", hint=hint)
        if request.grammar is None:
            self._scheduler.add(request)
            return
        self._scheduler.add(request, held=True)
        if self._grammars.submit(request):
            self._scheduler.release(request.request_id)

    def check_grammar(self, request: Request) -> None:
        """Raise if the request's grammar cannot be compiled within the limits. Blocks until this is known."""
        if request.grammar is not None:
            self._grammars.check(request.grammar)

    def tool_call_grammar(self, tools: Sequence[Mapping[str, Any]], document: GrammarSpec | None = None) -> GrammarSpec:
        """Return a grammar that allows only calls of `tools`. With a `document`, it allows either that document or calls."""
        return self._grammars.call_grammar(tools, document)

    def prepare_grammars(self) -> None:
        """Index the vocabulary now. Otherwise the first grammar blocks the engine for about 3 s."""
        self._grammars.prepare()

    def cancel(self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL) -> None:
        """End a request, or one of its samples. `step` reports the end.

        Unknown ids are ignored, because the request may already have ended.
        """
        self._scheduler.cancel(request_id, sample, reason)

    # The loop

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> SchedulerStats:
        """Return the scheduler's counts and the device's seconds since startup."""
        seconds, count = self._worker.device_seconds(), self._worker.compile_count
        return replace(
            self._scheduler.stats(),
            verify_seconds=seconds.get("verify", 0.0),
            draft_seconds=seconds.get("draft", 0.0),
            kernels_compiled=0 if count is None else count.while_serving,
        )

    def step(self) -> list[TokenDelta]:
        """Run one step. Return its new tokens, and the ends of requests that were cancelled or timed out.

        With look-ahead, the next step is launched before waiting for this one's result, so the device always has work.
        If a step fails, raise. The next call returns the ends of the requests that were part of it, even if `has_work` is
        false by then. All others go on.
        """
        for request_id, error in self._grammars.done(self._scheduler.is_alive):
            if error:
                self._scheduler.cancel(request_id, reason=FinishReason.ERROR, error=error)
            self._scheduler.release(request_id, has_new_grammar=self._grammars.is_new(request_id))
        self._scheduler.page_allocator.host.grow(self._worker.num_host_pages)
        is_running = False  # whether the worker, and not the scheduler, has the step
        try:
            while len(self._in_flight) < self._max_in_flight and (plan := self._scheduler.schedule()) is not None:
                is_running = True
                self._in_flight.append(self._worker.launch(plan))
                is_running = False
            if self._in_flight:
                is_running = True
                result = self._in_flight.popleft().result()
                is_running = False
                self._scheduler.apply(result)
            else:
                self._grammars.wait(COMPILE_WAIT_S)  # there is nothing else to do
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}", is_running=is_running)
            raise
        return self._scheduler.deltas()

    def _fail(self, error: str, *, is_running: bool) -> None:
        """End the requests of the steps in flight if those failed. End all if the scheduler failed and cannot be trusted."""
        self._in_flight.clear()
        if is_running:
            self._scheduler.fail_steps(error)
        else:
            self._scheduler.fail(error)
            self._grammars.forget()

    def close(self) -> None:
        """Release the worker. The engine cannot be used afterwards."""
        self._worker.close()
