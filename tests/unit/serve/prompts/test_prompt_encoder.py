"""Prompts of chats: a conversation that comes back is encoded from memory, but only for the same salt."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from culet.media.reader import MediaReader
from culet.models.embedded import embedded_folder
from culet.serve.prompts.encoder import PromptEncoder
from culet.text.template import ChatTemplate
from culet.text.text_queue import TextQueue
from culet.text.tokenizer import Tokenizer


class CountingTokenizer(Tokenizer):
    """Counts the characters that it encodes."""

    num_chars = 0

    def _encode(self, text: str) -> list[int]:
        self.num_chars += len(text)
        return super()._encode(text)


class NoMedia:
    spec = None

    def check(self, sources: object) -> None:
        assert not sources


def test_a_conversation_that_comes_back_is_not_encoded_anew() -> None:
    folder = embedded_folder("built-in")
    tokenizer = CountingTokenizer(folder)
    template = ChatTemplate.of_checkpoint(folder, empty_thought=False, control_tokens=tokenizer.control_tokens)
    texts = TextQueue(1, max_waiting=10, max_waiting_mb=10)
    media = cast(MediaReader, NoMedia())
    encoder = PromptEncoder(tokenizer, template, media, texts, max_len=lambda: 100_000, prompt_bytes=100, enable_thinking=False)
    turns: list[dict[str, Any]] = [
        {"role": role, "content": f"Say <|turn> {number}. " + f"{role} {number} " * 60}
        for number in range(30)
        for role in ("user", "assistant")
    ]

    def encoded(messages: list[dict[str, Any]], salt: str | None) -> tuple[list[int], int]:
        """Return the prompt's token ids and how many characters were encoded for it."""
        before = tokenizer.num_chars
        prompt = asyncio.run(encoder.encode_chat(messages, salt=salt))
        return list(prompt.token_ids), tokenizer.num_chars - before

    try:
        whole, num_chars = encoded(turns[:-1], None)
        assert num_chars > 30_000
        assert encoded(turns[:-1], None) == (whole, num_chars)  # nothing is remembered without a salt
        assert encoded(turns[:-3], "a")[1] > 0.9 * num_chars
        with_memory, num_new = encoded(turns[:-1], "a")
        assert with_memory == whole
        assert num_new < 0.1 * num_chars
        assert encoded(turns[:-1], "b")[1] > 0.9 * num_chars
    finally:
        texts.close()
        template.close()
