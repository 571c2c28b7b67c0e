"""Decide which chunks run in two steps, each with half of the layers (decision 26).

An image whose tokens see each other cannot be cut along its tokens. On a large model, its chunk makes a step so long that
running answers wait noticeably. So the chunk's first half of the layers runs in one step, and the second half in the next
step that has room. In between, nothing of the chunk counts as computed, but its sequence keeps the pages. It continues with
exactly this chunk, unless it loses its pages or ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from culet.scheduler.rows import PlannedRow, RowShape
from culet.scheduler.sequence import Sequence
from culet.scheduler.stats import Counters
from culet.types import Half


class Halves:
    """The chunk whose first half has been planned. There is one at a time, because the runner keeps its hidden states."""

    def __init__(self, least: int, most: int, counters: Counters) -> None:
        """Halve chunks of at least `least` tokens (0: none) and at most `most`, which every later step has room for."""
        self.least, self._most, self._counters = least, most, counters
        self._begun: PlannedRow | None = None  # as it would have been planned as a whole

    def shape_of(self, seq: Sequence) -> RowShape | None:
        """Return the shape of the next row of `seq` if it is a second half, which already has all its pages."""
        if not seq.halved:
            return None
        assert self._begun is not None
        assert self._begun.owner is seq, "another sequence's chunk is in halves"
        row = self._begun.row
        assert (row.start, row.num_new) == (seq.num_computed, seq.halved), "a chunk has changed between its halves"
        missing = (0,) * len(row.store_from)
        return RowShape(
            row.num_new, 0, row.num_logits, row.store_from, missing, bool(row.draw_slots), self._begun.resume_lengths
        )

    def num_left(self, budget: int, planned: Rows[PlannedRow]) -> int:
        """Return how many of a step's tokens are left for new prompts.

        None starts beside a second half, since that would make the step as long as without halves.
        """
        return 0 if any(plan.owner.halved for plan in planned) else budget - sum(plan.row.num_new for plan in planned)

    def mark(self, planned: list[PlannedRow]) -> list[PlannedRow]:
        """Mark the rows of a step that are halves. At most one is. Return the rows."""
        if ending := next((plan for plan in planned if plan.owner.halved), None):
            ending.row = ending.row._replace(which_half=Half.SECOND)
            ending.owner.halved, self._begun = 0, None
        elif self.least and (chosen := self._choose(planned)) is not None:
            self._begin(chosen)
        return planned

    def _choose(self, planned: Rows[PlannedRow]) -> PlannedRow | None:
        """Return the row to halve: a step's only chunk, if it has an image that is computed as a whole, beside decoding."""
        chunks = [plan for plan in planned if plan.row.num_new > 1]
        if len(chunks) != 1 or len(planned) == 1 or (self._begun is not None and self._begun.owner.halved):
            return None
        row, seq = chunks[0].row, chunks[0].owner
        end = row.start + row.num_new
        if not self.least <= row.num_new <= self._most or seq.sampling.prompt_logprobs is not None:
            return None
        if any(first > row.start for first in row.store_from):  # pages with holes could not be kept for later
            return None
        has_image = any(span.is_whole and row.start <= span.start < end for span in seq.request.media)
        return chunks[0] if has_image else None

    def _begin(self, plan: PlannedRow) -> None:
        """Turn a row into a first half, and put its sequence back to where it was, apart from its pages."""
        seq, row = plan.owner, plan.row
        self._begun = PlannedRow(row, seq, list(plan.drawers), plan.resume_lengths)
        seq.halved, seq.num_computed = row.num_new, row.start
        seq.draws_in_flight -= len(plan.drawers)
        plan.row, plan.drawers, plan.resume_lengths = row._replace(which_half=Half.FIRST, num_logits=0, draw_slots=()), [], ()
        self._counters.halved_chunks += 1
