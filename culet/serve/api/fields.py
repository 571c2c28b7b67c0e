"""Field types of the request structs, and the sampling fields that OpenAI's APIs share.

Every list, text and number has a fixed bound here. `Limits` sets tighter ones. Unknown fields are ignored, unless they look
like a misspelt one (`endpoint`). Unsupported fields that would change the answer are refused by name (`refused`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Raw, Struct

from culet.errors import BadRequest, UnsupportedError
from culet.media.parts import MediaOptions
from culet.serve.api.refused import UnsupportedFields, refuse_unsupported
from culet.serve.service import Service
from culet.structured.request_fields import ResponseFormat, StructuredFields, form_of
from culet.thinking import read_thinking_budgets
from culet.types import MAX_SEED, GrammarSpec, SamplingParams

MAX_TEXT = 64 << 20  # larger than any body
MAX_TOKENS = 2**31 - 1

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
# The name in an earlier call, which a model may have written freely. The reader of answers takes the same names.
PastToolName = Annotated[str, Meta(pattern=r"""^[^\s{}()\[\],"'<>|]{1,256}$""")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
CountOrNone = Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
Schema = dict[str, Any]
# The arguments of an earlier tool call, as JSON text or as an object. They may be long, so the template process parses them.
RawArguments = Annotated[
    Raw, Meta(extra_json_schema={"anyOf": [{"type": "string", "maxLength": MAX_TEXT}, {"type": "object"}]})
]


Detail = Literal["low", "auto", "high", "original"]


class UrlField(Struct, omit_defaults=True):
    """A `data:` URL, or an https URL of a host that the server allows."""

    url: Text
    detail: Detail | None = None


class TextPart(Struct, tag_field="type", tag="text"):
    """A text part of a message."""

    text: Text


class ImageUrlPart(Struct, tag_field="type", tag="image_url"):
    """An image."""

    image_url: UrlField | Text


class VideoUrlPart(Struct, tag_field="type", tag="video_url"):
    """A video."""

    video_url: UrlField | Text


class AudioUrlPart(Struct, tag_field="type", tag="audio_url"):
    """A recording."""

    audio_url: UrlField | Text


class AudioData(Struct):
    data: Text  # base64
    format: Annotated[str, Meta(max_length=32)] | None = None  # ignored, because the data says what it is


class InputAudioPart(Struct, tag_field="type", tag="input_audio"):
    """A recording as base64."""

    input_audio: AudioData


class FileData(Struct, omit_defaults=True):
    file_data: Text | None = None  # a `data:` URL
    filename: Annotated[str, Meta(max_length=1024)] | None = None
    file_id: Annotated[str, Meta(max_length=256)] | None = None


class FilePart(Struct, tag_field="type", tag="file"):
    """A file that is an image, a video or a recording."""

    file: FileData


Part = TextPart | ImageUrlPart | VideoUrlPart | AudioUrlPart | InputAudioPart | FilePart


class MediaFields(Struct, forbid_unknown_fields=True):
    """How images and video frames are prepared."""

    max_soft_tokens: Literal[70, 140, 280, 560, 1120] | None = None  # the most tokens of an image or a frame

    def options(self) -> MediaOptions:
        return MediaOptions(self.max_soft_tokens)


class StreamOptions(Struct):
    """Options for the contents of a stream."""

    include_usage: bool = False
    repeat_tool_call_ids: bool | None = None  # the id and the name of a tool call are in each part of it


class TemplateOptions(Struct, forbid_unknown_fields=True):
    """Variables of the chat template."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None

    def variables(self) -> dict[str, Any] | None:
        """Return those that only the template reads."""
        return {"preserve_thinking": True} if self.preserve_thinking else None


class SamplingFields(UnsupportedFields, kw_only=True):
    """Fields that OpenAI's APIs and `/v1/messages` have in common."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    max_tokens: CountOrNone = None
    min_tokens: CountOrNone = None
    thinking_token_budget: CountOrNone = None  # the most tokens in all thoughts of an answer
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool = False
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=65536)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # lower runs first
    cache_salt: CacheSalt | None = None  # only requests with the same salt share cached prefixes
    stream: bool | None = False
    stream_options: StreamOptions | None = None


def shortest(*lengths: int | None) -> int | None:
    """Return the smallest of the most tokens that a request asks for under several names, or None."""
    return min((length for length in lengths if length is not None), default=None)


def check_single(fields: SamplingFields) -> None:
    """Raise if `n` is above 1. Some APIs return exactly one answer per request."""
    if fields.n is not None and fields.n > 1:
        raise UnsupportedError(f"n: got {fields.n}, but this API returns one answer per request", hint="send several requests")


class Thinking(NamedTuple):
    """Whether the model thinks, and how much. None means the server's default, or no limit."""

    is_on: bool | None = None
    budget: int | None = None


_read_budgets = cache(read_thinking_budgets)


def thinking_of(
    service: Service, *, effort: Effort | None = None, budget: int | None = None, is_on: bool | None = None
) -> Thinking:
    """Return what a request says about thinking.

    `effort` is a level, which the server turns into a budget. A `budget` is more exact, and `is_on` decides alone.
    """
    if budget is None and effort is not None:
        budget = _read_budgets(service.settings.thinking_budgets).get(effort)
    if is_on is None and (effort is not None or budget is not None):
        is_on = effort != "none" and budget != 0
    return Thinking(is_on, budget)


def sampling_params(
    service: Service,
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    more_stops: Sequence[str] = (),
    thinking_budget: int | None = None,
    form: GrammarSpec | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Convert `fields` to SamplingParams. Raise if a field is not supported or exceeds the server's limits.

    `more_stops`, `thinking_budget` and `form` come from fields that not all APIs have.
    """
    refuse_unsupported(fields, thinks=service.settings.enable_thinking)
    limits = service.limits
    stop = [*([fields.stop] if isinstance(fields.stop, str) else fields.stop or ()), *more_stops]
    n = fields.n or 1
    for name, got, limit in (
        ("n", n, limits.n),
        ("stop_sequences" if more_stops else "stop", len(stop), limits.stops),
        ("logprobs", max(logprobs or 0, prompt_logprobs or 0), limits.logprobs),
        ("logit_bias", len(fields.logit_bias or ()), limits.logit_bias),
    ):
        if got > limit:
            raise BadRequest(f"{name}: got {got}, but the maximum is {limit}", hint="the server sets the maximum with --limits")
    return SamplingParams(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        thinking_token_budget=thinking_budget if fields.thinking_token_budget is None else fields.thinking_token_budget,
        stop=stop,
        stop_token_ids=fields.stop_token_ids or (),
        ignore_eos=fields.ignore_eos,
        seed=None if fields.seed is None else fields.seed & MAX_SEED,
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=fields.logit_bias,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        structured_outputs=form_of(fields.response_format, fields.structured_outputs, fields, form),
    )
