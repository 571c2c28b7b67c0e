"""LLM: the offline interface. Prompts in, results out; no server, no threads."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeGuard

from culet.config import BUILT_IN, Config, build_config
from culet.engine.engine import Engine
from culet.errors import BadRequest, ConfigError, QueueFull, UserError
from culet.text.stops import StopMatcher
from culet.text.tokenizer import IncrementalDecoder, Tokenizer
from culet.types import FinishReason, Logprobs, Request, SamplingParams, TokenDelta

Prompt = str | Sequence[int]
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Tool = Mapping[str, Any]  # {"type": "function", "function": {...}}


@dataclass(frozen=True)
class Sample:
    """One continuation of a prompt."""

    text: str
    token_ids: tuple[int, ...]  # the stop token included, if one ended it
    logprobs: tuple[Logprobs, ...] | None  # per token: token id -> log-probability; None if not asked for
    finish_reason: str  # stop, length, cancel, timeout or error
    error: str = ""  # what went wrong, where finish_reason is error
    num_accepted_drafts: int = field(default=0, compare=False)  # of token_ids, those that a drafter had proposed
    num_rejected_drafts: int = field(default=0, compare=False)
    first_token_at: float = field(default=0.0, compare=False)  # time.perf_counter() when the first token came
    last_token_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Result:
    """What became of one prompt. `text`, `token_ids`, `logprobs` and `finish_reason` are those of the first sample."""

    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]  # n of them
    num_cached_tokens: int  # prompt tokens that were found in the prefix cache
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # of each prompt token but the first; None if not asked for

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[Logprobs, ...] | None:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason


class Delta(NamedTuple):
    """What one sample of a request brought since its last delta: tokens, and the text that is certain by now."""

    request_id: str
    sample: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str = ""
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0


class _SampleText:
    """Text of one sample: tokens in, text out, until a stop string is met."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stop)

    def push(self, delta: TokenDelta) -> tuple[str, bool]:
        """(text that is certain now, whether a stop string was met). A stop token leaves no text."""
        if delta.finish_reason is None:
            return self._matcher.push(self._decoder.push(delta.token_ids))
        token_ids = delta.token_ids[:-1] if delta.stop_token_id is not None else delta.token_ids
        certain, is_hit = self._matcher.push(self._decoder.push(token_ids) + self._decoder.flush())
        return (certain, True) if is_hit else (certain + self._matcher.flush(), False)


@dataclass
class _Collected:
    """Deltas of one request, as they come in."""

    request: Request
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    text: dict[int, list[str]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)
    finish_reason: dict[int, str] = field(default_factory=dict)
    error: dict[int, str] = field(default_factory=dict)
    num_accepted_drafts: Counter[int] = field(default_factory=Counter)
    num_rejected_drafts: Counter[int] = field(default_factory=Counter)
    first_token_at: dict[int, float] = field(default_factory=dict)
    last_token_at: dict[int, float] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.text.setdefault(delta.sample, []).append(delta.text)
        self.token_ids.setdefault(delta.sample, []).extend(delta.token_ids)
        self.logprobs.setdefault(delta.sample, []).extend(delta.logprobs)
        self.num_accepted_drafts[delta.sample] += delta.num_accepted_drafts
        self.num_rejected_drafts[delta.sample] += delta.num_rejected_drafts
        if delta.token_ids:
            self.last_token_at[delta.sample] = time.perf_counter()
            self.first_token_at.setdefault(delta.sample, self.last_token_at[delta.sample])
        if delta.finish_reason is not None:
            self.finish_reason[delta.sample] = delta.finish_reason.value
            self.error[delta.sample] = delta.error

    @property
    def is_done(self) -> bool:
        return len(self.finish_reason) == self.request.n

    def result(self) -> Result:
        sampling = self.request.sampling
        samples = tuple(
            Sample(
                text="".join(self.text[sample]),
                token_ids=tuple(self.token_ids[sample]),
                logprobs=None if sampling.logprobs is None else tuple(self.logprobs[sample]),
                finish_reason=self.finish_reason[sample],
                error=self.error[sample],
                num_accepted_drafts=self.num_accepted_drafts[sample],
                num_rejected_drafts=self.num_rejected_drafts[sample],
                first_token_at=self.first_token_at.get(sample, 0.0),
                last_token_at=self.last_token_at.get(sample, 0.0),
            )
            for sample in range(self.request.n)
        )
        prompt_logprobs = None if sampling.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return Result(self.request.prompt_token_ids, samples, self.num_cached_tokens, prompt_logprobs)


