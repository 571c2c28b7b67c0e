"""The bodies of Ollama's requests.

Ollama has its own names for sampling fields and groups them in `options`. Options that only say how a model is loaded, such as
`num_ctx` and `num_gpu`, have no effect, because the model is already loaded. The same holds for `keep_alive`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from culet.errors import BadRequest, UnsupportedError
from culet.serve.api.fields import (
    CacheSalt,
    CountOrNone,
    PastToolName,
    Penalty,
    SamplingFields,
    Share,
    StopText,
    Temperature,
    Text,
    Thinking,
    sampling_params,
    thinking_of,
)
from culet.serve.api.openai.chat import PastCall, Tool
from culet.serve.api.refused import Refused, UnsupportedFields, refuse_unsupported
from culet.serve.service import Service
from culet.structured.request_fields import FormAliases, StructuredFields, any_object, schema_form
from culet.types import GrammarSpec, SamplingParams

ModelName = Annotated[str, Meta(max_length=256)]
_SHARED = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
# "json" asks for any JSON object, a schema for a document that matches it. The schema is not parsed here.
Format = Annotated[Raw, Meta(extra_json_schema={"anyOf": [{"enum": ["", "json", None]}, {"type": "object"}]})] | UnsetType
Images = Annotated[list[Text], Meta(max_length=1024)] | None


class OllamaFields(UnsupportedFields, kw_only=True):
    """The fields of the other APIs, all of which are refused where Ollama has other names or places for them."""

    max_tokens: Refused = UNSET
    min_tokens: Refused = UNSET
    temperature: Refused = UNSET
    top_p: Refused = UNSET
    top_k: Refused = UNSET
    min_p: Refused = UNSET
    presence_penalty: Refused = UNSET
    frequency_penalty: Refused = UNSET
    repetition_penalty: Refused = UNSET
    n: Refused = UNSET
    seed: Refused = UNSET
    stop: Refused = UNSET
    stop_token_ids: Refused = UNSET
    ignore_eos: Refused = UNSET
    logit_bias: Refused = UNSET
    response_format: Refused = UNSET
    structured_outputs: Refused = UNSET
    thinking_token_budget: Refused = UNSET
    template: Refused = UNSET


class OllamaOptions(OllamaFields, kw_only=True):
    """How to draw tokens."""

    num_predict: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # below 1 means up to the end of the context
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Share | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # below 0 means a random one
    stop: Annotated[str, Meta(max_length=1024)] | Annotated[list[StopText], Meta(max_length=1024)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # only 0 (no penalties) and -1 (the whole context)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    guided_json: Refused = UNSET
    guided_regex: Refused = UNSET
    guided_grammar: Refused = UNSET
    guided_choice: Refused = UNSET
    regex: Refused = UNSET
    grammar: Refused = UNSET


class OllamaRequest(OllamaFields, kw_only=True):
    """The fields that chat and generate requests share."""

    model: ModelName
    stream: bool | None = True
    format: Format = UNSET
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    thinking_token_budget: CountOrNone = None  # the most tokens in all thoughts of an answer
    structured_outputs: StructuredFields | None = None  # what `format` cannot say
    cache_salt: CacheSalt | None = None


class OllamaMessage(Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Images = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=256)] | None = None
    tool_name: PastToolName | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=65536)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=4096)] | None = None
    parallel_tool_calls: bool | None = True
    constrain_tool_calls: bool | None = None  # hold tool calls to the declared tools
    unmarked_tool_calls: bool | None = None  # calls of declared tools count without the tokens around them
    images: Refused = UNSET  # they belong to messages


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/generate."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = False  # the prompt is used as it is, without the chat template
    images: Images = None
    context: Refused = UNSET


def read_params(service: Service, body: OllamaRequest) -> SamplingParams:
    """Return the sampling parameters of a request. Raise if it has an unsupported field that would change the answer."""
    options = body.options or OllamaOptions()
    refuse_unsupported(body, thinks=service.settings.enable_thinking)
    given: dict[str, Any] = {name: getattr(options, name) for name in _SHARED}
    given |= {name: getattr(body, name) for name in (*FormAliases.__struct_fields__, "structured_outputs")}
    given["thinking_token_budget"] = body.thinking_token_budget
    given["repetition_penalty"] = options.repeat_penalty
    if options.seed is not None and options.seed >= 0:
        given["seed"] = options.seed
    given["stop"] = options.stop or None  # an empty text means none
    has_penalty = options.repeat_penalty not in (None, 1.0) or options.presence_penalty or options.frequency_penalty
    if options.repeat_last_n == 0:
        given |= {"repetition_penalty": 1.0, "presence_penalty": None, "frequency_penalty": None}
    elif options.repeat_last_n is not None and options.repeat_last_n > 0 and has_penalty:
        problem = f"options.repeat_last_n: got {options.repeat_last_n}, but penalties always count the whole context"
        raise UnsupportedError(problem, hint="omit the field, or set it to -1")
    max_tokens = options.num_predict if options.num_predict is not None and options.num_predict > 0 else None
    budget, form = read_thinking(service, body).budget, _read_format(body.format)
    return sampling_params(service, SamplingFields(**given), max_tokens=max_tokens, thinking_budget=budget, form=form)


def read_thinking(service: Service, body: OllamaRequest) -> Thinking:
    """Return whether the model thinks, and how much. `think` is a switch or a level, which the server turns into a budget."""
    if body.think is None or isinstance(body.think, bool):
        return Thinking(body.think)
    return thinking_of(service, effort="xhigh" if body.think == "max" else body.think)


def _read_format(given: Raw | UnsetType) -> GrammarSpec | None:
    if isinstance(given, UnsetType) or bytes(memoryview(given)[:6]) in (b"null", b'""'):
        return None
    if memoryview(given)[:1] == b"{":
        return schema_form(given, "format", strict=False)
    if memoryview(given) == b'"json"':
        return any_object("format")
    raise BadRequest('format: expected "json" or a JSON schema')


def read_messages(body: OllamaChatRequest) -> list[dict[str, Any]]:
    """Return the conversation as chat messages."""
    messages = []
    for index, message in enumerate(body.messages or ()):
        content = with_images(message.content or "", message.images, f"messages[{index}].images")
        given: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            given["reasoning_content"] = message.thinking
        if message.tool_calls:
            given["tool_calls"] = [_past_call(call) for call in message.tool_calls]
            if not message.content and not message.images:
                del given["content"]
        if message.tool_name is not None:
            given["name"] = message.tool_name
        if message.tool_call_id is not None:
            given["tool_call_id"] = message.tool_call_id
        messages.append(given)
    return messages


def _past_call(call: PastCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def with_images(text: str, images: Images, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message. Its images, which are base64, come first. `where` names them in errors."""
    if not images:
        return text
    parts = [{"type": "image", "base64": image, "where": f"{where}[{index}]"} for index, image in enumerate(images)]
    return [*parts, {"type": "text", "text": text}]


def find_model(service: Service, name: str) -> str:
    """Return the model's name for the answer. Ollama's clients may add `:latest`. Raise a 404 if it is not served."""
    short = name.removesuffix(":latest")
    return service.check_model(name if name in service.names else short)
