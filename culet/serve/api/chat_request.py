"""Prepare a chat request for the engine: its prompt tokens, its sampling parameters and the parser for its answer.

All APIs with messages (OpenAI's chat and responses APIs, Anthropic's and Ollama's) go through `prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import Struct

from culet.errors import BadRequest
from culet.media.parts import MediaOptions
from culet.media.prompt import ExpandedPrompt
from culet.serve.answers.turns import json_size
from culet.serve.generation import Generation, Origin
from culet.serve.service import Service
from culet.structured.check import GrammarForm
from culet.structured.tool_grammar import ToolForm, allows_calls, tool_form
from culet.text.output import chat_output
from culet.types import MAX_GRAMMAR_CHARS, GrammarSpec, SamplingParams

_OPEN_CALL = "<|tool_call>"
_FORBID = -100.0  # a bias that rules a token out


@dataclass(frozen=True)
class PreparedChat:
    """A chat request that is ready to be submitted."""

    service: Service
    origin: Origin
    prompt: ExpandedPrompt
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    single_call: bool = False  # end with the first tool call
    calls_hold: bool = False  # a grammar holds tool calls to their form, so their parts can be sent before they are complete
    unmarked_calls: bool = False  # calls count without the tokens around them

    def open(self, endpoint: str) -> Generation:
        """Submit the request. The caller must read the generation and close it (`async with`)."""
        make_output = partial(
            chat_output,
            self.service.tokenizer,
            tools=self.tools,
            single_call=self.single_call,
            calls_hold=self.calls_hold,
            unmarked_calls=self.unmarked_calls,
        )
        return Generation(
            self.service,
            self.prompt,
            self.params,
            make_output,
            endpoint=endpoint,
            origin=self.origin,
        )


async def check_chat(service: Service, messages: Sequence[object], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a chat has too many messages or tools, or if its tools are too large. Call before rendering."""
    limits = service.limits
    for name, got, limit in (("messages", len(messages), limits.messages), ("tools", len(tools), limits.tools)):
        if got > limit:
            hint = "the server sets the maximum with --limits"
            raise BadRequest(f"{name}: got {got}, but the maximum is {limit}", hint=hint)
    if tools:
        max_size, size = limits.tool_kb << 10, 0
        async for sizes in service.turns.run(json_size(tools, max_size)):
            size = max([size, *sizes])
        if size > max_size:
            raise BadRequest(
                f"tools: the JSON is larger than {limits.tool_kb} kB",
                hint="send fewer or smaller tools; the server sets the maximum with --limits tool_kb=N",
            )


async def prepare(
    service: Service,
    origin: Origin,
    messages: Sequence[Mapping[str, Any] | Struct],
    params: SamplingParams,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    constrain_tool_calls: bool | None = None,
    unmarked_tool_calls: bool | None = None,
    single_call: bool = False,
    enable_thinking: bool | None = None,
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continued: str | None = None,
    clamp: bool = False,
    media: MediaOptions | None = None,
) -> PreparedChat:
    """Check, render and tokenize a chat request.

    `tool_choice` is auto, none, required, or `=NAME` for the tool that must be called. With `constrain_tool_calls`, or if the
    server says so, the calls of `auto` are held to the tools. `unmarked_tool_calls` also accepts calls without the tokens
    around them. `continued` is the text of the last message if the answer continues it. A form then holds for both together.
    With `clamp`, a `max_tokens` that exceeds the context is lowered. A thinking budget of 0 turns thinking off.
    """
    service.require_ready()
    if params.thinking_token_budget == 0:
        enable_thinking = False
    await check_chat(service, messages, tools)
    names = [tool["function"]["name"] for tool in tools]
    if tool_choice.startswith("=") and tool_choice[1:] not in names:
        raise BadRequest(f"tool_choice: got {tool_choice[1:]!r}, which is not one of the tools")
    if tool_choice == "required" and not tools:
        raise BadRequest("tool_choice: got 'required', but the request has no tools")
    offered = () if tool_choice == "none" else tools
    document = None if params.structured_outputs is None else params.structured_outputs.spec()
    if document is not None and continued is not None:
        document = _continue_document(document, continued)
    form = _form(document, offered, tool_choice, single_call)
    if form is not None:  # before rendering, because a refusal is cheap and a known grammar does not wait
        thinking = service.settings.enable_thinking if enable_thinking is None else enable_thinking
        spec = await service.grammars.admit(form)
        params = replace(params, structured_outputs=replace(spec, after_thought=thinking and continued is None))
    elif offered and (service.settings.constrain_tool_calls if constrain_tool_calls is None else constrain_tool_calls):
        spec = await service.grammars.admit(tool_form(offered, one_call=True, is_lenient=True))
        params = replace(params, structured_outputs=replace(spec, on_call=True))
    calls_hold = isinstance(form, ToolForm) or (form is None and params.structured_outputs is not None)
    prompt = await service.prompts.encode_chat(
        messages,
        tools=list(offered) or None,
        enable_thinking=enable_thinking,
        add_generation_prompt=add_generation_prompt,
        options=options,
        continued=continued,
        media=media,
        salt=origin.cache_salt,
    )
    call_id = service.tokenizer.token_id(_OPEN_CALL)
    if tool_choice == "none" and tools and call_id is not None:
        params = replace(params, logit_bias={**(params.logit_bias or {}), call_id: _FORBID})
    if clamp or service.settings.clamp_max_tokens:
        params = service.clamp(params, len(prompt.token_ids))
    unmarked = service.settings.unmarked_tool_calls if unmarked_tool_calls is None else unmarked_tool_calls
    return PreparedChat(service, origin, prompt, params, offered, single_call, calls_hold, unmarked)


def prefilled(message: Mapping[str, Any]) -> str | None:
    """Return the text of a chat's last message if it is the beginning of the model's answer, or None."""
    text = message.get("content")
    is_text = isinstance(text, str) and bool(text.strip())
    return text if message["role"] == "assistant" and "tool_calls" not in message and is_text else None


def _continue_document(document: GrammarSpec, continued: str) -> GrammarSpec:
    """Return the same form for an answer that continues a text."""
    if len(continued) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"messages: a document that the answer continues has at most {MAX_GRAMMAR_CHARS} characters")
    return replace(document, prefix=continued.lstrip())  # templates trim the beginning


def _form(
    document: GrammarSpec | None, tools: Sequence[Mapping[str, Any]], tool_choice: str, single_call: bool
) -> GrammarForm | None:
    """Return the form of the answer, which is tool calls if they are required. Otherwise it is `document`, or calls if allowed.

    Tools are not expanded to a grammar here, because that takes long.
    """
    is_required = tool_choice == "required" or tool_choice.startswith("=")
    if not is_required and (document is None or not tools or not allows_calls(document)):
        return document
    name = tool_choice[1:] if tool_choice.startswith("=") else None
    return tool_form(tools, name=name, one_call=single_call, document=None if is_required else document)
