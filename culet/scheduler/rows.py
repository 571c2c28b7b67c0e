"""Plan one row of a step. Find its largest size with the available pages, and update its sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from culet.cache.prefix import POINT_SLACK
from culet.scheduler.budget import Grant, StepBudget
from culet.scheduler.draft_length import DraftLengths
from culet.scheduler.page_allocator import PageAllocator
from culet.scheduler.sequence import MAX_TRAIL, Sequence
from culet.types import WHOLE, Row, StepResult


@dataclass(slots=True)
class PlannedRow:
    """A row of a plan, and the sequences that wait for its result."""

    row: Row
    owner: Sequence
    drawers: list[Sequence]  # in the order of row.draw_slots, with the owner first if it draws
    resume_lengths: tuple[int, ...] = ()  # lengths worth a resume point that its pages can be resumed at

    @property
    def members(self) -> list[Sequence]:
        """All sequences that share this row."""
        return self.drawers or [self.owner]


@dataclass(frozen=True)
class PlannedStep:
    """A step whose result is not there yet."""

    step_id: int
    planned: list[PlannedRow]
    planned_at: float  # on the scheduler's clock
    is_slowed: bool = False  # by encoding media or by moving pages, which takes its own time

    @cached_property
    def leg_row(self) -> Row | None:
        """The row for which only some of the layers run, if there is one."""
        # Identity is several times faster than a property, and this runs for every row of every step.
        return next((plan.row for plan in self.planned if plan.row.leg is not WHOLE), None)

    @cached_property
    def num_tokens(self) -> int:
        """Its new tokens. Those of a chunk in legs count with the last one."""
        num_tokens = sum([plan.row.num_new for plan in self.planned])
        return num_tokens if self.leg_row is None or self.leg_row.leg.is_last else num_tokens - self.leg_row.num_new

    @property
    def is_timed(self) -> bool:
        """Whether its time says how long its tokens take. That of a leg does not."""
        return not self.is_slowed and self.leg_row is None

    @property
    def chunk_tokens(self) -> int:
        """The tokens of rows that do not just decode."""
        return sum([plan.row.num_new for plan in self.planned if plan.row.num_new > plan.row.num_drafts + 1])

    @cached_property
    def shape(self) -> tuple[int, int, int] | None:
        return decode_shape(self.planned) if self.is_timed and self.planned else None


class StepTimer:
    """Learns how long steps take, for the size of chunks and the number of drafts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_shape: tuple[int, int, int] | None = None  # of the last step with a result
        self._last_end = 0.0  # when that result came

    def ended(self, step: PlannedStep, result: StepResult, budget: StepBudget, policy: DraftLengths | None) -> None:
        """Learn from a step that has ended. The policy learns from it too if it has as many drafts as the step before."""
        now, last = self._clock(), self._last_shape
        if step.is_timed:
            chunk_tokens = step.chunk_tokens if budget.decode_factor else 0
            budget.took(step.num_tokens, now - max(self._last_end, step.planned_at), chunk_tokens)
        # The time of a step that made fewer proposals than it was asked for says nothing about others.
        shape = step.shape if result.num_proposed == sum([plan.row.num_wanted for plan in step.planned]) else None
        if policy is not None and shape and last and shape[2] == last[2]:
            policy.took(*shape, now - self._last_end)
        self._last_shape, self._last_end = shape, now


@dataclass(frozen=True, slots=True)
class RowShape:
    """A row before its pages are taken."""

    num_new: int
    num_drafts: int
    num_logits: int
    store_from: tuple[int, ...]  # per KV group
    num_missing: tuple[int, ...]  # fresh pages, per KV group
    draws: bool  # whether it reaches the sequence's last token
    resume_lengths: tuple[int, ...]  # the sequence's resume lengths that its pages can be resumed at


def shape_row(seq: Sequence, num_new: int, num_drafts: int, slack: int = POINT_SLACK) -> RowShape:
    """Return the shape of a row of `num_new` tokens.

    The row also stores the tokens needed to resume at its resume lengths, and as many as `slack` tokens before them. Without
    slack, it stores no more than it must, and only its end can be a resume length.
    """
    draws = num_new - num_drafts == seq.num_uncomputed
    num_logits = num_new if seq.is_scored_next else num_drafts + 1 if draws else 0
    end = seq.num_computed + num_new
    max_end = end + seq.num_open  # the end if all drafts in flight are accepted
    first_length = end - MAX_TRAIL if slack else end
    lengths = tuple([length for length in seq.resume_lengths if first_length <= length <= end])
    # The query `slack` tokens before the first of them is the first whose keys must all be stored.
    num_queries = max(num_logits, end - lengths[0] + slack) if lengths else num_logits
    store_from = tuple([pages.first_stored(seq.num_computed, num_new, num_queries) for pages in seq.groups])
    missing = tuple([p.num_missing(max_end + p.ahead * draws, first) for p, first in zip(seq.groups, store_from, strict=True)])
    return RowShape(num_new, num_drafts, num_logits, store_from, missing, draws, lengths)


