"""POST /v1/audio/transcriptions and /v1/audio/translations: OpenAI's audio API.

The recording becomes a chat with one message, which asks the model to write down or to translate what it hears. Gemma gives no
times, so formats with timestamps are refused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.errors import BadRequest, UnsupportedError
from culet.media.items import MediaKind
from culet.media.sources import MediaSource
from culet.serve.api.chat_request import PreparedChat, prepare
from culet.serve.api.endpoint import SMALL_BODY, Endpoint, decoding_thread, encoder, json_response, origin_of
from culet.serve.api.fields import MAX_TEXT, Temperature
from culet.serve.generation import Generation, Origin
from culet.serve.http.forms import FORM, Form, read_form
from culet.serve.service import Service
from culet.serve.streams import EventStream, run_all
from culet.text.output import OutputDelta
from culet.types import SamplingParams

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
_FORMATS = ("json", "text")
# Fields that would change the answer. A field that is not known at all is ignored, as in the other APIs.
_REFUSED = (
    "chunking_strategy",
    "include",
    "keywords",
    "known_speaker_names",
    "known_speaker_references",
    "languages",
    "timestamp_granularities",
)
_LANGUAGE_LIST = """
ar Arabic, bg Bulgarian, bn Bengali, ca Catalan, cs Czech, da Danish, de German, el Greek, en English, es Spanish, et Estonian,
fa Persian, fi Finnish, fr French, he Hebrew, hi Hindi, hr Croatian, hu Hungarian, id Indonesian, it Italian, ja Japanese,
ko Korean, lt Lithuanian, lv Latvian, mr Marathi, ms Malay, nl Dutch, no Norwegian, pl Polish, pt Portuguese, ro Romanian,
ru Russian, sk Slovak, sl Slovenian, sr Serbian, sv Swedish, sw Swahili, ta Tamil, te Telugu, th Thai, tr Turkish,
uk Ukrainian, ur Urdu, vi Vietnamese, zh Chinese
"""
_LANGUAGES = dict(re.findall(r"(\w\w) (\w+)", _LANGUAGE_LIST))


class TranslationRequest(Struct, kw_only=True):
    """The form of POST /v1/audio/translations."""

    # The bytes of the file are read apart from the other fields.
    file: Annotated[str, Meta(max_length=MAX_TEXT, extra_json_schema={"format": "binary"})]
    model: Annotated[str, Meta(max_length=256)] | None = None
    prompt: Annotated[str, Meta(max_length=1 << 16)] = ""  # names and style to expect
    response_format: Annotated[str, Meta(max_length=32, extra_json_schema={"enum": list(_FORMATS)})] = "json"
    temperature: Temperature = 0.0


class TranscriptionRequest(TranslationRequest, kw_only=True):
    """The form of POST /v1/audio/transcriptions."""

    language: Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z -]{0,31}$")] | None = None  # a code such as `de`, or a name
    stream: bool = False


T = TypeVar("T", bound=TranslationRequest)


class AudioInputDetails(Struct):
    audio_tokens: int
    text_tokens: int


class AudioUsage(Struct):
    """Token counts of a request. Tokens of audio include the marks around it."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: AudioInputDetails
    type: str = "tokens"


class TextAnswer(Struct):
    """What was heard. The finish reason is `length` if the context had no room for all of it."""

    text: str
    usage: AudioUsage
    finish_reason: str


async def transcribe(service: Service, request: Request) -> Response:
    """Write down what is said in a recording. With `stream`, send the text as server-sent events."""
    fields, recording = await _read(service, request, TranscriptionRequest)
    name = _LANGUAGES.get((fields.language or "").lower(), fields.language)
    language = f"in {name} into {name} text" if name else "in its original language"
    task = f"Transcribe the following speech segment {language}. Write only the transcription, without newlines."
    prepared = await _prepare(service, origin_of(request), fields, recording, task)
    open_generation = partial(prepared.open, TRANSCRIPTIONS)
    if not fields.stream:
        return await _answer(request, fields, prepared, open_generation)
    if fields.response_format != "json":
        raise BadRequest("response_format: a stream has events of JSON", hint="omit response_format or stream")
    return EventStream(service, [open_generation], _write_deltas, end=partial(_write_end, prepared))


