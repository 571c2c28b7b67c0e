"""Masks that take long hold up neither the step nor the masks of other grammars."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from culet.structured.compiler import GrammarCompiler
from culet.structured.matcher import Mask, Matcher
from tests.unit.structured.test_grammar import allowed, make_compiler, spec, token

LONG_S = 60.0
LIMIT_S = 0.2


class SlowGrammar:
    """A compiled grammar whose masks take as long as the test wants."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self.may_end, self.num_begun = threading.Event(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        self.num_begun += 1
        assert self.may_end.wait(LONG_S)
        self._grammar.unsafe_compute_mask_ptr(pointer, num_bytes)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


def begin(compiler: GrammarCompiler) -> Matcher:
    """Return a matcher after the first character of a document."""
    return compiler.start(spec(regex="[abc]{3}"), [9, token("a")], 1)


def begin_slow(compiler: GrammarCompiler) -> tuple[Matcher, SlowGrammar]:
    matcher = begin(compiler)
    matcher.grammar = slow = SlowGrammar(matcher.grammar)  # type: ignore[assignment]
    return matcher, slow


def wait_idle(matcher: Matcher) -> None:
    deadline = time.monotonic() + LONG_S
    while matcher.is_busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def masks(compiler: GrammarCompiler, *matchers: Matcher, limit_s: float = LIMIT_S, skip_slow: bool = False) -> Mask:
    return compiler.masks([(matcher, 0) for matcher in matchers], limit_s=limit_s, skip_slow=skip_slow)


def test_a_slow_mask_comes_later_and_is_computed_once(compiler: GrammarCompiler) -> None:
    matcher, slow = begin_slow(compiler)
    for _ in range(3):
        assert (masks(compiler, matcher, limit_s=0.01) == -1).all()
        assert matcher.num_masks == 0
    slow.may_end.set()
    wait_idle(matcher)
    found = masks(compiler, matcher)
    assert matcher.num_masks == 1
    assert (found == masks(compiler, begin(compiler), limit_s=LONG_S)).all()
    assert slow.num_begun == 1
    matcher.take([token("b")], is_masked=True)  # the mask before this token does not hold after it
    assert (masks(compiler, matcher, limit_s=LONG_S) == masks(compiler, after_b(compiler), limit_s=LONG_S)).all()


def after_b(compiler: GrammarCompiler) -> Matcher:
    matcher = begin(compiler)
    matcher.take([token("b")], is_masked=True)
    return matcher


def test_slow_masks_do_not_hold_up_quick_ones(compiler: GrammarCompiler) -> None:
    slow = [begin_slow(compiler) for _ in range(20)]
    for matcher, _ in slow:
        matcher.is_slow = True  # as after a first slow mask
    quick = begin(compiler)
    masks(compiler, *[matcher for matcher, _ in slow], quick, limit_s=LONG_S, skip_slow=True)
    assert quick.num_masks == 1
    assert all(matcher.num_masks == 0 for matcher, _ in slow)
    for _, grammar in slow:
        grammar.may_end.set()
    for matcher, _ in slow:
        wait_idle(matcher)
    masks(compiler, *[matcher for matcher, _ in slow])
    assert all(matcher.num_masks == 1 for matcher, _ in slow)
    assert all(grammar.num_begun == 1 for _, grammar in slow)


def test_what_had_no_time_to_begin_is_asked_again(compiler: GrammarCompiler) -> None:
    slow = [begin_slow(compiler) for _ in range(20)]
    masks(compiler, *[matcher for matcher, _ in slow], limit_s=0.01)
    idle = [matcher for matcher, _ in slow if not matcher.is_busy]
    assert len(idle) >= 20 - 8  # a thread each for the others
    for _, grammar in slow:
        grammar.may_end.set()
    for matcher, _ in slow:
        wait_idle(matcher)
    masks(compiler, *[matcher for matcher, _ in slow], limit_s=LONG_S)
    assert all(matcher.num_masks == 1 for matcher, _ in slow)


def test_the_first_mask_is_computed_with_the_grammar(compiler: GrammarCompiler) -> None:
    """So a prompt's first draw, which several samples may share, is never late."""
    matcher = compiler.start(spec(regex="[abc]{3}"), [9], 1)
    matcher.grammar = SlowGrammar(matcher.grammar)  # type: ignore[assignment]
    found = masks(compiler, matcher, limit_s=0.0)
    assert matcher.num_masks == 1
    assert token("a") in allowed(found[0])
    assert np.any(found != -1)


def test_a_chain_stops_when_its_time_is_over(compiler: GrammarCompiler) -> None:
    matcher, drafts = begin(compiler), (token("b"), token("c"))
    matcher.compute(drafts, deadline=0.0)
    mask_KW = np.zeros((3, compiler.vocabulary.num_words), dtype=np.int32)
    matcher.write(mask_KW, drafts)
    assert matcher.num_masks == 1
    assert (mask_KW[1:] == -1).all()
    matcher.compute(drafts)
    matcher.write(mask_KW, drafts)
    assert matcher.num_masks == 3


def test_a_mask_that_cannot_be_computed_ends_the_sequence(compiler: GrammarCompiler) -> None:
    class Broken(SlowGrammar):
        def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
            raise BaseException("panicked")

    matcher = begin(compiler)
    matcher.grammar = Broken(matcher.grammar)  # type: ignore[assignment]
    masks(compiler, matcher, limit_s=LONG_S)
    assert matcher.num_masks == 1
    assert "panicked" in matcher.fault
    assert not matcher.is_busy
