"""Grammars of an engine's requests: checked by a process of its own, compiled by threads while the engine goes on.

The grammar engine is loaded with the first grammar, or by `prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

from culet.errors import CuletError
from culet.structured.check import GrammarCheck
from culet.text.text import Tokenizer
from culet.types import GrammarSpec, ModelDefaults, Request

if TYPE_CHECKING:
    from culet.structured.grammar import Grammars

THOUGHT_MARKS = ("<|channel>", "<channel|>")


def make_grammar_check(tokenizer: Tokenizer, **limits: Any) -> GrammarCheck:
    """What says of a grammar whether it can be compiled for the tokenizer's special tokens."""
    return GrammarCheck([tokenizer.piece(token_id).decode() for token_id in sorted(tokenizer.special_ids)], **limits)


class GrammarQueue:
    """Requests whose grammar is being compiled, and the grammars themselves."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, defaults: ModelDefaults) -> None:
        self._tokenizer, self._vocab_size, self._defaults = tokenizer, vocab_size, defaults
        self._grammars: Grammars | None = None
        self._check: GrammarCheck | None = None
        self._compiling: dict[str, Future[Any]] = {}

    @property
    def grammars(self) -> Grammars:
        """The compiled grammars, for the runner."""
        if self._grammars is None:
            from culet.structured.grammar import Grammars, Vocabulary

            opens, closes = map(self._tokenizer.token_id, THOUGHT_MARKS)
            self._grammars = Grammars(
                Vocabulary(
                    size=self._vocab_size,
                    piece=self._tokenizer.piece,
                    special_ids=self._tokenizer.special_ids,
                    end_ids=self._defaults.eos_token_ids,
                    thought_ids=None if opens is None or closes is None else (opens, closes),
                )
            )
        return self._grammars

    def check(self, spec: GrammarSpec) -> None:
        """Refuse what is no grammar or cannot be compiled in time; waits for the answer."""
        if self._check is None:
            self._check = make_grammar_check(self._tokenizer)
        self._check.check(spec)

    def submit(self, request: Request) -> bool:
        """Begin to compile a request's grammar; whether it is there already."""
        assert request.grammar is not None
        future = self.grammars.submit(request.grammar)
        if not future.done():
            self._compiling[request.request_id] = future
            return False
        return True

    def done(self) -> Iterator[tuple[str, str]]:
        """(request id, what went wrong or nothing) of those that are compiled by now."""
        if not self._compiling:
            return
        for request_id, future in list(self._compiling.items()):
            if future.done():
                del self._compiling[request_id]
                error = future.exception()
                yield request_id, "" if error is None else error.message if isinstance(error, CuletError) else str(error)

    def wait(self, limit_s: float) -> None:
        """Until one is compiled; at once where none is being compiled."""
        if self._compiling:
            wait(self._compiling.values(), limit_s, FIRST_COMPLETED)

    def forget(self) -> None:
        """The requests that waited are gone."""
        self._compiling.clear()
