"""POST /v1/responses: OpenAI's newer API, stateless."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest, CuletError, UnsupportedError
from culet.serve.api.answers import encoder
from culet.serve.api.chat_request import Turn, prepare, sampling_params
from culet.serve.api.endpoint import Endpoint, json_response, request_id_of
from culet.serve.api.openai_responses_protocol import ResponsesRequest, ResponsesToolName, messages_of
from culet.serve.api.protocol import SamplingFields, decode
from culet.serve.errors import facts_of
from culet.serve.generation import Generation, Piece
from culet.serve.service import Service
from culet.serve.streams import EventStream, run_all
from culet.structured.forms import schema_form
from culet.text.output_events import ContentPiece, Event, ReasoningPiece, ToolCallArguments, ToolCallEnd, ToolCallStart
from culet.types import StructuredOutputs

ENDPOINT = "/v1/responses"


class InputDetails(Struct):
    cached_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponsesUsage(Struct):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponsesAnswer(Struct, kw_only=True):
    """What a request is answered with."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage | None = None
    incomplete_details: dict[str, str] | None = None
    error: dict[str, str] | None = None
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
    """Answer a conversation; with `stream` as server-sent events. Nothing is stored."""
    body = decode(ResponsesRequest, await request.body())
    model = service.check_model(body.model)
    turn = await _prepare(service, body)
    open_it = partial(turn.open, ENDPOINT, request_id_of(request))
    answer = _new_answer(model, body)
    if body.stream:
        writer = _Writer(answer)
        return EventStream(
            service, [open_it], writer.write, begin=writer.begin(), end=writer.end, write_error=writer.write_error
        )
    (generation,) = await run_all(request, [open_it])
    items = _Items()
    output = generation.samples[0].reader.output()
    if output.reasoning:
        items.begin("reasoning").text = output.reasoning
    if output.content:
        items.begin("message").text = output.content
    for call in output.tool_calls:
        item = items.begin("function_call")
        item.call_id, item.name, item.text = call.id, call.name, call.arguments_json
    return json_response(_completed(answer, generation, items))


async def _prepare(service: Service, body: ResponsesRequest) -> Turn:
    if body.previous_response_id is not None:
        raise UnsupportedError(
            "previous_response_id: this server keeps no responses", hint="send the conversation in input each time"
        )
    if body.background:
        raise UnsupportedError("background: this server answers while the client waits", hint="use stream")
    fields = SamplingFields(temperature=body.temperature, top_p=body.top_p)
    params = sampling_params(service, fields, max_tokens=body.max_output_tokens)
    params = replace(params, structured_outputs=_form(body))
    choice = body.tool_choice
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters},
        }
        for tool in body.tools or ()
    ]
    effort = body.reasoning.effort if body.reasoning is not None else None
    return await prepare(
        service,
        messages_of(body),
        params,
        tools=tools,
        tool_choice=f"={choice.name}" if isinstance(choice, ResponsesToolName) else choice or "auto",
        one_call=body.parallel_tool_calls is False,
        enable_thinking=None if effort is None else effort != "none",
    )


def _form(body: ResponsesRequest) -> StructuredOutputs | None:
    asked = body.text.format if body.text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True)
    if asked.schema_ is None:
        raise BadRequest("text.format.schema: missing, expected a JSON schema")
    return schema_form(asked.schema_, strict=bool(asked.strict))


def _new_answer(model: str, body: ResponsesRequest) -> ResponsesAnswer:
    """An answer without its output, which says again what was asked."""
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
        tools=[{"strict": None, **msgspec.to_builtins(tool)} for tool in body.tools or ()],
        tool_choice=choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text={"format": {"type": "text"} if form is None else msgspec.to_builtins(form)},
        reasoning={"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        metadata=body.metadata or {},
        truncation=body.truncation or "disabled",
    )