def largest_row(grant: Grant, num_pages: int, num_spared: int) -> RowShape | None:
    """Return the shape of the granted row, without drafts or with a shorter chunk if `num_pages` pages are not enough.

    Return None if no chunk fits. Tokens that only a resume length needs are stored if `num_spared` pages remain for others.
    """
    seq, num_new, num_drafts = grant.sequence, grant.num_new, grant.num_drafts
    while True:
        for slack in (POINT_SLACK, 1, 0):  # a point can then be resumed some tokens before its end, at one, or not be there
            shape = shape_row(seq, num_new, num_drafts, slack)
            if not shape.resume_lengths or sum(shape.num_missing) + num_spared <= num_pages:
                break
        if sum(shape.num_missing) <= num_pages:
            return shape
        if num_drafts:
            num_new, num_drafts = num_new - num_drafts, 0
        elif num_new > seq.min_chunk:
            num_new = seq.chunk_within(num_new // 2) or seq.min_chunk
        else:
            return None


def commit_row(seq: Sequence, shape: RowShape, page_allocator: PageAllocator, num_wanted: int = 0) -> PlannedRow:
    """Take the row's pages and count its tokens as computed, except those that depend on its result.

    If the row draws, it asks the drafter for `num_wanted` proposals for the next step.
    """
    assert seq.slot is not None
    end = seq.num_computed + shape.num_new
    for pages, first, count in zip(seq.groups, shape.store_from, shape.num_missing, strict=True):
        if first > seq.num_computed:
            pages.stored_from = first
        pages.extend(end + seq.num_open + pages.ahead * shape.draws, first, page_allocator.take(count) if count else [])
    seq.tables = tuple([pages.table for pages in seq.groups])
    seq.unchanged_until = min([pages.unchanged_until for pages in seq.groups])
    row = Row(
        slot=seq.slot,
        start=seq.num_computed,
        num_new=shape.num_new,
        num_logits=shape.num_logits,
        tables=seq.tables,
        store_from=shape.store_from,
        num_drafts=shape.num_drafts,
        num_wanted=num_wanted if shape.draws else 0,
        draw_slots=(seq.slot,) if shape.draws else (),
        is_prompt_logprobs=seq.is_scored_next,
        num_open=seq.num_open,
        is_bound=seq.is_bound,
        min_accepted=seq.acceptance.min_accepted if shape.num_drafts else 0,
    )
    if seq.is_scored_next:
        seq.num_scored = end
    seq.num_computed = end - shape.num_drafts
    seq.num_proposed = num_wanted if shape.draws else 0
    seq.num_open += shape.num_drafts
    seq.rows_in_flight += 1
    seq.draws_in_flight += shape.draws
    seq.awaits_drafts = bool(shape.num_drafts or num_wanted)
    seq.resume_lengths = tuple([length for length in seq.resume_lengths if length > end]) if seq.resume_lengths else ()
    return PlannedRow(row, seq, [seq] if shape.draws else [], shape.resume_lengths)


def num_wanted(seq: Sequence, max_drafts: int, policy: DraftLengths | None, num_seqs: int) -> int:
    """Return how many of at most `max_drafts` proposals to make after the token that `seq` is about to draw.

    `num_seqs` sequences, including those that are about to start, will decode together.
    """
    count = max_drafts if policy is None else policy.length(seq.acceptance, max(1, num_seqs))
    return max(0, min(count, seq.num_left - 2))  # the token drawn now and the one after the last draft need no proposal


def drafts_to_continue(running: Iterable[Sequence], budget: int, max_changing: int, *, is_open: bool) -> list[int] | None:
    """Return how many drafts each of `running` verifies with its next token.

    Return None if one of them cannot continue or is still in its prompt, or if more than `max_changing` of them need other
    pages. `is_open` means that drafts of their last rows are in flight.
    """
    counts = []
    num_changing = 0
    for seq in running:
        if seq.prefill_end > seq.num_computed or seq.num_uncomputed != 1:
            return None
        if not (seq.is_plain and seq.num_left > 0 if is_open else seq.is_ready):
            return None
        counts.append(seq.num_useful_drafts if seq.num_proposed else 0)
        num_changing += not seq.pages_unchanged(1 + counts[-1])
    num_drafts = sum(counts)
    fits = len(counts) + num_drafts <= budget and num_changing <= max_changing
    return counts if fits and (num_drafts or not is_open) else None


def continue_in_pages(seq: Sequence, num_drafts: int, num_wanted: int) -> PlannedRow:
    """Do what `commit_row` does for one more token and its drafts, if `pages_unchanged`. Most rows take this fast path."""
    slot, start, num_new = seq.slot, seq.num_computed, 1 + num_drafts
    assert slot is not None
    stored = (start,) * len(seq.tables)
    num_open, is_bound, least = seq.num_open, seq.is_bound, seq.acceptance.min_accepted if num_drafts else 0
    counts = num_new, num_new, seq.tables, stored, num_drafts, num_wanted
    row = Row(slot, start, *counts, (slot,), False, num_open, is_bound, least)
    seq.num_computed = start + 1
    seq.num_proposed = num_wanted
    seq.num_open += num_drafts
    seq.rows_in_flight += 1
    seq.draws_in_flight += 1
    seq.awaits_drafts = num_drafts + num_wanted > 0
    return PlannedRow(row, seq, [seq])


def decode_shape(planned: Iterable[PlannedRow]) -> tuple[int, int, int] | None:
    """Return (sequences, sequences with drafts, most drafts of one) of a step that only decodes.

    The step must also ask for as many drafts as it verifies. Return None for other steps, whose time says nothing about
    decoding.
    """
    num_rows = num_drafting = num_drafts = num_wanted = 0
    for plan in planned:
        row = plan.row
        if not row.num_new == row.num_drafts + 1 == row.num_logits:
            return None
        num_rows, num_drafting = num_rows + 1, num_drafting + (row.num_drafts > 0)
        num_drafts, num_wanted = max(num_drafts, row.num_drafts), max(num_wanted, row.num_wanted)
    return (num_rows, num_drafting, num_drafts) if num_drafts == num_wanted else None
