"""Turn messages and texts of clients into token ids and media, in threads and processes, so that the event loop stays free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw, Struct

from culet.errors import BadRequest, ContextTooLong
from culet.line_process import Stopper
from culet.media.parts import MediaOptions, TakenMedia, count_bytes, take_media
from culet.media.prompt import ExpandedPrompt, expand_prompt
from culet.media.reader import MediaReader
from culet.serve.prompts.piece_memory import PieceMemory
from culet.text.template import Chat, ChatTemplate
from culet.text.text_queue import SHORT_BYTES, TextQueue, request_bytes
from culet.text.tokenizer import Tokenizer

_MAX_TOKEN_CHARS = 8  # few texts have more characters per token
_CUT_TOKENS = 1024  # more tokens than a cut can add to the text before it


class PromptEncoder:
    """Encodes the prompts of all APIs. Use it from one event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        media: MediaReader,
        texts: TextQueue,
        *,
        max_len: Callable[[], int],
        prompt_bytes: int,
        enable_thinking: bool,
    ) -> None:
        """Create an encoder. `max_len` returns the size of the context, and raises while no engine is ready.

        `prompt_bytes` is the most JSON per token of the context.
        """
        self._tokenizer, self._template, self._media, self._texts = tokenizer, template, media, texts
        self._pieces = PieceMemory(tokenizer)
        self._max_len, self._prompt_bytes, self._enable_thinking = max_len, prompt_bytes, enable_thinking

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any] | Struct],
        *,
        tools: Sequence[Mapping[str, Any] | Struct] | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        continued: str | None = None,
        media: MediaOptions | None = None,
        salt: str | None = None,
    ) -> ExpandedPrompt:
        """Render a conversation with the chat template and return its token ids and media.

        If `enable_thinking` is None, the server's default applies. Arguments of tool calls may be JSON. `continued` is that of
        `Chat`. `salt` is that of the cached prefixes. Only prompts with the same salt share what is remembered of their texts.
        Without one, nothing is remembered.
        """
        thinking = self._enable_thinking if enable_thinking is None else enable_thinking
        limit = self._max_len()

        def take(stopper: Stopper) -> TakenMedia:
            taken = take_media(_plain(messages), media)
            self._media.check(taken.sources)
            return taken

        def encode(taken: TakenMedia, stopper: Stopper) -> list[int]:
            self._check_size((taken.messages, tools), limit)
            chat = Chat(taken.messages, _plain(tools), add_generation_prompt, thinking, options, continued=continued)
            rendered = self._template.render_chat(chat, stopper)
            if stopper.is_stopped:  # the client has left
                return []
            self._check_length(rendered.text, limit)
            if salt is None:
                token_ids = self._tokenizer.encode_pieces(rendered.text, rendered.cuts)
            else:
                token_ids = self._pieces.encode(rendered.text, rendered.cuts, salt)
            taken.check_shown(token_ids, self._media.spec)
            return token_ids

        num_bytes = request_bytes.get()
        if num_bytes <= SHORT_BYTES:
            sources, token_ids = await self._texts.run(
                lambda stopper: ((taken := take(stopper)).sources, encode(taken, stopper)), num_bytes
            )
        else:  # media are much larger than the text, and only the text takes long here
            taken = await self._texts.run(take, 0)
            sources = taken.sources
            token_ids = await self._texts.run(partial(encode, taken), max(0, num_bytes - count_bytes(sources)))
        if not sources:
            return ExpandedPrompt(token_ids, (), ())
        found = await self._media.read(sources, limit)
        spec, tokenizer = self._media.spec, self._tokenizer
        return await self._texts.run(lambda stopper: expand_prompt(token_ids, found, spec, tokenizer.encode), 0)

    async def encode_text(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Return the token ids of a plain text, which may spell out control tokens."""
        limit = self._max_len()

        def encode(stopper: Stopper) -> list[int]:
            self._check_length(text, limit)
            return self._tokenizer.encode(text, add_bos=add_bos)

        return await self._texts.run(encode, len(text))

    def _check_size(self, conversation: object, limit: int) -> None:
        """Raise if a conversation is far too large for the context, before any slow work on it."""
        try:
            num_bytes = len(msgspec.json.encode(conversation))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"messages: cannot convert them to JSON: {error}") from None
        max_bytes = limit * self._prompt_bytes
        if num_bytes > max_bytes:
            raise ContextTooLong(
                f"the messages and tools have {num_bytes} bytes, but the context of {limit} tokens holds at most {max_bytes}",
                hint="send less text (the server sets the bytes per token with --limits prompt_bytes=N)",
            )

    def _check_length(self, text: str, limit: int) -> None:
        """Raise if a text is far too long for the context, after encoding only its start, which saves seconds."""
        if len(text) > limit * _MAX_TOKEN_CHARS:
            num_tokens = len(self._tokenizer.encode(text[: limit * _MAX_TOKEN_CHARS]))
            if num_tokens > limit + _CUT_TOKENS:
                raise ContextTooLong(f"the prompt is longer than the context of {limit} tokens")


def _plain(values: Sequence[Mapping[str, Any] | Struct] | None) -> object:
    """Return messages or tools as plain data. Arguments that have not been parsed stay so."""
    return msgspec.to_builtins(values, builtin_types=(Raw,)) if values and isinstance(values[0], Struct) else values
