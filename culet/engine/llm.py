"""LLM, the offline interface. It takes prompts and returns results, without a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeGuard

from culet.config import BUILT_IN, Config
from culet.engine.engine import Engine
from culet.engine.jobs import Job, JobLoop, Result, check_params, offline_config
from culet.engine.progress import show_progress
from culet.engine.prompts import Message, Prompt, PromptReader, TokenizedPrompt, Tool, as_list
from culet.errors import BadRequest, InternalError, UserError
from culet.structured.tool_grammar import allows_calls
from culet.text.chat_tokenizer import ChatTokenizer
from culet.text.messages import continued_text, read_template_options
from culet.text.output import MakeOutput, OutputDelta, chat_output, plain_output
from culet.types import Request, SamplingParams


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
        # Nobody reads along, so chunks of prompts may be as long as the budget.
        self._start(offline_config(model, {"max_step_ms": 0, **settings}, trust_remote_code=trust_remote_code))

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Create an LLM from a Config."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: Config) -> None:
        engine = Engine(config)
        self._loop = JobLoop(engine)
        self._prompts = PromptReader(engine.tokenizer, engine.chat_template, engine.media)

    @property
    def engine(self) -> Engine:
        """The engine, for statistics and settings."""
        return self._loop.engine

    def get_tokenizer(self) -> ChatTokenizer:
        """Return the tokenizer. It has the most common methods of transformers' tokenizers."""
        return ChatTokenizer(self.engine.tokenizer, self.engine.chat_template)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[Result]:
        """Continue each prompt, which is a text or a list of token ids. Results are in the same order as the prompts.

        A prompt with images, video or audio is a mapping with `prompt`, in which each medium is a placeholder such as
        `<|image|>`, and `multi_modal_data`, such as {"image": [path, bytes, a picture of Pillow or an array]}.

        All prompts are checked before any is computed. `sampling_params` applies to all prompts, or is a list with one entry
        per prompt. `priority` has one entry per prompt, and lower ones run first. With `use_tqdm`, a terminal shows the
        progress.
        """
        return self._run(self._prompts.read(prompts), sampling_params, self._plain_output(), use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        constrain_tool_calls: bool = True,
        unmarked_tool_calls: bool = False,
        enable_thinking: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[Result]:
        """Answer one conversation, or several, using the model's chat template.

        The content of a message may be a list of parts: texts, and images, video and audio (see the guide to media).

        Results separate the answer (`text`) from thoughts (`reasoning`) and tool calls (`tool_calls`, with parsed arguments).
        With `constrain_tool_calls`, a grammar holds each call to the tools and their schemas. With `unmarked_tool_calls`,
        `call:NAME{...}` is a call of a declared tool even without the tokens around it. Without `tools`, calls are text. The
        arguments of earlier calls may be JSON. `chat_template_kwargs` may have `enable_thinking` and `preserve_thinking`. A
        `thinking_token_budget` of 0 turns thinking off. `mm_processor_kwargs` may have `max_soft_tokens`. With
        `continue_final_message` and without `add_generation_prompt`, the answer continues the assistant's last message, and
        structured outputs hold for both together.
        """
        options = read_template_options(chat_template_kwargs)
        asked = options.pop("enable_thinking", None)
        enable_thinking = enable_thinking if asked is None else asked
        if _is_conversation(messages):
            messages = [messages]
        conversations = as_list(messages, "messages", "a list of messages")
        texts: list[str | None] = [None] * len(conversations)
        if continue_final_message:
            texts = [continued_text(messages, add_generation_prompt=add_generation_prompt) for messages in conversations]
        all_params = _params_per_prompt(sampling_params, len(conversations))
        prompts = [
            self._prompts.render(
                conversation,
                tools,
                _thinks(enable_thinking, params),
                options,
                mm_processor_kwargs,
                add_generation_prompt=add_generation_prompt,
                continued=text,
            )
            for conversation, params, text in zip(conversations, all_params, texts, strict=True)
        ]
        if continue_final_message:
            all_params = [_continue_form(params, text or "") for params, text in zip(all_params, texts, strict=True)]
        else:
            all_params = [_after_thought(params) if _thinks(enable_thinking, params) else params for params in all_params]
        if tools and constrain_tool_calls:
            all_params = [self._hold_calls(params, tools) for params in all_params]
        return self._run(prompts, all_params, self._chat_output(tools, unmarked_tool_calls), use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        constrain_tool_calls: bool = True,
        unmarked_tool_calls: bool = False,
        enable_thinking: bool = False,
    ) -> OutputStream:
        """Stream the output for one prompt or conversation. Closing the stream cancels the request.

        The request is checked and queued by this call, not by the first `next`.
        """
        is_chat = _is_conversation(prompt)
        params = SamplingParams() if sampling_params is None else check_params(sampling_params)
        enable_thinking = _thinks(enable_thinking, params)
        if _is_conversation(prompt):
            prompts = [self._prompts.render(prompt, tools, enable_thinking)]
        else:
            prompts = self._prompts.read(prompt)
        if len(prompts) != 1:
            raise BadRequest(f"stream: got {len(prompts)} prompts, expected one", hint="open one stream per prompt")
        if enable_thinking:
            params = _after_thought(params)
        if is_chat and tools and constrain_tool_calls:
            params = self._hold_calls(params, tools)
        request = self._loop.make_request(prompts[0].token_ids, params, prompts[0].media, prompts[0].items)
        job = Job(request, params, self._chat_output(tools, unmarked_tool_calls) if is_chat else self._plain_output())
        job.unread = deque()
        self._loop.add(job)
        return OutputStream(self._loop, job)

    def close(self) -> None:
        """Free the model and its memory. The LLM cannot be used afterwards."""
        self._loop.close()
        self._prompts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _hold_calls(self, params: SamplingParams, tools: Sequence[Tool]) -> SamplingParams:
        """Hold calls to `tools` by a grammar. If the params ask for a form, the answer has that form or is calls."""
        form = params.structured_outputs
        document = None if form is None else form.spec()
        if document is not None and not allows_calls(document):
            return params
        return replace(params, structured_outputs=self.engine.tool_call_grammar(tools, document))

    def _plain_output(self) -> MakeOutput:
        return partial(plain_output, self.engine.tokenizer)

    def _chat_output(self, tools: Sequence[Tool] | None, unmarked_calls: bool) -> MakeOutput:
        return partial(chat_output, self.engine.tokenizer, tools=tools, unmarked_calls=unmarked_calls)

    def _run(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        make_output: MakeOutput,
        shows_progress: bool,
        priorities: Sequence[int] | None = None,
    ) -> list[Result]:
        """Check every request, then run them all. An error or Ctrl-C cancels them all."""
        all_params = _params_per_prompt(sampling_params, len(prompts))
        if priorities is not None and len(priorities) != len(prompts):
            raise BadRequest(f"priority: got {len(priorities)} for {len(prompts)} prompts", hint="pass one per prompt")
        finished: deque[Job] = deque()
        jobs = [
            Job(self._make_request(index, prompt, params, priority), params, make_output, prompt.text, finished)
            for index, (prompt, params, priority) in enumerate(
                zip(prompts, all_params, priorities or [0] * len(prompts), strict=True)
            )
        ]
        waiting, num_left, num_failures = deque(jobs), len(jobs), self._loop.num_failures
        try:
            with show_progress(len(jobs) if shows_progress else 0) as advance:
                while num_left:
                    while waiting and self._loop.try_add(waiting[0]):
                        waiting.popleft()
                    if not finished:  # another thread's step may have finished some
                        self._loop.step()
                    while finished:
                        num_left -= 1
                        advance(sum(len(sample.token_ids) for sample in finished.popleft().samples))
                    if num_left and self._loop.num_failures != num_failures:
                        raise InternalError("the engine failed in another thread's step and ended this call's requests")
        finally:
            for job in jobs:
                self._loop.drop(job)
        return [job.result() for job in jobs]

    def _make_request(self, index: int, prompt: TokenizedPrompt, params: SamplingParams, priority: int) -> Request:
        """Make the request for a prompt. Errors name the prompt's index."""
        try:
            return self._loop.make_request(prompt.token_ids, params, prompt.media, prompt.items, priority)
        except UserError as error:
            raise type(error)(f"prompt {index}: {error.message}", hint=error.hint) from None


class OutputStream(Iterator[OutputDelta]):
    """The output of one request as deltas. Closing it, leaving its `with` block or dropping it cancels the request."""

    def __init__(self, loop: JobLoop, job: Job) -> None:
        self._loop = loop
        self._job = job
        self._is_closed = False

    def __next__(self) -> OutputDelta:
        with self._loop.lock:
            unread = self._job.unread
            while not unread:
                if self._is_closed or self._job.num_running == 0:
                    raise StopIteration
                if not self._loop.is_closed and not self._loop.is_running(self._job):
                    raise InternalError("the engine failed and ended this request")
                self._loop.step()
            return unread.popleft()

    def close(self) -> None:
        self._is_closed, self._job.unread = True, None
        self._loop.drop(self._job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Return whether `prompt` is a list of messages."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _thinks(enable_thinking: bool, params: SamplingParams) -> bool:
    """Return whether the model thinks. A budget of 0 turns that off."""
    return enable_thinking and params.thinking_token_budget != 0


def _after_thought(params: SamplingParams) -> SamplingParams:
    """Return the same params, except that structured outputs apply only after the thought."""
    form = params.structured_outputs
    return params if form is None else replace(params, structured_outputs=replace(form, after_thought=True))


def _continue_form(params: SamplingParams, text: str) -> SamplingParams:
    """Return the same params, except that structured outputs hold for `text` and the output together."""
    form = params.structured_outputs
    return params if form is None else replace(params, structured_outputs=replace(form.spec(), prefix=text.lstrip()))


def _params_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        check_params(params)
    if len(params) != count:
        raise BadRequest(
            f"sampling_params: got {len(params)} for {count} prompts", hint="pass one for all prompts, or one per prompt"
        )
    return [check_params(entry) for entry in params]
