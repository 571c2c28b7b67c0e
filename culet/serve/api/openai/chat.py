"""POST /v1/chat/completions: OpenAI's chat API."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest
from culet.serve.answers.limits import AnswerSize
from culet.serve.answers.parts import BigAnswer, in_messages
from culet.serve.answers.parts import Part as AnswerPart
from culet.serve.api.chat_request import PreparedChat, check_chat, prepare
from culet.serve.api.endpoint import Endpoint, encoder, json_response, origin_of, read_body
from culet.serve.api.fields import (
    Count,
    CountOrNone,
    Effort,
    MediaFields,
    Part,
    PastToolName,
    RawArguments,
    SamplingFields,
    Schema,
    StreamOptions,
    TemplateOptions,
    Text,
    ToolName,
    sampling_params,
    shortest,
    thinking_of,
)
from culet.serve.api.openai.answers import ChatLogprobs, Usage, chat_entries, chat_size, usage_of
from culet.serve.api.refused import Refused
from culet.serve.generation import Generation, Origin
from culet.serve.service import Service
from culet.serve.streams import DONE, EventStream, run_all
from culet.text.messages import continued_text
from culet.text.output import OutputDelta, stop_reason_of
from culet.text.output_pieces import Output, OutputPiece, ReasoningPiece, TextPiece, call_part
from culet.types import SamplingParams

ENDPOINT = "/v1/chat/completions"


class FunctionCall(Struct):
    """The function and arguments of an earlier tool call."""

    name: PastToolName
    arguments: RawArguments = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


class PastCall(Struct):
    """An earlier tool call, with its id."""

    function: FunctionCall
    id: Annotated[str, Meta(max_length=256)] = ""
    type: Literal["function"] = "function"


class Message(Struct, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Meta(max_length=1024)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=256)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    prefix: bool | None = None  # continue this message, which must be the last one (DeepSeek, Mistral)
    function_call: Refused = UNSET  # a call before there were `tool_calls`


class FunctionSpec(Struct, omit_defaults=True):
    """A function that the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    input_schema: Refused = UNSET  # Anthropic's `parameters`
    inputSchema: Refused = UNSET  # the same in MCP


class Tool(Struct):
    """A tool that the model may call."""

    function: FunctionSpec
    type: Literal["function"] = "function"
    parameters: Refused = UNSET  # these belong into `function`
    strict: Refused = UNSET
    input_schema: Refused = UNSET
    inputSchema: Refused = UNSET  # the same in MCP


class FunctionName(Struct):
    name: ToolName


class NamedChoice(Struct):
    """The tool that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class Reasoning(Struct):
    """OpenRouter's form of `reasoning_effort` and `thinking_token_budget`."""

    effort: Effort | None = None
    max_tokens: CountOrNone = None
    enabled: bool | None = None
    exclude: Refused = UNSET


class ChatRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=4096)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = True
    constrain_tool_calls: bool | None = None  # hold tool calls to the declared tools
    unmarked_tool_calls: bool | None = None  # calls of declared tools count without the tokens around them
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the last message, which is the assistant's
    mm_processor_kwargs: MediaFields | None = None


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
    stop_reason: str | UnsetType = UNSET  # empty_after_thinking, which clients would not accept as a finish reason
    warning: str | UnsetType = UNSET  # the same as a sentence


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
    body = await read_body(service, request, ChatRequest)
    model = service.check_model(body.model)
    origin = origin_of(request, priority=body.priority, cache_salt=body.cache_salt)
    prepared = await _prepare(service, origin, body)
    open_generation = partial(prepared.open, ENDPOINT)
    num_top = prepared.params.logprobs
    if body.stream:
        chunks = _Chunks(service, model, prepared.params, body.stream_options or StreamOptions())
        return EventStream(service, [open_generation], chunks.write, begin=chunks.begin(), end=chunks.end)
    if num_top is not None:
        return await _answer_with_logprobs(service, request, prepared, open_generation, model)
    (generation,) = await run_all(request, [open_generation])
    choices = [
        Choice(
            index,
            _message(sample.output()),
            None,
            sample.finish_reason or "stop",
            sample.stop_reason or UNSET,
            sample.warning or UNSET,
        )
        for index, sample in enumerate(generation.samples)
    ]
    return json_response(ChatAnswer(_new_id(), int(time.time()), model, choices, usage_of([generation])))


