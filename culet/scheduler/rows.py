"""One row of a plan: how large it can be with the pages at hand, and what planning it does to its sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from culet.scheduler.budget import Grant
from culet.scheduler.page_allocator import PageAllocator
from culet.scheduler.sequence import MAX_TRAIL, Sequence
from culet.types import Row


@dataclass(slots=True)
class PlannedRow:
    """A row of a plan, and the sequences that wait for its result."""

    row: Row
    owner: Sequence
    drawers: list[Sequence]  # in the order of row.draw_slots: the owner first, if it draws
    resume_points: tuple[int, ...] = ()  # lengths at which its pages can be resumed from, and are worth a checkpoint

    @property
    def members(self) -> list[Sequence]:
        """All sequences that it is a row of."""
        return self.drawers or [self.owner]


@dataclass(frozen=True, slots=True)
class RowShape:
    """A row before its pages are taken."""

    num_new: int
    num_drafts: int
    num_logits: int
    store_from: tuple[int, ...]  # per KV group
    num_missing: tuple[int, ...]  # fresh pages, per KV group
    draws: bool  # it reaches the sequence's last token
    resume_points: tuple[int, ...]  # of the sequence's, those at which its pages can be resumed from


def shape_row(one: Sequence, num_new: int, num_drafts: int, *, first_point: int = 0) -> RowShape:
    """A row of `num_new` tokens for `one`, which stores what resuming at its points from `first_point` on takes."""
    draws = num_new - num_drafts == one.num_uncomputed
    num_logits = num_new if one.is_scored_next else num_drafts + 1 if draws else 0
    end = one.num_computed + num_new
    most = end + one.num_open  # where it ends if all drafts in flight are accepted
    points = tuple([point for point in one.resume_points if max(first_point, end - MAX_TRAIL) <= point <= end])
    # A checkpoint can also be resumed from one token before its end, so that is the first query to see everything.
    num_queries = max(num_logits, end - points[0] + 1) if points else num_logits
    store_from = tuple([pages.first_stored(one.num_computed, num_new, num_queries) for pages in one.groups])
    missing = tuple([p.num_missing(most + p.ahead * draws, first) for p, first in zip(one.groups, store_from, strict=True)])
    return RowShape(num_new, num_drafts, num_logits, store_from, missing, draws, points)


def largest_row(grant: Grant, num_pages: int, num_spared: int) -> RowShape | None:
    """The granted row, without drafts or with a shorter chunk if `num_pages` do not suffice; None: not even one token.

    What only a resume point within it needs is stored where that leaves `num_spared` pages for others.
    """
    num_new, num_drafts = grant.num_new, grant.num_drafts
    while True:
        shape = shape_row(grant.sequence, num_new, num_drafts)
        if shape.resume_points and sum(shape.num_missing) + num_spared > num_pages:
            shape = shape_row(grant.sequence, num_new, num_drafts, first_point=grant.sequence.num_computed + num_new)
        if sum(shape.num_missing) <= num_pages:
            return shape
        if num_new == 1:
            return None
        num_new, num_drafts = (num_new - num_drafts, 0) if num_drafts else (num_new // 2, 0)


def commit_row(one: Sequence, shape: RowShape, page_allocator: PageAllocator, num_wanted: int = 0) -> PlannedRow:
    """Take the row's pages and count it as computed, but for what only its result can tell.

    If it draws, `num_wanted` proposals are to be made for the step after it.
    """
    assert one.slot is not None
    end = one.num_computed + shape.num_new
    for pages, first, count in zip(one.groups, shape.store_from, shape.num_missing, strict=True):
        pages.extend(end + one.num_open + pages.ahead * shape.draws, first, page_allocator.take(count) if count else [])
    one.tables = tuple([pages.table for pages in one.groups])
    one.calm_until = min([pages.calm_until for pages in one.groups])
    row = Row(
        slot=one.slot,
        start=one.num_computed,
        num_new=shape.num_new,
        num_logits=shape.num_logits,
        tables=one.tables,
        store_from=shape.store_from,
        num_drafts=shape.num_drafts,
        num_wanted=num_wanted if shape.draws else 0,
        draw_slots=(one.slot,) if shape.draws else (),
        is_prompt_logprobs=one.is_scored_next,
        num_open=one.num_open,
    )
    if one.is_scored_next:
        one.num_scored = end
    one.num_computed = end - shape.num_drafts
    one.num_proposed = num_wanted if shape.draws else 0
    one.num_open += shape.num_drafts
    one.rows_in_flight += 1
    one.draws_in_flight += shape.draws
    one.awaits_drafts = bool(shape.num_drafts or num_wanted)
    one.resume_points = tuple([point for point in one.resume_points if point > end]) if one.resume_points else ()
    return PlannedRow(row, one, [one] if shape.draws else [], shape.resume_points)


def drafts_to_go_on(running: Iterable[Sequence], budget: int, *, is_open: bool) -> list[int] | None:
    """Drafts that each of `running` goes on with, beside the token before them; None where one cannot, or begins.

    `is_open`: drafts of their last rows are in flight.
    """
    counts = []
    for one in running:
        if one.prefill_end > one.num_computed or one.num_uncomputed != 1:
            return None
        if not (one.is_plain and one.num_left > 0 if is_open else one.is_ready):
            return None
        counts.append(one.num_useful_drafts if one.num_proposed else 0)
    num_drafts = sum(counts)
    return counts if len(counts) + num_drafts <= budget and (num_drafts or not is_open) else None


def go_on(one: Sequence, num_drafts: int, num_wanted: int) -> PlannedRow:
    """What `commit_row` gives for a token more and drafts, where the sequence is calm; most rows are such, so it is quick."""
    slot, start, num_new = one.slot, one.num_computed, 1 + num_drafts
    assert slot is not None
    stored = (start,) * len(one.tables)
    row = Row(slot, start, num_new, num_new, one.tables, stored, num_drafts, num_wanted, (slot,), False, one.num_open)
    one.num_computed = start + 1
    one.num_proposed = num_wanted
    one.num_open += num_drafts
    one.rows_in_flight += 1
    one.draws_in_flight += 1
    one.awaits_drafts = num_drafts + num_wanted > 0
    return PlannedRow(row, one, [one])


def decode_shape(planned: Iterable[PlannedRow]) -> tuple[int, int] | None:
    """Sequences of a step and the most drafts that one of them has; None where any row is a prompt's."""
    num_rows = most = 0
    for plan in planned:
        row = plan.row
        if not row.num_new == row.num_drafts + 1 == row.num_logits:
            return None
        num_rows, most = num_rows + 1, max(most, row.num_drafts)
    return num_rows, most
