"""Prepare a chat request for the engine: its prompt tokens, its sampling parameters and the parser for its answer.

All APIs with messages (OpenAI's chat and responses APIs, and Anthropic's) go through `prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from culet.errors import BadRequest
from culet.serve.generation import Generation, Origin
from culet.serve.service import Service
from culet.structured.forms import admit, or_calls
from culet.structured.tool_grammar import call_grammar, call_rules
from culet.text.output import chat_output
from culet.types import SamplingParams, StructuredOutputs

_OPEN_CALL = "<|tool_call>"
_FORBID = -100.0  # a bias that rules a token out


@dataclass(frozen=True)
class PreparedChat:
    """A chat request that is ready to be submitted."""

    service: Service
    prompt_token_ids: list[int]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    single_call: bool = False  # end with the first tool call

    def open(self, endpoint: str, origin: Origin) -> Generation:
        """Submit the request. The caller must read the generation and close it (`async with`)."""
        make_output = partial(chat_output, self.service.tokenizer, tools=self.tools, single_call=self.single_call)
        return Generation(
            self.service,
            self.prompt_token_ids,
            self.params,
            make_output,
            endpoint=endpoint,
            origin=origin,
        )


async def prepare(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    single_call: bool = False,
    enable_thinking: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> PreparedChat:
    """Check, render and tokenize a chat request.

    `tool_choice` is auto, none, required, or `=NAME` for the tool that must be called.
    """
    service.require_ready()
    limits = service.limits
    if len(messages) > limits.messages:
        raise BadRequest(f"messages: got {len(messages)}, but the maximum is {limits.messages}")
    if len(tools) > limits.tools:
        raise BadRequest(f"tools: got {len(tools)}, but the maximum is {limits.tools}")
    names = [tool["function"]["name"] for tool in tools]
    if tool_choice.startswith("=") and tool_choice[1:] not in names:
        raise BadRequest(f"tool_choice: got {tool_choice[1:]!r}, which is not one of the tools")
    if tool_choice == "required" and not tools:
        raise BadRequest("tool_choice: got 'required', but the request has no tools")
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
    params = replace(params, structured_outputs=_form(params.structured_outputs, offered, tool_choice, single_call))
    thinking = service.settings.enable_thinking if enable_thinking is None else enable_thinking
    params = await admit(service.grammar_check, params, after_thought=thinking)
    return PreparedChat(service, prompt, params, offered, single_call)


def _form(
    form: StructuredOutputs | None, tools: Sequence[Mapping[str, Any]], tool_choice: str, single_call: bool
) -> StructuredOutputs | None:
    """Return the form of the answer, which is tool calls if they are required. Otherwise it is `form`, or calls if allowed."""
    if tool_choice == "required" or tool_choice.startswith("="):
        name = tool_choice[1:] if tool_choice.startswith("=") else None
        return StructuredOutputs(grammar=call_grammar(tools, name=name, one_call=single_call))
    return or_calls(form, call_rules(tools, one_call=single_call)) if form is not None and tools else form
