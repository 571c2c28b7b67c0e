"""POST /v1/completions: OpenAI's completions API for plain text.

It can also return log-probabilities of the prompt, which evaluation tools use.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, cast

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from culet.errors import BadRequest, ContextTooLong
from culet.serve.answers.limits import AnswerSize
from culet.serve.answers.parts import BigAnswer, Part, in_messages
from culet.serve.api.endpoint import Endpoint, encoder, origin_of, read_body
from culet.serve.api.fields import Count, SamplingFields, Text, TokenId, sampling_params, shortest
from culet.serve.api.openai.answers import TEXT_BYTES, TextColumns, TextLogprobs, Usage, text_size, usage_of, write_columns
from culet.serve.generation import Generation, Origin
from culet.serve.service import Service
from culet.serve.streams import DONE, EventStream, run_all
from culet.text.output import OutputDelta, plain_output
from culet.text.tokenizer import IncrementalDecoder, Tokenizer
from culet.types import Logprobs, SamplingParams

ENDPOINT = "/v1/completions"
_STEP_TOKENS = 256  # tokens that are decoded in one step
_MAX_TOKENS = 16  # OpenAI's default


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: (
        Text | Annotated[list[Text | TokenId | Annotated[list[TokenId], Meta(max_length=1 << 21)]], Meta(max_length=1 << 21)]
    )
    max_completion_tokens: Count | None = None  # another name for max_tokens, as in chat requests
    echo: bool | None = False
    logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    add_special_tokens: bool = True  # begin texts with <bos>
    # Also return the ids of the generated tokens, and with `echo` those of the prompt. Always done without a tokenizer.
    return_token_ids: bool | None = None


class CompletionChoice(Struct, omit_defaults=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None  # with echo


class CompletionAnswer(Struct):
    """The answer to a completions request."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"


async def complete(service: Service, request: Request) -> Response:
    """Continue one or more prompts. With `stream`, send the answers as server-sent events."""
    body = await read_body(service, request, CompletionRequest)
    model = service.check_model(body.model)
    service.require_ready()
    origin = origin_of(request, priority=body.priority, cache_salt=body.cache_salt)
    params, prompts = await _prepare(service, body)
    open_all: list[Callable[[], Generation]] = [partial(_open, service, prompt, params, origin) for prompt in prompts]
    size = service.answers.open()
    builder = _Builder(service, body, params.n, size)
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = _Chunks(service, builder, model, with_usage)
        return _CompletionStream(service, open_all, chunks.write, end=chunks.end, size=size)
    try:
        generations = await run_all(request, open_all, builder)
        usage = usage_of(generations)
        if body.max_tokens == 0:
            usage.total_tokens -= usage.completion_tokens
            usage.completion_tokens = 0
        return BigAnswer(builder.answer(model, generations, usage), size)
    except BaseException:
        size.close()
        raise