class LLM:
    """A Gemma 4 model, loaded and ready.

        llm = LLM("google/gemma-4-E2B-it", max_model_len=4096)
        for result in llm.generate(["Once upon a time", "In the beginning"], SamplingParams(max_tokens=32)):
            print(result.text)

    Keywords are the names of the settings (`culet generate --help`, with underscores). One thread at a time.
    """

    def __init__(self, model: str = BUILT_IN, **settings: Any) -> None:
        self._start(build_config({"model": str(model), **settings}))

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """The same from a Config."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: Config) -> None:
        self._engine: Engine | None = Engine(config)
        self._ids = (str(number) for number in itertools.count())
        self._inbox: dict[str, deque[Delta]] = {}  # of the requests that somebody waits for
        self._texts: dict[str, dict[int, _SampleText]] = {}  # by request and sample, while they run

    @property
    def engine(self) -> Engine:
        """The engine below, for statistics and settings."""
        if self._engine is None:
            raise ConfigError("this LLM is closed", hint="make a new one")
        return self._engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Continue each prompt (a text, or a list of token ids); results are in the prompts' order.

        Every prompt is checked before any is computed. `params` is one for all, or one per prompt.
        """
        return self._run(self._token_lists(prompts), params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        enable_thinking: bool = False,
    ) -> list[Result]:
        """Answer one conversation, or each of several, through the model's chat template."""
        if _is_conversation(messages):
            messages = [messages]
        conversations = _as_list(messages, "messages", "a list of messages")
        prompts = [self._render(conversation, tools, enable_thinking) for conversation in conversations]
        if enable_thinking:
            params = [_thinking_first(one) for one in _params_per_prompt(params, len(prompts))]
        return self._run(prompts, params)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        enable_thinking: bool = False,
    ) -> Stream:
        """Deltas of one prompt or conversation as they come; closing the stream cancels the rest.

        The request is checked and queued by this call, not by the first `next`.
        """
        prompts = [self._render(prompt, tools, enable_thinking)] if _is_conversation(prompt) else self._token_lists(prompt)
        if len(prompts) != 1:
            raise BadRequest(f"stream: got {len(prompts)} prompts, expected one", hint="open one stream for each")
        params = _thinking_first(params or SamplingParams()) if enable_thinking else params or SamplingParams()
        request = self.engine.rules.make_request(next(self._ids), prompts[0], params)
        self.engine.check_grammar(request)
        self._add(request, params)
        return Stream(self, request)

    def close(self) -> None:
        """Free the model and its memory; the LLM cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._inbox.clear()
        self._texts.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # From prompts to token ids

    def _token_lists(self, prompts: Any) -> list[Sequence[int]]:
        """Token ids of each prompt: one text, one list of ids, or a list of either."""
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
        """Token ids of a plain text. It begins with <bos>, which Gemma was never without; chat templates write their own."""
        return self.engine.tokenizer.encode(text, add_bos=True)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] | None, enable_thinking: bool) -> list[int]:
        engine = self.engine
        text = engine.chat_template.render(messages, tools=tools, enable_thinking=enable_thinking)
        return engine.tokenizer.encode(text)

    # The loop

    def _add(self, request: Request, params: SamplingParams) -> None:
        self.engine.add(request)
        self._inbox[request.request_id] = deque()
        self._texts[request.request_id] = {
            sample: _SampleText(self.engine.tokenizer, params.stop) for sample in range(request.n)
        }

    def _pump(self) -> None:
        """One step; its deltas go to whoever waits for them. Ctrl-C is heeded after the step, never within."""
        with _interrupt_later():
            for token_delta in self.engine.step():
                delta = self._with_text(token_delta)
                if delta is not None and delta.request_id in self._inbox:
                    self._inbox[delta.request_id].append(delta)

    def _with_text(self, delta: TokenDelta) -> Delta | None:
        """The delta with its text; None for samples that have ended."""
        texts = self._texts.get(delta.request_id)
        if texts is None or delta.sample not in texts:
            return None
        text, is_hit = texts[delta.sample].push(delta)
        finish_reason = delta.finish_reason
        if is_hit:
            if finish_reason is None:
                self.engine.cancel(delta.request_id, delta.sample, FinishReason.STOP)
            finish_reason = FinishReason.STOP
        if finish_reason is not None:
            del texts[delta.sample]
            if not texts:
                del self._texts[delta.request_id]
        return Delta(
            delta.request_id,
            delta.sample,
            text,
            delta.token_ids,
            delta.logprobs,
            delta.prompt_logprobs,
            finish_reason,
            delta.num_cached_tokens,
            delta.error,
            delta.num_accepted_drafts,
            delta.num_rejected_drafts,
        )

    def _drop(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        self._texts.pop(request_id, None)
        if self._inbox.pop(request_id, None) is not None and self._engine is not None:
            self._engine.cancel(request_id)

    def _run(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None) -> list[Result]:
        """Check every request, then run them all; on an error or Ctrl-C none is left behind."""
        each = _params_per_prompt(params, len(prompts))
        requests = [self._checked(index, prompt, one) for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))]
        collected = {request.request_id: _Collected(request) for request in requests}
        waiting = deque(zip(requests, each, strict=True))
        running: set[str] = set()
        try:
            with _progress(len(requests)) as advance:
                while waiting or running:
                    while waiting and self._try_add(*waiting[0]):
                        running.add(waiting.popleft()[0].request_id)
                    self._pump()
                    for request_id in list(running):
                        inbox = self._inbox[request_id]
                        while inbox:
                            collected[request_id].add(inbox.popleft())
                        if collected[request_id].is_done:
                            running.remove(request_id)
                            del self._inbox[request_id]
                            advance(sum(map(len, collected[request_id].token_ids.values())))
        finally:
            for request_id in running:
                self._drop(request_id)
        return [collected[request.request_id].result() for request in requests]

    def _checked(self, index: int, prompt: Sequence[int], params: SamplingParams) -> Request:
        """The request for a prompt; what is wrong with it is said with the prompt's number."""
        try:
            request = self.engine.rules.make_request(next(self._ids), prompt, params)
            self.engine.check_grammar(request)
            return request
        except UserError as error:
            raise type(error)(f"prompt {index}: {error.message}", hint=error.hint) from None

    def _try_add(self, request: Request, params: SamplingParams) -> bool:
        try:
            self._add(request, params)
        except QueueFull:
            return False  # room comes with the next steps
        return True


