"""POST /v1/responses: OpenAI's Responses API. With `--store-responses`, a request can continue an earlier response."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest, CuletError, UnsupportedError
from culet.serve.answers.stored import StoredResponse
from culet.serve.api.chat_request import PreparedChat, prepare
from culet.serve.api.endpoint import Endpoint, encoder, json_response, origin_of, read_body
from culet.serve.api.fields import TemplateOptions, check_single, sampling_params, shortest, thinking_of
from culet.serve.api.openai.responses_protocol import (
    ReasoningOptions,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolName,
    messages_of,
)
from culet.serve.generation import Generation, Origin
from culet.serve.http_errors import HttpError, reply_to
from culet.serve.service import Service
from culet.serve.streams import EventStream, run_all
from culet.structured.request_fields import any_object, given_schema, schema_form
from culet.text.output import OutputDelta
from culet.text.output_pieces import CallPart, Output, OutputPiece, ReasoningPiece, TextPiece, ToolCall, call_part
from culet.types import GrammarSpec

ENDPOINT = "/v1/responses"
# What `include` may name. Clients ask for encrypted thoughts by default, and thoughts are always in the answer. The others are
# about tools of OpenAI's own servers, which no request can have.
_INCLUDED = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


class InputDetails(Struct):
    cached_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int
    thinking_budget_reached: bool


class ResponsesUsage(Struct):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponsesAnswer(Struct, kw_only=True):
    """The answer to a responses request."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage | None = None
    incomplete_details: dict[str, str] | None = None
    error: dict[str, str] | None = None
    stop_reason: str | UnsetType = UNSET  # empty_after_thinking, which is no reason in incomplete_details
    warning: str | UnsetType = UNSET  # the same as a sentence
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    truncation: str = "disabled"
    previous_response_id: str | None = None
    store: bool = False
    background: bool = False
    object: str = "response"


async def responses(service: Service, request: Request) -> Response:
    """Answer a conversation. With `stream`, send the answer as server-sent events."""
    body = await read_body(service, request, ResponsesRequest)
    model = service.check_model(body.model)
    origin = origin_of(request, cache_salt=body.cache_salt)
    given = messages_of(body, service.limits.messages)
    prepared = await _prepare(service, origin, body, [*_earlier(service, body, origin), *given])
    open_generation = partial(prepared.open, ENDPOINT)
    answer = _new_answer(model, body, is_stored=service.settings.store_responses and body.store is not False)
    keep = partial(_keep, service, origin.caller.name, given)
    if body.stream:
        writer = _Writer(answer, keep)
        return EventStream(
            service, [open_generation], writer.write, begin=writer.begin(), end=writer.end, write_error=writer.write_error
        )
    (generation,) = await run_all(request, [open_generation])
    output = generation.samples[0].output()
    return json_response(keep(_completed(answer, generation, _items_of(output, _is_cut(generation))), output))


def _items_of(output: Output, is_cut: bool) -> _Items:
    """Return the items of a whole answer. If the answer `is_cut`, its last item is incomplete. A finished call never is."""
    items = _Items()
    if output.reasoning:
        items.begin("reasoning").text = output.reasoning
    if output.text:
        items.begin("message").text = output.text
    if items.all and is_cut and not output.tool_calls:
        items.all[-1].status = "incomplete"
    for call in output.tool_calls:
        item = items.begin("function_call")
        item.call_id, item.name, item.text = call.id, call.name, call.arguments_json
        item.status = "completed" if call.is_complete else "incomplete"
    return items


