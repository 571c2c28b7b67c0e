"""The state that all endpoints share: engine client, tokenizer, chat template, model names, limits and counts."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from prometheus_client import CollectorRegistry

from culet import env
from culet.config import BUILT_IN, Config, ServeConfig
from culet.engine.requests import ChatMarks, RequestRules
from culet.errors import BadRequest, ContextTooLong, CuletError, QueueFull, WorkerDied
from culet.limits import Limits, read_limits
from culet.line_process import Stopper
from culet.log import logger
from culet.models.checkpoint import open_checkpoint
from culet.serve.answers.limits import AnswerLimits
from culet.serve.answers.stored import StoredResponses
from culet.serve.answers.turns import Turns
from culet.serve.http.intake import Intake
from culet.serve.http_errors import HttpError
from culet.serve.keys import Caller, KeyRing
from culet.serve.markdown.renderer import MarkdownRenderer
from culet.serve.plot_history import PERIOD_S, PlotHistory
from culet.serve.process import watchdog
from culet.serve.process.client import EngineClient, State, TokenStream
from culet.serve.process.wire import Script
from culet.structured.admission import GrammarAdmission
from culet.structured.check import GrammarCheck
from culet.text.template import Chat, ChatTemplate, RenderLimits
from culet.text.text_queue import TextQueue, request_bytes
from culet.text.tokenizer import make_tokenizer
from culet.types import SamplingParams

# Seconds between tokens, as vLLM counts them.
_GAPS_MS = (1, 2.5, 5, 7.5, 10, 15, 20, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 2500, 10000)
GAP_BOUNDS = tuple(milliseconds / 1000 for milliseconds in _GAPS_MS)
_MAX_TOKEN_CHARS = 8  # few texts have more characters per token
_CUT_TOKENS = 1024  # more tokens than a cut can add to the text before it
_LAG_PERIOD_S = 0.1
_FIRST_PAUSE_S = 1.0  # before a restart; each further restart within the window waits twice as long
_MAX_PAUSE_S = 30.0
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

    def __init__(self, config: Config, settings: ServeConfig, script: Script | None = None) -> None:
        self.config, self.settings, self.script = config, settings, script
        self.limits: Limits = read_limits(settings.limits)
        self.intake = Intake(self.limits.bodies_mb << 20)
        names = (settings.served_model_name or _public_name(config.model.model)).split(",")
        self.names = [name.strip() for name in names if name.strip()]
        keys = settings.api_key if settings.api_key is not None else env.API_KEY.get()
        self.keys = KeyRing(keys, settings.api_key_file)
        self._given_name = config.model.model
        self.checkpoint = open_checkpoint(config.model.model, config.model.revision)
        spec, folder = self.checkpoint.spec, self.checkpoint.folder
        is_random = self.checkpoint.random is not None
        is_skipped = config.model.skip_tokenizer_init
        self.tokenizer = make_tokenizer(folder, spec.vocab_size, is_random=is_random, is_skipped=is_skipped)
        self.template = ChatTemplate.of_checkpoint(
            folder,
            config.model.chat_template,
            empty_thought=spec.ple_dim == 0,
            control_tokens=() if config.model.allow_control_tokens else self.tokenizer.control_tokens,
            limits=RenderLimits(num_processes=settings.text_workers),
        )
        if not is_random:  # The checkpoint is downloaded now, so the engine process need not look it up again.
            self.config = replace(config, model=replace(config.model, model=str(folder), revision=None))
        grammar_check = GrammarCheck.for_tokenizer(self.tokenizer, time_limit_s=float(self.limits.grammar_s))
        self.grammars = GrammarAdmission(grammar_check, max_waiting=self.limits.grammars)
        self.answers = AnswerLimits(self.limits)
        self.stored = StoredResponses(self.limits, enabled=settings.store_responses)
        self.turns = Turns()
        self.started_at = time.time()
        self.is_draining = False
        self.is_refusing = False  # set while draining, unless requests on open connections are still answered
        self.on_exit: Callable[[CuletError], None] = lambda error: None  # called when the engine will not be restarted
        self.observers: list[Callable[[FinishedRequest], None]] = [self._count]
        self.lag_observers: list[Callable[[float], None]] = []  # called with the seconds that a timer was late
        self.metrics_registry: CollectorRegistry | None = None  # see metrics.attach
        self.plot_history = PlotHistory()
        self.num_finished = 0
        self.num_samples = 0  # in flight
        self.num_restarts = 0
        self._engine: EngineClient | None = None
        self._watchdog: watchdog.Watchdog | None = None
        self._restarted_at: deque[float] = deque()  # within the restart window
        self._rules: RequestRules | None = None
        self.texts = TextQueue(
            settings.text_workers, max_waiting=self.limits.waiting_prompts, max_waiting_mb=self.limits.waiting_prompt_mb
        )
        self.markdown = MarkdownRenderer(max_kb=self.limits.markdown_kb, time_limit_s=self.limits.markdown_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: deque[float] = deque(maxlen=256)  # end times of requests, to estimate how fast the queue moves

    @property
    def is_built_in(self) -> bool:
        """Whether the model is the one that comes with Culet."""
        return self._given_name == BUILT_IN

    # The engine process

    @property
    def engine(self) -> EngineClient:
        """The current engine process. Raises before `start`."""
        if self._engine is None:
            raise WorkerDied("the engine has not been started")
        return self._engine

    @property
    def rules(self) -> RequestRules:
        """The rules for requests. Raises if the engine is not ready."""
        if self._rules is None or self.engine.state is not State.READY:
            raise self._unavailable()
        return self._rules

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted. The model must be loaded and warm, and the server must not be shutting down."""
        return self._is_up and not self.is_draining

    def require_ready(self) -> None:
        """Raise if requests are not accepted. Call before doing any work for a request."""
        if self.is_refusing:
            raise WorkerDied("the server is shutting down", hint="use another replica")
        if not self._is_up:
            raise self._unavailable()

    @property
    def _is_up(self) -> bool:
        return self._rules is not None and self._engine is not None and self._engine.state is State.READY

    def _unavailable(self) -> CuletError:
        if self.health == "restarting":
            return WorkerDied("the engine died and is being restarted", hint="try again later")
        return WorkerDied("the model is still loading", hint="try again later")

    @property
    def health(self) -> str:
        """`ok`, or why the engine answers no requests: it is `loading`, `restarting` after its death, or `stuck`."""
        if not self._is_up:
            has_died = self._engine is not None and self._engine.state is State.DEAD
            return "restarting" if has_died or self.num_restarts else "loading"
        return "stuck" if self._is_stuck else "ok"

    @property
    def _is_stuck(self) -> bool:
        return self._watchdog is not None and self._watchdog.silent_s > self.limits.step_s

    async def start(self) -> None:
        """Start the engine process and wait until the model is loaded. Raise if that fails."""
        level = logging_level()
        form = self.settings.log_format
        engine = await EngineClient.start(
            self.config, log_level=level, log_form=form, script=self.script, previous=self._engine
        )
        self._engine, self._watchdog = engine, None
        engine.on_death = self._on_death
        facts = await engine.wait_ready()
        await asyncio.to_thread(self._warm_up)
        gc.collect()
        gc.freeze()  # garbage collections skip everything created so far
        if engine.state is State.DEAD:
            raise engine.death()
        self._rules = RequestRules(
            vocab_size=facts.vocab_size,
            defaults=facts.defaults,
            max_position=facts.max_position,
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.max_num_seqs,
            marks=ChatMarks.of(self.tokenizer),
            has_text=self.tokenizer.has_text,
        )
        self._watchdog = watchdog.Watchdog(engine)
        self._spawn(self._watch(engine, self._watchdog))
        self._spawn(self._record_history(engine))

    def _warm_up(self) -> None:
        """Start the template processes, so that the first chats do not wait for them."""
        try:
            self.template.warm_up()
            self.template.render([{"role": "user", "content": "1"}])
            problem = self.template.find_problem()
        except CuletError as error:
            problem = f"cannot be rendered: {error.message}"
        if problem:
            logger.warning(
                "the chat template (%s) %s; --chat-template built-in uses Culet's own", self.template.origin, problem
            )

    async def stop(self) -> None:
        """End the engine process and all helper threads and processes."""
        for task in list(self._tasks):
            task.cancel()
        if self._engine is not None:
            await self._engine.stop()
        self.texts.close()
        self.markdown.close()
        self.template.close()
        self.grammars.close()

    def _on_death(self) -> None:
        engine = self.engine
        error = engine.death()
        if self._rules is None:
            return  # the code that awaits the start sees the error
        logger.error("the engine died: %s", error.message)
        self._rules = None
        if self.is_draining:
            engine.fail_all(error)
        else:
            self._spawn(self._restart(error))

    async def _restart(self, error: CuletError) -> None:
        """Restart the engine, up to the configured number of times within the window, then give up.

        Requests that were not sent a token yet wait for the new engine.
        """
        limit, window_s = self.settings.max_engine_restarts, self.settings.engine_restart_window
        while True:
            now = time.monotonic()
            while self._restarted_at and now - self._restarted_at[0] > window_s:
                self._restarted_at.popleft()
            if len(self._restarted_at) >= limit:
                break
            pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** len(self._restarted_at))
            self._restarted_at.append(now)
            self.num_restarts += 1
            waiting = f"{self.engine.num_in_flight} requests are kept"
            logger.warning("restarting the engine in %g s (%d of %d, %s)", pause_s, len(self._restarted_at), limit, waiting)
            await self.engine.stop()  # reap the process
            await asyncio.sleep(pause_s)
            try:
                await self.start()
            except CuletError as failure:
                error = failure
                logger.error("the engine did not start: %s", error.message)
            else:
                logger.info("the engine is ready again")
                return
        self.engine.fail_all(WorkerDied("the engine died and is not restarted any more", hint="use another replica"))
        self.on_exit(error)

    async def _watch(self, engine: EngineClient, silence: watchdog.Watchdog) -> None:
        """Kill an engine that hangs in a step."""
        while engine.state is State.READY:
            await asyncio.sleep(watchdog.PERIOD_S)
            silence.tick()
            if silence.silent_s > self.limits.step_s:
                logger.error("killing the engine, which has sent no message for %d s", silence.silent_s)
                engine.kill()
                return

    async def measure_lag(self) -> None:
        """Measure how late timers fire, which is how long other work holds up the event loop."""
        while True:
            due_at = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            lag_s = max(0.0, time.monotonic() - due_at)
            for observe in self.lag_observers:
                observe(lag_s)

    async def _record_history(self, engine: EngineClient) -> None:
        """Record the values that the web page plots, once per period."""
        while engine.state is State.READY:
            if engine.stats is not None:
                self.plot_history.record(engine.stats)
            await asyncio.sleep(PERIOD_S)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Text

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any] | Struct],
        *,
        tools: Sequence[Mapping[str, Any] | Struct] | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        continued: str | None = None,
    ) -> list[int]:
        """Render a conversation with the chat template and return its token ids.

        If `enable_thinking` is None, the server's default applies. Arguments of tool calls may be JSON. `continued` is the text
        of the last message if the answer continues it. There is no generation prompt then.
        """
        thinking = self.settings.enable_thinking if enable_thinking is None else enable_thinking
        limit = self.rules.max_model_len

        def encode(stopper: Stopper) -> list[int]:
            self._check_size((messages, tools), limit)
            opens_turn = add_generation_prompt and continued is None
            chat = Chat(_plain(messages), _plain(tools), opens_turn, thinking, options, parsed=False)
            rendered = self.template.render_chat(chat, stopper)
            if stopper.is_stopped:  # the client has left
                return []
            if continued is not None:
                rendered = rendered.up_to(continued)
            self._check_length(rendered.text, limit)
            return self.tokenizer.encode_pieces(rendered.text, rendered.cuts)

        return await self.texts.run(encode, request_bytes.get())

    async def encode_text(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Return the token ids of a plain text, which may spell out control tokens."""
        limit = self.rules.max_model_len

        def encode(stopper: Stopper) -> list[int]:
            self._check_length(text, limit)
            return self.tokenizer.encode(text, add_bos=add_bos)

        return await self.texts.run(encode, len(text))

    def _check_size(self, conversation: object, limit: int) -> None:
        """Raise if a conversation is far too large for the context, before anything slow is done with it."""
        try:
            num_bytes = len(msgspec.json.encode(conversation))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"messages: cannot convert them to JSON: {error}") from None
        max_bytes = limit * self.limits.prompt_bytes
        if num_bytes > max_bytes:
            raise ContextTooLong(
                f"the messages and tools have {num_bytes} bytes, but the context of {limit} tokens holds at most {max_bytes}",
                hint="send less text (the server sets the bytes per token with --limits prompt_bytes=N)",
            )

    def _check_length(self, text: str, limit: int) -> None:
        """Raise if a text is far too long for the context, after encoding only its start, which saves seconds."""
        if len(text) > limit * _MAX_TOKEN_CHARS:
            num_tokens = len(self.tokenizer.encode(text[: limit * _MAX_TOKEN_CHARS]))
            if num_tokens > limit + _CUT_TOKENS:
                raise ContextTooLong(f"the prompt is longer than the context of {limit} tokens")

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
    ) -> TokenStream:
        """Send a request to the engine. Raise if the server is not ready, the queue is full, or the key is at a limit.

        `caller.end` must follow when the request has ended.
        """
        self.require_ready()
        deadline = time.monotonic() + self.settings.request_timeout  # all processes on a machine share this clock
        engine = self.engine
        request = self.rules.make_request(engine.next_id(), prompt_token_ids, params, priority=priority, deadline=deadline)
        request = replace(request, cache_salt=cache_salt, tenant=caller.name)
        facts = engine.facts
        assert facts is not None
        capacity = facts.max_num_seqs + facts.max_queue_len
        if self.num_samples + params.n > capacity:
            raise QueueFull(
                f"the queue is full: {self.num_samples} samples are running or waiting "
                f"(at most {facts.max_num_seqs} can run and {facts.max_queue_len} can wait)",
                hint="try again later",
            )
        caller.begin(len(prompt_token_ids), params.n, num_in_flight=self.num_samples, capacity=capacity)
        return engine.submit(request)

    def retry_after_s(self) -> int:
        """Return after how many seconds a refused client should retry. Estimated from the rate of finished requests."""
        now = time.monotonic()
        recent = [at for at in self._ends if now - at < _RATE_WINDOW_S]
        if len(recent) < 2 or now == recent[0]:
            return 1
        waiting = self._engine.num_in_flight if self._engine is not None else 0
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


def _public_name(model: str) -> str:
    """Return the model's name for clients. For a local path it is the last part, so that the path stays private."""
    path = Path(model).expanduser()
    return path.resolve().name if model and path.is_dir() else model


def _plain(values: Sequence[Mapping[str, Any] | Struct] | None) -> object:
    """Return messages or tools as plain data. Arguments that have not been parsed stay so."""
    return msgspec.to_builtins(values, builtin_types=(Raw,)) if values and isinstance(values[0], Struct) else values


def logging_level() -> str:
    """Return the log level of this process. The engine process uses the same level."""
    return logging.getLevelName(logger.getEffectiveLevel()).lower()
