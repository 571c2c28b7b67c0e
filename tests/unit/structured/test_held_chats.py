"""prepare: how the calls of `auto` are held to the tools, or why they are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from culet.errors import QueueFull
from culet.limits import Limits
from culet.serve.api.chat_request import PreparedChat, prepare
from culet.structured.tool_grammar import ToolForm
from culet.types import GrammarSpec, SamplingParams

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class Grammars:
    """Gives every form the same grammar, or none."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.forms: list[ToolForm] = []

    async def admit(self, form: ToolForm) -> GrammarSpec:
        self.forms.append(form)
        if self.error is not None:
            raise self.error
        return GrammarSpec("lark", "start: TEXT", field="tools", free_tools=("f",))


def chat(grammars: Grammars, **fields: Any) -> PreparedChat:
    async def sizes(_: object) -> AsyncIterator[list[int]]:
        yield [10]

    async def encode_chat(*_: object, **__: object) -> Any:
        return SimpleNamespace(token_ids=(1, 2))

    settings = SimpleNamespace(
        constrain_tool_calls=True, enable_thinking=False, clamp_max_tokens=False, unmarked_tool_calls=False
    )
    service: Any = SimpleNamespace(
        require_ready=lambda: None,
        limits=Limits(),
        turns=SimpleNamespace(run=sizes),
        settings=settings,
        grammars=grammars,
        prompts=SimpleNamespace(encode_chat=encode_chat),
        tokenizer=SimpleNamespace(token_id=lambda name: 7),
    )
    origin: Any = SimpleNamespace(cache_salt="")
    messages = [{"role": "user", "content": "Hi"}]
    return asyncio.run(prepare(service, origin, messages, SamplingParams(), tools=TOOLS, **fields))


def test_calls_of_auto_are_held() -> None:
    grammars = Grammars()
    spec = chat(grammars).params.structured_outputs
    assert isinstance(spec, GrammarSpec)
    assert spec.on_call
    assert spec.free_tools == ("f",)
    assert grammars.forms[0].is_lenient
    assert chat(grammars, constrain_tool_calls=False).params.structured_outputs is None


def test_a_full_queue_refuses_the_request() -> None:
    """Going on without the grammar would break a promise without a word. Clients retry a 429."""
    with pytest.raises(QueueFull):
        chat(Grammars(QueueFull("64 requests already wait for their grammars")))


def test_required_calls_are_never_free() -> None:
    grammars = Grammars()
    chat(grammars, tool_choice="required")
    assert not grammars.forms[0].is_lenient