def _earlier(service: Service, body: ResponsesRequest, origin: Origin) -> list[Mapping[str, Any]]:
    """Return the messages before the input: the instructions, and the conversation that the request continues."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if body.previous_response_id is not None and not service.stored.is_enabled:
        raise UnsupportedError(
            "previous_response_id: this server does not store responses",
            hint="send the whole conversation in input, or start the server with --store-responses",
        )
    try:
        return [*system, *service.stored.history(origin.caller.name, body.previous_response_id)]
    except HttpError as error:
        problem = f"previous_response_id: {error.message}"
        hint = f"send the whole conversation in input; {error.hint}"
        raise HttpError(400, problem, hint=hint, code="previous_response_not_found") from None


def _keep(
    service: Service, key: str, given: Sequence[Mapping[str, Any]], answer: ResponsesAnswer, output: Output
) -> ResponsesAnswer:
    """Store a complete answer after the messages that it was `given`, unless the client asked not to. Return the answer."""
    if not answer.store:
        return answer
    said: dict[str, Any] = {"role": "assistant"}
    if output.reasoning:
        said["reasoning_content"] = output.reasoning
    calls = [call for call in output.tool_calls if call.is_complete]
    if output.text or not calls:
        said["content"] = output.text
    if calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in calls
        ]
    stored = StoredResponse(encoder.encode(answer), [*given, said], answer.previous_response_id)
    return msgspec.structs.replace(answer, store=service.stored.add(key, answer.id, stored))


async def _prepare(
    service: Service, origin: Origin, body: ResponsesRequest, messages: Sequence[Mapping[str, Any]]
) -> PreparedChat:
    if body.background:
        raise UnsupportedError("background: not supported", hint="use stream instead")
    for name in body.include or ():
        if name not in _INCLUDED:
            raise UnsupportedError(f"include: got {name!r}, which is not supported", hint="omit it")
    check_single(body)
    options = body.chat_template_kwargs or TemplateOptions()
    asked = body.reasoning or ReasoningOptions()
    is_on = asked.enabled if options.enable_thinking is None else options.enable_thinking
    effort = asked.effort or body.reasoning_effort
    thinking = thinking_of(service, effort=effort, budget=asked.max_tokens, is_on=is_on)
    max_tokens = shortest(body.max_output_tokens, body.max_tokens)
    params = sampling_params(service, body, max_tokens=max_tokens, thinking_budget=thinking.budget, form=_form(body))
    choice = body.tool_choice
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters,
                "strict": tool.strict,
            },
        }
        for tool in body.tools or ()
    ]
    return await prepare(
        service,
        origin,
        messages,
        params,
        tools=tools,
        tool_choice=f"={choice.name}" if isinstance(choice, ResponsesToolName) else choice or "auto",
        constrain_tool_calls=body.constrain_tool_calls,
        unmarked_tool_calls=body.unmarked_tool_calls,
        single_call=body.parallel_tool_calls is False,
        enable_thinking=thinking.is_on,
        options=options.variables(),
    )


def _form(body: ResponsesRequest) -> GrammarSpec | None:
    asked = body.text.format if body.text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return any_object("text.format")
    if given_schema(asked.schema_) is None:
        raise BadRequest("text.format.schema: a JSON schema is required")
    return schema_form(asked.schema_, "text.format.schema", strict=bool(asked.strict))


def _new_answer(model: str, body: ResponsesRequest, *, is_stored: bool) -> ResponsesAnswer:
    """Create an answer without output. It repeats the settings of the request."""
    form = body.text.format if body.text is not None else None
    choice = body.tool_choice
    return ResponsesAnswer(
        id=f"resp_{secrets.token_hex(16)}",
        created_at=int(time.time()),
        model=model,
        status="in_progress",
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=[_given(tool) for tool in body.tools or ()],
        tool_choice=choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text={"format": {"type": "text"} if form is None else form},
        reasoning={"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        metadata=body.metadata or {},
        previous_response_id=body.previous_response_id,
        store=is_stored,
    )


def _given(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool as the client sent it, without copying its schema."""
    return {name: value for name, value in msgspec.structs.asdict(tool).items() if value is not UNSET}


