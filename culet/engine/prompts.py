"""Read prompts and conversations and turn them into token ids and media, for `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from culet.errors import BadRequest
from culet.media.items import MediaItem
from culet.media.local import open_local, read_media_data
from culet.media.parts import read_options, take_media
from culet.media.prompt import expand_prompt
from culet.media.reader import MediaReader
from culet.media.sources import MediaSource
from culet.text.template import Chat, ChatTemplate
from culet.text.tokenizer import Tokenizer
from culet.types import MediaSpan

# A mapping has `prompt` or `prompt_token_ids`, and may have `multi_modal_data` and `mm_processor_kwargs`.
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Tool = Mapping[str, Any]  # {"type": "function", "function": {...}}


@dataclass(frozen=True)
class TokenizedPrompt:
    """The tokens of a prompt, its media, and its text if it was given as text."""

    token_ids: Sequence[int]
    text: str | None = None
    media: Sequence[MediaSpan] = ()
    items: Sequence[MediaItem] = ()  # the content of `media`


class PromptReader:
    """Turns prompts into token ids, and their media into what the towers read."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate, media: MediaReader) -> None:
        self._tokenizer, self._chat_template, self._media = tokenizer, chat_template, media

    def read(self, prompts: Any) -> list[TokenizedPrompt]:
        """Return the token ids of each prompt. `prompts` is one prompt or a list of prompts."""
        if isinstance(prompts, str | Mapping):
            return [self._read_prompt(prompts, "prompt")]
        prompts = as_list(prompts, "prompts", "a text, token ids, or a list of either")
        if prompts and all(isinstance(entry, int) for entry in prompts):
            return [TokenizedPrompt(prompts)]
        return [self._read_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]

    def _read_prompt(self, prompt: Any, name: str) -> TokenizedPrompt:
        sources: list[MediaSource] = []
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            others = sorted(set(prompt) - {"prompt_token_ids", "prompt", "multi_modal_data", "mm_processor_kwargs"})
            if not known or others:
                got = f"the key {others[0]!r}" if others else "neither"
                raise BadRequest(f"{name}: got {got}, expected prompt or prompt_token_ids, and perhaps multi_modal_data")
            options = read_options(prompt.get("mm_processor_kwargs"))
            if prompt.get("multi_modal_data") is not None:
                sources = read_media_data(prompt["multi_modal_data"], options, f"{name}: multi_modal_data")
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            # Gemma was always trained with <bos>. Chat templates write their own.
            return self._expand(self._tokenizer.encode(prompt, add_bos=True), sources, prompt)
        return self._expand(as_list(prompt, name, "a text or a list of token ids"), sources)

    def _expand(self, token_ids: Sequence[int], sources: Sequence[MediaSource], text: str | None = None) -> TokenizedPrompt:
        """Return the prompt with its media in place of their placeholders. Blocks while they are decoded."""
        if not sources:
            return TokenizedPrompt(token_ids, text)
        expanded = expand_prompt(token_ids, self._media.read_now(sources), self._media.spec, self._tokenizer.encode)
        return TokenizedPrompt(expanded.token_ids, text, expanded.spans, expanded.items)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        enable_thinking: bool,
        options: Mapping[str, Any] | None = None,
        media_options: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continued: str | None = None,
    ) -> TokenizedPrompt:
        """Return the tokens and media of a conversation, using the chat template. `media_options` are `mm_processor_kwargs`.

        `continued` is the text of the last message if the answer continues it.
        """
        taken = take_media(messages, read_options(media_options), open_local)
        self._media.check(taken.sources)
        chat = Chat(taken.messages, tools, add_generation_prompt, enable_thinking, options, continued=continued)
        rendered = self._chat_template.render_chat(chat)
        token_ids = self._tokenizer.encode_pieces(rendered.text, rendered.cuts)
        taken.check_shown(token_ids, self._media.spec)
        return self._expand(token_ids, taken.sources)

    def close(self) -> None:
        """End the processes that decode media."""
        self._media.close()


def as_list(value: Any, name: str, expected: str) -> list[Any]:
    """Return `value` as a list. Raise if it is a mapping, bytes or not iterable."""
    if isinstance(value, Mapping | bytes) or not isinstance(value, Iterable):
        raise BadRequest(f"{name}: got {type(value).__name__}, expected {expected}")
    return list(value)
