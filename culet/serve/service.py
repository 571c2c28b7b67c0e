"""The state that all endpoints share: engines, tokenizer, chat template, model names, limits and counts."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from culet import env
from culet.config import BUILT_IN, Config, ServeConfig
from culet.engine.requests import ChatMarks, RequestRules
from culet.errors import CuletError, QueueFull, WorkerDied
from culet.limits import Limits, read_limits
from culet.log import logger
from culet.media.items import MediaItem
from culet.media.reader import MediaReader
from culet.models.checkpoint import open_checkpoint
from culet.models.quantised.head import check_head
from culet.models.quantised.part_bytes import check_shares
from culet.serve.answers.limits import AnswerLimits
from culet.serve.answers.stored import StoredResponses
from culet.serve.answers.turns import Turns
from culet.serve.engines.group import Engines, EngineSource, unavailable
from culet.serve.http.intake import Intake
from culet.serve.http_errors import HttpError
from culet.serve.keys import Caller, KeyRing
from culet.serve.markdown.renderer import MarkdownRenderer
from culet.serve.plot_history import PERIOD_S, PlotHistory
from culet.serve.process.client import EngineClient, State, TokenStream
from culet.serve.process.wire import Script
from culet.serve.prompts.encoder import PromptEncoder
from culet.structured.admission import GrammarAdmission
from culet.structured.check import GrammarCheck
from culet.text.template import ChatTemplate, RenderLimits
from culet.text.text_queue import TextQueue
from culet.text.tokenizer import make_tokenizer
from culet.types import MediaSpan, SamplingParams

# Seconds between tokens, as vLLM counts them.
_GAPS_MS = (1, 2.5, 5, 7.5, 10, 15, 20, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 2500, 10000)
GAP_BOUNDS = tuple(milliseconds / 1000 for milliseconds in _GAPS_MS)
_LAG_PERIOD_S = 0.1
_RATE_WINDOW_S = 60.0
MAX_RETRY_S = 60
T = TypeVar("T")


class TokenGaps:
    """Times between tokens, counted by how long they are. A long answer has too many to keep each one."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_BOUNDS) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(GAP_BOUNDS, seconds)] += 1
        self.total_s += seconds

    def merge(self, others: TokenGaps) -> None:
        self.counts = list(map(add, self.counts, others.counts))
        self.total_s += others.total_s


@dataclass(slots=True)
class FinishedRequest:
    """A request that has ended, for logs and metrics."""

    endpoint: str
    request_id: str
    finish_reasons: tuple[str, ...] = ()  # one per sample, or none if the request failed
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_reasoning_tokens: int = 0
    max_tokens: int = 0
    n: int = 1
    queue_s: float = 0.0  # time in the engine's queue
    first_token_s: float | None = None  # from submission to the first token
    total_s: float = 0.0
    decode_s: float = 0.0  # from the first token to the last
    max_generated_tokens: int = 0  # of the longest sample
    gaps: TokenGaps = field(default_factory=TokenGaps)  # between consecutive deltas of a sample
    key: str = ""  # name of the API key


