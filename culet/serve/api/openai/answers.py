"""The usage and log-probabilities in the answers of OpenAI's chat and completions APIs.

Log-probabilities are written as JSON token by token, so that a long answer can be built in short turns of the event loop and
never exists as objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from culet.serve.api.endpoint import encoder
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

    reasoning_tokens: int  # of thoughts, without the marks around them
    thinking_budget_reached: bool  # so the thought was closed, whether or not the model had more to think
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
            thinking_budget_reached=any(count.is_thought_out for count in counts),
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


CHAT_ENTRY_BYTES = 112  # usual size of a token or of one of its alternatives


def chat_size(num_tokens: int, num_top: int) -> int:
    """Return the usual size in bytes of the log-probabilities of `num_tokens` tokens."""
    return num_tokens * (1 + num_top) * CHAT_ENTRY_BYTES


def chat_entries(tokenizer: Tokenizer, tokens: Iterable[tuple[int, Logprobs]], num_top: int) -> Iterator[bytes]:
    """Yield log-probabilities in the format of the chat API, as the JSON of a TokenLogprob per token."""
    for token_id, logprobs in tokens:
        piece = tokenizer.piece(token_id)
        top = [
            TopLogprob(token_text(tokenizer, top_id), value, list(tokenizer.piece(top_id)))
            for top_id, value in _top(logprobs, num_top)
        ]
        yield encoder.encode(TokenLogprob(_text(piece), _finite(logprobs[token_id]), list(piece), top))


class TextLogprobs(Struct):
    """Log-probabilities in the format of the completions API, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


TEXT_BYTES = 16  # usual size of a repeated prompt token, with escapes
_TEXT_ENTRY_BYTES = 64  # usual size of a token in all four lists
_TEXT_TOP_BYTES = 40  # usual size of one of its alternatives


def text_size(num_tokens: int, num_top: int) -> int:
    """Return the usual size in bytes of the log-probabilities of `num_tokens` tokens in TextLogprobs."""
    return num_tokens * (_TEXT_ENTRY_BYTES + num_top * _TEXT_TOP_BYTES)


class TextColumns:
    """The four lists of TextLogprobs as JSON without brackets. They grow token by token."""

    NAMES = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")

    def __init__(self, tokenizer: Tokenizer, num_top: int, offset: int = 0) -> None:
        """Create empty lists. `offset` is the length of the text before the first token."""
        self._tokenizer, self._num_top = tokenizer, num_top
        self.offset = offset
        self.num_tokens = 0
        self.columns = [bytearray() for _ in self.NAMES]

    def add(self, token_id: int, logprobs: Logprobs | None) -> int:
        """Append a token and return the number of bytes. `logprobs` is None for the first token of a prompt, which has none."""
        text = token_text(self._tokenizer, token_id)
        top: dict[str, float] | None = None
        if logprobs is not None:
            top = {}
            for top_id, value in _top(logprobs, self._num_top):  # among tokens with the same text, keep the most likely
                top.setdefault(token_text(self._tokenizer, top_id), value)
        num_bytes = 0
        own = None if logprobs is None else _finite(logprobs[token_id])
        for column, entry in zip(self.columns, (text, own, top, self.offset), strict=True):
            data = encoder.encode(entry)
            column += b"," + data if column else data
            num_bytes += len(data) + 1
        self.offset += len(text)
        self.num_tokens += 1
        return num_bytes


def write_columns(parts: Sequence[TextColumns]) -> Iterator[bytes | bytearray]:
    """Yield the JSON of a TextLogprobs with the tokens of all parts, in order. Nothing is copied."""
    for number, name in enumerate(TextColumns.NAMES):
        yield b'%s"%s":[' % (b"," if number else b"{", name)
        is_first = True
        for column in (part.columns[number] for part in parts if part.num_tokens):
            if not is_first:
                yield b","
            yield column
            is_first = False
        yield b"]"
    yield b"}"


def _top(logprobs: Logprobs, count: int) -> list[tuple[int, float]]:
    """Return the most likely tokens, best first."""
    best = sorted(logprobs.items(), key=lambda item: -item[1])[:count]
    return [(token_id, _finite(value)) for token_id, value in best]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _MINUS_INFINITY


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token. Incomplete UTF-8 becomes replacement characters. Without a tokenizer it is the id."""
    if not tokenizer.has_text:
        return f"token_id:{token_id}"  # vLLM's form
    return _text(tokenizer.piece(token_id))


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")
