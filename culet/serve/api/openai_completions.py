"""POST /v1/completions: plain text in and out, with log-probabilities of prompts too, as evaluation tools want them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.api.answers import TextLogprobs, Usage, encoder, usage_of
from culet.serve.api.chat_request import sampling_params
from culet.serve.api.endpoint import Endpoint, json_response, request_id_of
from culet.serve.api.protocol import CompletionRequest, decode
from culet.serve.generation import Generation, Piece, TextReader
from culet.serve.process.wire import Logprobs
from culet.serve.service import Service
from culet.serve.streams import DONE, EventStream, run_all
from culet.structured.forms import admit
from culet.text.output_events import ContentPiece
from culet.types import SamplingParams

ENDPOINT = "/v1/completions"
_MAX_TOKENS = 16  # OpenAI's default


class Choice(Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str


class CompletionAnswer(Struct):
    """What a completions request is answered with."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "text_completion"


async def complete(service: Service, request: Request) -> Response:
    """Continue one prompt or several; with `stream` as server-sent events."""
    body = decode(CompletionRequest, await request.body())
    model = service.check_model(body.model)
    service.require_ready()
    params = await admit(service.grammar_check, _params(service, body))
    prompts = await _encode(service, body)
    request_id = request_id_of(request)
    open_all: list[Callable[[], Generation]] = [
        partial(_open, service, prompt, params, request_id, body.priority) for prompt in prompts
    ]
    writer = _Writer(service, body, params.n)
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = _Chunks(writer, model, with_usage)
        return EventStream(service, open_all, chunks.write, end=chunks.end)
    generations = await run_all(request, open_all)
    choices = [
        writer.choice(number, generation, sample) for number, generation in enumerate(generations) for sample in range(params.n)
    ]
    answer = CompletionAnswer(_new_id(), int(time.time()), model, choices, usage_of(generations))
    if body.max_tokens == 0:
        answer.usage.total_tokens -= answer.usage.completion_tokens
        answer.usage.completion_tokens = 0
    return json_response(answer)


def _params(service: Service, body: CompletionRequest) -> SamplingParams:
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens: got 0, which makes sense with echo alone")
    return sampling_params(
        service,
        body,
        # Nothing can be computed without drawing a token: with 0 it is drawn and left out.
        max_tokens=_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


async def _encode(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt: one text, one list of ids, or a list of either."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await service.encode_text(prompt)]
    if not prompt:
        raise BadRequest("prompt: got an empty list, expected at least one prompt")
    ids = [entry for entry in prompt if isinstance(entry, int)]
    if ids:
        if len(ids) < len(prompt):
            raise BadRequest(
                "prompt: got token ids among prompts", hint="one prompt is a list of ids, several are lists in a list"
            )
        return [ids]
    if len(prompt) > service.limits.prompts:
        raise BadRequest(f"prompt: got {len(prompt)} prompts, at most {service.limits.prompts} are taken in one request")
    return [
        await service.encode_text(entry) if isinstance(entry, str) else entry for entry in prompt if not isinstance(entry, int)
    ]


def _open(service: Service, prompt: Sequence[int], params: SamplingParams, request_id: str, priority: int) -> Generation:
    end_ids = (*params.stop_token_ids, *(() if params.ignore_eos else service.rules.defaults.eos_token_ids))

    def make_reader() -> TextReader:
        return TextReader(service.tokenizer, stop=tuple(params.stop), end_ids=end_ids)

    return Generation(service, prompt, params, make_reader, endpoint=ENDPOINT, request_id=request_id, priority=priority)


def _new_id() -> str:
    return f"cmpl-{secrets.token_hex(12)}"


class _Writer:
    """Texts and log-probabilities as a request wants them."""

    def __init__(self, service: Service, body: CompletionRequest, n: int) -> None:
        self.tokenizer, self.n = service.tokenizer, n
        self.num_top, self.echo = body.logprobs, bool(body.echo)
        self.without_output = body.max_tokens == 0

    def choice(self, number: int, generation: Generation, sample: int) -> Choice:
        """The whole answer of one sample of prompt `number`."""
        one = generation.samples[sample]
        text = "" if self.without_output else one.reader.output().content
        scored = [] if self.without_output else one.logprobs
        reason = "length" if self.without_output else one.finish_reason or "stop"
        return Choice(
            number * self.n + sample,
            self.prompt_text(generation) + text,
            self.logprobs(generation, scored, with_prompt=self.echo),
            reason,
        )

    def prompt_text(self, generation: Generation) -> str:
        """The prompt as text, where it is to be repeated."""
        return self.tokenizer.decode(generation.prompt_token_ids) if self.echo else ""

    def logprobs(
        self, generation: Generation, scored: Sequence[tuple[int, Logprobs]], *, with_prompt: bool
    ) -> TextLogprobs | None:
        """Of the prompt's tokens, where they are repeated, and of those of the answer."""
        if self.num_top is None:
            return None
        lists = TextLogprobs([], [], [], [])
        if with_prompt:
            prompt = generation.prompt_token_ids
            scores: list[Logprobs | None] = [None, *generation.prompt_logprobs]
            for token_id, each in zip(prompt, scores, strict=True):
                lists.add(self.tokenizer, token_id, each, self.num_top)
        for token_id, each in scored:
            lists.add(self.tokenizer, token_id, each, self.num_top)
        return lists


class _Chunks:
    """Pieces of answers as server-sent events."""

    def __init__(self, writer: _Writer, model: str, with_usage: bool) -> None:
        self._writer, self._with_usage = writer, with_usage
        head = {"id": _new_id(), "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = b"data: " + encoder.encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._begun: set[tuple[int, int]] = set()

    def write(self, number: int, generation: Generation, pieces: Sequence[Piece]) -> bytes:
        """One chunk per piece that says something."""
        writer = self._writer
        chunks: list[bytes] = []
        for piece in pieces:
            key = (number, piece.sample)
            is_first = writer.echo and key not in self._begun
            self._begun.add(key)
            scored = () if writer.without_output else piece.logprobs
            text = (
                ""
                if writer.without_output
                else "".join(event.text for event in piece.events if isinstance(event, ContentPiece))
            )
            text = writer.prompt_text(generation) + text if is_first else text
            if not (text or scored or is_first or piece.finish_reason):
                continue
            logprobs = writer.logprobs(generation, scored, with_prompt=is_first)
            finish = b"null" if piece.finish_reason is None else b'"%s"' % piece.finish_reason.encode()
            chunks += (
                self._head,
                b'{"index":%d,"text":' % (number * writer.n + piece.sample),
                encoder.encode(text),
                b',"logprobs":',
                encoder.encode(logprobs),
                b',"finish_reason":',
                finish,
                b"}",
                self._tail,
            )
        return b"".join(chunks)

    def end(self, generations: Sequence[Generation]) -> bytes:
        """The usage, if it is asked for, and the end."""
        if not self._with_usage:
            return DONE
        return self._head + b'],"usage":' + encoder.encode(usage_of(generations)) + b"}\n\n" + DONE


ENDPOINTS = (Endpoint("POST", ENDPOINT, complete, body=CompletionRequest, answer=CompletionAnswer),)