@dataclass
class _Item:
    """One item of the output so far."""

    kind: str  # reasoning, message or function_call
    id: str
    text: str = ""  # the thought, the answer text, or the arguments of a call
    call_id: str = ""
    name: str = ""
    status: str = "completed"  # or in_progress, or incomplete if the answer was cut in it

    def build(self) -> dict[str, Any]:
        """Return the item in the format of the API."""
        head: dict[str, Any] = {"type": self.kind, "id": self.id, "status": self.status}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [self.part()] if self.text or self.status != "in_progress" else []
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        """Return the only part of the item's content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class _Items:
    """The items of the output, in order."""

    _PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # noqa: RUF012

    def __init__(self) -> None:
        self.all: list[_Item] = []

    def begin(self, kind: str) -> _Item:
        item = _Item(kind, f"{self._PREFIX[kind]}_{secrets.token_hex(12)}")
        self.all.append(item)
        return item


def _is_cut(generation: Generation) -> bool:
    """Return whether the answer ended because it reached its greatest length."""
    return generation.samples[0].finish_reason == "length"


def _completed(answer: ResponsesAnswer, generation: Generation, items: _Items) -> ResponsesAnswer:
    """Return the answer with its output, which is complete or cut off."""
    counts, is_cut = generation.token_counts(), _is_cut(generation)
    return msgspec.structs.replace(
        answer,
        status="incomplete" if is_cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        output=[item.build() for item in items.all],
        stop_reason=generation.samples[0].stop_reason or UNSET,
        warning=generation.samples[0].warning or UNSET,
        usage=ResponsesUsage(
            input_tokens=counts.num_prompt,
            input_tokens_details=InputDetails(counts.num_cached),
            output_tokens=counts.num_generated,
            output_tokens_details=OutputDetails(counts.num_reasoning, counts.is_thought_out),
            total_tokens=counts.num_prompt + counts.num_generated,
        ),
    )


class _Writer:
    """Writes one answer as numbered events. A piece of another item closes the open item."""

    _DELTAS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}  # noqa: RUF012

    def __init__(self, answer: ResponsesAnswer, keep: Callable[[ResponsesAnswer, Output], ResponsesAnswer]) -> None:
        self._answer, self._items, self._keep = answer, _Items(), keep
        self._open: _Item | None = None
        self._num_events = 0

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        data = encoder.encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._items.all) - 1}

    def begin(self) -> bytes:
        """Return the events before the output."""
        return self._event("response.created", response=self._answer) + self._event(
            "response.in_progress", response=self._answer
        )

    def write(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes:
        return b"".join(event for delta in deltas for piece in delta.pieces for event in self._events_of(piece))

    def _events_of(self, piece: OutputPiece) -> list[bytes]:
        if isinstance(piece, ReasoningPiece):
            return self._text("reasoning", piece.text)
        if isinstance(piece, TextPiece):
            return self._text("message", piece.text)
        return self._call(piece)

    def _call(self, piece: CallPart | ToolCall) -> list[bytes]:
        """Return the events for part of a tool call. The call itself closes the item of its parts."""
        events: list[bytes] = []
        if (part := call_part(piece)) is not None:
            item = self._open
            if item is None or part.is_first:
                events += self._close()
                item = self._open = self._items.begin("function_call")
                item.call_id, item.name, item.status = part.id, part.name, "in_progress"
                events.append(self._added(item))
            item.text += part.arguments_json
            delta = self._event("response.function_call_arguments.delta", **self._place(item), delta=part.arguments_json)
            events.append(delta)
        return [*events, *self._close(is_cut=not piece.is_complete)] if isinstance(piece, ToolCall) else events

    def _added(self, item: _Item) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._items.all) - 1, item=item.build())

    def _text(self, kind: str, text: str) -> list[bytes]:
        """Return the events for more text of a thought or of the answer. Open an item for it if needed."""
        events: list[bytes] = []
        item = self._open
        if item is None or item.kind != kind:
            events += self._close()
            item = self._open = self._items.begin(kind)
            item.status = "in_progress"
            events.append(self._added(item))
            events.append(self._event("response.content_part.added", **self._place(item), content_index=0, part=item.part()))
        item.text += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        events.append(self._event(f"{self._DELTAS[kind]}.delta", **self._place(item), content_index=0, delta=text, **more))
        return events

    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        """Close the open item, if any, and return its last events. `is_cut` says that the answer ends in the item."""
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = "incomplete" if is_cut else "completed"
        place = self._place(item)
        events = []
        if item.kind == "function_call":
            events.append(self._event("response.function_call_arguments.done", **place, name=item.name, arguments=item.text))
        else:
            more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            events.append(self._event(f"{self._DELTAS[item.kind]}.done", **place, content_index=0, text=item.text, **more))
            events.append(self._event("response.content_part.done", **place, content_index=0, part=item.part()))
        events.append(self._event("response.output_item.done", output_index=len(self._items.all) - 1, item=item.build()))
        return events

    def end(self, generations: Sequence[Generation]) -> bytes:
        """Close the open item and return its last events, then the complete answer."""
        closing = self._close(is_cut=_is_cut(generations[0]))
        answer = self._keep(_completed(self._answer, generations[0], self._items), generations[0].samples[0].output())
        return b"".join([*closing, self._event(f"response.{answer.status}", response=answer)])

    def write_error(self, error: CuletError) -> bytes:
        """Return the event for an answer that cannot be completed."""
        reply = reply_to(error)
        problem = {"code": reply.code or reply.type, "message": reply.message}
        return self._event("response.failed", response=msgspec.structs.replace(self._answer, status="failed", error=problem))


ENDPOINTS = (Endpoint("POST", ENDPOINT, responses, body=ResponsesRequest, answer=ResponsesAnswer),)
