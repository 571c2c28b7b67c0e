"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.api.answers import ChatLogprobs, Usage, chat_logprobs, encoder, usage_of
from culet.serve.api.chat_request import Turn, prepare, sampling_params
from culet.serve.api.endpoint import Endpoint, json_response, request_id_of
from culet.serve.api.protocol import ChatRequest, NamedChoice, decode
from culet.serve.generation import Generation, Piece
from culet.serve.service import Service
from culet.serve.streams import DONE, EventStream, run_all
from culet.text.output_events import ContentPiece, Event, Output, ReasoningPiece, ToolCallArguments, ToolCallStart

ENDPOINT = "/v1/chat/completions"


class CalledFunction(Struct):
    name: str
    arguments: str


class AnswerCall(Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class AnswerMessage(Struct, omit_defaults=True):
    role: str
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall] | None = None


class Choice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatAnswer(Struct):
    """What a chat request is answered with."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "chat.completion"


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    body = decode(ChatRequest, await request.body())
    model = service.check_model(body.model)
    turn = await _prepare(service, body)
    open_it = partial(turn.open, ENDPOINT, request_id_of(request))
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = Chunks(service, model, turn.params.n, num_top, with_usage)
        return EventStream(service, [open_it], chunks.write, begin=chunks.begin(), end=chunks.end)
    (generation,) = await run_all(request, [open_it])
    choices = [
        Choice(
            index,
            _message(sample.reader.output()),
            None if num_top is None else chat_logprobs(service.tokenizer, sample.logprobs, num_top),
            sample.finish_reason or "stop",
        )
        for index, sample in enumerate(generation.samples)
    ]
    return json_response(ChatAnswer(_new_id(), int(time.time()), model, choices, usage_of([generation])))


async def _prepare(service: Service, body: ChatRequest) -> Turn:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs: got it without logprobs", hint="set logprobs to true")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens == 0:
        raise BadRequest("max_tokens: got 0, expected at least 1")
    params = sampling_params(service, body, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    options = body.chat_template_kwargs
    thinking = options.enable_thinking if options is not None else None
    if thinking is None and body.reasoning_effort is not None:
        thinking = body.reasoning_effort != "none"
    choice = body.tool_choice
    return await prepare(
        service,
        msgspec.to_builtins(body.messages),
        params,
        tools=msgspec.to_builtins(body.tools or []),
        tool_choice=f"={choice.function.name}" if isinstance(choice, NamedChoice) else choice or "auto",
        one_call=body.parallel_tool_calls is False,
        enable_thinking=thinking,
        options={"preserve_thinking": True} if options is not None and options.preserve_thinking else None,
        priority=body.priority,
    )


def _message(output: Output) -> AnswerMessage:
    calls = [AnswerCall(call.id, CalledFunction(call.name, call.arguments_json)) for call in output.tool_calls]
    return AnswerMessage(
        role="assistant",
        content=output.content if output.content or not calls else None,
        reasoning_content=output.reasoning or None,
        tool_calls=calls or None,
    )


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"


class Chunks:
    """Events of one answer as bytes. What all chunks have in common is encoded once."""

    def __init__(self, service: Service, model: str, n: int, num_top: int | None, with_usage: bool) -> None:
        self._tokenizer, self._num_top = service.tokenizer, num_top
        head = {"id": _new_id(), "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._head = b"data: " + encoder.encode(head)[:-1] + b',"choices":['
        self._with_usage, self._n = with_usage, n
        tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._open = [self._head + b'{"index":%d,"delta":{' % index for index in range(n)]
        self._close = b'},"logprobs":null,"finish_reason":null}' + tail
        self._tail = tail

    def begin(self) -> bytes:
        """The chunk that stands before all: who speaks."""
        return b"".join(opening + b'"role":"assistant","content":""' + self._close for opening in self._open)

    def write(self, index: int, generation: Generation, pieces: Sequence[Piece]) -> bytes:
        """One chunk per event; log-probabilities stand in the last of a piece, and the finish reason in one of its own."""
        chunks: list[bytes] = []
        for piece in pieces:
            opening = self._open[piece.sample]
            if piece.logprobs and self._num_top is not None:
                chunks += self._with_logprobs(opening, piece)
            else:
                for event in piece.events:
                    if (delta := _delta(event)) is not None:
                        chunks += (opening, delta, self._close)
            if piece.finish_reason is not None:
                chunks += (opening, b'},"logprobs":null,"finish_reason":"', piece.finish_reason.encode(), b'"}', self._tail)
        return b"".join(chunks)

    def _with_logprobs(self, opening: bytes, piece: Piece) -> list[bytes]:
        assert self._num_top is not None
        deltas = [delta for event in piece.events if (delta := _delta(event)) is not None] or [b'"content":""']
        logprobs = encoder.encode(chat_logprobs(self._tokenizer, piece.logprobs, self._num_top))
        chunks = [part for delta in deltas[:-1] for part in (opening, delta, self._close)]
        return [*chunks, opening, deltas[-1], b'},"logprobs":', logprobs, b',"finish_reason":null}', self._tail]

    def end(self, generations: Sequence[Generation]) -> bytes:
        """What stands after all: the usage, if it is asked for, and the end."""
        if not self._with_usage:
            return DONE
        return self._head + b'],"usage":' + encoder.encode(usage_of(generations)) + b"}\n\n" + DONE


def _delta(event: Event) -> bytes | None:
    """An event as the inside of a chunk's delta; None for those that have no form there."""
    match event:
        case ContentPiece():
            return b'"content":' + encoder.encode(event.text)
        case ReasoningPiece():
            return b'"reasoning_content":' + encoder.encode(event.text)
        case ToolCallStart():
            call: dict[str, Any] = {"index": event.index, "id": event.id, "type": "function"}
            call["function"] = {"name": event.name, "arguments": ""}
            return b'"tool_calls":[' + encoder.encode(call) + b"]"
        case ToolCallArguments():
            return b'"tool_calls":[' + encoder.encode({"index": event.index, "function": {"arguments": event.text}}) + b"]"
    return None


ENDPOINTS = (Endpoint("POST", ENDPOINT, chat, body=ChatRequest, answer=ChatAnswer),)
