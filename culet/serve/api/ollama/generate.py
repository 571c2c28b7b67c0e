"""POST /api/chat and /api/generate: Ollama's endpoints that generate.

An answer is streamed as lines of JSON unless the request says otherwise. The last line has the counts and durations. A tool
call is complete when it is sent, because Ollama's format has no parts of calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest, CuletError
from culet.serve.api.chat_request import PreparedChat, check_chat, prefilled, prepare
from culet.serve.api.endpoint import Endpoint, encoder, json_response, origin_of, read_body
from culet.serve.api.ollama.protocol import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    find_model,
    read_messages,
    read_params,
    read_thinking,
    with_images,
)
from culet.serve.api.openai.chat import tool_fields
from culet.serve.generation import Generation, Origin, TokenCounts
from culet.serve.http_errors import OLLAMA_PATHS, error_body, reply_to
from culet.serve.service import Service
from culet.serve.streams import EventStream, run_all
from culet.text.output import OutputDelta, plain_output
from culet.text.output_pieces import ReasoningPiece, TextPiece, ToolCall
from culet.types import SamplingParams

CHAT, GENERATE = "/api/chat", "/api/generate"
OpenGeneration = Callable[[], Generation]
Fields = dict[str, Any]


class OllamaCall(Struct):
    """A tool call of the answer."""

    id: str
    function: dict[str, Any]


class OllamaAnswerMessage(Struct, omit_defaults=True):
    role: str
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaDone(Struct, kw_only=True):
    """The end of an answer, with token counts and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool = True
    done_reason: str
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    warning: str | UnsetType = UNSET  # begins with empty_after_thinking if the answer is empty after thoughts


class OllamaChatAnswer(OllamaDone, kw_only=True):
    """The answer to a chat request."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaDone, kw_only=True):
    """The answer to a generate request."""

    response: str
    thinking: str = ""


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation. Unless `stream` is false, send the answer as lines of JSON."""
    began_at = time.perf_counter()
    body = await read_body(service, request, OllamaChatRequest)
    lines = _Lines(find_model(service, body.model), began_at, _message_fields)
    if not body.messages:  # a request to load the model
        read_params(service, body)  # refuses a `prompt`, which would be ignored
        return lines.nothing()
    prepared = await _prepare_chat(service, origin_of(request, cache_salt=body.cache_salt), body)
    open_generation = partial(prepared.open, CHAT)
    return await _answer(service, request, body, open_generation, lines)


async def generate(service: Service, request: Request) -> Response:
    """Answer one prompt. Unless `stream` is false, send the answer as lines of JSON."""
    began_at = time.perf_counter()
    body = await read_body(service, request, OllamaGenerateRequest)
    lines = _Lines(find_model(service, body.model), began_at, _text_fields)
    if body.raw and body.images:
        raise BadRequest("images: cannot be combined with raw, because the chat template is not used")
    params = read_params(service, body)
    if not body.prompt:
        return lines.nothing()
    origin = origin_of(request, cache_salt=body.cache_salt)
    if body.raw:
        open_generation = await _open_raw(service, body, params, origin)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        asked: dict[str, Any] = {"role": "user", "content": with_images(body.prompt, body.images, "images")}
        messages = [*system, asked]
        is_thinking = read_thinking(service, body).is_on
        prepared = await prepare(service, origin, messages, params, enable_thinking=is_thinking, clamp=True)
        open_generation = partial(prepared.open, GENERATE)
    return await _answer(service, request, body, open_generation, lines)


async def _prepare_chat(service: Service, origin: Origin, body: OllamaChatRequest) -> PreparedChat:
    params = read_params(service, body)
    await check_chat(service, body.messages or (), ())  # before they are converted
    messages = read_messages(body)
    return await prepare(
        service,
        origin,
        messages,
        params,
        tools=[tool_fields(tool) for tool in body.tools or ()],
        constrain_tool_calls=body.constrain_tool_calls,
        unmarked_tool_calls=body.unmarked_tool_calls,
        single_call=body.parallel_tool_calls is False,
        enable_thinking=read_thinking(service, body).is_on,
        continued=prefilled(messages[-1]),
        clamp=True,  # Ollama does the same
    )


async def _open_raw(
    service: Service, body: OllamaGenerateRequest, params: SamplingParams, origin: Origin
) -> Callable[[], Generation]:
    """Return a function that submits a prompt as it is, without the chat template."""
    service.require_ready()
    for name, value in (("system", body.system), ("think", body.think)):
        if value:
            raise BadRequest(f"{name}: cannot be combined with raw, because the chat template is not used")
    if params.structured_outputs is not None:
        params = replace(params, structured_outputs=await service.grammars.admit(params.structured_outputs.spec()))
    prompt = await service.prompts.encode_text(body.prompt or "")
    params = service.clamp(params, len(prompt))
    make_output = partial(plain_output, service.tokenizer)
    return lambda: Generation(service, prompt, params, make_output, endpoint=GENERATE, origin=origin)


