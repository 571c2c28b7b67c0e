"""Fields of other servers that are not supported and would change the answer. A request with one of them is refused by name.

`Refused` is the type of such a field. `UnsupportedFields` has those of all APIs. A request type that supports one of them
declares it again, with its own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from culet.errors import UnsupportedError
from culet.structured.request_fields import FormAliases

if TYPE_CHECKING:
    Refused: TypeAlias = Any  # so that a request type may declare the field again
else:
    Refused = Annotated[Raw, Meta(extra_json_schema={"enum": [None]})] | UnsetType
# Values that change nothing, as JSON: for most fields, and for some of them.
_NEUTRAL = (b"null", b"false", b"0", b"0.0", b"[]", b"{}", b'""', b"-1", b"-1.0")
_NO_LIMIT = (b"null", b"-1")  # where 0 would be a limit
_ON_BY_DEFAULT = (b"null", b"true")
_ONE = (b"null", b"1", b"1.0")
_NEUTRAL_OF = {
    "best_of": (b"null", b"0", b"1"),
    "adaptive_target": (b"null", b"-1", b"-1.0"),
    "repeat_last_n": (b"null", b"-1"),  # penalties count the whole context
    "modalities": (b"null", b"[]", b'["text"]'),
    "function_call": (b"null", b'""', b'"none"', b'"auto"'),
    "tool_choice": (b"null", b'""', b'"auto"'),
    **dict.fromkeys(("n", "num_beams", "length_penalty", "typical_p", "tfs_z", "repeat_penalty", "repetition_penalty"), _ONE),
    **dict.fromkeys(("n_cmpl", "num_return_sequences", "guidance_scale"), _ONE),
    **dict.fromkeys(("do_sample", "skip_special_tokens", "include_reasoning", "separate_reasoning"), _ON_BY_DEFAULT),
    **dict.fromkeys(("parse_tool_calls", "add_generation_prompt", "parallel_tool_calls"), _ON_BY_DEFAULT),
    **dict.fromkeys(("prompt_logprobs", "thinking_budget", "max_tool_calls", "web_search_options"), (b"null",)),
    **dict.fromkeys(("search_parameters", "random_seed"), (b"null",)),
    **dict.fromkeys(("format", "json_schema"), (b"null", b'""')),  # an empty schema is any JSON
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed"), (b"null",)),
    **dict.fromkeys(("reasoning_budget", "thinking_budget_tokens", "thinking_token_budget", "max_thinking_tokens"), _NO_LIMIT),
    **dict.fromkeys(("n_predict", "num_predict", "max_tokens", "max_new_tokens"), _NO_LIMIT),
    **dict.fromkeys(("max_output_tokens", "max_completion_tokens"), _NO_LIMIT),
    "reasoning_format": (b"null", b'""', b'"auto"', b'"deepseek"'),  # thoughts are in reasoning_content
    "verbosity": (b"null", b'"medium"'),
    "truncation": (b"null", b'"disabled"'),
}
_SWITCHES = ("enable_thinking", "think")  # of thoughts, so the server's default changes nothing
_HINTS = {
    "do_sample": "set temperature to 0 instead",
    "n": "send several requests",
    "repeat_last_n": "omit the field, because penalties always count the whole context",
    **dict.fromkeys(("extra_body", "sampling_params", "parameters"), "put its fields into the body itself"),
    "input_ids": "send token ids as the prompt of /v1/completions",
    "chat_template": "the server sets the template with --chat-template",
    "truncation": "omit the field, and send a conversation that fits the context",
    "return_token_ids": "omit the field; only /v1/completions returns token ids",
    **dict.fromkeys(
        ("multi_modal_data", "image_data", "video_data", "audio_data"), "send media in the messages of /v1/chat/completions"
    ),
    **dict.fromkeys(("lora_path", "lora"), "omit the field; the server runs one model without adapters"),
    "session_params": "send the whole conversation; the server finds the part that it knows",
}
# Supported fields that do the same as a refused one, best first.
_INSTEAD = {
    "enable_thinking": ("chat_template_kwargs.enable_thinking", "think"),
    "chat_template_kwargs": ("think",),
    "think": ("chat_template_kwargs.enable_thinking",),
    "thinking": (
        "think",
        "reasoning.max_tokens, or chat_template_kwargs.enable_thinking with thinking_token_budget",
        "thinking_token_budget",
    ),
    "thinking_budget": ("thinking_token_budget",),
    "thinking_budget_tokens": ("thinking_token_budget",),
    "max_thinking_tokens": ("thinking_token_budget",),
    "reasoning_budget": ("thinking_token_budget",),
    "reasoning": ("thinking", "think", "thinking_token_budget"),
    "reasoning_effort": ("output_config.effort", "think", "thinking_token_budget"),
    "stop_sequences": ("stop", "options.stop"),
    **dict.fromkeys(
        ("max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict", "n_predict", "max_tokens"),
        ("options.num_predict", "num_predict", "max_completion_tokens", "max_output_tokens", "max_tokens"),
    ),
    "min_new_tokens": ("min_tokens",),
    "max_tool_calls": ("parallel_tool_calls",),
    "repeat_penalty": ("repetition_penalty", "options.repeat_penalty"),
    "repetition_penalty": ("repeat_penalty", "options.repeat_penalty"),
    "format": ("text.format", "output_config.format", "response_format"),
    "json_schema": ("text.format", "output_config.format", "format", "response_format"),
    "response_format": ("format",),
    "ebnf": ("grammar",),
    "grammar_string": ("grammar",),
    "regex_pattern": ("regex",),
    "random_seed": ("seed", "options.seed"),
    **dict.fromkeys(("n_cmpl", "num_return_sequences"), ("n",)),
    "prompt_truncate_len": ("truncate_prompt_tokens",),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use",),
    # Of a tool
    **dict.fromkeys(("parameters", "input_schema", "inputSchema"), ("parameters", "function.parameters", "input_schema")),
    "strict": ("function.strict",),
    "top_logprobs": ("logprobs",),
    "n_probs": ("top_logprobs", "logprobs"),
    "system": ("instructions", "messages"),
    "instructions": ("system", "messages"),
    "input": ("messages", "prompt"),
    "messages": ("input", "prompt"),
    "prompt": ("messages", "input"),
    "functions": ("tools",),
    "function_call": ("tool_choice", "tool_calls"),  # of a request, and of a message
    **{
        name: (f"options.{name}",)
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty", "repeat_last_n"),
        )
    },
}


class UnsupportedFields(FormAliases, kw_only=True):
    """Fields of other servers that would change the answer. They are refused by name, unless the value has no effect.

    The class derives from FormAliases only because a Struct cannot have two bases.
    """

    # Sampling
    do_sample: Refused = UNSET
    num_beams: Refused = UNSET
    allowed_token_ids: Refused = UNSET
    bad_words: Refused = UNSET
    best_of: Refused = UNSET
    suffix: Refused = UNSET
    use_beam_search: Refused = UNSET
    length_penalty: Refused = UNSET
    typical_p: Refused = UNSET
    tfs_z: Refused = UNSET
    repeat_penalty: Refused = UNSET
    repeat_last_n: Refused = UNSET
    repetition_detection: Refused = UNSET
    no_repeat_ngram_size: Refused = UNSET
    top_a: Refused = UNSET
    top_n_sigma: Refused = UNSET
    smoothing_factor: Refused = UNSET
    epsilon_cutoff: Refused = UNSET
    eta_cutoff: Refused = UNSET
    samplers: Refused = UNSET
    mirostat: Refused = UNSET
    dry_multiplier: Refused = UNSET
    xtc_probability: Refused = UNSET
    dynatemp_range: Refused = UNSET
    adaptive_target: Refused = UNSET
    watermark: Refused = UNSET
    logits_processors: Refused = UNSET
    custom_logit_processor: Refused = UNSET
    custom_params: Refused = UNSET  # of SGLang's logit processors
    banned_strings: Refused = UNSET
    guidance_scale: Refused = UNSET
    negative_prompt: Refused = UNSET
    random_seed: Refused = UNSET  # Mistral's
    n_cmpl: Refused = UNSET  # llama.cpp's
    num_return_sequences: Refused = UNSET
    vllm_xargs: Refused = UNSET
    nvext: Refused = UNSET  # NIM's
    options: Refused = UNSET  # Ollama's
    sampling_params: Refused = UNSET  # SGLang's
    parameters: Refused = UNSET  # TGI's
    extra_body: Refused = UNSET  # a client sends its fields, so that a body has it only by mistake
    # Lengths and ends
    n_predict: Refused = UNSET
    num_predict: Refused = UNSET
    min_new_tokens: Refused = UNSET
    max_new_tokens: Refused = UNSET
    max_output_tokens: Refused = UNSET
    max_completion_tokens: Refused = UNSET
    t_max_predict_ms: Refused = UNSET
    stop_sequences: Refused = UNSET
    stop_regex: Refused = UNSET
    ban_eos_token: Refused = UNSET
    no_stop_trim: Refused = UNSET
    truncation: Refused = UNSET
    # The form of the answer
    structural_tag: Refused = UNSET
    guided_whitespace_pattern: Refused = UNSET
    ebnf: Refused = UNSET
    grammar_string: Refused = UNSET
    regex_pattern: Refused = UNSET
    grammar_lazy: Refused = UNSET
    grammar_triggers: Refused = UNSET
    n_indent: Refused = UNSET
    json_schema: Refused = UNSET
    format: Refused = UNSET
    output_format: Refused = UNSET
    output_config: Refused = UNSET
    text: Refused = UNSET
    verbosity: Refused = UNSET
    # What the answer shows
    include_stop_str_in_output: Refused = UNSET
    skip_special_tokens: Refused = UNSET
    echo: Refused = UNSET
    logprobs: Refused = UNSET
    top_logprobs: Refused = UNSET
    prompt_logprobs: Refused = UNSET
    logprob_token_ids: Refused = UNSET
    n_probs: Refused = UNSET
    return_token_ids: Refused = UNSET
    return_tokens_as_token_ids: Refused = UNSET
    return_hidden_states: Refused = UNSET
    parse_tool_calls: Refused = UNSET
    modalities: Refused = UNSET
    audio: Refused = UNSET
    # Thoughts
    enable_thinking: Refused = UNSET  # in chat_template_kwargs, it is supported
    include_reasoning: Refused = UNSET
    separate_reasoning: Refused = UNSET
    reasoning_format: Refused = UNSET
    reasoning: Refused = UNSET
    reasoning_effort: Refused = UNSET
    reasoning_budget: Refused = UNSET
    think: Refused = UNSET
    thinking: Refused = UNSET
    thinking_budget: Refused = UNSET
    thinking_budget_tokens: Refused = UNSET
    max_thinking_tokens: Refused = UNSET
    # The prompt and the tools
    messages: Refused = UNSET
    prompt: Refused = UNSET
    input: Refused = UNSET
    input_ids: Refused = UNSET
    system: Refused = UNSET
    instructions: Refused = UNSET
    prompt_embeds: Refused = UNSET
    documents: Refused = UNSET
    truncate_prompt_tokens: Refused = UNSET
    prompt_truncate_len: Refused = UNSET
    context_management: Refused = UNSET
    add_special_tokens: Refused = UNSET
    add_generation_prompt: Refused = UNSET
    continue_final_message: Refused = UNSET
    chat_template: Refused = UNSET  # a template is a program, so requests cannot send one
    chat_template_kwargs: Refused = UNSET
    mm_processor_kwargs: Refused = UNSET
    media_io_kwargs: Refused = UNSET
    multi_modal_data: Refused = UNSET
    image_data: Refused = UNSET
    video_data: Refused = UNSET
    audio_data: Refused = UNSET
    tools: Refused = UNSET
    tool_choice: Refused = UNSET
    tool_prompt: Refused = UNSET
    parallel_tool_calls: Refused = UNSET
    max_tool_calls: Refused = UNSET
    functions: Refused = UNSET  # OpenAI's tools before there were `tools`
    function_call: Refused = UNSET
    web_search_options: Refused = UNSET
    search_parameters: Refused = UNSET
    session_params: Refused = UNSET
    lora_path: Refused = UNSET
    lora: Refused = UNSET


def refuse_unsupported(fields: Struct, prefix: str = "", *, thinks: bool = False, outer: Struct | None = None) -> None:
    """Raise if a `Refused` field, here or in a struct inside, has a value that would change the answer. Drop other values.

    `thinks` says whether the model thinks if the request does not say so. `outer` is the struct that has these fields inside.
    """
    names = _field_names(type(fields))
    for name in [name for name in names.refused if getattr(fields, name) is not UNSET]:  # none, for almost every request
        if not _is_neutral(name, memoryview(getattr(fields, name)), fields, thinks):
            raise UnsupportedError(f"{prefix}{name}: not supported", hint=_hint_for(name, fields, outer))
        setattr(fields, name, UNSET)
    for name in names.nested:
        value = getattr(fields, name)
        if isinstance(value, Struct):
            refuse_unsupported(value, f"{prefix}{name}.", thinks=thinks, outer=fields)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, Struct):
                    refuse_unsupported(entry, f"{prefix}{name}[{index}].", thinks=thinks, outer=fields)


def _is_neutral(name: str, value: memoryview, fields: Struct, thinks: bool) -> bool:
    """Return whether a value, as JSON, says what holds without it."""
    if name in _SWITCHES:
        return value in (b"null", b"true" if thinks else b"false")
    if name == "best_of" and value == str(getattr(fields, "n", None)).encode():  # as many as are returned
        return True
    if name == "repeat_last_n" and bytes(value).isdigit() and _has_no_penalty(fields):
        return True
    return value in _NEUTRAL_OF.get(name, _NEUTRAL)


def _has_no_penalty(fields: Struct) -> bool:
    """Return whether these fields could have a penalty on tokens, and have none."""
    if "repetition_penalty" not in _field_names(type(fields)).usable:
        return False
    given: Any = fields
    return given.repetition_penalty in (None, 1.0) and not given.presence_penalty and not given.frequency_penalty


def _hint_for(name: str, fields: Struct, outer: Struct | None) -> str:
    """Return what to do about a refused field: use the field that does the same, if these `fields` have it."""
    usable = _field_names(type(fields)).usable
    for other in _INSTEAD.get(name, ()):
        if other.partition(".")[0] in usable:
            return f"use {other}"
    if outer is not None and name in _field_names(type(outer)).usable:
        return f"use {name} of the request itself"
    return _HINTS.get(name, "omit the field")


class _FieldNames(NamedTuple):
    refused: Sequence[str]  # those of type `Refused`
    usable: Sequence[str]  # all others
    nested: Sequence[str]  # of these, those that may have a refused field inside


@cache
def _field_names(cls: type[Struct]) -> _FieldNames:
    fields = msgspec.structs.fields(cls)
    refused = [field.name for field in fields if field.type == Refused]
    usable = [name for name in cls.__struct_fields__ if name not in refused]
    return _FieldNames(refused, usable, [field.name for field in fields if field.name in usable and _may_refuse(field.type)])


def _may_refuse(kind: Any) -> bool:
    """Return whether a value of this type may have a refused field inside."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return any(field.type == Refused or _may_refuse(field.type) for field in msgspec.structs.fields(kind))
    return any(map(_may_refuse, get_args(kind)))
