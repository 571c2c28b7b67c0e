"""A chat request made ready for the engine: prompt tokens, sampling parameters, and how its answer is to be read.

All APIs that speak of messages (OpenAI's chat, responses, Anthropic's) come through `prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from culet.errors import BadRequest
from culet.serve.api.protocol import SamplingFields
from culet.serve.generation import Generation
from culet.serve.service import Service
from culet.structured.forms import admit, form_of, or_calls
from culet.structured.tool_grammar import call_grammar, call_rules
from culet.text.output_reader import OutputReader, tool_schemas
from culet.types import MAX_SEED, SamplingParams, StructuredOutputs

_OPEN_CALL = "<|tool_call>"
_FORBID = -100.0  # a bias that leaves a token no chance


@dataclass(frozen=True)
class Turn:
    """One answer to be given: everything but the engine's part is done."""

    service: Service
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    tools: Sequence[Mapping[str, Any]] = ()
    one_call: bool = False  # end with the first tool call

    def open(self, endpoint: str, request_id: str) -> Generation:
        """Submit it; the caller reads the generation and closes it (`async with`)."""
        return Generation(
            self.service,
            self.prompt_token_ids,
            self.params,
            self._reader,
            endpoint=endpoint,
            request_id=request_id,
            priority=self.priority,
            one_call=self.one_call,
        )

    def _reader(self) -> OutputReader:
        rules, params = self.service.rules, self.params
        return OutputReader(
            self.service.tokenizer,
            prompt_ids=self.prompt_token_ids,
            schemas=tool_schemas(self.tools),
            # A client cannot take back a call that was begun: it hears of one when it is whole.
            hold_calls=True,
            end_ids=(*params.stop_token_ids, *(() if params.ignore_eos else rules.defaults.eos_token_ids)),
            ignore_end=params.ignore_eos,
            stop=tuple(params.stop),
        )


async def prepare(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    one_call: bool = False,
    enable_thinking: bool | None = None,
    options: Mapping[str, Any] | None = None,
    priority: int = 0,
) -> Turn:
    """Render, tokenize and check. `tool_choice` is auto, none, required, or `=NAME` for the tool that must be called."""
    service.require_ready()
    limits = service.limits
    if len(messages) > limits.messages:
        raise BadRequest(f"messages: got {len(messages)}, at most {limits.messages} are taken")
    if len(tools) > limits.tools:
        raise BadRequest(f"tools: got {len(tools)}, at most {limits.tools} are taken")
    names = [tool["function"]["name"] for tool in tools]
    if tool_choice.startswith("=") and tool_choice[1:] not in names:
        raise BadRequest(f"tool_choice: got {tool_choice[1:]!r}, which is not among the tools")
    if tool_choice == "required" and not tools:
        raise BadRequest("tool_choice: got required, but there are no tools")
    offered = () if tool_choice == "none" else tools
    prompt = await service.encode_chat(
        messages,
        tools=list(offered) or None,
        enable_thinking=enable_thinking,
        options=options,
    )
    call_id = service.tokenizer.token_id(_OPEN_CALL)
    if tool_choice == "none" and tools and call_id is not None:
        params = replace(params, logit_bias={**(params.logit_bias or {}), call_id: _FORBID})
    params = replace(params, structured_outputs=_form(params.structured_outputs, offered, tool_choice, one_call))
    thinking = service.settings.enable_thinking if enable_thinking is None else enable_thinking
    params = await admit(service.grammar_check, params, after_thought=thinking)
    return Turn(service, prompt, params, priority, offered, one_call)


def _form(
    form: StructuredOutputs | None, tools: Sequence[Mapping[str, Any]], tool_choice: str, one_call: bool
) -> StructuredOutputs | None:
    """The form that the answer must have: calls where a tool must be called; calls or the form asked for where it may be."""
    if tool_choice == "required" or tool_choice.startswith("="):
        name = tool_choice[1:] if tool_choice.startswith("=") else None
        return StructuredOutputs(grammar=call_grammar(tools, name=name, one_call=one_call))
    return or_calls(form, call_rules(tools, one_call=one_call)) if form is not None and tools else form


def sampling_params(
    service: Service,
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What a request says about drawing, within the server's limits."""
    limits = service.limits
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    n = fields.n or 1
    for name, got, limit in (
        ("n", n, limits.n),
        ("stop", len(stop), limits.stops),
        ("logprobs", max(logprobs or 0, prompt_logprobs or 0), limits.logprobs),
        ("logit_bias", len(fields.logit_bias or ()), limits.logit_bias),
    ):
        if got > limit:
            raise BadRequest(f"{name}: got {got}, at most {limit} are taken", hint="the server's --limits say how many")
    return SamplingParams(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        max_tokens=max_tokens,
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
        structured_outputs=form_of(fields.response_format, fields.structured_outputs),
    )
