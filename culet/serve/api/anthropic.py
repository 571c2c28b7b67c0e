"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest, CuletError, UnsupportedError
from culet.serve.api.anthropic_blocks import (
    Block,
    DocumentBlock,
    ImageBlock,
    RedactedBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    part_of,
    result_of,
    text_of,
)
from culet.serve.api.chat_request import PreparedChat, check_chat, prefilled, prepare
from culet.serve.api.endpoint import Endpoint, encoder, json_response, origin_of, read_body
from culet.serve.api.fields import (
    MAX_TOKENS,
    Count,
    Effort,
    SamplingFields,
    Schema,
    StopText,
    TemplateOptions,
    Text,
    ToolName,
    check_single,
    sampling_params,
    thinking_of,
)
from culet.serve.api.refused import Refused, refuse_unsupported
from culet.serve.generation import Generation, Origin
from culet.serve.http_errors import error_body, reply_to
from culet.serve.service import Service
from culet.serve.streams import EventStream, run_all
from culet.structured.request_fields import SchemaText, schema_form
from culet.text.output import OutputDelta
from culet.text.output_pieces import Output, OutputPiece, ReasoningPiece, TextPiece, call_part
from culet.types import GrammarSpec

ENDPOINT = "/v1/messages"
_THOUGHT_EDIT = "clear_thinking_"  # templates drop the thoughts of past turns in any case, and Claude Code asks for it
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessage(Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]  # Claude Code sends system messages between the others
    content: Text | Annotated[list[Block], Meta(max_length=1024)]


class AnthropicTool(Struct):
    """A tool that the model may call."""

    name: ToolName
    input_schema: Schema
    description: Text | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    parameters: Refused = UNSET  # OpenAI's `input_schema`
    inputSchema: Refused = UNSET  # the same in MCP
    input_examples: Refused = UNSET
    defer_loading: Refused = UNSET


class AnthropicToolChoice(Struct):
    """Whether a tool must be called, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False


class ThinkingChoice(Struct):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None  # with omitted, thinking blocks have no text


class OutputFormat(Struct):
    """The required format of the answer."""

    type: Literal["json_schema"]
    schema_: SchemaText = msgspec.field(name="schema")


class OutputConfig(Struct):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # sets the server's thinking budget for this level
    task_budget: Refused = UNSET


class ContextEdit(Struct):
    """An edit to the conversation, made before the model sees it."""

    type: Annotated[str, Meta(max_length=256)]


class ContextManagement(Struct):
    edits: Annotated[list[ContextEdit], Meta(max_length=64)] = []


class CountTokensRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/messages/count_tokens, and the base of MessagesRequest.

    Clients may count the tokens of a whole POST /v1/messages body. Its sampling fields are allowed and do not change the count.
    """

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=65536)]
    system: Text | Annotated[list[TextBlock], Meta(max_length=1024)] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=4096)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingChoice | None = None
    chat_template_kwargs: TemplateOptions | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)]  # lowered to what the context has room for
    stop_sequences: Annotated[list[StopText], Meta(max_length=1024)] | None = None
    stream: bool = False
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: Refused = UNSET
    container: Refused = UNSET
    context_management: ContextManagement | None = None
    constrain_tool_calls: bool | None = None  # hold tool calls to the declared tools
    unmarked_tool_calls: bool | None = None  # calls of declared tools count without the tokens around them


class AnthropicUsage(Struct):
    """Token counts of a request. Prompt tokens found in the prefix cache are counted separately."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    thinking_budget_reached: bool = False


class AnthropicAnswer(Struct):
    """The answer to a messages request."""

    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage
    type: str = "message"
    role: str = "assistant"
    warning: str | UnsetType = UNSET  # begins with empty_after_thinking, which clients would not accept as a stop reason


class TokenCount(Struct):
    """The answer to a count_tokens request."""

    input_tokens: int


async def messages(service: Service, request: Request) -> Response:
    """Answer a conversation. With `stream`, send the answer as server-sent events."""
    body = await read_body(service, request, MessagesRequest)
    model = service.check_model(body.model)
    origin = origin_of(request, cache_salt=body.cache_salt)
    prepared = await _prepare(service, origin, body)
    open_generation = partial(prepared.open, ENDPOINT)
    shows_thoughts = body.thinking is None or body.thinking.display != "omitted"
    if body.stream:
        writer = _Writer(model, shows_thoughts)
        return EventStream(service, [open_generation], writer.write, end=writer.end, write_error=_error_event)
    (generation,) = await run_all(request, [open_generation])
    sample = generation.samples[0]
    output = sample.output()
    reason, stop = _stop_of(sample.finish_reason, output)
    answer = AnthropicAnswer(_new_id(), model, _blocks(output, shows_thoughts), reason, stop, _usage(generation))
    answer.warning = sample.warning or UNSET
    return json_response(answer)


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of a conversation as the model would see it."""
    body = await read_body(service, request, CountTokensRequest)
    service.check_model(body.model)
    choice = body.tool_choice
    for index, tool in enumerate(body.tools or ()):
        refuse_unsupported(tool, f"tools[{index}].")
    tools = [] if choice is not None and choice.type == "none" else _tools(body)
    await check_chat(service, body.messages, tools)
    messages = _openai_messages(body)
    prompt = await service.prompts.encode_chat(
        messages,
        tools=tools or None,
        enable_thinking=_thinking(body),
        options=_template_options(body).variables(),
        continued=prefilled(messages[-1]),
    )
    return json_response(TokenCount(len(prompt.token_ids)))


