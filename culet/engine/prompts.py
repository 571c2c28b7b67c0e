"""Read prompts and conversations and turn them into token ids, for `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from culet.errors import BadRequest
from culet.text.template import Chat, ChatTemplate
from culet.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]  # a mapping has `prompt` or `prompt_token_ids`
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Tool = Mapping[str, Any]  # {"type": "function", "function": {...}}


@dataclass(frozen=True)
class TokenizedPrompt:
    """The tokens of a prompt, and its text if it was given as text."""

    token_ids: Sequence[int]
    text: str | None = None


class PromptReader:
    """Turns prompts into token ids."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
        self._tokenizer, self._chat_template = tokenizer, chat_template

    def read(self, prompts: Any) -> list[TokenizedPrompt]:
        """Return the token ids of each prompt. `prompts` is one prompt or a list of prompts."""
        if isinstance(prompts, str | Mapping):
            return [self._read_prompt(prompts, "prompt")]
        prompts = as_list(prompts, "prompts", "a text, token ids, or a list of either")
        if prompts and all(isinstance(entry, int) for entry in prompts):
            return [TokenizedPrompt(prompts)]
        return [self._read_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]

    def _read_prompt(self, prompt: Any, name: str) -> TokenizedPrompt:
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            others = sorted(set(prompt) - {"prompt_token_ids", "prompt"})
            if not known or others:
                got = f"the key {others[0]!r}" if others else "neither"
                raise BadRequest(f"{name}: got {got}, expected prompt or prompt_token_ids")
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            # Gemma was always trained with <bos>. Chat templates write their own.
            return TokenizedPrompt(self._tokenizer.encode(prompt, add_bos=True), prompt)
        return TokenizedPrompt(as_list(prompt, name, "a text or a list of token ids"))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        enable_thinking: bool,
        options: Mapping[str, Any] | None = None,
    ) -> TokenizedPrompt:
        """Return the token ids of a conversation, using the chat template."""
        chat = Chat(messages, tools, enable_thinking=enable_thinking, options=options)
        rendered = self._chat_template.render_chat(chat)
        return TokenizedPrompt(self._tokenizer.encode_pieces(rendered.text, rendered.cuts))


def as_list(value: Any, name: str, expected: str) -> list[Any]:
    """Return `value` as a list. Raise if it is a mapping, bytes or not iterable."""
    if isinstance(value, Mapping | bytes) or not isinstance(value, Iterable):
        raise BadRequest(f"{name}: got {type(value).__name__}, expected {expected}")
    return list(value)
