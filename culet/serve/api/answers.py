"""Parts of answers that OpenAI's two APIs share: ids, usage and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from culet.serve.generation import Generation
from culet.serve.process.wire import Logprobs
from culet.text.tokenizer import Tokenizer

_NO_CHANCE = -9999.0  # JSON has no infinity; OpenAI writes this
encoder = msgspec.json.Encoder()


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    """With OpenAI's names for drafts. Those that were rejected are no completion tokens, and were never sent."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(generations: Sequence[Generation]) -> Usage:
    """Tokens of all `generations` together."""
    parts = [generation.usage() for generation in generations]
    num_prompt, num_generated = sum(part.num_prompt for part in parts), sum(part.num_generated for part in parts)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=PromptDetails(sum(part.num_cached for part in parts)),
        completion_tokens_details=CompletionDetails(
            reasoning_tokens=sum(part.num_reasoning for part in parts),
            accepted_prediction_tokens=sum(part.num_accepted_drafts for part in parts),
            rejected_prediction_tokens=sum(part.num_rejected_drafts for part in parts),
        ),
    )


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """One token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


def chat_logprobs(tokenizer: Tokenizer, scored: Iterable[tuple[int, Logprobs]], num_top: int) -> ChatLogprobs:
    """Log-probabilities in the form of the chat API."""
    entries = []
    for token_id, scores in scored:
        piece = tokenizer.piece(token_id)
        top = [
            TopLogprob(text_of(tokenizer, each), value, list(tokenizer.piece(each))) for each, value in _top(scores, num_top)
        ]
        entries.append(TokenLogprob(_text(piece), _finite(scores[token_id]), list(piece), top))
    return ChatLogprobs(entries)


class TextLogprobs(Struct):
    """Log-probabilities in the form of the completions API: parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def add(self, tokenizer: Tokenizer, token_id: int, scores: Logprobs | None, num_top: int) -> None:
        """Append a token; `scores` is None for a prompt's first, before which nothing stands."""
        token = text_of(tokenizer, token_id)
        last = self.text_offset[-1] + len(self.tokens[-1]) if self.tokens else 0
        self.tokens.append(token)
        self.text_offset.append(last)
        self.token_logprobs.append(None if scores is None else _finite(scores[token_id]))
        if scores is None:
            self.top_logprobs.append(None)
            return
        top: dict[str, float] = {}
        for each, value in _top(scores, num_top):
            top.setdefault(text_of(tokenizer, each), value)  # of tokens that read alike the likeliest counts
        self.top_logprobs.append(top)


def _top(scores: Logprobs, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens, best first."""
    best = sorted(scores.items(), key=lambda item: -item[1])[:count]
    return [(token_id, _finite(value)) for token_id, value in best]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _NO_CHANCE


def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; bytes that are no characters of their own become replacement characters."""
    return _text(tokenizer.piece(token_id))


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")
