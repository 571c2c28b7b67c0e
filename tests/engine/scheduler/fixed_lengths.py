"""A draft-length policy for tests with a fixed length that learns nothing."""

from __future__ import annotations

from collections.abc import Sequence

from culet.scheduler.sequence import Acceptance


class FixedLengths:
    """Always chooses the same length. Subclasses override what they test."""

    def __init__(self, num_drafts: int = 0) -> None:
        self.num_drafts = num_drafts

    def plan(self, batch: Sequence[Acceptance]) -> None:
        pass

    def length(self, state: Acceptance, num_seqs: int) -> int:
        return self.num_drafts

    def note(self, state: Acceptance, num_drafts: int, num_accepted: int) -> None:
        pass

    def ended(self, state: Acceptance) -> None:
        pass

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        pass
