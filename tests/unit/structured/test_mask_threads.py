"""The threads that compute masks: each matcher is computed once, by one thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from culet.runner.draw_plan import DrawGroup
from culet.runner.grammar_masks import MASK_LIMIT_S, SlotGrammars
from culet.structured import mask_threads
from culet.structured.compiler import GrammarCompiler
from culet.structured.mask_threads import MaskThreads
from culet.structured.matcher import Matcher


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


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, (MASK_LIMIT_S, True)), (2, (None, False))])
def test_ranks_wait_for_all_masks(num_ranks: int, expected: tuple[float | None, bool]) -> None:
    """A mask may be late on one of them only, and then they would draw different tokens."""
    seen = []

    def masks(rows: Any, *, limit_s: float | None, skip_slow: bool) -> Any:
        seen.append((limit_s, skip_slow))
        return np.zeros((len(rows), 1), dtype=np.int32)

    slots = SlotGrammars(num_ranks)
    slots.grammars = cast(GrammarCompiler, SimpleNamespace(masks=masks))
    slots._by_slot[0] = cast(Matcher, SimpleNamespace(is_bound=True))
    groups = [cast(DrawGroup, SimpleNamespace(slot=slot, is_bound=not slot, first=slot, num_drafts=0)) for slot in (0, 1)]
    assert slots.masks(groups) is not None
    assert seen == [expected]