async def _answer_with_logprobs(
    service: Service, request: Request, prepared: PreparedChat, open_generation: Callable[[], Generation], model: str
) -> Response:
    """Run a request and answer with log-probabilities. They are written while the tokens arrive."""
    size = service.answers.open()
    lists = _LogprobLists(service, prepared.params, size)
    try:
        (generation,) = await run_all(request, [open_generation], lists)
        head = {"id": _new_id(), "created": int(time.time()), "model": model}
        parts: list[AnswerPart] = [encoder.encode(head)[:-1] + b',"choices":[']
        for index, sample in enumerate(generation.samples):
            opening = b'%s{"index":%d,"message":' % (b"," if index else b"", index)
            parts += (opening, encoder.encode(_message(sample.output())), b',"logprobs":{"content":[')
            parts += (lists.entries[index], b"]},", _finish(sample.finish_reason or "stop", sample.warning), b"}")
        parts.append(b'],"usage":' + encoder.encode(usage_of([generation])) + b',"object":"chat.completion"}')
        return BigAnswer(parts, size)
    except BaseException:
        size.close()
        raise


class _LogprobLists:
    """The log-probabilities of each sample of an answer, as JSON that grows while tokens arrive."""

    def __init__(self, service: Service, params: SamplingParams, size: AnswerSize) -> None:
        self._service, self._num_top, self._size = service, params.logprobs or 0, size
        self.entries = [bytearray() for _ in range(params.n)]

    async def read(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> None:
        await self._service.turns.finish(self._steps(deltas))

    def forget(self, index: int) -> None:
        for entries in self.entries:
            self._size.remove(len(entries) + bool(entries))  # each entry counts with a comma
            entries.clear()

    def _steps(self, deltas: Sequence[OutputDelta]) -> Iterator[None]:
        for delta in deltas:
            entries = self.entries[delta.sample]
            for entry in chat_entries(self._service.tokenizer, delta.visible_logprobs, self._num_top):
                self._size.add(len(entry) + 1)
                entries += b"," + entry if entries else entry
                yield


async def _prepare(service: Service, origin: Origin, body: ChatRequest) -> PreparedChat:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: only allowed with logprobs", hint="set logprobs to true")
    max_tokens = shortest(body.max_completion_tokens, body.max_tokens)
    if max_tokens == 0:
        raise BadRequest("max_tokens: got 0, expected at least 1")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    options = body.chat_template_kwargs or TemplateOptions()
    asked = body.reasoning or Reasoning()
    is_on = asked.enabled if options.enable_thinking is None else options.enable_thinking
    thinking = thinking_of(service, effort=body.reasoning_effort or asked.effort, budget=asked.max_tokens, is_on=is_on)
    params = sampling_params(service, body, max_tokens=max_tokens, thinking_budget=thinking.budget, logprobs=num_top)
    if num_top is not None and max_tokens is not None:
        num_tokens = params.n * min(max_tokens, service.rules.max_model_len)
        service.answers.check(chat_size(num_tokens, num_top), "logprobs")
    choice = body.tool_choice
    await check_chat(service, body.messages, ())  # before they are converted
    last_text = continued(body.messages, is_asked=body.continue_final_message, add_generation_prompt=body.add_generation_prompt)
    prepared = await prepare(
        service,
        origin,
        body.messages,
        params,
        tools=[tool_fields(tool) for tool in body.tools or ()],
        tool_choice=f"={choice.function.name}" if isinstance(choice, NamedChoice) else choice or "auto",
        constrain_tool_calls=body.constrain_tool_calls,
        unmarked_tool_calls=body.unmarked_tool_calls,
        single_call=body.parallel_tool_calls is False,
        enable_thinking=thinking.is_on,
        options=options.variables(),
        add_generation_prompt=body.add_generation_prompt,
        continued=last_text,
        media=(body.mm_processor_kwargs or MediaFields()).options(),
    )
    return prepared if num_top is None or max_tokens is not None else _shorten(service, prepared, num_top)


def continued(messages: Sequence[Message], *, is_asked: bool, add_generation_prompt: bool) -> str | None:
    """Return the text of the last message if the answer continues it, or None.

    Either the request (`is_asked`) or the message itself (`prefix`) can ask for this.
    """
    for index, message in enumerate(messages[:-1]):
        if message.prefix:
            raise BadRequest(f"messages[{index}].prefix: got true, but only the last message can be continued")
    has_prefix = bool(messages[-1].prefix)
    if not is_asked and not has_prefix:
        return None
    last = msgspec.to_builtins(messages[-1], builtin_types=(msgspec.Raw,))
    field = f"messages[{len(messages) - 1}].prefix" if has_prefix else "continue_final_message"
    return continued_text([last], add_generation_prompt=add_generation_prompt and not has_prefix, field=field)


def _shorten(service: Service, prepared: PreparedChat, num_top: int) -> PreparedChat:
    """Set `max_tokens` of a request without it, so that its log-probabilities fit the limit on an answer."""
    fitting = service.answers.max_bytes // chat_size(prepared.params.n, num_top)
    if fitting >= service.rules.max_model_len - len(prepared.prompt.token_ids):
        return prepared
    return replace(prepared, params=replace(prepared.params, max_tokens=max(1, fitting)))


def tool_fields(tool: Tool) -> dict[str, Any]:
    """Return a tool as plain data, without copying its schema."""
    function = tool.function
    given = {name: getattr(function, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


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

    def __init__(self, service: Service, model: str, params: SamplingParams, options: StreamOptions) -> None:
        n, num_top, with_usage = params.n, params.logprobs, options.include_usage
        repeats = options.repeat_tool_call_ids
        self._repeats_ids = service.settings.repeat_tool_call_ids if repeats is None else repeats
        self._tokenizer, self._turns, self._num_top = service.tokenizer, service.turns, num_top
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

    def write(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes | AsyncIterator[bytes]:
        """Return one chunk per piece.

        Log-probabilities are in the last chunk of a delta. The finish reason has its own chunk.
        """
        if self._num_top is not None:
            return self._write_long(deltas, self._num_top)
        chunks: list[bytes] = []
        for delta in deltas:
            chunks += self._chunks(delta)
        return b"".join(chunks)

    async def _write_long(self, deltas: Sequence[OutputDelta], num_top: int) -> AsyncIterator[bytes]:
        steps = (self._with_logprobs(delta, num_top) if delta.visible_logprobs else self._chunks(delta) for delta in deltas)
        async for chunks in self._turns.run(steps):
            for message in in_messages(part for chunk in chunks for part in chunk):
                yield message

    def _chunks(self, delta: OutputDelta) -> list[bytes]:
        opening = self._open[delta.sample]
        chunks: list[bytes] = []
        for piece in delta.pieces:
            for fields in _delta_fields(piece, self._repeats_ids):
                chunks += (opening, fields, self._close)
        if delta.finish_reason is not None:
            chunks += (opening, b'},"logprobs":null,', _finish(delta.finish_reason, delta.warning), b"}", self._tail)
        return chunks

    def _with_logprobs(self, delta: OutputDelta, num_top: int) -> list[bytes]:
        opening = self._open[delta.sample]
        *others, last = [fields for piece in delta.pieces for fields in _delta_fields(piece, self._repeats_ids)] or [
            b'"content":""'
        ]
        entries = b",".join(chat_entries(self._tokenizer, delta.visible_logprobs, num_top))
        chunks = [part for fields in others for part in (opening, fields, self._close)]
        chunks += (opening, last, b'},"logprobs":{"content":[', entries, b']},"finish_reason":null}', self._tail)
        if delta.finish_reason is not None:
            chunks += (opening, b'},"logprobs":null,', _finish(delta.finish_reason, delta.warning), b"}", self._tail)
        return chunks

    def end(self, generations: Sequence[Generation]) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        if not self._with_usage:
            return DONE
        return self._head + b'],"usage":' + encoder.encode(usage_of(generations)) + b"}\n\n" + DONE


def _finish(reason: str, warning: str) -> bytes:
    """Return the last fields of a choice."""
    finish = b'"finish_reason":"%s"' % reason.encode()
    if not warning:
        return finish
    return b'%s,"stop_reason":%s,"warning":%s' % (finish, encoder.encode(stop_reason_of(warning)), encoder.encode(warning))


def _delta_fields(piece: OutputPiece, repeats_ids: bool) -> Iterator[bytes]:
    """Yield the contents of the `delta` object of each chunk. The first part of a tool call takes two chunks, others one.

    OpenAI's clients join the parts of an id or a name, so these are only in the first chunk, unless a client wants them in
    all (`repeats_ids`). They do not join types.
    """
    if isinstance(piece, TextPiece):
        yield b'"content":' + encoder.encode(piece.text)
    elif isinstance(piece, ReasoningPiece):
        yield b'"reasoning_content":' + encoder.encode(piece.text)
    elif (part := call_part(piece)) is not None:
        for is_head in (True, False) if part.is_first else (False,):
            call: dict[str, Any] = {"index": part.index, "type": "function"}
            function = {"arguments": "" if is_head else part.arguments_json}
            if is_head or repeats_ids:
                call["id"], function["name"] = part.id, part.name
            yield b'"tool_calls":[' + encoder.encode({**call, "function": function}) + b"]"


ENDPOINTS = (Endpoint("POST", ENDPOINT, chat, body=ChatRequest, answer=ChatAnswer),)
