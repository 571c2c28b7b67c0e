"""Decide what towers encode beside the next step, and count what steps use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from culet.scheduler.fairness import FairQueue
from culet.scheduler.media.features import NOTHING, EncoderPlan, FeatureLedger
from culet.scheduler.page_allocator import PageAllocator
from culet.scheduler.reuse import find_prefix
from culet.scheduler.rows import PlannedRow
from culet.scheduler.sequence import Sequence
from culet.scheduler.stats import Counters
from culet.types import Request

MAX_AHEAD = 16  # waiting sequences whose media are encoded before they start


def plan_encoding(
    features: FeatureLedger | None, running: Iterable[Sequence], waiting: FairQueue, page_allocator: PageAllocator, budget: int
) -> EncoderPlan:
    """Decide what to encode beside the next step. If nothing decodes, nothing can stall, so `budget` tokens are encoded."""
    if features is None or not features.has_work:
        return NOTHING
    is_decoding = any(seq.num_uncomputed == 1 for seq in running)
    return features.plan(_needs(running, waiting, page_allocator), features.max_step_tokens if is_decoding else budget)


def _needs(running: Iterable[Sequence], waiting: FairQueue, page_allocator: PageAllocator) -> Iterator[tuple[Request, int]]:
    """Yield the requests with media and how far each is computed, those that run or start first coming first."""
    for seq in running:
        start = seq.num_computed + seq.num_underway  # the first leg has read the features
        if seq.features is not None and start < seq.media_end:
            yield seq.request, start
    for seq in waiting.next_ones(MAX_AHEAD):
        if seq.features is not None:
            yield seq.request, find_prefix(seq, page_allocator).resume


def count_media(
    features: FeatureLedger | None, encoding: EncoderPlan, planned: Iterable[PlannedRow], counters: Counters
) -> None:
    """Count what a step encodes, and which spans find features that were used before."""
    if features is None or not features.has_work:
        return
    counters.encoded_items += len(encoding.encodes)
    counters.encoded_tokens += encoding.num_tokens
    for plan in planned:
        row = plan.row
        if plan.owner.features is not None and row.start < plan.owner.media_end and row.leg.is_first:
            for span in plan.owner.request.media:
                if row.start <= span.start < row.start + row.num_new:
                    counters.feature_hits += features.use(span)
