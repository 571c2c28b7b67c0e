"""Compile and cache the grammars of one engine, start matchers, and compute the masks of a step.

Shapes: R masks · W words of 32 tokens.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from culet.errors import BadRequest
from culet.structured.compiled_grammar import GrammarFault, compile_grammar, index_vocabulary
from culet.structured.matcher import Mask, Matcher, Phase, Vocabulary
from culet.text.tokenizer import Tokenizer
from culet.types import GRAMMAR_FAULT, GrammarSpec, OutputRules

THOUGHT_MARKS = ("<|channel>", "<channel|>")
CALL_MARKS = ("<|tool_call>", "<tool_call|>")
MAX_KEPT = 256  # limit on cached grammars. An ordinary one takes 1 to 2 MiB.
MAX_KEPT_CHARS = 4 << 20  # limit on the text of cached grammars. A long one takes about 35 bytes per character.
_NICENESS = 10  # of the threads that compile, above the process's own
_STACK_BYTES = 16 << 20  # Grammars are checked with a quarter of this, because llguidance follows rules recursively.


class GrammarCompiler:
    """Compiles and caches grammars. Call `compile` and `submit` from any thread, the rest only from the engine's thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._index: LLTokenizer | None = None
        self._kept: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()  # key -> compiled grammar, text length
        self._threads: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

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

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """Return the compiled grammar, from the cache if possible. Raise BadRequest if the spec is not a valid grammar."""
        if (kept := self._find(spec)) is not None:
            return kept
        self.prepare()
        assert self._index is not None
        try:
            grammar = compile_grammar(spec, self._index)
        except GrammarFault as fault:
            raise BadRequest(f"{GRAMMAR_FAULT}{fault}") from fault
        with self._lock:
            self._kept[spec.key] = (grammar, len(spec.text))
            while len(self._kept) > MAX_KEPT or sum(size for _, size in self._kept.values()) > MAX_KEPT_CHARS:
                self._kept.popitem(last=False)
        return grammar

    def _find(self, spec: GrammarSpec) -> LLMatcher | None:
        with self._lock:
            if spec.key not in self._kept:
                return None
            self._kept.move_to_end(spec.key)
            return self._kept[spec.key][0]

    def submit(self, spec: GrammarSpec) -> Future[LLMatcher]:
        """Compile in another thread. The future of a cached grammar is already done."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar", initializer=_yield_to_the_engine)
        if (kept := self._find(spec)) is not None:
            done: Future[LLMatcher] = Future()
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
        grammar = None if spec is None else self.compile(spec)
        if grammar is not None and not is_free:
            grammar = grammar.deep_copy()
        matcher = Matcher(vocabulary, grammar, phase, rules, on_call=spec is not None and spec.on_call)
        matcher.accept(token_ids[prompt_len:])
        return matcher

    def masks(self, rows: Sequence[tuple[Matcher, int]]) -> Mask:
        """Return masks [R, W] for the next draws. A matcher gets one, plus one for each of its first `num_drafts` drafts."""
        num_masks = sum(num_drafts + 1 for _, num_drafts in rows)
        mask_RW = np.empty((num_masks, self.vocabulary.num_words), dtype=np.int32)
        plain: list[tuple[Matcher, int]] = []
        index = 0
        for matcher, num_drafts in rows:
            if num_drafts == 0 and matcher.phase in (Phase.START, Phase.DOCUMENT):
                plain.append((matcher, index))
            else:
                matcher.fill_chain(mask_RW[index : index + num_drafts + 1], matcher.drafts[:num_drafts])
            index += num_drafts + 1
        self._fill_plain(plain, mask_RW)
        return mask_RW

    def _fill_plain(self, plain: Sequence[tuple[Matcher, int]], mask_RW: Mask) -> None:
        """Fill masks in several threads, for matchers without drafts that are at the start or inside their documents."""
        if len(plain) < 2:
            for matcher, index in plain:
                matcher.fill(mask_RW[index])
            return
        if self._executor is None:
            self._executor = LLExecutor(num_threads=max(1, min(8, (os.cpu_count() or 1) // 2)))
        grammars = [(matcher.grammar, index) for matcher, index in plain if matcher.grammar is not None]
        self._executor.unsafe_compute_mask_ptr(grammars, mask_RW.ctypes.data, mask_RW.strides[0], mask_RW.shape[0])
        for matcher, index in plain:
            matcher.finish_fill(mask_RW[index])


def _yield_to_the_engine() -> None:
    """Lower the priority of this thread, so that compilers do not slow down the engine's steps. Only Linux can do this."""
    if sys.platform == "linux":
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
