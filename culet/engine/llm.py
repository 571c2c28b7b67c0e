"""LLM, the offline interface. It takes prompts and returns results, without a server or threads."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeGuard

from culet.config import BUILT_IN, Config, build_config
from culet.engine.engine import Engine
from culet.errors import BadRequest, ConfigError, InternalError, QueueFull, UserError
from culet.text.output import MakeOutput, OutputDelta, chat_output, plain_output
from culet.text.output_pieces import ToolCall
from culet.text.template import Chat
from culet.types import FinishReason, Logprobs, Request, SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Tool = Mapping[str, Any]  # {"type": "function", "function": {...}}


@dataclass(frozen=True)
class Sample:
    """One continuation of a prompt, or one answer of a chat."""

    text: str
    token_ids: tuple[int, ...]  # including the stop token, if one ended it
    logprobs: tuple[Logprobs, ...] | None  # for each token, a map of token id -> log-probability; None if not requested
    finish_reason: str  # stop, length, tool_calls, cancel, timeout or error
    reasoning: str = ""  # the model's thoughts; chats only
    tool_calls: tuple[ToolCall, ...] = ()  # chats only
    error: str = ""  # what went wrong, if finish_reason is error
    num_accepted_drafts: int = field(default=0, compare=False)  # tokens in token_ids that a drafter proposed
    num_rejected_drafts: int = field(default=0, compare=False)
    first_token_at: float = field(default=0.0, compare=False)  # time.perf_counter() of the first token
    last_token_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Result:
    """The outcome of one prompt. Properties such as `text`, `reasoning` and `tool_calls` belong to the first sample."""

    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]  # n of them
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # for every prompt token but the first; None if not requested

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


class _Job:
    """A request and its output so far."""

    def __init__(self, request: Request, params: SamplingParams, make_output: MakeOutput) -> None:
        self.request = request
        self.samples = [make_output(request, params) for _ in range(request.n)]
        self.num_running = request.n
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[Logprobs] = []
        self.unread: deque[OutputDelta] | None = None  # for a stream

    def result(self) -> Result:
        sampling = self.request.sampling
        samples = []
        for sample in self.samples:
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
                    num_accepted_drafts=sample.num_accepted_drafts,
                    num_rejected_drafts=sample.num_rejected_drafts,
                    first_token_at=sample.first_token_at,
                    last_token_at=sample.last_token_at,
                )
            )
        prompt_logprobs = None if sampling.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return Result(self.request.prompt_token_ids, tuple(samples), self.num_cached_tokens, prompt_logprobs)


class LLM:
    """A Gemma 4 model that is loaded and ready to run.

        llm = LLM("google/gemma-4-E2B-it", max_model_len=4096)
        for result in llm.generate(["Once upon a time", "In the beginning"], SamplingParams(max_tokens=32)):
            print(result.text)
        [answer] = llm.chat([{"role": "user", "content": "Why is the sky blue?"}], enable_thinking=True)
        print(answer.reasoning, answer.text)

    Keywords are the settings listed by `culet generate --help`, with underscores. Not thread-safe.
    """

    def __init__(self, model: str = BUILT_IN, **settings: Any) -> None:
        self._start(build_config({"model": str(model), **settings}))

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Create an LLM from a Config."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: Config) -> None:
        self._engine: Engine | None = Engine(config)
        self._ids = (str(number) for number in itertools.count())
        self._jobs: dict[str, _Job] = {}  # by request id

    @property
    def engine(self) -> Engine:
        """The engine, for statistics and settings."""
        if self._engine is None:
            raise ConfigError("this LLM is closed", hint="create a new one")
        return self._engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Continue each prompt, which is a text or a list of token ids. Results are in the same order as the prompts.

        All prompts are checked before any is computed. `params` applies to all prompts, or is a list with one entry per prompt.
        """
        return self._run(self._token_lists(prompts), params, self._plain_output())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        enable_thinking: bool = False,
    ) -> list[Result]:
        """Answer one conversation, or several, using the model's chat template.

        Results separate the answer (`text`) from thoughts (`reasoning`) and tool calls (`tool_calls`, with parsed arguments).
        """
        if _is_conversation(messages):
            messages = [messages]
        conversations = _as_list(messages, "messages", "a list of messages")
        prompts = [self._render(conversation, tools, enable_thinking) for conversation in conversations]
        if enable_thinking:
            params = [_after_thought(each_params) for each_params in _params_per_prompt(params, len(prompts))]
        return self._run(prompts, params, self._chat_output(tools))

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        enable_thinking: bool = False,
    ) -> OutputStream:
        """Stream the output for one prompt or conversation. Closing the stream cancels the request.

        The request is checked and queued by this call, not by the first `next`.
        """
        is_chat = _is_conversation(prompt)
        prompts = [self._render(prompt, tools, enable_thinking)] if _is_conversation(prompt) else self._token_lists(prompt)
        if len(prompts) != 1:
            raise BadRequest(f"stream: got {len(prompts)} prompts, expected one", hint="open one stream per prompt")
        params = params or SamplingParams()
        if enable_thinking:
            params = _after_thought(params)
        request = self.engine.rules.make_request(next(self._ids), prompts[0], params)
        self.engine.check_grammar(request)
        job = _Job(request, params, self._chat_output(tools) if is_chat else self._plain_output())
        job.unread = deque()
        self._add(job)
        return OutputStream(self, job)

    def close(self) -> None:
        """Free the model and its memory. The LLM cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._jobs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # From prompts to token ids

    def _token_lists(self, prompts: Any) -> list[Sequence[int]]:
        """Return the token ids of each prompt. `prompts` is one text, one list of ids, or a list of either."""
        if isinstance(prompts, str):
            return [self._encode(prompts)]
        prompts = _as_list(prompts, "prompts", "a text, token ids, or a list of either")
        if prompts and all(isinstance(entry, int) for entry in prompts):
            return [prompts]
        return [
            self._encode(prompt)
            if isinstance(prompt, str)
            else _as_list(prompt, f"prompt {index}", "a text or a list of token ids")
            for index, prompt in enumerate(prompts)
        ]

    def _encode(self, text: str) -> list[int]:
        """Encode plain text after <bos>, which Gemma was always trained with. Chat templates write their own <bos>."""
        return self.engine.tokenizer.encode(text, add_bos=True)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] | None, enable_thinking: bool) -> list[int]:
        engine = self.engine
        rendered = engine.chat_template.render_chat(Chat(messages, tools, enable_thinking=enable_thinking))
        return engine.tokenizer.encode_pieces(rendered.text, rendered.cuts)

    def _plain_output(self) -> MakeOutput:
        return partial(plain_output, self.engine.tokenizer)

    def _chat_output(self, tools: Sequence[Tool] | None) -> MakeOutput:
        return partial(chat_output, self.engine.tokenizer, tools=tools)

    # The loop

    def _add(self, job: _Job) -> None:
        self.engine.add(job.request)
        self._jobs[job.request.request_id] = job

    def _step(self) -> list[_Job]:
        """Run one step and return the jobs it finished. Ctrl-C takes effect after the step, never during it."""
        finished: list[_Job] = []
        with _interrupt_deferred():
            try:
                deltas = self.engine.step()
            except BaseException:
                for request_id in self._jobs:  # the engine has ended only those that were part of the step
                    self.engine.cancel(request_id)
                self._jobs.clear()
                raise
            for delta in deltas:
                job = self._jobs.get(delta.request_id)
                if job is None or (sample := job.samples[delta.sample]).finish_reason is not None:
                    continue
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
                        finished.append(job)
        return finished

    def _drop(self, job: _Job) -> None:
        """Cancel a job, unless it has finished."""
        if self._jobs.pop(job.request.request_id, None) is not None and self._engine is not None:
            self._engine.cancel(job.request.request_id)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        make_output: MakeOutput,
    ) -> list[Result]:
        """Check every request, then run them all. An error or Ctrl-C cancels them all."""
        all_params = _params_per_prompt(params, len(prompts))
        jobs = [
            _Job(self._make_request(index, prompt, prompt_params), prompt_params, make_output)
            for index, (prompt, prompt_params) in enumerate(zip(prompts, all_params, strict=True))
        ]
        waiting, running = deque(jobs), set[str]()
        try:
            with _progress(len(jobs)) as advance:
                while waiting or running:
                    while waiting and self._try_add(waiting[0]):
                        running.add(waiting.popleft().request.request_id)
                    for job in self._step():
                        if job.request.request_id in running:
                            running.remove(job.request.request_id)
                            advance(sum(len(sample.token_ids) for sample in job.samples))
        finally:
            for job in jobs:
                self._drop(job)
        return [job.result() for job in jobs]

    def _make_request(self, index: int, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Make the request for a prompt. Errors name the prompt's index."""
        try:
            request = self.engine.rules.make_request(next(self._ids), prompt, params)
            self.engine.check_grammar(request)
            return request
        except UserError as error:
            raise type(error)(f"prompt {index}: {error.message}", hint=error.hint) from None

    def _try_add(self, job: _Job) -> bool:
        try:
            self._add(job)
        except QueueFull:
            return False  # the next steps make room
        return True