class Service:
    """The model as endpoints see it. Runs in the web process, which never loads torch."""

    def __init__(
        self, config: Config, settings: ServeConfig, script: Script | None = None, engines: EngineSource | None = None
    ) -> None:
        """Open the checkpoint. Unless there are `engines` elsewhere, `start` starts some on this machine.

        With a `script`, these answer from it.
        """
        self.config, self.settings = config, settings
        self.limits: Limits = read_limits(settings.limits)
        self.intake = Intake(self.limits.bodies_mb << 20)
        names = (settings.served_model_name or public_name(config.model.model)).split(",")
        self.names = [name.strip() for name in names if name.strip()]
        keys = settings.api_key if settings.api_key is not None else env.API_KEY.get()
        self.keys = KeyRing(keys, settings.api_key_file)
        self._given_name = config.model.model
        self.checkpoint = open_checkpoint(config.model.model, config.model.revision)
        spec, folder = self.checkpoint.spec, self.checkpoint.folder
        num_ranks = config.parallel.tensor_parallel_size
        # These raise before an engine is started.
        check_shares(spec, self.checkpoint.config, config.model.quantization, num_ranks)
        check_head(spec, self.checkpoint.config, config.model.head_quantization, config.model.model)
        is_random = self.checkpoint.random is not None
        is_skipped = config.model.skip_tokenizer_init
        vocabulary = self.checkpoint.tokenizer_folder
        self.tokenizer = make_tokenizer(vocabulary, spec.vocab_size, is_random=is_random, is_skipped=is_skipped)
        self.template = ChatTemplate.of_checkpoint(
            folder,
            config.model.chat_template,
            empty_thought=spec.ple_dim == 0,
            control_tokens=() if config.model.allow_control_tokens else self.tokenizer.control_tokens,
            limits=RenderLimits(num_processes=settings.text_workers),
        )
        if config.model.chat_template is not None:  # A bad template of a checkpoint only leads to a warning (`_warm_up`).
            self.template.compile()
        self.media = MediaReader.of_checkpoint(self.checkpoint.config, None if is_random else folder, config.media)
        if not is_random:  # The checkpoint is downloaded now, so the engine process need not look it up again.
            self.config = replace(config, model=replace(config.model, model=str(folder), revision=None))
        self.engines: EngineSource = engines or Engines(
            self.config, settings, self.limits, script=script, log_level=logging_level()
        )
        grammar_check = GrammarCheck.for_tokenizer(self.tokenizer, time_limit_s=float(self.limits.grammar_s))
        self.grammars = GrammarAdmission(grammar_check, max_waiting=self.limits.grammars)
        self.answers = AnswerLimits(self.limits)
        self.stored = StoredResponses(self.limits, enabled=settings.store_responses)
        self.turns = Turns()
        self.started_at = time.time()
        self.is_refusing = False  # set while draining, unless requests on open connections are still answered
        self.observers: list[Callable[[FinishedRequest], None]] = [self._count]
        self.lag_observers: list[Callable[[float], None]] = []  # called with the seconds that a timer was late
        self.metrics_registry: CollectorRegistry | None = None  # see metrics.attach
        self.plot_history = PlotHistory()
        self.num_finished = 0
        self.num_samples = 0  # in flight
        self._rules: RequestRules | None = None
        self.texts = TextQueue(
            settings.text_workers, max_waiting=self.limits.waiting_prompts, max_waiting_mb=self.limits.waiting_prompt_mb
        )
        self.prompts = PromptEncoder(
            self.tokenizer,
            self.template,
            self.media,
            self.texts,
            max_len=lambda: self.rules.max_model_len,
            prompt_bytes=self.limits.prompt_bytes,
            enable_thinking=settings.enable_thinking,
        )
        self.markdown = MarkdownRenderer(max_kb=self.limits.markdown_kb, time_limit_s=self.limits.markdown_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: deque[float] = deque(maxlen=256)  # end times of requests, to estimate how fast the queue moves

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        return self.engines.is_draining

    @property
    def is_built_in(self) -> bool:
        """Whether the model is the one that comes with Culet."""
        return self._given_name == BUILT_IN

    # The engines

    @property
    def rules(self) -> RequestRules:
        """The rules for requests. Raises if no engine is ready."""
        if self._rules is None or self.engines.state is not State.READY:
            raise unavailable(self.engines)
        return self._rules

    @property
    def has_started(self) -> bool:
        """Whether the model has been loaded. The engine may have died since."""
        return self._rules is not None

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted. The model must be loaded and warm, and the server must not be shutting down."""
        return self._is_up and not self.is_draining

    def require_ready(self) -> None:
        """Raise if requests are not accepted. Call before doing any work for a request."""
        if self.is_refusing:
            raise WorkerDied("the server is shutting down", hint="use another replica")
        if not self._is_up:
            raise unavailable(self.engines)

    @property
    def _is_up(self) -> bool:
        return self.has_started and self.engines.state is State.READY

    @property
    def health(self) -> str:
        """`ok`, or why no engine answers requests: `loading`, `restarting` after its death, `stuck`, or `given up`."""
        health = self.engines.health
        return "loading" if health == "ok" and self._rules is None else health

    async def start(self) -> None:
        """Start the engines and wait until the model is loaded. Raise if that fails."""
        await self.engines.start()
        await asyncio.to_thread(self._warm_up)
        gc.collect()
        gc.freeze()  # garbage collections skip everything created so far
        facts = self.engines.facts
        assert facts is not None
        self._rules = RequestRules(
            vocab_size=facts.vocab_size,
            defaults=facts.defaults,
            max_position=facts.max_position,
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.max_num_seqs,
            marks=ChatMarks.of(self.tokenizer),
            has_text=self.tokenizer.has_text,
        )
        self._spawn(self._record_history())

    def _warm_up(self) -> None:
        """Start the template and media processes now, so that the first chats do not wait for them."""
        if self.media.spec.kinds:
            self.media.warm_up()
        try:
            self.template.warm_up()
            self.template.render([{"role": "user", "content": "1"}])
            problem = self.template.find_problem()
        except CuletError as error:
            problem = f"cannot be rendered, so chats are refused and only completions are answered: {error.message}"
        if problem:
            logger.warning(
                "the chat template (%s) %s; --chat-template built-in uses Culet's own", self.template.origin, problem
            )

    async def stop(self) -> None:
        """End the engine processes and all helper threads and processes."""
        for task in list(self._tasks):
            task.cancel()
        await self.engines.stop()
        self.texts.close()
        self.markdown.close()
        self.template.close()
        self.media.close()
        self.grammars.close()

    async def measure_lag(self) -> None:
        """Measure how late timers fire, which is how long other work holds up the event loop."""
        while True:
            due_at = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            lag_s = max(0.0, time.monotonic() - due_at)
            for observe in self.lag_observers:
                observe(lag_s)

    async def _record_history(self) -> None:
        """Record the values that the web page plots, once per period."""
        while True:
            stats = self.engines.stats
            if stats is not None and self.engines.state is State.READY:
                self.plot_history.record(stats)
            await asyncio.sleep(PERIOD_S)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Requests

    def check_model(self, name: str | None) -> str:
        """Return the model name for the answer. Raise a 404 if the model is not served."""
        if not name or name == self._given_name:
            return self.names[0]
        if name not in self.names:
            raise HttpError(
                404,
                f"the model {name!r} is not served",
                hint=f"available models: {', '.join(self.names)}",
                code="model_not_found",
            )
        return name

    def clamp(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Lower `max_tokens` to what the context has room for after the prompt."""
        room = self.rules.max_model_len - num_prompt_tokens
        if params.max_tokens is None or not 0 < room < params.max_tokens:
            return params
        return replace(params, max_tokens=room)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        caller: Caller,
        *,
        priority: int = 0,
        cache_salt: str = "",
        media: Sequence[MediaSpan] = (),
        items: Sequence[MediaItem] = (),
    ) -> TokenStream:
        """Send a request to the engine. Raise if the server is not ready, the queue is full, or the key is at a limit.

        `items` are the content of the spans `media`. `caller.end` must follow when the request has ended.
        """
        self.require_ready()
        deadline = time.monotonic() + self.settings.request_timeout  # all processes on a machine share this clock
        request = self.rules.make_request(
            EngineClient.next_id(),
            prompt_token_ids,
            params,
            media=media,
            items=items,
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
            tenant=caller.name,
        )
        capacity = self.engines.capacity
        if self.num_samples + params.n > capacity:
            raise QueueFull(
                f"the queue is full: {self.num_samples} samples are running or waiting (at most {capacity} can)",
                hint="try again later",
            )
        caller.begin(len(prompt_token_ids), params.n, num_in_flight=self.num_samples, capacity=capacity)
        return self.engines.submit(request)

    def retry_after_s(self) -> int:
        """Return after how many seconds a refused client should retry. Estimated from the rate of finished requests."""
        now = time.monotonic()
        recent = [at for at in self._ends if now - at < _RATE_WINDOW_S]
        if len(recent) < 2 or now == recent[0]:
            return 1
        waiting = self.engines.num_in_flight
        return max(1, min(MAX_RETRY_S, math.ceil(waiting * (now - recent[0]) / len(recent) / 2)))

    def report_finished(self, finished: FinishedRequest) -> None:
        """Tell the observers, which count and log, that a request has ended."""
        for observe in self.observers:
            observe(finished)

    def _count(self, finished: FinishedRequest) -> None:
        self.num_finished += 1
        if finished.first_token_s is not None:
            self.plot_history.add_first_token(finished.first_token_s)
        self._ends.append(time.monotonic())


def public_name(model: str) -> str:
    """Return the model's name for clients. For a local path it is the last part, so that the path stays private."""
    path = Path(model).expanduser()
    return path.resolve().name if model and path.is_dir() else model


def logging_level() -> str:
    """Return the log level of this process. The engine process uses the same level."""
    return logging.getLevelName(logger.getEffectiveLevel()).lower()
