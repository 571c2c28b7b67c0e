"""The usage and log-probabilities in the answers of OpenAI's chat and completions APIs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from culet.serve.generation import Generation
from culet.text.tokenizer import Tokenizer
from culet.types import Logprobs

_MINUS_INFINITY = -9999.0  # OpenAI's value, since JSON has no infinity


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    """Details of the generated tokens. OpenAI calls drafts predictions.

    Rejected drafts are never sent and do not count as completion tokens.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(generations: Sequence[Generation]) -> Usage:
    """Return the total token counts of `generations`."""
    counts = [generation.token_counts() for generation in generations]
    num_prompt, num_generated = sum(count.num_prompt for count in counts), sum(count.num_generated for count in counts)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=PromptDetails(sum(count.num_cached for count in counts)),
        completion_tokens_details=CompletionDetails(
            reasoning_tokens=sum(count.num_reasoning for count in counts),
            accepted_prediction_tokens=sum(count.num_accepted_drafts for count in counts),
            rejected_prediction_tokens=sum(count.num_rejected_drafts for count in counts),
        ),
    )


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """One token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[tuple[int, Logprobs]], num_top: int) -> ChatLogprobs:
    """Return log-probabilities in the format of the chat API."""
    entries = []
    for token_id, logprobs in tokens:
        piece = tokenizer.piece(token_id)
        top = [
            TopLogprob(token_text(tokenizer, top_id), value, list(tokenizer.piece(top_id)))
            for top_id, value in _top(logprobs, num_top)
        ]
        entries.append(TokenLogprob(_text(piece), _finite(logprobs[token_id]), list(piece), top))
    return ChatLogprobs(entries)


class TextLogprobs(Struct):
    """Log-probabilities in the format of the completions API, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def add(self, tokenizer: Tokenizer, token_id: int, logprobs: Logprobs | None, num_top: int) -> None:
        """Append a token. `logprobs` is None for the first token of a prompt, which has none."""
        offset = self.text_offset[-1] + len(self.tokens[-1]) if self.tokens else 0
        self.tokens.append(token_text(tokenizer, token_id))
        self.text_offset.append(offset)
        self.token_logprobs.append(None if logprobs is None else _finite(logprobs[token_id]))
        if logprobs is None:
            self.top_logprobs.append(None)
            return
        top: dict[str, float] = {}
        for top_id, value in _top(logprobs, num_top):
            top.setdefault(token_text(tokenizer, top_id), value)  # among tokens with the same text, keep the most likely
        self.top_logprobs.append(top)


def _top(logprobs: Logprobs, count: int) -> list[tuple[int, float]]:
    """Return the most likely tokens, best first."""
    best = sorted(logprobs.items(), key=lambda item: -item[1])[:count]
    return [(token_id, _finite(value)) for token_id, value in best]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _MINUS_INFINITY


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token. Incomplete UTF-8 becomes replacement characters."""
    return _text(tokenizer.piece(token_id))


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")
