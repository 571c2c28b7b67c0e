"""What clients may send: every list, text and number has a bound. The OpenAPI document is made from these structs.

Bounds here are those that no setting lifts; `Limits` has tighter ones. Fields that are not named are ignored, as OpenAI's
own servers do, except those that would change the answer: they are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from culet.errors import BadRequest, UnsupportedError
from culet.structured.forms import ResponseFormat, StructuredFields
from culet.text.messages import check_messages

MAX_TEXT = 64 << 20  # above any body
MAX_TOKENS = 2**31 - 1

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Schema = dict[str, Any]


class StreamOptions(Struct):
    """What a stream brings besides the answer."""

    include_usage: bool = False


class TextPart(Struct, tag_field="type", tag="text"):
    """A part of a message."""

    text: Text


class FunctionCall(Struct):
    """A call of a tool, as the model made it before."""

    name: ToolName
    arguments: Text | dict[str, Any] = "{}"


class PastCall(Struct):
    """The same with its id."""

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
    """A tool that the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Struct):
    """The same, as OpenAI wraps it."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class FunctionName(Struct):
    name: ToolName


class NamedChoice(Struct):
    """The tool that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class TemplateOptions(Struct, forbid_unknown_fields=True):
    """Variables that the chat template knows."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What both kinds of request say about the drawing of tokens."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
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
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # lower goes first
    stream: bool | None = False
    stream_options: StreamOptions | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=4096)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    chat_template: UnsetType | None = UNSET  # a template is a program: none is taken from a request


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: (
        Text | Annotated[list[Text | TokenId | Annotated[list[TokenId], Meta(max_length=1 << 21)]], Meta(max_length=1 << 21)]
    )
    echo: bool | None = False
    logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None


class TokenizeRequest(Struct):
    """POST /tokenize: a text, or the messages of a chat."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    prompt: Text | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=4096)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool = True


class DetokenizeRequest(Struct):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=1 << 21)]
    model: Annotated[str, Meta(max_length=256)] | None = None


T = TypeVar("T", bound=Struct)
_decoders: dict[type[Struct], msgspec.json.Decoder[Any]] = {}


def decode(kind: type[T], body: bytes) -> T:
    """The request in `body`; what does not fit is a BadRequest that names the place."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        request: T = decoder.decode(body)
    except msgspec.ValidationError as error:
        _explain_messages(body)
        problem, _, place = str(error).partition(" - at `")
        path = place.rstrip("`").removeprefix("$").removeprefix(".")
        raise BadRequest(f"{path or 'body'}: {problem[:1].lower()}{problem[1:]}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadRequest(f"body: not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("body: nested too deep") from None
    return request


def _explain_messages(body: bytes) -> None:
    """Where a message has a part of a kind that is not served, say so instead of what the struct says."""
    try:
        check_messages(msgspec.json.decode(body).get("messages"))
    except UnsupportedError as error:
        raise error from None
    except Exception:  # whatever else is wrong, the caller says
        return
