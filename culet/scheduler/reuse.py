"""Find where a sequence resumes, from the prefix cache or from host memory, and keep resume points for later ones."""

from __future__ import annotations

from culet.cache.point_tree import Match
from culet.scheduler.page_allocator import PageAllocator
from culet.scheduler.rows import PlannedRow
from culet.scheduler.sequence import Sequence
from culet.scheduler.stats import Counters


def find_prefix(seq: Sequence, page_allocator: PageAllocator) -> Match:
    """Find where `seq` can resume. Prompt tokens whose log-probabilities are wanted must be computed.

    A parked sequence goes on where it was, without a point.
    """
    if seq.parked:
        return Match(None, seq.parked_len, seq.parked_len)
    prefix = page_allocator.prefix
    if prefix is None:
        return Match(None, 0, 0)
    assert seq.content is not None
    limit = min(len(seq.tokens) - 1, seq.num_scored) if seq.needs_scoring else len(seq.tokens) - 1
    match = prefix.find(seq.tokens, seq.content, limit)
    if match.point is not None:
        # Keep this point from being evicted even if the sequence must wait. The same goes for the points where the next prompt
        # may diverge.
        prefix.touch(match.point)
        for length in seq.request.resume_lengths:
            prefix.touch_at(seq.tokens, length, seq.content)
    return match


def take_known_pages(seq: Sequence, match: Match, page_allocator: PageAllocator) -> bool:
    """Give a sequence the pages of the tokens that it resumes after. Return False if they do not fit."""
    if seq.parked and match.resume:
        return seq.return_to_pages(page_allocator)
    seq.unpark(page_allocator)
    return match.point is None or seq.resume_from(match.point, match.resume, page_allocator)


def complete_start(seq: Sequence, match: Match, page_allocator: PageAllocator, counters: Counters) -> None:
    """Have the pages of a sequence that starts loaded if it was parked, and count where it resumes."""
    if seq.parked:
        counters.restored += 1
        counters.restored_tokens += match.resume
        seq.load_parked(page_allocator)
    elif page_allocator.prefix is not None:
        _count_prefix(seq, match, counters)


def _count_prefix(seq: Sequence, match: Match, counters: Counters) -> None:
    """Count the look-up of a sequence that has started. Each prompt counts once, when its request first starts."""
    if not seq.is_announced:
        seq.num_cached = min(match.resume, seq.prompt_len)
    if seq.sample or seq.was_preempted:
        counters.restart_hits += match.point is not None
        counters.restart_hit_tokens += match.resume
        return
    counters.prefix_queries += 1
    counters.prefix_query_tokens += seq.prompt_len
    counters.prefix_hits += match.point is not None
    counters.prefix_hit_tokens += match.resume


def keep_row_points(plan: PlannedRow, page_allocator: PageAllocator) -> None:
    """Keep a resume point where a prompt ends, and where later prompts may diverge.

    The latter are added last, so that they are evicted later.
    """
    seq = plan.owner
    if not plan.row.leg.is_last:  # nothing of its chunk is computed yet
        return
    if plan.row.start < seq.prefill_end == seq.num_computed:
        keep_point(seq, seq.num_computed, page_allocator)
    for length in plan.resume_lengths:
        keep_point(seq, length, page_allocator)


def keep_point(seq: Sequence, length: int, page_allocator: PageAllocator) -> None:
    """Keep a resume point at the first `length` computed tokens of `seq`."""
    prefix, tables = page_allocator.prefix, seq.raw_tables()
    # While a forked sequence waits for page copies, its parent has already kept everything it has.
    if prefix is None or not length or any(page_allocator.is_awaiting_copy(table.pages) for table in tables):
        return
    assert seq.content is not None
    prefix.insert(seq.tokens, length, seq.content, tables, [pages.stored_from for pages in seq.groups])
