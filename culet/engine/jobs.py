"""Requests with their outputs, and the loop that runs them. `LLM` and `AsyncLLM` share this module."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

from culet.config import Config, build_config
from culet.engine.engine import Engine
from culet.errors import BadRequest, ConfigError, QueueFull
from culet.log import logger
from culet.media.items import MediaItem
from culet.text.output import MakeOutput, OutputDelta, stop_reason_of
from culet.text.output_pieces import ToolCall
from culet.types import FinishReason, Logprobs, MediaSpan, Request, SamplingParams, TokenDelta


@dataclass(frozen=True)
class Sample:
    """One continuation of a prompt, or one answer of a chat."""

    text: str
    token_ids: tuple[int, ...]  # including the stop token, if one ended it
    logprobs: tuple[Logprobs, ...] | None  # for each token, a map of token id -> log-probability; None if not requested
    finish_reason: str  # stop, length, tool_calls, abort, timeout or error
    reasoning: str = ""  # the model's thoughts; chats only
    tool_calls: tuple[ToolCall, ...] = ()  # chats only
    error: str = ""  # what went wrong, if finish_reason is error
    warning: str = ""  # why an answer that has ended is empty; chats only
    num_thought_tokens: int = 0  # which a thinking budget counts
    index: int = field(default=0, compare=False)  # among the samples of its prompt: 0 .. n - 1
    num_accepted_drafts: int = field(default=0, compare=False)  # tokens in token_ids that a drafter proposed
    num_rejected_drafts: int = field(default=0, compare=False)
    first_token_at: float = field(default=0.0, compare=False)  # time.perf_counter() of the first token
    last_token_at: float = field(default=0.0, compare=False)

    @property
    def stop_reason(self) -> str | None:
        """`empty_after_thinking` if a chat's answer ended after thoughts, without text or a tool call. Otherwise None."""
        return stop_reason_of(self.warning)


