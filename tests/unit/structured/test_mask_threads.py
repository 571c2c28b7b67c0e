"""The threads that compute masks: each matcher is computed once, by one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from culet.structured import mask_threads
from culet.structured.mask_threads import MaskThreads
from culet.structured.matcher import Matcher, Phase, Vocabulary


class SlowMatcher:
    """Counts its computations. Only the last one shows that it is slow."""

    is_busy = is_slow = False
    mask_s = 0.0
    num_computed = 0

    def compute(self, drafts: tuple[int, ...], deadline: float) -> None:
        self.num_computed += 1


class Inline:
    """A pool whose work is done when `submit` returns, as if its thread were faster than the caller."""

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        work(*arguments)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def test_a_matcher_that_turns_out_to_be_slow_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread would compute its masks while the engine already takes the next token."""
    monkeypatch.setattr(mask_threads, "SLOW_S", -1.0)  # every computation counts as slow
    threads = MaskThreads()
    monkeypatch.setattr(threads, "_quick", Inline())
    monkeypatch.setattr(threads, "_slow", Inline())
    matcher = SlowMatcher()
    threads.compute([(cast(Matcher, matcher), ())], None, skip_slow=False)
    assert matcher.is_slow
    assert matcher.num_computed == 1
    threads.compute([(cast(Matcher, matcher), ())], None, skip_slow=False)
    assert matcher.num_computed == 2


class SharedGrammar:
    """A grammar that computes a mask until it is allowed to go on. Like llguidance's, it must not advance meanwhile."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.is_computing = self.was_disturbed = False

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self.is_computing = True
        self.has_begun.set()
        self.may_end.wait(60)
        self.is_computing = False

    def consume_token(self, token_id: int) -> bool:
        self.was_disturbed |= self.is_computing
        return True

    def is_error(self) -> bool:
        return False


def test_a_matcher_does_not_advance_while_its_masks_are_computed() -> None:
    grammar = SharedGrammar()
    matcher = Matcher(Vocabulary(64, lambda _: b"x", frozenset(), (1,)), cast(Any, grammar), Phase.DOCUMENT)
    computing = threading.Thread(target=matcher.compute)
    computing.start()
    grammar.has_begun.wait(60)
    assert matcher.take((), is_masked=True) == 0  # Nothing was drawn, so there is nothing to wait for.
    taking = threading.Thread(target=matcher.take, args=((5,),), kwargs={"is_masked": True})
    taking.start()
    taking.join(0.05)
    grammar.may_end.set()
    computing.join(60)
    taking.join(60)
    assert not grammar.was_disturbed
    assert not matcher.has_masks(())  # The masks were those of the draw before.