async def _prepare(service: Service, origin: Origin, body: MessagesRequest) -> PreparedChat:
    check_single(body)
    for index, edit in enumerate(body.context_management.edits if body.context_management is not None else ()):
        if not edit.type.startswith(_THOUGHT_EDIT):
            problem = f"context_management.edits[{index}].type: got {edit.type!r}, which is not supported"
            raise UnsupportedError(problem, hint="omit it, and send the messages that the model should see")
    config = body.output_config or OutputConfig()
    effort: Effort | None = "xhigh" if config.effort == "max" else config.effort
    budget = body.thinking.budget_tokens if body.thinking is not None else None
    params = sampling_params(
        service,
        body,
        max_tokens=min(body.max_tokens, MAX_TOKENS),
        more_stops=body.stop_sequences or (),
        thinking_budget=thinking_of(service, effort=effort, budget=budget).budget,
        form=_form(body, config),
    )
    choice = body.tool_choice
    names = {"any": "required", "none": "none", "auto": "auto"}
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise BadRequest("tool_choice.name: the name of a tool is required")
    if choice is not None and choice.type != "tool" and choice.name is not None:
        problem = f"tool_choice.name: got {choice.name!r} with the type {choice.type!r}"
        raise BadRequest(problem, hint="set the type to tool, or omit the name")
    if choice is not None and choice.type == "any" and not body.tools:
        raise BadRequest("tool_choice: got 'any', but the request has no tools")
    await check_chat(service, body.messages, ())
    messages = _openai_messages(body)
    return await prepare(
        service,
        origin,
        messages,
        params,
        tools=_tools(body),
        tool_choice="auto" if choice is None else names.get(choice.type, f"={choice.name}"),
        constrain_tool_calls=body.constrain_tool_calls,
        unmarked_tool_calls=body.unmarked_tool_calls,
        single_call=choice is not None and choice.disable_parallel_tool_use,
        enable_thinking=_thinking(body),
        options=_template_options(body).variables(),
        continued=prefilled(messages[-1]),
        clamp=True,  # clients must always send max_tokens, so they send large ones
    )


def _form(body: MessagesRequest, config: OutputConfig) -> GrammarSpec | None:
    if body.output_format is not None and config.format is not None:
        raise BadRequest("output_format: cannot be combined with output_config.format", hint="omit output_format")
    if body.output_format is not None:
        return schema_form(body.output_format.schema_, "output_format", strict=True)
    return None if config.format is None else schema_form(config.format.schema_, "output_config.format", strict=True)


# From Anthropic's messages to chat messages


def _thinking(body: CountTokensRequest) -> bool | None:
    asked = _template_options(body).enable_thinking
    return asked if body.thinking is None or asked is not None else body.thinking.type != "disabled"


def _template_options(body: CountTokensRequest) -> TemplateOptions:
    return body.chat_template_kwargs or TemplateOptions()


def _tools(body: CountTokensRequest) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in body.tools or ()
    ]


def _openai_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system)})
    for index, message in enumerate(body.messages):
        blocks = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
        where = f"messages[{index}].content"
        converted = [_from_model(blocks, where)] if message.role == "assistant" else _from_user(blocks, where)
        messages += [entry | {"role": "system"} for entry in converted] if message.role == "system" else converted
    return messages