@dataclass(frozen=True)
class Result:
    """The outcome of one prompt. Properties such as `text`, `reasoning` and `tool_calls` belong to the first sample."""

    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]  # n of them
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    prompt: str | None = None  # the prompt's text, if it was given as text
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # for every prompt token but the first; None if not requested
    finished: bool = True  # only AsyncLLM yields results that are not
    request_id: str = field(default="", compare=False)  # the number of the request, or the name that AsyncLLM was given

    @property
    def outputs(self) -> tuple[Sample, ...]:
        """The samples, under vLLM's name."""
        return self.samples

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def reasoning(self) -> str:
        return self.samples[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.samples[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[Logprobs, ...] | None:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason

    @property
    def stop_reason(self) -> str | None:
        return self.samples[0].stop_reason


class Job:
    """A request and its output so far."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        make_output: MakeOutput,
        prompt: str | None = None,
        finished: deque[Job] | None = None,
    ) -> None:
        """Create a job for a request. When the job ends, it is added to `finished`."""
        self.request, self.prompt, self.finished = request, prompt, finished
        self.samples = [make_output(request, params) for _ in range(request.n)]
        self.num_running = request.n
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[Logprobs] = []
        self.unread: deque[OutputDelta] | None = None  # for a stream

    def result(self) -> Result:
        sampling = self.request.sampling
        samples = []
        for index, sample in enumerate(self.samples):
            output = sample.output()
            samples.append(
                Sample(
                    text=output.text,
                    token_ids=tuple(sample.token_ids),
                    logprobs=None if sampling.logprobs is None else tuple(sample.logprobs),
                    finish_reason=sample.finish_reason or "",
                    reasoning=output.reasoning,
                    tool_calls=output.tool_calls,
                    error=sample.error,
                    warning=sample.warning,
                    num_thought_tokens=output.num_thought_tokens,
                    index=index,
                    num_accepted_drafts=sample.num_accepted_drafts,
                    num_rejected_drafts=sample.num_rejected_drafts,
                    first_token_at=sample.first_token_at,
                    last_token_at=sample.last_token_at,
                )
            )
        prompt_logprobs = None if sampling.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return Result(
            self.request.prompt_token_ids,
            tuple(samples),
            self.num_cached_tokens,
            self.prompt,
            prompt_logprobs,
            request_id=self.request.request_id,
        )


def offline_config(model: str, settings: Mapping[str, Any], *, trust_remote_code: bool) -> Config:
    """Return the Config for the arguments of `LLM` and `AsyncLLM`."""
    if trust_remote_code:
        _warn_of_remote_code()
    return build_config({"model": str(model), **settings})


def check_params(params: object) -> SamplingParams:
    """Return `params`. Raise if they are anything but SamplingParams."""
    if isinstance(params, SamplingParams):
        return params
    raise BadRequest(
        f"sampling_params: got {type(params).__name__}, expected SamplingParams",
        hint="pass SamplingParams(max_tokens=32), for example; its fields are keywords",
    )


@cache
def _warn_of_remote_code() -> None:
    """Say once per process that the argument is ignored."""
    logger.warning("trust_remote_code has no effect: Culet never runs code from a checkpoint")


class JobLoop:
    """Runs jobs on an engine, one step at a time. Several threads may use it, and whichever runs a step runs it for all."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._numbers = itertools.count()  # of requests
        self.lock = threading.RLock()  # for the engine and everything below
        self._jobs: dict[str, Job] = {}  # by request id
        self.num_failures = 0  # steps that failed

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ConfigError("this LLM is closed", hint="create a new one")
        return self._engine

    @property
    def is_closed(self) -> bool:
        return self._engine is None

    def next_id(self) -> str:
        return str(next(self._numbers))

    def make_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        media: Sequence[MediaSpan] = (),
        items: Sequence[MediaItem] = (),
        priority: int = 0,
    ) -> Request:
        """Return a complete request. Raise if it cannot be served. Blocks while its grammar is checked."""
        rules, name = self.engine.rules, self.next_id()
        request = rules.make_request(name, prompt, params, media=media, items=items, priority=priority)
        self.engine.check_grammar(request)
        return request

    def add(self, job: Job) -> None:
        """Queue a job. Raise QueueFull if there is no room."""
        with self.lock:
            self.engine.add(job.request)
            self._jobs[job.request.request_id] = job

    def try_add(self, job: Job) -> bool:
        """Queue a job, and return whether there was room. The next steps make room."""
        try:
            self.add(job)
        except QueueFull:
            return False
        return True

    def is_running(self, job: Job) -> bool:
        return job.request.request_id in self._jobs

    def cancel(self, job: Job) -> None:
        """End a job early. A later step reports its end."""
        with self.lock:
            self.engine.cancel(job.request.request_id)

    def drop(self, job: Job) -> None:
        """Cancel a job and forget it, unless it has finished."""
        with self.lock:
            if self._jobs.pop(job.request.request_id, None) is not None and self._engine is not None:
                self._engine.cancel(job.request.request_id)

    def step(self) -> None:
        """Run one step, for the jobs of all threads. Ctrl-C takes effect after the step, never during it."""
        with self.lock, _interrupt_deferred():
            try:
                deltas = self.engine.step()
            except BaseException:
                for request_id in self._jobs:  # the engine has ended only those that were part of the step
                    self.engine.cancel(request_id)
                self._jobs.clear()
                self.num_failures += 1
                raise
            for delta in deltas:
                self._read(delta)

    def _read(self, delta: TokenDelta) -> None:
        job = self._jobs.get(delta.request_id)
        if job is None or (sample := job.samples[delta.sample]).finish_reason is not None:
            return
        output = sample.push(delta)
        if delta.num_cached_tokens:
            job.num_cached_tokens = max(job.num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs:
            job.prompt_logprobs += delta.prompt_logprobs
        if job.unread is not None:
            job.unread.append(output)
        if output.finish_reason is not None:
            if delta.finish_reason is None:
                self.engine.cancel(delta.request_id, delta.sample, FinishReason.STOP)
            job.num_running -= 1
            if job.num_running == 0:
                del self._jobs[delta.request_id]
                if job.finished is not None:
                    job.finished.append(job)

    def close(self) -> None:
        """Free the engine. The loop cannot be used afterwards."""
        with self.lock:
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            self._jobs.clear()


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the block is done, because a half-applied step would leak pages.

    A program that ignores it goes on ignoring it, and the handler of one that has its own is called after the block.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pending: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pending:
        handler(signal.SIGINT, pending[-1])
