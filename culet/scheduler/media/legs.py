"""Decide which chunks go through the layers in several steps, some of the layers in each (decision 26).

An image whose tokens see each other cannot be cut along its tokens. On a large model, its chunk makes a step so long that
running answers wait noticeably. So the chunk is cut along the layers into **legs**: the first layers run in one step, the next
ones in the next step that has room, and so on. Until the last leg, nothing of the chunk counts as computed, but its sequence
keeps the pages. It continues with exactly this chunk, unless it loses its pages or ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sized
from collections.abc import Sequence as Rows

from culet.scheduler.rows import PlannedRow, RowShape
from culet.scheduler.sequence import Sequence
from culet.scheduler.stats import Counters
from culet.types import Leg

MAX_LEGS = 8  # more would delay the first token without making steps noticeably shorter


class Legs:
    """The chunk that has begun its legs. There is one at a time, because the runner keeps its hidden states."""

    def __init__(self, leg_tokens: int, most: int, running: Collection[Sequence], waiting: Sized, counters: Counters) -> None:
        """Cut chunks of more than `leg_tokens` tokens (0: none) and at most `most`, which every later step has room for.

        A leg takes about as long as `leg_tokens` tokens do in all layers. `running` and `waiting` are the scheduler's.
        """
        self.leg_tokens, self._most, self._counters = leg_tokens, most, counters
        self._running, self._waiting = running, waiting
        self._begun: PlannedRow | None = None  # the row as it would have been planned as a whole, and its last leg

    def shape_of(self, seq: Sequence) -> RowShape | None:
        """Return the shape of the next row of `seq` if it is another leg, which already has all its pages."""
        if not seq.num_underway:
            return None
        assert self._begun is not None
        assert self._begun.owner is seq, "another sequence's chunk is underway"
        row = self._begun.row
        assert (row.start, row.num_new) == (seq.num_computed, seq.num_underway), "a chunk has changed between its legs"
        missing = (0,) * len(row.store_from)
        return RowShape(
            row.num_new, 0, row.num_logits, row.store_from, missing, bool(row.draw_slots), self._begun.resume_lengths
        )

    def is_full(self, planned: Rows[PlannedRow]) -> bool:
        """Return whether no other prompt starts in a step: beside a leg, or if its images take long for so few that wait."""
        if not self.leg_tokens:
            return False
        if any(plan.owner.num_underway for plan in planned):
            return True
        chunks = [plan for plan in planned if plan.row.num_new > 1]
        if len(chunks) == len(planned) or not any(_has_image(plan) for plan in chunks):
            return False
        # Without the half, images that arrive a little faster than legs run would pile up, and then run together in a long step
        # (docs/log/towers.md, "Legs, simulated").
        return sum(plan.row.num_new for plan in chunks) >= self.leg_tokens * (1 + self._num_waiting(chunks)) / 2

    def mark(self, planned: list[PlannedRow]) -> list[PlannedRow]:
        """Say which layers run for the rows of a step. At most one row is a leg. Return the rows."""
        if going_on := next((plan for plan in planned if plan.owner.num_underway), None):
            assert self._begun is not None
            begin, count = self._begun.row.leg.end, self._begun.row.leg.of
            # If no answer is running any more, all other layers run at once.
            self._run(going_on, Leg(begin, begin + 1 if len(planned) > 1 else count, count))
        elif (chosen := self._choose(planned)) is not None:
            self._counters.chunks_in_legs += 1
            self._run(chosen, Leg(0, 1, self._num_legs(chosen)))
        return planned

    def _num_legs(self, plan: PlannedRow) -> int:
        """Return how many legs a chunk has. Each delays the prompts that wait, so the more wait, the fewer legs."""
        most = min(MAX_LEGS, -(-plan.row.num_new // self.leg_tokens))
        return -(-most // (1 + self._num_waiting([plan])))

    def _num_waiting(self, chunks: Rows[PlannedRow]) -> int:
        """Return how many prompts have not started, or not ended, besides those of `chunks`."""
        owners = [plan.owner for plan in chunks]
        return len(self._waiting) + sum(seq.num_uncomputed > 1 and seq not in owners for seq in self._running)

    def _choose(self, planned: Rows[PlannedRow]) -> PlannedRow | None:
        """Return the row to cut: a step's only chunk, if it has an image that is computed as a whole, beside decoding."""
        chunks = [plan for plan in planned if plan.row.num_new > 1] if self.leg_tokens else []
        if len(chunks) != 1 or len(planned) == 1 or (self._begun is not None and self._begun.owner.num_underway):
            return None
        [chunk] = chunks
        if chunk.row.num_new > self._most or chunk.owner.sampling.prompt_logprobs is not None:
            return None
        return chunk if _has_image(chunk) and self._num_legs(chunk) > 1 else None

    def _run(self, plan: PlannedRow, leg: Leg) -> None:
        """Turn a row into a leg. Unless it is the last one, undo the progress of its sequence, but let it keep its pages."""
        seq, row = plan.owner, plan.row._replace(leg=leg)
        plan.row = row
        if leg.is_last:
            seq.num_underway, self._begun = 0, None
            return
        self._begun = PlannedRow(row, seq, list(plan.drawers), plan.resume_lengths)
        seq.num_underway, seq.num_computed = row.num_new, row.start
        seq.draws_in_flight -= len(plan.drawers)
        for pages, first in zip(seq.groups, row.store_from, strict=True):
            if first > row.start:  # the tokens that the row skips are not computed yet
                pages.go_back(row.start)
        plan.row, plan.drawers = row._replace(num_logits=0, draw_slots=()), []


def _has_image(plan: PlannedRow) -> bool:
    """Return whether a row has an image that is computed as a whole."""
    row = plan.row
    end = row.start + row.num_new
    return any(span.is_whole and row.start <= span.start < end for span in plan.owner.request.media)