class Stream(Iterator[Delta]):
    """Deltas of one request. Closing it, leaving its `with` block or losing it cancels what is not done."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._llm = llm
        self._request = request
        self._num_running = request.n

    def __next__(self) -> Delta:
        inbox = self._llm._inbox.get(self._request.request_id)
        if inbox is None:
            raise StopIteration
        while not inbox:
            if self._num_running == 0:
                self.close()
                raise StopIteration
            self._llm._pump()
        delta = inbox.popleft()
        self._num_running -= delta.finish_reason is not None
        return delta

    def close(self) -> None:
        self._llm._drop(self._request.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _as_list(value: Any, name: str, expected: str) -> list[Any]:
    """`value` as a list; a mapping, bytes or something that cannot be walked is refused."""
    if isinstance(value, Mapping | bytes) or not isinstance(value, Iterable):
        raise BadRequest(f"{name}: got {type(value).__name__}, expected {expected}")
    return list(value)


def _is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether this is a list of messages."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _thinking_first(params: SamplingParams) -> SamplingParams:
    """The same, but a form that the output must have is that of what comes after the thought."""
    form = params.structured_outputs
    return params if form is None else replace(params, structured_outputs=replace(form, after_thought=True))


def _params_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise BadRequest(f"params: got {len(params)} of them for {count} prompts", hint="give one for all, or one per prompt")
    return list(params)


@contextmanager
def _interrupt_later() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done: a step that is half applied would leave pages in limbo."""
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
    """A progress bar on stderr for many prompts, in a terminal; called with the tokens of each prompt that is done."""
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
