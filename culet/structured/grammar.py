"""Structured output: which tokens may come next, as packed bit masks, for each sequence that has a grammar.

A sequence goes through phases. While the model thinks (its prompt leaves a thought open, or it opens one where it may) every
ordinary token is allowed, the end of the turn is not. Then the document: the grammar's own masks, and an end where the
grammar is complete. After the end only the end.

Masks are bits of int32 words, bit i of word w for token 32 w + i, as `kernels.eager.sampling.apply_bitmask` reads them.
Shapes: R masks · W words, a 32nd of the vocabulary.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from culet.errors import BadRequest
from culet.structured.grammar_text import GrammarFault, compile_grammar, make_tokenizer, short
from culet.types import GRAMMAR_FAULT, GrammarSpec

MAX_KEPT = 256  # compiled grammars that are kept; an ordinary one takes 1 to 2 MiB,
MAX_KEPT_CHARS = 4 << 20  # a long one some 35 bytes for each character of its text
_DEAD_END = "no token of the vocabulary can go on from here"
Mask = NDArray[np.int32]


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar must know of the tokens."""

    size: int  # of the model's logits
    piece: Callable[[int], bytes]  # bytes of a token; the name of a special one, nothing for an id without a token
    special_ids: frozenset[int]
    end_ids: tuple[int, ...]  # any of them ends a turn
    thought_ids: tuple[int, int] | None = None  # what opens and what closes a thought