def _from_user(blocks: Sequence[Block], where: str) -> list[dict[str, Any]]:
    """Convert a user message. Tool results come first, as one message each, followed by the user's text."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock() | ImageBlock():
                parts.append(part_of(block, f"{where}[{index}]"))
            case ToolResultBlock():
                result = {"role": "tool", "tool_call_id": block.tool_use_id}
                results.append(result | {"content": result_of(block, f"{where}[{index}].content")})
            case DocumentBlock():
                raise UnsupportedError(f"{where}[{index}]: documents are not supported", hint="send text and images")
            case _:
                raise BadRequest(f"{where}[{index}]: got an assistant block in a user message")
    if parts or not results:
        has_images = any(part["type"] == "image" for part in parts)
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        results.append({"role": "user", "content": parts if has_images else text})
    return results


def _from_model(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                if memoryview(block.input)[:1] != b"{":
                    raise BadRequest(f"{where}[{index}].input: expected an object")
                calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}})
            case RedactedBlock():
                pass
            case _:
                raise BadRequest(f"{where}[{index}]: got a user block in an assistant message")
    if calls:
        message["tool_calls"] = calls
    if texts or not calls:
        message["content"] = "".join(texts)  # they are parts of one answer
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return message


# Answers


def _new_id() -> str:
    return f"msg_{secrets.token_hex(12)}"


def _stop_of(finish_reason: str | None, output: Output) -> tuple[str, str | None]:
    """Return (stop reason, the stop sequence that ended the answer or None)."""
    if finish_reason == "stop" and output.stop is not None:
        return "stop_sequence", output.stop
    return _STOP_REASONS.get(finish_reason or "", "end_turn"), None


def _usage(generation: Generation) -> AnthropicUsage:
    counts = generation.token_counts()
    num_new = counts.num_prompt - counts.num_cached
    return AnthropicUsage(num_new, counts.num_generated, counts.num_cached, thinking_budget_reached=counts.is_thought_out)


def _blocks(output: Output, shows_thoughts: bool) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if output.reasoning:
        blocks.append({"type": "thinking", "thinking": output.reasoning if shows_thoughts else "", "signature": ""})
    if output.text:
        blocks.append({"type": "text", "text": output.text})
    calls = [call for call in output.tool_calls if call.is_complete]
    return blocks + [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in calls]


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encoder.encode({"type": name, **fields}))


class _Writer:
    """Writes one answer as events. Only one block is open at a time. A piece of another block closes it."""

    def __init__(self, model: str, shows_thoughts: bool) -> None:
        self._model, self._shows_thoughts = model, shows_thoughts
        self._num_blocks = 0
        self._open: str | None = None  # the kind of the open block
        self._has_begun = False

    def write(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes:
        events = [] if self._has_begun else [self._begin(generation)]
        self._has_begun = True
        for delta in deltas:
            for piece in delta.pieces:
                events += self._events_of(piece)
        return b"".join(events)

    def _begin(self, generation: Generation) -> bytes:
        counts = generation.token_counts()
        first = AnthropicUsage(counts.num_prompt - counts.num_cached, 1, counts.num_cached)
        return _event("message_start", message=AnthropicAnswer(_new_id(), self._model, [], None, None, first))

    def _events_of(self, piece: OutputPiece) -> list[bytes]:
        if isinstance(piece, ReasoningPiece):
            start = self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*start, self._delta(type="thinking_delta", thinking=piece.text)] if self._shows_thoughts else start
        if isinstance(piece, TextPiece):
            start = self._switch("text", {"type": "text", "text": ""})
            return [*start, self._delta(type="text_delta", text=piece.text)]
        if (part := call_part(piece)) is None:
            return []
        start = self._switch(f"call {part.index}", {"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        return [*start, self._delta(type="input_json_delta", partial_json=part.arguments_json)]

    def _switch(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """Start a new block, unless one of this kind is open."""
        if self._open == kind:
            return []
        closing = self._close()
        self._open = kind
        return [*closing, _event("content_block_start", index=self._num_blocks, content_block=block)]

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        self._num_blocks += 1
        return [_event("content_block_stop", index=self._num_blocks - 1)]

    def end(self, generations: Sequence[Generation]) -> bytes:
        """Return the final events, with the stop reason and the usage."""
        sample = generations[0].samples[0]
        reason, stop = _stop_of(sample.finish_reason, sample.output())
        delta = {"stop_reason": reason, "stop_sequence": stop, **({"warning": sample.warning} if sample.warning else {})}
        last = _event("message_delta", delta=delta, usage=_usage(generations[0]))
        return b"".join([*self._close(), last, _event("message_stop")])


def _error_event(error: CuletError) -> bytes:
    return b"event: error\ndata: " + error_body(reply_to(error), ENDPOINT) + b"\n\n"


ENDPOINTS = (
    Endpoint("POST", ENDPOINT, messages, body=MessagesRequest, answer=AnthropicAnswer),
    Endpoint("POST", f"{ENDPOINT}/count_tokens", count_tokens, body=CountTokensRequest, answer=TokenCount),
)
