"""LLM, the offline interface. It takes prompts and returns results, without a server."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeGuard

from culet.config import BUILT_IN, Config, build_config
from culet.engine.engine import Engine
from culet.engine.progress import show_progress
from culet.errors import BadRequest, ConfigError, InternalError, QueueFull, UserError
from culet.log import logger
from culet.text.output import MakeOutput, OutputDelta, chat_output, plain_output
from culet.text.output_pieces import ToolCall
from culet.text.template import Chat
from culet.text.tokenizer import Tokenizer
from culet.types import FinishReason, GrammarSpec, Logprobs, Request, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]  # a mapping has `prompt` or `prompt_token_ids`
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
    warning: str = ""  # why an answer that has ended is empty; chats only
    num_thought_tokens: int = 0  # which a thinking budget counts; chats only
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
    prompt: str | None = None  # the prompt's text, if it was given as text
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # for every prompt token but the first; None if not requested

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


class _Job:
    """A request and its output so far."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        make_output: MakeOutput,
        prompt: str | None = None,
        finished: deque[_Job] | None = None,
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
                    warning=sample.warning,
                    num_thought_tokens=output.num_thought_tokens,
                    num_accepted_drafts=sample.num_accepted_drafts,
                    num_rejected_drafts=sample.num_rejected_drafts,
                    first_token_at=sample.first_token_at,
                    last_token_at=sample.last_token_at,
                )
            )
        prompt_logprobs = None if sampling.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return Result(self.request.prompt_token_ids, tuple(samples), self.num_cached_tokens, self.prompt, prompt_logprobs)


@dataclass(frozen=True)
class _TokenizedPrompt:
    """The tokens of a prompt, and its text if it was given as text."""

    token_ids: Sequence[int]
    text: str | None = None