class Grammars:
    """The compiled grammars of one engine. `compile` and `submit` may be called from any thread, the rest from the engine's."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.num_words = -(-vocabulary.size // 32)
        self.end_mask = self._mask_of(vocabulary.end_ids)
        self.open_mask = self._mask_of(vocabulary.thought_ids[:1] if vocabulary.thought_ids else ())
        ordinary = np.ones(self.num_words * 32, dtype=np.uint8)
        ordinary[[token for token in (*vocabulary.special_ids, *vocabulary.end_ids) if token < vocabulary.size]] = 0
        ordinary[vocabulary.size :] = 0
        closes = self._mask_of(vocabulary.thought_ids[1:] if vocabulary.thought_ids else ())
        self.thought_mask = _pack(ordinary) | closes
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()  # by key: at its beginning, length of the text
        self._pool: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def _mask_of(self, token_ids: Sequence[int]) -> Mask:
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[[token_id for token_id in token_ids if token_id < self.vocabulary.size]] = 1
        return _pack(bits)

    def prepare(self) -> None:
        """Index the vocabulary now: 3 s for Gemma's, during which no other thread of this process runs."""
        with self._lock:
            if self._tokenizer is None:
                known = self.vocabulary
                pieces = [known.piece(token_id) for token_id in range(known.size)]
                self._tokenizer = make_tokenizer(pieces, sorted(known.special_ids), known.end_ids)

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """The grammar at its beginning, from the kept ones or compiled now. Refuses what is no grammar."""
        if (kept := self._find(spec)) is not None:
            return kept
        self.prepare()
        assert self._tokenizer is not None
        try:
            matcher = compile_grammar(spec, self._tokenizer)
        except GrammarFault as fault:
            raise BadRequest(f"{GRAMMAR_FAULT}{fault}") from fault
        with self._lock:
            self._kept[spec.key] = (matcher, len(spec.text))
            while len(self._kept) > MAX_KEPT or sum(size for _, size in self._kept.values()) > MAX_KEPT_CHARS:
                self._kept.popitem(last=False)
        return matcher

    def _find(self, spec: GrammarSpec) -> LLMatcher | None:
        with self._lock:
            if spec.key not in self._kept:
                return None
            self._kept.move_to_end(spec.key)
            return self._kept[spec.key][0]

    def submit(self, spec: GrammarSpec) -> Future[LLMatcher]:
        """`compile` in a thread of its own kind; one that is kept is done at once."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")
        if (kept := self._find(spec)) is not None:
            done: Future[LLMatcher] = Future()
            done.set_result(kept)
            return done
        return self._pool.submit(self.compile, spec)

    def start(self, spec: GrammarSpec, token_ids: Sequence[int], prompt_len: int) -> SequenceGrammar:
        """A sequence takes up its grammar, or resumes it: what it has generated is gone through once more."""
        marks = self.vocabulary.thought_ids
        if marks and _is_open(token_ids[:prompt_len], marks, self.vocabulary):
            phase = Phase.THOUGHT
        else:
            phase = Phase.START if spec.after_thought and marks else Phase.DOCUMENT
        sequence = SequenceGrammar(self, self.compile(spec).deep_copy(), phase)
        sequence.accept(token_ids[prompt_len:])
        return sequence

    def masks(self, rows: Sequence[tuple[SequenceGrammar, int]]) -> Mask:
        """Masks [R, W] for the next draws: of each sequence one, and one more for each of its first so many drafts."""
        mask_RW = np.empty((sum(num_drafts + 1 for _, num_drafts in rows), self.num_words), dtype=np.int32)
        plain: list[tuple[SequenceGrammar, int]] = []
        index = 0
        for sequence, num_drafts in rows:
            if num_drafts == 0 and sequence.phase in (Phase.START, Phase.DOCUMENT):
                plain.append((sequence, index))
            else:
                sequence.fill_chain(mask_RW[index : index + num_drafts + 1], sequence.drafts[:num_drafts])
            index += num_drafts + 1
        self._fill_plain(plain, mask_RW)
        return mask_RW

    def _fill_plain(self, plain: Sequence[tuple[SequenceGrammar, int]], mask_RW: Mask) -> None:
        """Masks of sequences within their documents, all at once by several threads."""
        if len(plain) < 2:
            for sequence, index in plain:
                sequence.fill(mask_RW[index])
            return
        if self._executor is None:
            self._executor = LLExecutor(num_threads=max(1, min(8, (os.cpu_count() or 1) // 2)))
        matchers = [(sequence.matcher, index) for sequence, index in plain]
        self._executor.unsafe_compute_mask_ptr(matchers, mask_RW.ctypes.data, self.num_words * 4, mask_RW.shape[0])
        for sequence, index in plain:
            sequence.finish_fill(mask_RW[index])


class Phase(Enum):
    """Where a sequence is in its output."""

    START = auto()  # before its first token, which may open a thought
    THOUGHT = auto()
    DOCUMENT = auto()
    ENDED = auto()


class SequenceGrammar:
    """One sequence's way through its grammar."""

    def __init__(self, grammars: Grammars, matcher: LLMatcher, phase: Phase) -> None:
        self.matcher = matcher
        self.phase = phase
        self.fault = ""  # why it cannot go on
        self.drafts: tuple[int, ...] = ()  # proposals that the next step may verify
        self._grammars = grammars

    def fill(self, mask_W: Mask) -> None:
        """Write which tokens may come next. One that nothing may follow has a fault, and its mask does not matter."""
        if self.phase is Phase.THOUGHT:
            mask_W[:] = self._grammars.thought_mask
        elif self.phase is Phase.ENDED:
            mask_W[:] = self._grammars.end_mask
        else:
            self.matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            self.finish_fill(mask_W)

    def finish_fill(self, mask_W: Mask) -> None:
        """After the matcher wrote its mask: add what the phase allows, see that something is allowed at all."""
        if self.phase is Phase.START:
            mask_W |= self._grammars.open_mask
        if self.matcher.is_error() or not mask_W.any():
            self.fault = self.fault or self._problem()
        if self.fault:
            mask_W[:] = -1

    def fill_chain(self, mask_KW: Mask, drafts: Sequence[int]) -> None:
        """Masks for the draw after each of `drafts` and before the first. After one that the grammar refuses all is allowed:
        the draw in its place differs from it, so what follows is not kept."""
        matcher, phase, fault = self.matcher, self.phase, self.fault
        self.matcher = matcher.deep_copy() if drafts else matcher  # a matcher that fails on a draft cannot be taken back
        for index in range(len(drafts) + 1):
            self.fill(mask_KW[index])
            if index == 0:
                fault = self.fault
            if index == len(drafts) or self.fault or not _is_set(mask_KW[index], drafts[index]):
                mask_KW[index + 1 :] = -1
                break
            self._advance(drafts[index])
        self.matcher, self.phase, self.fault = matcher, phase, fault

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by what was drawn."""
        for token_id in token_ids:
            if self.fault:
                return
            self._advance(token_id)

    def _advance(self, token_id: int) -> None:
        vocabulary = self._grammars.vocabulary
        opens, closes = vocabulary.thought_ids or (-1, -1)
        if self.phase is Phase.START:
            self.phase = Phase.THOUGHT if token_id == opens else Phase.DOCUMENT
            if self.phase is Phase.THOUGHT:
                return
        if self.phase is Phase.THOUGHT and token_id == closes:
            self.phase = Phase.DOCUMENT
        elif token_id in vocabulary.end_ids:
            self.phase = Phase.ENDED
        elif self.phase is Phase.DOCUMENT and not self.matcher.consume_token(token_id):
            self.fault = self._problem()

    def _problem(self) -> str:
        """Why the matcher cannot go on."""
        why = short(self.matcher.get_error()) if self.matcher.is_error() else _DEAD_END
        return GRAMMAR_FAULT + (_DEAD_END if why.startswith("NoExtension") else why)


def _is_open(prompt: Sequence[int], marks: tuple[int, int], vocabulary: Vocabulary) -> bool:
    """Whether a prompt ends within a thought."""
    opens, closes = marks
    for token_id in reversed(prompt):
        if token_id == opens:
            return True
        if token_id == closes or token_id in vocabulary.end_ids:
            return False
    return False


def _pack(bits: NDArray[np.uint8]) -> Mask:
    return np.packbits(bits, bitorder="little").view(np.int32)


def _is_set(mask_W: Mask, token_id: int) -> bool:
    return bool((int(mask_W[token_id >> 5]) >> (token_id & 31)) & 1)
