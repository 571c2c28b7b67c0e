"""POST /v1/chat/completions: OpenAI's chat API."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.api.chat_request import PreparedChat, prepare
from culet.serve.api.endpoint import Endpoint, decode, encoder, json_response, origin_of
from culet.serve.api.fields import Count, SamplingFields, Schema, Text, ToolName, sampling_params
from culet.serve.api.openai_answers import ChatLogprobs, Usage, chat_logprobs, usage_of
from culet.serve.generation import Generation
from culet.serve.service import Service
from culet.serve.streams import DONE, EventStream, run_all
from culet.text.output import OutputDelta
from culet.text.output_pieces import Output, OutputPiece, ReasoningPiece, TextPiece

ENDPOINT = "/v1/chat/completions"


class TextPart(Struct, tag_field="type", tag="text"):
    """A text part of a message."""

    text: Text


class FunctionCall(Struct):
    """The function and arguments of an earlier tool call."""

    name: ToolName
    arguments: Text | dict[str, Any] = "{}"


class PastCall(Struct):
    """An earlier tool call, with its id."""

    function: FunctionCall
    id: Annotated[str, Meta(max_length=256)] = ""
    type: Literal["function"] = "function"


class Message(Struct, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Meta(max_length=1024)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=256)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None


class FunctionSpec(Struct, omit_defaults=True):
    """A function that the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool that the model may call."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class FunctionName(Struct):
    name: ToolName


class NamedChoice(Struct):
    """The tool that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class TemplateOptions(Struct, forbid_unknown_fields=True):
    """Variables of the chat template."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=4096)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    chat_template: UnsetType | None = UNSET  # a template is a program, so requests cannot send one


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
    """The answer to a chat request."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "chat.completion"


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation. With `stream`, send the answer as server-sent events."""
    body = decode(ChatRequest, await request.body())
    model = service.check_model(body.model)
    origin = origin_of(request, priority=body.priority, cache_salt=body.cache_salt)
    prepared = await _prepare(service, body)
    open_generation = partial(prepared.open, ENDPOINT, origin)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = _Chunks(service, model, prepared.params.n, num_top, with_usage)
        return EventStream(service, [open_generation], chunks.write, begin=chunks.begin(), end=chunks.end)
    (generation,) = await run_all(request, [open_generation])
    choices = [
        Choice(
            index,
            _message(sample.output()),
            None if num_top is None else chat_logprobs(service.tokenizer, sample.visible_logprobs, num_top),
            sample.finish_reason or "stop",
        )
        for index, sample in enumerate(generation.samples)
    ]
    return json_response(ChatAnswer(_new_id(), int(time.time()), model, choices, usage_of([generation])))


async def _prepare(service: Service, body: ChatRequest) -> PreparedChat:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs: only allowed with logprobs", hint="set logprobs to true")
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
        single_call=body.parallel_tool_calls is False,
        enable_thinking=thinking,
        options={"preserve_thinking": True} if options is not None and options.preserve_thinking else None,
    )


def _message(output: Output) -> AnswerMessage:
    calls = [AnswerCall(call.id, CalledFunction(call.name, call.arguments_json)) for call in output.tool_calls]
    return AnswerMessage(
        role="assistant",
        content=output.text if output.text or not calls else None,
        reasoning_content=output.reasoning or None,
        tool_calls=calls or None,
    )


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"


class _Chunks:
    """Writes one answer as server-sent events. The parts that all chunks share are encoded once."""

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
        """Return the first chunk of every choice, which contains the role."""
        return b"".join(opening + b'"role":"assistant","content":""' + self._close for opening in self._open)

    def write(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes:
        """Return one chunk per piece.

        Log-probabilities are in the last chunk of a delta. The finish reason has its own chunk.
        """
        chunks: list[bytes] = []
        for delta in deltas:
            opening = self._open[delta.sample]
            if delta.visible_logprobs and self._num_top is not None:
                chunks += self._with_logprobs(opening, delta, self._num_top)
            else:
                for piece in delta.pieces:
                    for fields in _delta_fields(piece):
                        chunks += (opening, fields, self._close)
            if delta.finish_reason is not None:
                chunks += (opening, b'},"logprobs":null,"finish_reason":"', delta.finish_reason.encode(), b'"}', self._tail)
        return b"".join(chunks)

    def _with_logprobs(self, opening: bytes, delta: OutputDelta, num_top: int) -> list[bytes]:
        *others, last = [fields for piece in delta.pieces for fields in _delta_fields(piece)] or [b'"content":""']
        logprobs = encoder.encode(chat_logprobs(self._tokenizer, delta.visible_logprobs, num_top))
        chunks = [part for fields in others for part in (opening, fields, self._close)]
        return [*chunks, opening, last, b'},"logprobs":', logprobs, b',"finish_reason":null}', self._tail]

    def end(self, generations: Sequence[Generation]) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        if not self._with_usage:
            return DONE
        return self._head + b'],"usage":' + encoder.encode(usage_of(generations)) + b"}\n\n" + DONE


def _delta_fields(piece: OutputPiece) -> tuple[bytes, ...]:
    """Return the contents of the `delta` object of each chunk. A tool call takes two chunks, any other piece one."""
    if isinstance(piece, TextPiece):
        return (b'"content":' + encoder.encode(piece.text),)
    if isinstance(piece, ReasoningPiece):
        return (b'"reasoning_content":' + encoder.encode(piece.text),)
    start = {"index": piece.index, "id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
    arguments = {"index": piece.index, "function": {"arguments": piece.arguments_json}}
    return tuple(b'"tool_calls":[' + encoder.encode(call) + b"]" for call in (start, arguments))


ENDPOINTS = (Endpoint("POST", ENDPOINT, chat, body=ChatRequest, answer=ChatAnswer),)
