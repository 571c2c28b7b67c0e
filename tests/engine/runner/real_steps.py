"""For tests with real models: drive a scheduler and runner to the end, and compute a whole sequence in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from culet.cache.spec import CacheLayout
from culet.models.gemma4 import Gemma4, Hidden
from culet.runner.runner import Runner
from culet.scheduler.scheduler import Scheduler
from culet.types import Entry, PageTable, Request, Row, StepPlan, StepResult
from tests.samplings import GREEDY


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(120, 600, (length,), generator=generator).tolist()


def run_to_end(
    scheduler: Scheduler,
    execute: Callable[[StepPlan], StepResult],
    *requests: Request,
    cancel_at: Mapping[int, str] | None = None,
    ahead: bool = False,
) -> dict[tuple[str, int], list[int]]:
    """Run the requests and return tokens by (request id, sample).

    `cancel_at` maps step counts to requests to cancel. With `ahead`, a step is planned before the previous result is applied.
    """
    for request in requests:
        scheduler.add(request)
    out: dict[tuple[str, int], list[int]] = {}
    step, waiting = 0, None
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None or waiting is not None
        result = None if plan is None else execute(plan)
        if ahead:
            result, waiting = waiting, result
        if result is not None:
            scheduler.apply(result)
        step += 1
        if cancel_at and step in cancel_at:
            scheduler.cancel(cancel_at[step])
        for delta in scheduler.deltas():
            out.setdefault((delta.request_id, delta.sample), []).extend(delta.token_ids)
    return out


def check_pages(scheduler: Scheduler) -> None:
    """Check that only resume points hold pages."""
    arena = scheduler.page_allocator.arena
    assert arena.num_free + arena.num_reclaimable == arena.num_pages
    scheduler.drop_resume_points()
    assert arena.num_free == arena.num_pages


def compute_at_once(
    model: Gemma4, runner: Runner, layout: CacheLayout, tokens: list[int], taps: tuple[int, ...] = ()
) -> Hidden:
    """Compute `tokens` in one step without an existing cache, with logits at every position."""
    tables, page = [], 0
    for group in layout.groups:
        count = group.pages_for(len(tokens))
        tables.append(PageTable(0, tuple(range(page, page + count))))
        page += count
    passed: list[Hidden] = []
    original = model.forward

    def capture(batch: Any, pool: Any, backends: Any, own_taps: tuple[int, ...], *others: Any) -> Hidden:
        passed.append(original(batch, pool, backends, taps or own_taps, *others))
        return passed[-1]

    row = Row(0, 0, len(tokens), len(tokens), tuple(tables), (0,) * len(tables))
    model.forward = capture  # type: ignore[method-assign]
    try:
        runner.execute(StepPlan(0, (Entry(0, tuple(tokens), len(tokens), GREEDY),), (), (row,)))
    finally:
        del model.forward
    return passed[0]
