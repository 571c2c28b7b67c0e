"""List the tokens that a step's rows ask to draw. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from culet.types import Row


class DrawGroup(NamedTuple):
    """The draws of one slot in a step, at consecutive positions. There is one for each draft and one more."""

    slot: int
    row: int  # the row whose logits they are drawn from
    source: int  # index of the token with logits that the first is drawn from (the others follow)
    position: int  # position of the first draw
    num_drafts: int
    num_wanted: int  # number of proposals to make for the next step
    first: int  # index of the first draw within the step
    is_bound: bool = False  # the draws may need masks
    min_accepted: int = 0  # make no proposals if fewer drafts are accepted

    @property
    def size(self) -> int:
        return self.num_drafts + 1


def draw_groups(rows: Sequence[Row]) -> list[DrawGroup]:
    """Return the draws of a step, in the order of its result."""
    groups: list[DrawGroup] = []
    end = first = 0
    for index, row in enumerate(rows):
        end += row.num_logits
        num_drafts = row.num_drafts
        assert not num_drafts or len(row.draw_slots) == 1, "samples that share logits cannot have drafts"
        source, position = end - 1 - num_drafts, row.start + row.num_new - num_drafts
        for slot in row.draw_slots:
            # Samples that fork get their own pages in the next step. In this step, a drafter could not keep them apart.
            num_wanted = row.num_wanted if slot == row.slot else 0
            least = row.min_accepted
            groups.append(DrawGroup(slot, index, source, position, num_drafts, num_wanted, first, row.is_bound, least))
            first += num_drafts + 1
    return groups


def has_drafts(rows: Sequence[Row]) -> bool:
    return any(row.num_drafts for row in rows)


def draws_follow_tokens(rows: Sequence[Row], groups: Sequence[DrawGroup]) -> bool:
    """Return whether there is one draw for each token of the step, in order and for the token's own slot."""
    return [(group.slot, group.num_drafts + 1) for group in groups] == [(row.slot, row.num_new) for row in rows]