@dataclass
class _Item:
    """One item of the output as far as it has come."""

    kind: str  # reasoning, message or function_call
    id: str
    text: str = ""  # of the thought or answer, or the arguments of a call
    call_id: str = ""
    name: str = ""
    is_done: bool = True

    def build(self) -> dict[str, Any]:
        """The item as the API has it."""
        head: dict[str, Any] = {"type": self.kind, "id": self.id, "status": "completed" if self.is_done else "in_progress"}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [self.part()] if self.text or self.is_done else []
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        """The one part of its content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class _Items:
    """The output's items in their order."""

    _PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # noqa: RUF012

    def __init__(self) -> None:
        self.all: list[_Item] = []

    def begin(self, kind: str) -> _Item:
        item = _Item(kind, f"{self._PREFIX[kind]}_{secrets.token_hex(12)}")
        self.all.append(item)
        return item


def _completed(answer: ResponsesAnswer, generation: Generation, items: _Items) -> ResponsesAnswer:
    """The answer with its output, complete or cut."""
    usage = generation.usage()
    is_cut = generation.samples[0].finish_reason == "length"
    return msgspec.structs.replace(
        answer,
        status="incomplete" if is_cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        output=[item.build() for item in items.all],
        usage=ResponsesUsage(
            input_tokens=usage.num_prompt,
            input_tokens_details=InputDetails(usage.num_cached),
            output_tokens=usage.num_generated,
            output_tokens_details=OutputDetails(usage.num_reasoning),
            total_tokens=usage.num_prompt + usage.num_generated,
        ),
    )


class _Writer:
    """One answer as events, numbered. What belongs to another item ends the one that is open."""

    _DELTAS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}  # noqa: RUF012

    def __init__(self, answer: ResponsesAnswer) -> None:
        self._answer, self._items = answer, _Items()
        self._open: _Item | None = None
        self._number = 0

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        data = encoder.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._items.all) - 1}

    def begin(self) -> bytes:
        """What stands before all."""
        return self._event("response.created", response=self._answer) + self._event(
            "response.in_progress", response=self._answer
        )

    def write(self, index: int, generation: Generation, pieces: Sequence[Piece]) -> bytes:
        return b"".join(chunk for piece in pieces for event in piece.events for chunk in self._of(event))

    def _of(self, event: Event) -> list[bytes]:
        match event:
            case ReasoningPiece():
                return self._text("reasoning", event.text)
            case ContentPiece():
                return self._text("message", event.text)
            case ToolCallStart():
                ended = self._close()
                item = self._open = self._items.begin("function_call")
                item.call_id, item.name, item.is_done = event.id, event.name, False
                return [*ended, self._added(item)]
            case ToolCallArguments() if self._open is not None:
                self._open.text += event.text
                return [self._event("response.function_call_arguments.delta", **self._place(self._open), delta=event.text)]
            case ToolCallEnd():
                return self._close()
        return []

    def _added(self, item: _Item) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._items.all) - 1, item=item.build())

    def _text(self, kind: str, text: str) -> list[bytes]:
        """More of a thought or of the answer, in an item of its own."""
        events: list[bytes] = []
        item = self._open
        if item is None or item.kind != kind:
            events += self._close()
            item = self._open = self._items.begin(kind)
            item.is_done = False
            events.append(self._added(item))
            events.append(self._event("response.content_part.added", **self._place(item), content_index=0, part=item.part()))
        item.text += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        events.append(self._event(f"{self._DELTAS[kind]}.delta", **self._place(item), content_index=0, delta=text, **more))
        return events

    def _close(self) -> list[bytes]:
        """End the open item."""
        item, self._open = self._open, None
        if item is None:
            return []
        item.is_done = True
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
        """The whole answer once more."""
        ended = self._close()
        whole = _completed(self._answer, generations[0], self._items)
        return b"".join([*ended, self._event(f"response.{whole.status}", response=whole)])

    def write_error(self, error: CuletError) -> bytes:
        """The answer cannot be completed."""
        facts = facts_of(error)
        problem = {"code": facts.code or facts.type, "message": facts.message}
        return self._event("response.failed", response=msgspec.structs.replace(self._answer, status="failed", error=problem))


ENDPOINTS = (Endpoint("POST", ENDPOINT, responses, body=ResponsesRequest, answer=ResponsesAnswer),)