class OutputStream(Iterator[OutputDelta]):
    """The output of one request as deltas. Closing it, leaving its `with` block or dropping it cancels the request."""

    def __init__(self, llm: LLM, job: _Job) -> None:
        self._llm = llm
        self._job = job
        self._is_closed = False

    def __next__(self) -> OutputDelta:
        unread = self._job.unread
        while not unread:
            if self._is_closed or self._job.num_running == 0:
                raise StopIteration
            if self._llm._engine is not None and self._job.request.request_id not in self._llm._jobs:
                raise InternalError("the engine failed and ended this request")
            self._llm._step()
        return unread.popleft()

    def close(self) -> None:
        self._is_closed, self._job.unread = True, None
        self._llm._drop(self._job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _as_list(value: Any, name: str, expected: str) -> list[Any]:
    """Return `value` as a list. Raise if it is a mapping, bytes or not iterable."""
    if isinstance(value, Mapping | bytes) or not isinstance(value, Iterable):
        raise BadRequest(f"{name}: got {type(value).__name__}, expected {expected}")
    return list(value)


def _is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Return whether `prompt` is a list of messages."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _after_thought(params: SamplingParams) -> SamplingParams:
    """Return the same params, except that structured outputs apply only after the thought."""
    form = params.structured_outputs
    return params if form is None else replace(params, structured_outputs=replace(form, after_thought=True))


def _params_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise BadRequest(f"params: got {len(params)} for {count} prompts", hint="pass one for all prompts, or one per prompt")
    return list(params)


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the block is done, because a half-applied step would leak pages."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt


@contextmanager
def _progress(count: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if there are several prompts and stderr is a terminal.

    Yields a function to call with the number of tokens of each finished prompt.
    """
    if count < 2 or not sys.stderr.isatty():
        yield lambda num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    speed = TextColumn("{task.fields[speed]}")
    began, total = time.monotonic(), 0
    with Progress(*columns, speed, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=count, speed="")

        def advance(num_tokens: int) -> None:
            nonlocal total
            total += num_tokens
            bar.update(task, advance=1, speed=f"{total / (time.monotonic() - began):.0f} tokens/s")

        yield advance
