"""Conversations as data, rendered to exactly the text that serving produces, with a mask of the model's own tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from culet.text.messages import check_messages, check_tools
from culet.text.template import BUILT_IN
from culet.text.template_worker import make_environment

EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """OpenAI messages that end with the assistant's, with the declared tools and whether thinking is on."""

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False

    @property
    def spoken(self) -> str:
        """Everything that users, tools and the model say, for filters and for the search for overlaps."""
        return "\n".join(str(message.get("content") or "") for message in self.messages)


def talk(kind: str, *turns: str, system: str | None = None, thought: str | None = None) -> Chat:
    """Make a chat of alternating turns, user first. With `thought`, thinking is on and the thought precedes the last answer."""
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
    """Render `messages` with Culet's own template, as for a model without per-layer embeddings."""
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
    """Return the prompt of the last answer exactly as served, then the answer and its end token."""
    if is_plain(chat):
        return plain_document(chat)
    prompt = render(chat, chat.messages[:-1], add_generation_prompt=True)
    whole = render(chat, chat.messages, add_generation_prompt=False).removesuffix("\n")
    history = prompt.removesuffix(EMPTY_THOUGHT)
    if not whole.startswith(history):
        raise ValueError(f"the prompt is no beginning of the whole:\n{prompt}\n---\n{whole}")
    return prompt + whole[len(history) :]


def is_plain(chat: Chat) -> bool:
    """Return whether there are only system, user and assistant messages, without tools or thinking."""
    return not (chat.tools or chat.thinking) and all(set(message) == {"role", "content"} for message in chat.messages)


def plain_document(chat: Chat) -> str:
    """Render a plain chat without the template, which is a hundred times faster. A test keeps the two equal."""
    *history, answer = chat.messages
    turns = "".join(f"<|turn>{_ROLES[message['role']]}\n{message['content'].strip()}<turn|>\n" for message in history)
    return f"<bos>{turns}<|turn>model\n{EMPTY_THOUGHT}{answer['content'].strip()}<turn|>"


_ROLES = {"system": "system", "user": "user", "assistant": "model"}


class Encoder:
    """Encodes rendered chats, with a mask of what the model writes: its turns without tool results and empty thoughts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turn, self._end, self._result, self._result_end = (
            tokenizer.token_to_id(name) for name in ("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>")
        )
        self._opening = self._ids("model\n")
        self._empty = self._ids(EMPTY_THOUGHT)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> tuple[list[int], list[bool]]:
        """Return the tokens and mask of a document."""
        ids = self._ids(text)
        mask = [False] * len(ids)
        index = 0
        while index < len(ids):
            if ids[index] == self._turn and ids[index + 1 : index + 1 + len(self._opening)] == self._opening:
                index = self._mark_turn(ids, mask, index + 1 + len(self._opening))
            else:
                index += 1
        return ids, mask

    def _mark_turn(self, ids: list[int], mask: list[bool], index: int) -> int:
        """Mark what the model writes from `index` to the end of its turn. Return where it ends."""
        if ids[index : index + len(self._empty)] == self._empty:
            index += len(self._empty)
        is_result = False
        while index < len(ids):
            token = ids[index]
            mask[index] = not is_result
            is_result = (is_result or token == self._result) and token != self._result_end
            index += 1
            if token == self._end:
                break
        return index
