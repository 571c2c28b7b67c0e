"""Compile and cache the grammars of one engine, start matchers, and compute the masks of a step.

Shapes: R masks · W words of 32 tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from culet.errors import BadRequest
from culet.structured.compiled_grammar import GrammarFault, compile_grammar, index_vocabulary
from culet.structured.mask_threads import MaskThreads
from culet.structured.matcher import Mask, Matcher, Phase, Vocabulary
from culet.text.tokenizer import Tokenizer
from culet.types import GRAMMAR_FAULT, GrammarSpec, OutputRules

THOUGHT_MARKS = ("<|channel>", "<channel|>")
CALL_MARKS = ("<|tool_call>", "<tool_call|>")
MAX_KEPT = 256  # limit on cached grammars. An ordinary one takes 1 to 2 MiB.
MAX_KEPT_CHARS = 4 << 20  # limit on the text of cached grammars. A long one takes about 35 bytes per character.
_STACK_BYTES = 16 << 20  # Grammars are checked with a quarter of this, because llguidance follows rules recursively.


class Compiled(NamedTuple):
    """A compiled grammar at its start, which sequences copy."""

    grammar: LLMatcher
    first_W: Mask | None  # its first mask, if there is one. Grammars for tool calls need none.
    num_chars: int  # of its text


class GrammarCompiler:
    """Compiles and caches grammars. Call `compile` and `submit` from any thread, the rest only from the engine's thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._index: LLTokenizer | None = None
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._held: dict[str, tuple[int, int]] = {}  # key -> how often it is held, length of its text
        self._threads: ThreadPoolExecutor | None = None
        self._mask_threads: MaskThreads | None = None

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]) -> GrammarCompiler:
        """Create a compiler for the tokens of a model with `vocab_size` logits."""

        def ids_of(marks: tuple[str, str]) -> tuple[int, int] | None:
            opens, closes = map(tokenizer.token_id, marks)
            return None if opens is None or closes is None else (opens, closes)

        marks = ids_of(THOUGHT_MARKS), ids_of(CALL_MARKS)
        return cls(Vocabulary(vocab_size, tokenizer.piece, tokenizer.special_ids, end_ids, *marks))

    def prepare(self) -> None:
        """Index the vocabulary now. Gemma's takes 3 s and blocks all other threads of this process."""
        with self._lock:
            if self._index is None:
                vocabulary = self.vocabulary
                pieces = [vocabulary.piece(token_id) for token_id in range(vocabulary.size)]
                self._index = index_vocabulary(pieces, sorted(vocabulary.special_ids), vocabulary.end_ids)

    def compile(self, spec: GrammarSpec) -> Compiled:
        """Return the compiled grammar, from the cache if possible. Raise BadRequest if the spec is not a valid grammar."""
        if (kept := self._find(spec)) is not None:
            return kept
        self.prepare()
        assert self._index is not None
        try:
            grammar = compile_grammar(spec, self._index)
        except GrammarFault as fault:
            raise BadRequest(f"{GRAMMAR_FAULT}{fault}") from fault
        compiled = Compiled(grammar, None if spec.on_call else self._first_mask(grammar), len(spec.text))
        with self._lock:
            self._kept[spec.key] = compiled
            while len(self._kept) > MAX_KEPT or sum(kept.num_chars for kept in self._kept.values()) > MAX_KEPT_CHARS:
                oldest = next((key for key in self._kept if key not in self._held), None)
                if oldest is None:
                    break
                del self._kept[oldest]
        return compiled

    def knows(self, spec: GrammarSpec) -> bool:
        """Return whether a grammar is compiled, or is being compiled for a request that holds it."""
        with self._lock:
            return spec.key in self._kept or spec.key in self._held

    def hold(self, spec: GrammarSpec) -> bool:
        """Keep a grammar in the cache until `let_go` is called as often as this. Return False if there is no room.

        A grammar that is held is compiled only once, so that `start` finds it and the engine does not wait.
        """
        with self._lock:
            num_chars = len(spec.text) + sum(size for _, size in self._held.values())
            if spec.key not in self._held and self._held and (len(self._held) >= MAX_KEPT or num_chars > MAX_KEPT_CHARS):
                return False
            count, _ = self._held.get(spec.key, (0, 0))
            self._held[spec.key] = (count + 1, len(spec.text))
            return True

    def let_go(self, key: str) -> None:
        with self._lock:
            count, num_chars = self._held.pop(key)
            if count > 1:
                self._held[key] = (count - 1, num_chars)

    def _first_mask(self, grammar: LLMatcher) -> Mask | None:
        """Return the grammar's first mask, or None if it has none. Computed here, it never makes a first draw wait."""
        mask_W = np.empty(self.vocabulary.num_words, dtype=np.int32)
        begun = grammar.deep_copy()
        begun.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        return None if begun.is_error() else mask_W

    def _find(self, spec: GrammarSpec) -> Compiled | None:
        with self._lock:
            if spec.key not in self._kept:
                return None
            self._kept.move_to_end(spec.key)
            return self._kept[spec.key]

    def submit(self, spec: GrammarSpec) -> Future[Compiled]:
        """Compile in another thread. The future of a cached grammar is already done."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")
        if (kept := self._find(spec)) is not None:
            done: Future[Compiled] = Future()
            done.set_result(kept)
            return done
        usual = threading.stack_size(_STACK_BYTES)  # for threads that are started from here on
        try:
            return self._threads.submit(self.compile, spec)
        finally:
            threading.stack_size(usual)

    def start(
        self, spec: GrammarSpec | None, token_ids: Sequence[int], prompt_len: int, rules: OutputRules | None = None
    ) -> Matcher:
        """Create a matcher for a sequence. A sequence that resumes continues after the tokens it has generated."""
        vocabulary = self.vocabulary
        is_free = spec is None or spec.on_call
        if vocabulary.ends_in_thought(token_ids[:prompt_len]):
            phase = Phase.THOUGHT
        elif is_free:
            phase = Phase.FREE
        else:
            phase = Phase.START if spec is not None and spec.after_thought and vocabulary.thought_ids else Phase.DOCUMENT
        grammar, first_W = (None, None) if spec is None else self.compile(spec)[:2]
        if is_free:
            first_W = None  # The cached mask is for grammars that hold from the first token.
        elif grammar is not None:
            grammar = grammar.deep_copy()
        on_call, is_strict = (False, False) if spec is None else (spec.on_call, spec.is_strict)
        matcher = Matcher(vocabulary, grammar, phase, rules, on_call=on_call, is_strict=is_strict, first_W=first_W)
        matcher.accept(token_ids[prompt_len:])
        return matcher

    def masks(self, rows: Sequence[tuple[Matcher, int]], *, limit_s: float | None = None, skip_slow: bool = False) -> Mask:
        """Return masks [R, W] for the next draws. A matcher gets one, plus one for each of its first `num_drafts` drafts.

        With `limit_s`, `Matcher.num_masks` says how many of a matcher's masks were computed in time. The others allow all
        tokens. With `skip_slow`, do not wait at all for matchers whose masks take long.
        """
        mask_RW = np.empty((sum(num_drafts + 1 for _, num_drafts in rows), self.vocabulary.num_words), dtype=np.int32)
        jobs = []
        for matcher, num_drafts in rows:
            drafts = matcher.drafts[:num_drafts]
            if matcher.is_cheap and not drafts:
                matcher.compute()
            elif not matcher.has_masks(drafts):
                jobs.append((matcher, drafts))
        if jobs:
            if self._mask_threads is None:
                self._mask_threads = MaskThreads()
            self._mask_threads.compute(jobs, limit_s, skip_slow=skip_slow)
        index = 0
        for matcher, num_drafts in rows:
            matcher.write(mask_RW[index : index + num_drafts + 1], matcher.drafts[:num_drafts])
            index += num_drafts + 1
        return mask_RW
