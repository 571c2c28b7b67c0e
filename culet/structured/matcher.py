"""Follow one sequence through its output and compute which tokens may come next, as packed bit masks.

A matcher knows a sequence's grammar, its thinking budget and its least number of tokens. The sequence goes through phases. The
model thinks if its prompt ends inside a thought, or if it opens one. With a grammar for the whole output, every ordinary token
is allowed in a thought, but not the end of the turn. Then comes the document. The grammar decides which tokens are allowed,
and the turn may end when the grammar is complete. After the end, only end tokens are allowed. A grammar for tool calls
(`GrammarSpec.on_call`) leaves everything free up to the token that opens a call, holds the call to a declared tool, and lets
go after its last token.

**Bound and free.** A sequence is bound while its next draw needs a mask. Its rows then wait for the results before them.
A free sequence draws without masks, may be planned ahead, and its drafts never come to the host. If one of its tokens binds
it, the tokens that were drawn after this one do not count, and they are drawn again with masks. The first draws are dropped
whatever they are, so the second ones have the distribution that masks give, and the same random numbers.

A mask consists of int32 words. Bit i of word w stands for token 32 w + i, as in `kernels.eager.sampling.apply_bitmask`.
Shapes: K masks of a chain of drafts · W words, 1/32 of the vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from culet.log import logger
from culet.structured.compiled_grammar import shorten
from culet.types import GRAMMAR_FAULT, OutputRules

_DEAD_END = "no token in the vocabulary can continue the output"
_NO_RULES = OutputRules()
Mask = NDArray[np.int32]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens as a grammar sees them, and the masks that do not depend on a grammar."""

    size: int  # number of the model's logits
    piece: Callable[[int], bytes]  # the bytes of a token, the name of a special token, or b"" for an unused id
    special_ids: frozenset[int]
    end_ids: tuple[int, ...]  # any of them ends a turn
    thought_ids: tuple[int, int] | None = None  # the tokens that open and close a thought
    call_ids: tuple[int, int] | None = None  # the tokens that open and close a tool call

    @property
    def num_words(self) -> int:
        return -(-self.size // 32)

    @cached_property
    def end_mask(self) -> Mask:
        return self.mask_of(self.end_ids)

    @cached_property
    def open_mask(self) -> Mask:
        """A mask that allows the token that opens a thought, if there is one."""
        return self.mask_of(self.thought_ids[:1] if self.thought_ids else ())

    @cached_property
    def close_mask(self) -> Mask:
        """A mask that allows the token that closes a thought, if there is one."""
        return self.mask_of(self.thought_ids[1:] if self.thought_ids else ())

    @cached_property
    def thought_mask(self) -> Mask:
        """A mask that allows ordinary tokens and the token that closes the thought."""
        bits = np.ones(self.num_words * 32, dtype=np.uint8)
        bits[[token_id for token_id in (*self.special_ids, *self.end_ids) if token_id < self.size]] = 0
        bits[self.size :] = 0
        return _pack(bits) | self.close_mask

    def mask_of(self, token_ids: Sequence[int]) -> Mask:
        """Return a mask that allows only these tokens."""
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[[token_id for token_id in token_ids if token_id < self.size]] = 1
        return _pack(bits)

    def ends_in_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether the prompt ends inside a thought."""
        if self.thought_ids is None:
            return False
        opens, closes = self.thought_ids
        closers = {closes, *self.end_ids, *(self.call_ids or ())[:1]}
        for token_id in reversed(prompt):
            if token_id == opens:
                return True
            if token_id in closers:
                return False
        return False


class Phase(Enum):
    """The part of its output that a sequence has reached."""

    FREE = auto()  # outside thoughts and calls, without a grammar for the whole output
    START = auto()  # before the first token of a document, which may open a thought
    THOUGHT = auto()
    DOCUMENT = auto()  # in a document, or in a tool call
    ENDED = auto()


class _Masks(NamedTuple):
    """The masks of a chain of drafts. The first `num_masks` of them are computed."""

    drafts: tuple[int, ...]
    mask_KW: Mask
    num_masks: int
    fault: str


class Matcher:
    """One sequence's position in its output."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammar: LLMatcher | None,
        phase: Phase,
        rules: OutputRules | None = None,
        *,
        on_call: bool = False,
        is_strict: bool = False,
        first_W: Mask | None = None,
    ) -> None:
        """Start in a phase. `grammar` is a compiled grammar for this sequence alone or, with `on_call`, one to copy.

        With `is_strict`, it is a fault if the grammar of a call fails.
        `first_W` is the grammar's first mask, if it is known.
        """
        self.phase = phase
        self.grammar = None if on_call else grammar  # the one that is in force
        self.fault = ""  # why the sequence cannot continue
        self.drafts: tuple[int, ...] = ()  # proposals that the next step may verify
        self.first_W = first_W  # the grammar's mask, until it takes a token
        self.num_masks = 0  # of the last step, computed in time
        self.is_busy = self.is_slow = False  # a thread computes its masks; the last ones took long
        self.mask_s = 0.0  # time that its masks took
        self._computed: _Masks | None = None  # the masks of its next draws
        self._vocabulary = vocabulary
        self._rules = rules or _NO_RULES
        self._call_grammar = grammar if on_call else None
        self._is_document = grammar is not None and not on_call
        self._is_strict = is_strict
        self._num_tokens = self._num_thought = 0  # drawn, and drawn inside thoughts

    @property
    def is_bound(self) -> bool:
        """Whether the next draw needs a mask."""
        if self.phase in (Phase.FREE, Phase.THOUGHT) and not (self.phase is Phase.THOUGHT and self._is_document):
            return self._num_tokens < self._rules.min_tokens or (self.phase is Phase.THOUGHT and self.is_thought_out)
        return True

    @property
    def is_thought_out(self) -> bool:
        """Whether the thinking budget is used up. Then an open thought must close, and no other may open."""
        budget = self._rules.thinking_budget
        return budget is not None and self._num_thought >= budget

    @property
    def banned_id(self) -> int | None:
        """The token that may not be drawn again in this output, outside of masks. It opens a thought."""
        thought_ids = self._vocabulary.thought_ids
        return thought_ids[0] if thought_ids is not None and self.is_thought_out else None

    # Masks

    def fill(self, mask_W: Mask) -> None:
        """Write the mask of tokens that may come next. If there are none, set `fault` to the reason and allow all tokens."""
        vocabulary = self._vocabulary
        if self.first_W is not None:
            mask_W[:] = self.first_W
        elif self.grammar is not None and self.phase in (Phase.START, Phase.DOCUMENT):
            self.grammar.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        if self.phase is Phase.THOUGHT:
            mask_W[:] = vocabulary.close_mask if self.is_thought_out else vocabulary.thought_mask if self._is_document else -1
        elif self.phase is Phase.ENDED:
            mask_W[:] = vocabulary.end_mask
        elif self.phase is Phase.FREE:
            mask_W[:] = -1
        elif self.phase is Phase.START and not self.is_thought_out:
            mask_W |= vocabulary.open_mask
        grammar = self.grammar
        if grammar is not None and (grammar.is_error() or not mask_W.any()):
            self._fail(grammar)
        if self.fault or (grammar is not None and self.grammar is None):
            mask_W[:] = -1
        if self.is_thought_out and self.phase is Phase.FREE:
            mask_W &= ~vocabulary.open_mask
        if self._num_tokens < self._rules.min_tokens and not self.fault:
            without_W = mask_W & ~self._end_mask
            if without_W.any():  # a form that is complete ends, however short it is
                mask_W[:] = without_W

    def compute(self, drafts: tuple[int, ...] = (), deadline: float = inf) -> None:
        """Compute masks for the draw before the first draft and, as far as there is time, after each one.

        All tokens are allowed after a draft that the grammar refuses. The token drawn in its place differs from the draft, so
        everything after it is dropped. May run in a thread.
        """
        walker = copy(self)  # This matcher stays as it is, because the engine's thread may read it.
        if drafts and self.grammar is not None:
            walker.grammar = self.grammar.deep_copy()
        mask_KW = np.full((len(drafts) + 1, self._vocabulary.num_words), -1, dtype=np.int32)
        fault, num_masks = "", len(mask_KW)
        for index in range(len(mask_KW)):
            walker.fill(mask_KW[index])
            if index == 0:
                fault = walker.fault
            if index == len(drafts) or walker.fault or not _is_set(mask_KW[index], drafts[index]):
                break
            if time.monotonic() >= deadline:
                num_masks = index + 1
                break
            walker._advance(drafts[index])
        self._computed = _Masks(drafts, mask_KW, num_masks, fault)

    def give_up(self, reason: str) -> None:
        """End the sequence with an error, because its masks cannot be computed."""
        mask_KW = np.full((1, self._vocabulary.num_words), -1, dtype=np.int32)
        self._computed = _Masks((), mask_KW, 1, GRAMMAR_FAULT + shorten(reason))

    def has_masks(self, drafts: tuple[int, ...]) -> bool:
        """Return whether masks were computed for the next draw and the draws after these drafts."""
        masks = None if self.is_busy else self._computed
        return masks is not None and masks.drafts[: len(drafts)] == drafts

    def write(self, mask_KW: Mask, drafts: tuple[int, ...]) -> None:
        """Write the masks that were computed, and allow all tokens in the others. `num_masks` says how many there are."""
        self.num_masks = 0
        if not self.is_busy and (masks := self._computed) is not None:
            num_useful = len(mask_KW) if masks.drafts[: len(drafts)] == drafts else 1
            self.num_masks = min(masks.num_masks, num_useful)
            mask_KW[: self.num_masks] = masks.mask_KW[: self.num_masks]
            self.fault = self.fault or masks.fault
        mask_KW[self.num_masks :] = -1

    @property
    def is_cheap(self) -> bool:
        """Whether the next mask takes no time, because no grammar computes it, or because it is known."""
        return self.grammar is None or self.first_W is not None or self.phase not in (Phase.START, Phase.DOCUMENT)

    @cached_property
    def _end_mask(self) -> Mask:
        """The tokens that may not be drawn before `min_tokens`."""
        return self._vocabulary.mask_of(self._rules.end_ids)

    # Tokens

    def take(self, token_ids: Sequence[int], *, is_masked: bool) -> int:
        """Advance by the tokens that a row drew. Return how many of them count.

        Without masks, tokens count up to the one that binds the sequence. A row that was planned before this was known counts
        nothing.
        """
        if is_masked:
            self.accept(token_ids)
            return len(token_ids)
        for count, token_id in enumerate(token_ids):
            if self.is_bound:
                return count
            self._advance(token_id)
        return len(token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens that were drawn with masks, or before the sequence lost its slot."""
        for token_id in token_ids:
            if self.fault:
                return
            self._advance(token_id)

    def _advance(self, token_id: int) -> None:
        vocabulary = self._vocabulary
        self._num_tokens += 1
        self._computed = None
        opens, closes = vocabulary.thought_ids or (-1, -1)
        if token_id == opens and self.phase in (Phase.START, Phase.FREE):
            self.phase = Phase.THOUGHT
            return
        if self.phase is Phase.START:
            self.phase = Phase.DOCUMENT
        if not self._is_document:
            self._advance_freely(token_id, closes)
        elif self.phase is Phase.THOUGHT and token_id == closes:
            self.phase = Phase.DOCUMENT
        elif token_id in vocabulary.end_ids:
            self.phase = Phase.ENDED
        elif self.phase is Phase.THOUGHT:
            self._num_thought += 1
        elif self.phase is Phase.DOCUMENT and self.grammar is not None:
            self.first_W = None
            if not self.grammar.consume_token(token_id):
                self._fail(self.grammar)

    def _advance_freely(self, token_id: int, closes: int) -> None:
        """Advance where no grammar holds for the whole output."""
        call_opens, call_closes = self._vocabulary.call_ids or (-1, -1)
        if self.phase is Phase.DOCUMENT:
            assert self.grammar is not None
            if token_id == call_closes:
                self.phase, self.grammar = Phase.FREE, None
            elif not self.grammar.consume_token(token_id):
                self._fail(self.grammar)
        elif token_id == call_opens:  # also ends a thought that was not closed
            self.phase = Phase.FREE
            if self._call_grammar is not None:
                self.phase, self.grammar = Phase.DOCUMENT, self._call_grammar.deep_copy()
                if not self.grammar.consume_token(token_id):
                    self._fail(self.grammar)
        elif self.phase is Phase.THOUGHT:
            if token_id == closes or token_id in self._vocabulary.end_ids:
                self.phase = Phase.FREE
            else:
                self._num_thought += 1

    def _fail(self, grammar: LLMatcher) -> None:
        """Give up the grammar. A tool call continues without it, unless a tool is strict. Anything else is a fault."""
        reason = shorten(grammar.get_error()) if grammar.is_error() else _DEAD_END
        reason = _DEAD_END if reason.startswith("NoExtension") else reason
        if self._is_document or self._is_strict:
            self.fault = self.fault or GRAMMAR_FAULT + reason
        else:
            logger.warning("a tool call continues without its grammar: %s", reason)
            self.phase, self.grammar = Phase.FREE, None


def _pack(bits: NDArray[np.uint8]) -> Mask:
    return np.packbits(bits, bitorder="little").view(np.int32)


def _is_set(mask_W: Mask, token_id: int) -> bool:
    return bool((int(mask_W[token_id >> 5]) >> (token_id & 31)) & 1)