class _CompletionStream(EventStream):
    """An EventStream that gives back the size of its answer at the end."""

    def __init__(self, *arguments: Any, size: AnswerSize, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._size:
            await super().__call__(scope, receive, send)


async def _prepare(service: Service, body: CompletionRequest) -> tuple[SamplingParams, list[list[int]]]:
    """Return the sampling parameters and the token ids of each prompt. Raise if the answer could become too large."""
    params = _params(service, body)
    _check_size(service, body, params, 0)  # what is known without the prompts
    if params.structured_outputs is not None:
        params = replace(params, structured_outputs=await service.grammars.admit(params.structured_outputs.spec()))
    prompts = await _encode(service, body)
    _check_size(service, body, params, sum(map(len, prompts)), len(prompts))
    return params, prompts


def _check_size(
    service: Service, body: CompletionRequest, params: SamplingParams, num_prompt_tokens: int, num_prompts: int = 1
) -> None:
    num_repeated = num_prompt_tokens if body.echo else 0
    num_bytes = num_repeated * TEXT_BYTES
    if body.logprobs is not None:
        num_drawn = num_prompts * min(params.max_tokens or 0, service.rules.max_model_len)
        num_bytes += text_size(num_repeated + num_drawn, body.logprobs)
    service.answers.check(params.n * num_bytes, "logprobs" if body.logprobs is not None else "echo")


def _params(service: Service, body: CompletionRequest) -> SamplingParams:
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens: got 0, which is only allowed with echo")
    given = shortest(body.max_completion_tokens, body.max_tokens)
    return sampling_params(
        service,
        body,
        # A request always draws at least one token. If max_tokens is 0, the answer leaves it out.
        max_tokens=_MAX_TOKENS if given is None else max(1, given),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


async def _encode(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Return the token ids of each prompt. The request has a text, a list of ids, or a list of either."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await service.prompts.encode_text(prompt, add_bos=body.add_special_tokens)]
    if not prompt:
        raise BadRequest("prompt: got an empty list, expected at least one prompt")
    is_ids = isinstance(prompt[0], int)
    if is_ids:
        _check_length(service, prompt)
    elif len(prompt) > service.limits.prompts:
        raise BadRequest(f"prompt: got {len(prompt)} prompts, but the maximum per request is {service.limits.prompts}")
    if any(isinstance(entry, int) is not is_ids for entry in prompt):
        raise BadRequest("prompt: got token ids mixed with texts", hint="to send several prompts, send a list of lists")
    if is_ids:
        return [cast(list[int], prompt)]
    encoded = []
    for entry in prompt:
        if isinstance(entry, list):
            _check_length(service, entry)
            encoded.append(cast(list[int], entry))
        else:
            text = cast(str, entry)
            encoded.append(await service.prompts.encode_text(text, add_bos=body.add_special_tokens))
    return encoded


def _check_length(service: Service, token_ids: Sequence[object]) -> None:
    limit = service.rules.max_model_len
    if len(token_ids) > limit:
        raise ContextTooLong(f"the prompt has {len(token_ids)} tokens, but the context holds only {limit}")


def _open(service: Service, prompt: Sequence[int], params: SamplingParams, origin: Origin) -> Generation:
    make_output = partial(plain_output, service.tokenizer)
    if service.settings.clamp_max_tokens:
        params = service.clamp(params, len(prompt))
    return Generation(service, prompt, params, make_output, endpoint=ENDPOINT, origin=origin)


def _new_id() -> str:
    return f"cmpl-{secrets.token_hex(12)}"


class _Echo:
    """A prompt that is repeated in the answers, as JSON: its text, and its token ids and log-probabilities if requested."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        num_top: int | None,
        count: Callable[[int], None],
        *,
        with_ids: bool,
    ) -> None:
        """Begin with an empty text. `count` is called with the number of bytes that each step writes."""
        self._tokenizer, self._prompt, self._count, self._with_ids = tokenizer, prompt, count, with_ids
        self.text = bytearray()  # without quotes
        self.ids = bytearray()  # without brackets
        self.columns = None if num_top is None else TextColumns(tokenizer, num_top)

    def read_text(self) -> Iterator[None]:
        """Write the text, in short steps."""
        decoder = IncrementalDecoder(self._tokenizer)
        for begin in range(0, len(self._prompt), _STEP_TOKENS):
            step = self._prompt[begin : begin + _STEP_TOKENS]
            self._add(decoder.push(step))
            if self._with_ids:
                ids = (b"," if begin else b"") + encoder.encode(step)[1:-1]
                self._count(len(ids))
                self.ids += ids
            yield
        self._add(decoder.flush())
        if self.columns is not None:
            self._count(self.columns.add(self._prompt[0], None))

    def _add(self, text: str) -> None:
        data = _unquoted(text)
        self._count(len(data))
        self.text += data

    def read_logprobs(self, arrived: Sequence[Logprobs]) -> Iterator[None]:
        """Write the log-probabilities that have arrived, in short steps."""
        for logprobs in arrived if self.columns is not None else ():
            assert self.columns is not None
            self._count(self.columns.add(self._prompt[self.columns.num_tokens], logprobs))
            yield

    @property
    def is_complete(self) -> bool:
        return self.columns is None or self.columns.num_tokens == len(self._prompt)


class _Builder:
    """Builds the texts and log-probabilities that a request asks for, while the tokens arrive."""

    def __init__(self, service: Service, body: CompletionRequest, n: int, size: AnswerSize) -> None:
        self._turns, self._size, self.n = service.turns, size, n
        self.tokenizer = service.tokenizer
        self.num_top, self.echo = body.logprobs, bool(body.echo)
        self.with_ids = bool(body.return_token_ids) or not service.tokenizer.has_text
        self.without_output = body.max_tokens == 0
        self._echoes: dict[int, _Echo] = {}  # by prompt
        self._columns: dict[tuple[int, int], TextColumns] = {}  # by prompt and sample
        self._num_bytes: Counter[int] = Counter()  # by prompt

    async def read(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> None:
        """Take new deltas of a prompt's samples."""
        if self.echo or self.num_top is not None:
            await self._turns.finish(self._steps(index, generation, deltas))

    def forget(self, index: int) -> None:
        """Drop what was built for a prompt, because its request starts over."""
        self._size.remove(self._num_bytes.pop(index, 0))
        self._echoes.pop(index, None)
        self._columns = {key: columns for key, columns in self._columns.items() if key[0] != index}

    def _count(self, index: int, num_bytes: int) -> None:
        self._size.add(num_bytes)
        self._num_bytes[index] += num_bytes

    def _steps(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> Iterator[None]:
        yield from self.echo_steps(index, generation)
        if self.num_top is None or self.without_output:
            return
        for delta in deltas:
            for token_id, logprobs in delta.visible_logprobs:
                key = (index, delta.sample)
                columns = self._columns.get(key)
                if columns is None:
                    columns = self._columns[key] = self.new_columns(index, with_prompt=True)
                self._count(index, columns.add(token_id, logprobs))
                yield

    def echo_steps(self, index: int, generation: Generation) -> Iterator[None]:
        """Write what is known of a prompt that is repeated, in short steps."""
        if not self.echo:
            return
        echo = self._echoes.get(index)
        if echo is None:
            count = partial(self._count, index)
            prompt = generation.prompt_token_ids
            echo = self._echoes[index] = _Echo(self.tokenizer, prompt, self.num_top, count, with_ids=self.with_ids)
            yield from echo.read_text()
        yield from echo.read_logprobs(generation.take_prompt_logprobs())

    def echo_of(self, index: int) -> _Echo | None:
        """Return the prompt to repeat, or None."""
        return self._echoes.get(index)

    def new_columns(self, index: int, *, with_prompt: bool) -> TextColumns:
        """Return empty lists for a sample's tokens. Offsets count from the prompt if it is repeated before them."""
        assert self.num_top is not None
        echo = self._echoes.get(index) if with_prompt else None
        before = 0 if echo is None or echo.columns is None else echo.columns.offset
        return TextColumns(self.tokenizer, self.num_top, before)

    def answer(self, model: str, generations: Sequence[Generation], usage: Usage) -> list[Part]:
        """Return the JSON of a CompletionAnswer, in parts."""
        head = {"id": _new_id(), "created": int(time.time()), "model": model}
        parts: list[Part] = [encoder.encode(head)[:-1] + b',"choices":[']
        for index, generation in enumerate(generations):
            for number, sample in enumerate(generation.samples):
                parts.append(b"," if index or number else b"")
                text = "" if self.without_output else sample.output().text
                reason = "length" if self.without_output else sample.finish_reason or "stop"
                columns = self._columns.get((index, number))
                ids = () if self.without_output else sample.token_ids
                parts += self.choice(index, number, _unquoted(text), columns, b'"%s"' % reason.encode(), ids)
        parts.append(b'],"usage":' + encoder.encode(usage) + b',"object":"text_completion"}')
        return parts

    def choice(
        self,
        index: int,
        sample: int,
        text: bytes,
        columns: TextColumns | None,
        reason: bytes,
        token_ids: Sequence[int],
        *,
        with_prompt: bool = True,
    ) -> list[Part]:
        """Return the JSON of a CompletionChoice, in parts."""
        echo = self._echoes.get(index) if with_prompt else None
        parts: list[Part] = [b'{"index":%d,"text":"' % (index * self.n + sample)]
        parts += [text] if echo is None else [echo.text, text]
        parts.append(b'","logprobs":')
        if self.num_top is None:
            parts.append(b"null")
        else:
            both = (None if echo is None else echo.columns, columns)
            parts += write_columns([part for part in both if part is not None])
        parts += (b',"finish_reason":', reason)
        if self.with_ids:
            parts += (b',"token_ids":', encoder.encode(token_ids))
        if self.with_ids and echo is not None:
            parts += (b',"prompt_token_ids":[', echo.ids, b"]")
        return [*parts, b"}"]


class _Chunks:
    """Writes the answers as server-sent events."""

    def __init__(self, service: Service, builder: _Builder, model: str, with_usage: bool) -> None:
        self._turns, self._builder, self._with_usage = service.turns, builder, with_usage
        head = {"id": _new_id(), "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = b"data: " + encoder.encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._started: set[tuple[int, int]] = set()

    def write(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes | AsyncIterator[bytes]:
        """Return one chunk per delta that has content."""
        if self._builder.echo or self._builder.num_top is not None:
            return self._write_long(index, generation, deltas)
        return b"".join([part for chunk in self._chunks(index, deltas) for part in chunk])

    async def _write_long(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> AsyncIterator[bytes]:
        await self._turns.finish(self._builder.echo_steps(index, generation))
        async for chunks in self._turns.run(self._chunks(index, deltas)):
            for message in in_messages(part for chunk in chunks for part in chunk):
                yield message

    def _chunks(self, index: int, deltas: Sequence[OutputDelta]) -> Iterator[list[Part]]:
        builder = self._builder
        echo = builder.echo_of(index)
        if echo is not None and not echo.is_complete:
            return  # so far there are only log-probabilities of the prompt
        for delta in deltas:
            key = (index, delta.sample)
            is_first = builder.echo and key not in self._started
            self._started.add(key)
            tokens = () if builder.without_output else delta.visible_logprobs
            text = "" if builder.without_output else delta.text
            ids = delta.token_ids if builder.with_ids and not builder.without_output else ()
            if not (text or tokens or ids or is_first or delta.finish_reason):
                continue
            columns = None
            if tokens:
                columns = builder.new_columns(index, with_prompt=is_first)
                for token_id, logprobs in tokens:
                    columns.add(token_id, logprobs)
            reason = b"null" if delta.finish_reason is None else b'"%s"' % delta.finish_reason.encode()
            choice = builder.choice(index, delta.sample, _unquoted(text), columns, reason, ids, with_prompt=is_first)
            yield [self._head, *choice, self._tail]

    def end(self, generations: Sequence[Generation]) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        if not self._with_usage:
            return DONE
        return self._head + b'],"usage":' + encoder.encode(usage_of(generations)) + b"}\n\n" + DONE


def _unquoted(text: str) -> bytes:
    """Return a text as JSON without the quotes, so that texts can be joined."""
    return encoder.encode(text)[1:-1]


ENDPOINTS = (Endpoint("POST", ENDPOINT, complete, body=CompletionRequest, answer=CompletionAnswer),)