async def translate(service: Service, request: Request) -> Response:
    """Write in English what is said in a recording."""
    fields, recording = await _read(service, request, TranslationRequest)
    task = "Translate the following speech segment into English. Write only the translation, without newlines."
    prepared = await _prepare(service, origin_of(request), fields, recording, task)
    return await _answer(request, fields, prepared, partial(prepared.open, TRANSLATIONS))


async def _read(service: Service, request: Request, kind: type[T]) -> tuple[T, MediaSource]:
    """Return the fields of the form and the recording."""
    body = await request.body()
    content_type = request.headers.get("content-type", "")
    if len(body) <= SMALL_BODY:
        form = read_form(content_type, body)
    else:
        form = await asyncio.get_running_loop().run_in_executor(decoding_thread, read_form, content_type, body)
    fields = _fields(form, kind)
    service.check_model(fields.model)
    if fields.response_format not in _FORMATS:
        problem = f"response_format: got {fields.response_format[:32]!r}, expected json or text"
        raise UnsupportedError(problem, hint="the model gives no times and no speakers")
    return fields, MediaSource(MediaKind.AUDIO, "file", data=form.files["file"], is_split=True)


def _fields(form: Form, kind: type[T]) -> T:
    if "file" not in form.files:
        raise BadRequest("file: missing, expected a recording")
    for name in (*form.values, *form.files):
        if name.removesuffix("[]") in _REFUSED:
            raise UnsupportedError(f"{name.removesuffix('[]')}: not supported", hint="omit the field")
    try:
        return msgspec.convert({**form.values, "file": ""}, kind, strict=False)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        raise BadRequest(f"{place.rstrip('`') or 'body'}: {problem[:1].lower()}{problem[1:500]}") from None


async def _prepare(
    service: Service, origin: Origin, fields: TranslationRequest, recording: MediaSource, task: str
) -> PreparedChat:
    guide = f"\nThis text shows the style and the names to expect: {fields.prompt}" if fields.prompt else ""
    parts: list[dict[str, Any]] = [{"type": "audio", "audio": recording}, {"type": "text", "text": task + guide}]
    messages = [{"role": "user", "content": parts}]
    return await prepare(service, origin, messages, SamplingParams(temperature=fields.temperature), enable_thinking=False)


async def _answer(
    request: Request, fields: TranslationRequest, prepared: PreparedChat, open_generation: Callable[[], Generation]
) -> Response:
    (generation,) = await run_all(request, [open_generation])
    sample = generation.samples[0]
    text = sample.output().text
    if fields.response_format == "text":
        return Response(text, media_type="text/plain")
    return json_response(TextAnswer(text, _usage(prepared, generation), sample.finish_reason or "stop"))


def _usage(prepared: PreparedChat, generation: Generation) -> AudioUsage:
    counts = generation.token_counts()
    num_audio = sum(span.length + 2 for span in prepared.prompt.spans)
    details = AudioInputDetails(num_audio, counts.num_prompt - num_audio)
    return AudioUsage(counts.num_prompt, counts.num_generated, counts.num_prompt + counts.num_generated, details)


def _write_deltas(index: int, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes:
    events = [{"type": "transcript.text.delta", "delta": delta.text} for delta in deltas if delta.text]
    return b"".join(b"data: " + encoder.encode(event) + b"\n\n" for event in events)


def _write_end(prepared: PreparedChat, generations: Sequence[Generation]) -> bytes:
    (generation,) = generations
    sample = generation.samples[0]
    answer = TextAnswer(sample.output().text, _usage(prepared, generation), sample.finish_reason or "stop")
    return b"data: " + encoder.encode({"type": "transcript.text.done", **msgspec.structs.asdict(answer)}) + b"\n\n"


ENDPOINTS = (
    Endpoint("POST", TRANSCRIPTIONS, transcribe, body=TranscriptionRequest, answer=TextAnswer, body_type=FORM),
    Endpoint("POST", TRANSLATIONS, translate, body=TranslationRequest, answer=TextAnswer, body_type=FORM),
)