class LLM:
    """A Gemma 4 model that is loaded and ready to run.

        llm = LLM("google/gemma-4-E2B-it", max_model_len=4096)
        for result in llm.generate(["Once upon a time", "In the beginning"], SamplingParams(max_tokens=32)):
            print(result.text)
        [answer] = llm.chat([{"role": "user", "content": "Why is the sky blue?"}], enable_thinking=True)
        print(answer.reasoning, answer.text)

    Keywords are the settings listed by `culet generate --help`, with underscores. Several threads may use it. Their requests
    run together: whichever thread runs the next step runs it for all.
    """

    def __init__(self, model: str = BUILT_IN, *, trust_remote_code: bool = False, **settings: Any) -> None:
        if trust_remote_code:
            logger.info("trust_remote_code has no effect: Culet never runs code from a checkpoint")
        self._start(build_config({"model": str(model), **settings}))

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Create an LLM from a Config."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: Config) -> None:
        self._engine: Engine | None = Engine(config)
        self._numbers = itertools.count()  # of requests
        self._lock = threading.RLock()  # for the engine and everything below
        self._jobs: dict[str, _Job] = {}  # by request id
        self._num_failures = 0  # steps that failed

    @property
    def engine(self) -> Engine:
        """The engine, for statistics and settings."""
        if self._engine is None:
            raise ConfigError("this LLM is closed", hint="create a new one")
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Result]:
        """Continue each prompt, which is a text or a list of token ids. Results are in the same order as the prompts.

        All prompts are checked before any is computed. `sampling_params` applies to all prompts, or is a list with one entry
        per prompt. With `use_tqdm`, a terminal shows the progress.
        """
        return self._run(self._read_prompts(prompts), sampling_params, self._plain_output(), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        constrain_tool_calls: bool = True,
        enable_thinking: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[Result]:
        """Answer one conversation, or several, using the model's chat template.

        Results separate the answer (`text`) from thoughts (`reasoning`) and tool calls (`tool_calls`, with parsed arguments).
        With `constrain_tool_calls`, a grammar holds each call to the tools and their schemas. `chat_template_kwargs` are
        variables of the template, and may include `enable_thinking`.
        """
        options = dict(chat_template_kwargs or {})
        enable_thinking = bool(options.pop("enable_thinking", enable_thinking))
        if _is_conversation(messages):
            messages = [messages]
        conversations = _as_list(messages, "messages", "a list of messages")
        prompts = [
            _TokenizedPrompt(self._render(conversation, tools, enable_thinking, options)) for conversation in conversations
        ]
        if enable_thinking:
            sampling_params = [_after_thought(params) for params in _params_per_prompt(sampling_params, len(prompts))]
        if tools and constrain_tool_calls:
            grammar = self.engine.tool_call_grammar(tools)
            sampling_params = [_hold_calls(params, grammar) for params in _params_per_prompt(sampling_params, len(prompts))]
        return self._run(prompts, sampling_params, self._chat_output(tools), use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        constrain_tool_calls: bool = True,
        enable_thinking: bool = False,
    ) -> OutputStream:
        """Stream the output for one prompt or conversation. Closing the stream cancels the request.

        The request is checked and queued by this call, not by the first `next`.
        """
        is_chat = _is_conversation(prompt)
        if _is_conversation(prompt):
            prompts = [_TokenizedPrompt(self._render(prompt, tools, enable_thinking))]
        else:
            prompts = self._read_prompts(prompt)
        if len(prompts) != 1:
            raise BadRequest(f"stream: got {len(prompts)} prompts, expected one", hint="open one stream per prompt")
        params = sampling_params or SamplingParams()
        if enable_thinking:
            params = _after_thought(params)
        if is_chat and tools and constrain_tool_calls:
            params = _hold_calls(params, self.engine.tool_call_grammar(tools))
        request = self.engine.rules.make_request(self._next_id(), prompts[0].token_ids, params)
        self.engine.check_grammar(request)
        job = _Job(request, params, self._chat_output(tools) if is_chat else self._plain_output())
        job.unread = deque()
        self._add(job)
        return OutputStream(self, job)

    def close(self) -> None:
        """Free the model and its memory. The LLM cannot be used afterwards."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            self._jobs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # From prompts to token ids

    def _read_prompts(self, prompts: Any) -> list[_TokenizedPrompt]:
        """Return the token ids of each prompt. `prompts` is one prompt or a list of prompts."""
        if isinstance(prompts, str | Mapping):
            return [self._read_prompt(prompts, "prompt")]
        prompts = _as_list(prompts, "prompts", "a text, token ids, or a list of either")
        if prompts and all(isinstance(entry, int) for entry in prompts):
            return [_TokenizedPrompt(prompts)]
        return [self._read_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]

    def _read_prompt(self, prompt: Any, name: str) -> _TokenizedPrompt:
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            others = sorted(set(prompt) - {"prompt_token_ids", "prompt"})
            if not known or others:
                got = f"the key {others[0]!r}" if others else "neither"
                raise BadRequest(f"{name}: got {got}, expected prompt or prompt_token_ids")
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            return _TokenizedPrompt(self._encode(prompt), prompt)
        return _TokenizedPrompt(_as_list(prompt, name, "a text or a list of token ids"))

    def _encode(self, text: str) -> list[int]:
        """Encode plain text after <bos>, which Gemma was always trained with. Chat templates write their own <bos>."""
        return self.engine.tokenizer.encode(text, add_bos=True)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        enable_thinking: bool,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        engine = self.engine
        chat = Chat(messages, tools, enable_thinking=enable_thinking, options=options)
        rendered = engine.chat_template.render_chat(chat)
        return engine.tokenizer.encode_pieces(rendered.text, rendered.cuts)

    def _plain_output(self) -> MakeOutput:
        return partial(plain_output, self.engine.tokenizer)

    def _chat_output(self, tools: Sequence[Tool] | None) -> MakeOutput:
        return partial(chat_output, self.engine.tokenizer, tools=tools)

    # The loop

    def _next_id(self) -> str:
        return str(next(self._numbers))

    def _add(self, job: _Job) -> None:
        with self._lock:
            self.engine.add(job.request)
            self._jobs[job.request.request_id] = job

    def _step(self) -> None:
        """Run one step, for the jobs of all threads. Ctrl-C takes effect after the step, never during it."""
        with self._lock, _interrupt_deferred():
            try:
                deltas = self.engine.step()
            except BaseException:
                for request_id in self._jobs:  # the engine has ended only those that were part of the step
                    self.engine.cancel(request_id)
                self._jobs.clear()
                self._num_failures += 1
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
                        if job.finished is not None:
                            job.finished.append(job)

    def _drop(self, job: _Job) -> None:
        """Cancel a job, unless it has finished."""
        with self._lock:
            if self._jobs.pop(job.request.request_id, None) is not None and self._engine is not None:
                self._engine.cancel(job.request.request_id)

    def _run(
        self,
        prompts: Sequence[_TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        make_output: MakeOutput,
        shows_progress: bool,
    ) -> list[Result]:
        """Check every request, then run them all. An error or Ctrl-C cancels them all."""
        all_params = _params_per_prompt(sampling_params, len(prompts))
        finished: deque[_Job] = deque()
        jobs = [
            _Job(self._make_request(index, prompt.token_ids, params), params, make_output, prompt.text, finished)
            for index, (prompt, params) in enumerate(zip(prompts, all_params, strict=True))
        ]
        waiting, num_left, num_failures = deque(jobs), len(jobs), self._num_failures
        try:
            with show_progress(len(jobs) if shows_progress else 0) as advance:
                while num_left:
                    while waiting and self._try_add(waiting[0]):
                        waiting.popleft()
                    if not finished:  # another thread's step may have finished some
                        self._step()
                    while finished:
                        num_left -= 1
                        advance(sum(len(sample.token_ids) for sample in finished.popleft().samples))
                    if num_left and self._num_failures != num_failures:
                        raise InternalError("the engine failed in another thread's step and ended this call's requests")
        finally:
            for job in jobs:
                self._drop(job)
        return [job.result() for job in jobs]

    def _make_request(self, index: int, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Make the request for a prompt. Errors name the prompt's index."""
        try:
            request = self.engine.rules.make_request(self._next_id(), prompt, params)
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
        with self._llm._lock:
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


def _hold_calls(params: SamplingParams, grammar: GrammarSpec | None) -> SamplingParams:
    """Return the same params with the grammar of tool calls, unless they have a form of their own."""
    return params if params.structured_outputs is not None else replace(params, structured_outputs=grammar)


def _params_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise BadRequest(
            f"sampling_params: got {len(params)} for {count} prompts", hint="pass one for all prompts, or one per prompt"
        )
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
