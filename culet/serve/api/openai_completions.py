"""POST /v1/completions: OpenAI's completions API for plain text.

It can also return log-probabilities of the prompt, which evaluation tools use.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.api.endpoint import Endpoint, decode, encoder, json_response, origin_of
from culet.serve.api.fields import SamplingFields, Text, TokenId, sampling_params
from culet.serve.api.openai_answers import TextLogprobs, Usage, usage_of
from culet.serve.generation import Generation, Origin
from culet.serve.service import Service
from culet.serve.streams import DONE, EventStream, run_all
from culet.structured.forms import admit
from culet.text.output import OutputDelta, plain_output
from culet.types import Logprobs, SamplingParams

ENDPOINT = "/v1/completions"
_MAX_TOKENS = 16  # OpenAI's default


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: (
        Text | Annotated[list[Text | TokenId | Annotated[list[TokenId], Meta(max_length=1 << 21)]], Meta(max_length=1 << 21)]
    )
    echo: bool | None = False
    logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None


class Choice(Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str


class CompletionAnswer(Struct):
    """The answer to a completions request."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "text_completion"


async def complete(service: Service, request: Request) -> Response:
    """Continue one or more prompts. With `stream`, send the answers as server-sent events."""
    body = decode(CompletionRequest, await request.body())
    model = service.check_model(body.model)
    service.require_ready()
    origin = origin_of(request, priority=body.priority, cache_salt=body.cache_salt)
    params = await admit(service.grammar_check, _params(service, body))
    prompts = await _encode(service, body)
    open_all: list[Callable[[], Generation]] = [partial(_open, service, prompt, params, origin) for prompt in prompts]
    writer = _Writer(service, body, params.n)
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = _Chunks(writer, model, with_usage)
        return EventStream(service, open_all, chunks.write, end=chunks.end)
    generations = await run_all(request, open_all)
    choices = [
        writer.choice(index, generation, sample) for index, generation in enumerate(generations) for sample in range(params.n)
    ]
    answer = CompletionAnswer(_new_id(), int(time.time()), model, choices, usage_of(generations))
    if body.max_tokens == 0:
        answer.usage.total_tokens -= answer.usage.completion_tokens
        answer.usage.completion_tokens = 0
    return json_response(answer)


def _params(service: Service, body: CompletionRequest) -> SamplingParams:
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens: got 0, which is only allowed with echo")
    return sampling_params(
        service,
        body,
        # A request always draws at least one token. If max_tokens is 0, the answer leaves it out.
        max_tokens=_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


async def _encode(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Return the token ids of each prompt. The request has a text, a list of ids, or a list of either."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await service.encode_text(prompt)]
    if not prompt:
        raise BadRequest("prompt: got an empty list, expected at least one prompt")
    ids = [entry for entry in prompt if isinstance(entry, int)]
    if ids:
        if len(ids) < len(prompt):
            raise BadRequest("prompt: got token ids mixed with texts", hint="to send several prompts, send a list of lists")
        return [ids]
    if len(prompt) > service.limits.prompts:
        raise BadRequest(f"prompt: got {len(prompt)} prompts, but the maximum per request is {service.limits.prompts}")
    return [
        await service.encode_text(entry) if isinstance(entry, str) else entry for entry in prompt if not isinstance(entry, int)
    ]


def _open(service: Service, prompt: Sequence[int], params: SamplingParams, origin: Origin) -> Generation:
    make_output = partial(plain_output, service.tokenizer)
    return Generation(service, prompt, params, make_output, endpoint=ENDPOINT, origin=origin)


def _new_id() -> str:
    return f"cmpl-{secrets.token_hex(12)}"


class _Writer:
    """Creates the texts and log-probabilities that a request asks for."""

    def __init__(self, service: Service, body: CompletionRequest, n: int) -> None:
        self.tokenizer, self.n = service.tokenizer, n
        self.num_top, self.echo = body.logprobs, bool(body.echo)
        self.without_output = body.max_tokens == 0

    def choice(self, prompt_index: int, generation: Generation, sample_index: int) -> Choice:
        """Return the complete answer of one sample of a prompt."""
        sample = generation.samples[sample_index]
        text = "" if self.without_output else sample.output().text
        tokens = [] if self.without_output else sample.visible_logprobs
        reason = "length" if self.without_output else sample.finish_reason or "stop"
        return Choice(
            prompt_index * self.n + sample_index,
            self.prompt_text(generation) + text,
            self.logprobs(generation, tokens, with_prompt=self.echo),
            reason,
        )

    def prompt_text(self, generation: Generation) -> str:
        """Return the text of the prompt if it is echoed, otherwise ""."""
        return self.tokenizer.decode(generation.prompt_token_ids) if self.echo else ""

    def logprobs(
        self, generation: Generation, tokens: Sequence[tuple[int, Logprobs]], *, with_prompt: bool
    ) -> TextLogprobs | None:
        """Return log-probabilities of `tokens`, after those of the prompt if `with_prompt` is set."""
        if self.num_top is None:
            return None
        lists = TextLogprobs([], [], [], [])
        if with_prompt:
            prompt = generation.prompt_token_ids
            prompt_logprobs: list[Logprobs | None] = [None, *generation.prompt_logprobs]
            for token_id, token_logprobs in zip(prompt, prompt_logprobs, strict=True):
                lists.add(self.tokenizer, token_id, token_logprobs, self.num_top)
        for token_id, token_logprobs in tokens:
            lists.add(self.tokenizer, token_id, token_logprobs, self.num_top)
        return lists


class _Chunks:
    """Writes the answers as server-sent events."""

    def __init__(self, writer: _Writer, model: str, with_usage: bool) -> None:
        self._writer, self._with_usage = writer, with_usage
        head = {"id": _new_id(), "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = b"data: " + encoder.encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._started: set[tuple[int, int]] = set()

    def write(self, prompt_index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes:
        """Return one chunk per delta that has content."""
        writer = self._writer
        chunks: list[bytes] = []
        for delta in deltas:
            key = (prompt_index, delta.sample)
            is_first = writer.echo and key not in self._started
            self._started.add(key)
            tokens = () if writer.without_output else delta.visible_logprobs
            text = "" if writer.without_output else delta.text
            text = writer.prompt_text(generation) + text if is_first else text
            if not (text or tokens or is_first or delta.finish_reason):
                continue
            logprobs = writer.logprobs(generation, tokens, with_prompt=is_first)
            finish_reason = b"null" if delta.finish_reason is None else b'"%s"' % delta.finish_reason.encode()
            chunks += (
                self._head,
                b'{"index":%d,"text":' % (prompt_index * writer.n + delta.sample),
                encoder.encode(text),
                b',"logprobs":',
                encoder.encode(logprobs),
                b',"finish_reason":',
                finish_reason,
                b"}",
                self._tail,
            )
        return b"".join(chunks)

    def end(self, generations: Sequence[Generation]) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        if not self._with_usage:
            return DONE
        return self._head + b'],"usage":' + encoder.encode(usage_of(generations)) + b"}\n\n" + DONE


ENDPOINTS = (Endpoint("POST", ENDPOINT, complete, body=CompletionRequest, answer=CompletionAnswer),)
