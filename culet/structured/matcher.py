"""Follow one sequence through its grammar and compute which tokens may come next, as packed bit masks.

A sequence goes through phases. The model thinks if its prompt ends inside a thought, or if it opens one where that is allowed.
While it thinks, every ordinary token is allowed, but not the end of the turn. Then comes the document. The grammar decides
which tokens are allowed, and the turn may end when the grammar is complete. After the end, only end tokens are allowed.

A mask consists of int32 words. Bit i of word w stands for token 32 w + i, as in `kernels.eager.sampling.apply_bitmask`.
Shapes: K masks of a chain of drafts · W words, 1/32 of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from culet.structured.compiled_grammar import shorten
from culet.types import GRAMMAR_FAULT

_DEAD_END = "no token in the vocabulary can continue the output"
Mask = NDArray[np.int32]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens as a grammar sees them, and the masks that do not depend on a grammar."""

    size: int  # number of the model's logits
    piece: Callable[[int], bytes]  # the bytes of a token, the name of a special token, or b"" for an unused id
    special_ids: frozenset[int]
    end_ids: tuple[int, ...]  # any of them ends a turn
    thought_ids: tuple[int, int] | None = None  # the tokens that open and close a thought

    @property
    def num_words(self) -> int:
        return -(-self.size // 32)

    @cached_property
    def end_mask(self) -> Mask:
        return self._mask_of(self.end_ids)

    @cached_property
    def open_mask(self) -> Mask:
        """A mask that allows the token that opens a thought, if there is one."""
        return self._mask_of(self.thought_ids[:1] if self.thought_ids else ())

    @cached_property
    def thought_mask(self) -> Mask:
        """A mask that allows ordinary tokens and the token that closes the thought."""
        bits = np.ones(self.num_words * 32, dtype=np.uint8)
        bits[[token_id for token_id in (*self.special_ids, *self.end_ids) if token_id < self.size]] = 0
        bits[self.size :] = 0
        return _pack(bits) | self._mask_of(self.thought_ids[1:] if self.thought_ids else ())

    def _mask_of(self, token_ids: Sequence[int]) -> Mask:
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[[token_id for token_id in token_ids if token_id < self.size]] = 1
        return _pack(bits)

    def ends_in_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether the prompt ends inside a thought."""
        if self.thought_ids is None:
            return False
        opens, closes = self.thought_ids
        for token_id in reversed(prompt):
            if token_id == opens:
                return True
            if token_id == closes or token_id in self.end_ids:
                return False
        return False


class Phase(Enum):
    """The part of its output that a sequence has reached."""

    START = auto()  # before the first token, which may open a thought
    THOUGHT = auto()
    DOCUMENT = auto()
    ENDED = auto()


class Matcher:
    """One sequence's position in its grammar."""

    def __init__(self, vocabulary: Vocabulary, grammar: LLMatcher, phase: Phase) -> None:
        """Take over `grammar`, a copy for this sequence alone."""
        self.grammar = grammar
        self.phase = phase
        self.fault = ""  # why the sequence cannot continue
        self.drafts: tuple[int, ...] = ()  # proposals that the next step may verify
        self._vocabulary = vocabulary

    def fill(self, mask_W: Mask) -> None:
        """Write the mask of tokens that may come next. If there are none, set `fault` to the reason and allow all tokens."""
        if self.phase is Phase.THOUGHT:
            mask_W[:] = self._vocabulary.thought_mask
        elif self.phase is Phase.ENDED:
            mask_W[:] = self._vocabulary.end_mask
        else:
            self.grammar.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            self.finish_fill(mask_W)

    def finish_fill(self, mask_W: Mask) -> None:
        """Add the tokens that the phase allows to the grammar's mask, and check that some token is allowed."""
        if self.phase is Phase.START:
            mask_W |= self._vocabulary.open_mask
        if self.grammar.is_error() or not mask_W.any():
            self.fault = self.fault or self._problem()
        if self.fault:
            mask_W[:] = -1

    def fill_chain(self, mask_KW: Mask, drafts: Sequence[int]) -> None:
        """Write masks for the draw before the first draft and after each one.

        All tokens are allowed after a draft that the grammar refuses. The token drawn in its place differs from the draft, so
        everything after it is dropped.
        """
        grammar, phase, fault = self.grammar, self.phase, self.fault
        self.grammar = grammar.deep_copy() if drafts else grammar  # a matcher that fails on a draft cannot go back
        for index in range(len(drafts) + 1):
            self.fill(mask_KW[index])
            if index == 0:
                fault = self.fault
            if index == len(drafts) or self.fault or not _is_set(mask_KW[index], drafts[index]):
                mask_KW[index + 1 :] = -1
                break
            self._advance(drafts[index])
        self.grammar, self.phase, self.fault = grammar, phase, fault

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by the tokens that were drawn."""
        for token_id in token_ids:
            if self.fault:
                return
            self._advance(token_id)

    def _advance(self, token_id: int) -> None:
        opens, closes = self._vocabulary.thought_ids or (-1, -1)
        if self.phase is Phase.START:
            self.phase = Phase.THOUGHT if token_id == opens else Phase.DOCUMENT
            if self.phase is Phase.THOUGHT:
                return
        if self.phase is Phase.THOUGHT and token_id == closes:
            self.phase = Phase.DOCUMENT
        elif token_id in self._vocabulary.end_ids:
            self.phase = Phase.ENDED
        elif self.phase is Phase.DOCUMENT and not self.grammar.consume_token(token_id):
            self.fault = self._problem()

    def _problem(self) -> str:
        """Return why the grammar cannot continue."""
        reason = shorten(self.grammar.get_error()) if self.grammar.is_error() else _DEAD_END
        return GRAMMAR_FAULT + (_DEAD_END if reason.startswith("NoExtension") else reason)


def _pack(bits: NDArray[np.uint8]) -> Mask:
    return np.packbits(bits, bitorder="little").view(np.int32)


def _is_set(mask_W: Mask, token_id: int) -> bool:
    return bool((int(mask_W[token_id >> 5]) >> (token_id & 31)) & 1)