async def _answer(
    service: Service, request: Request, body: OllamaRequest, open_generation: OpenGeneration, lines: _Lines
) -> Response:
    if body.stream is not False:
        return _LineStream(service, [open_generation], lines.write, end=lines.end, write_error=_error_line, lines=lines)
    (generation,) = await run_all(request, [open_generation])
    output = generation.samples[0].output()
    return json_response({**lines.done(generation), **lines.fields(output.text, output.reasoning, output.tool_calls)})


# Answers


def _message_fields(text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> Fields:
    whole = [call for call in calls if call.is_complete]
    given = [OllamaCall(call.id, {"index": call.index, "name": call.name, "arguments": call.arguments}) for call in whole]
    return {"message": OllamaAnswerMessage("assistant", text, thinking, given)}


def _text_fields(text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> Fields:
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class _Lines:
    """Writes one answer as lines of JSON. `fields` returns the part of a line that chat and generate write differently."""

    def __init__(self, model: str, began_at: float, fields: Callable[..., Fields]) -> None:
        self._model, self._began_at, self.fields = model, began_at, fields

    def line(self, text: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> bytes:
        """Return a line in the middle of an answer."""
        head = {"model": self._model, "created_at": _now()}
        return encoder.encode({**head, **self.fields(text, thinking, calls), "done": False}) + b"\n"

    def write(self, index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes:
        """Return lines for the new thoughts, the new text, and each tool call that is complete now, in order."""
        lines = []
        for piece in (piece for delta in deltas for piece in delta.pieces):
            if isinstance(piece, ReasoningPiece):
                lines.append(self.line(thinking=piece.text))
            elif isinstance(piece, TextPiece):
                lines.append(self.line(piece.text))
            elif isinstance(piece, ToolCall) and piece.is_complete:
                lines.append(self.line(calls=[piece]))
        return b"".join(lines)

    def end(self, generations: Sequence[Generation]) -> bytes:
        """Return the last line."""
        return encoder.encode({**self.done(generations[0]), **self.fields("")}) + b"\n"

    def done(self, generation: Generation) -> Fields:
        """Return the fields that tell how the answer ended, what it cost and how long it took."""
        sample, counts = generation.samples[0], generation.token_counts()
        now = time.perf_counter()
        waited_s = max(0.0, (sample.first_token_at or now) - self._began_at - generation.queue_s)
        prompt_s, eval_s = _split(waited_s, sample.last_token_at - sample.first_token_at, counts)
        warning = {"warning": sample.warning} if sample.warning else {}
        return {
            "model": self._model,
            "created_at": _now(),
            "done": True,
            "done_reason": "length" if sample.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(now - self._began_at),
            "load_duration": 0,
            "prompt_eval_count": counts.num_prompt,
            "prompt_eval_duration": _nanoseconds(prompt_s),
            "eval_count": counts.num_generated,
            "eval_duration": _nanoseconds(eval_s),
            **warning,
        }

    def nothing(self) -> Response:
        """Return the answer to a request without a prompt, which only asks that the model be loaded."""
        head = {"model": self._model, "created_at": _now(), "done": True, "done_reason": "load"}
        return json_response({**head, **self.fields("")})


def _split(waited_s: float, rest_s: float, counts: TokenCounts) -> tuple[float, float]:
    """Return the time for the prompt and for the answer. The first token was drawn in a step that also computed the prompt.

    It counts as much as each of the others, or if they all came at once, as much as a token of the prompt.
    """
    if not counts.num_generated:
        return waited_s, 0.0
    num_steps = counts.num_generated - 1 if rest_s else counts.num_prompt - counts.num_cached + 1
    first_s = min(waited_s, (rest_s or waited_s) / max(1, num_steps))
    return waited_s - first_s, rest_s + first_s


def _nanoseconds(seconds: float) -> int:
    """Return at least 1, because clients divide by durations."""
    return max(1, round(seconds * 1e9))


def _error_line(error: CuletError) -> bytes:
    """Return the last line of a stream that cannot be completed."""
    return error_body(reply_to(error), OLLAMA_PATHS) + b"\n"


class _LineStream(EventStream):
    """A stream of JSON lines."""

    kind = b"application/x-ndjson"

    def __init__(self, *arguments: Any, lines: _Lines, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.keep_alive = lines.line()  # clients parse every line, so it is one without text


ENDPOINTS = (
    Endpoint("POST", CHAT, chat, body=OllamaChatRequest, answer=OllamaChatAnswer),
    Endpoint("POST", GENERATE, generate, body=OllamaGenerateRequest, answer=OllamaGenerateAnswer),
)
