"""Conversations as data, and their rendering: the very text and tokens that serving makes of them, with what the model writes marked."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from culet.engine.messages import check_messages, check_tools
from culet.engine.template import BUILT_IN
from culet.engine.template_worker import make_environment

EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Messages in OpenAI's form that end with the assistant's, and what came with them."""

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False

    @property
    def spoken(self) -> str:
        """All that users and tools say and the model answers, for filters and for the search of overlaps."""
        return "\n".join(str(message.get("content") or "") for message in self.messages)


def talk(kind: str, *turns: str, system: str | None = None, thought: str | None = None) -> Chat:
    """A chat of turns that begin with the user's; with `thought`, thinking is on and comes before the last answer."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(turns):
        messages.append({"role": "assistant" if index % 2 else "user", "content": turn})
    if thought is not None:
        messages[-1]["reasoning"] = thought
    return Chat(kind, tuple(messages), thinking=thought is not None)


@functools.cache
def _template() -> Any:
    return make_environment().from_string(BUILT_IN.read_text())


def render(chat: Chat, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """Text of `messages` by Culet's own template, as a model without per-layer embeddings is served."""
    text: str = _template().render(
        messages=check_messages(messages),
        tools=check_tools(chat.tools or None),
        add_generation_prompt=add_generation_prompt,
        enable_thinking=chat.thinking,
        empty_thought=True,
        bos_token="<bos>",
    )
    return text


def document(chat: Chat) -> str:
    """The prompt of the last answer exactly as served, the answer, and the token that ends it."""
    prompt = render(chat, chat.messages[:-1], add_generation_prompt=True)
    whole = render(chat, chat.messages, add_generation_prompt=False).removesuffix("\n")
    history = prompt.removesuffix(EMPTY_THOUGHT)
    if not whole.startswith(history):
        raise ValueError(f"the prompt is no beginning of the whole:\n{prompt}\n---\n{whole}")
    return prompt + whole[len(history) :]


def encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[bool]]:
    """Tokens of a rendered chat, and for each whether the model writes it: its turns without results and empty thoughts."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    names = {
        name: tokenizer.token_to_id(name)
        for name in ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_response>", "<tool_response|>")
    }
    opening = tokenizer.encode("model\n", add_special_tokens=False).ids
    empty = tokenizer.encode(EMPTY_THOUGHT, add_special_tokens=False).ids
    mask = [False] * len(ids)
    index = 0
    while index < len(ids):
        if ids[index] != names["<|turn>"] or ids[index + 1 : index + 1 + len(opening)] != opening:
            index += 1
            continue
        index += 1 + len(opening)
        is_result = False
        while index < len(ids):
            if ids[index : index + len(empty)] == empty:
                index += len(empty)
                continue
            token = ids[index]
            mask[index] = not is_result
            if token == names["<|tool_response>"]:
                is_result = True
            elif token == names["<tool_response|>"]:
                is_result = False
            index += 1
            if token == names["<turn|>"]:
                break
    return ids, mask
