"""What a step's rows ask to be drawn, and how a step is like the one before it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from culet.types import Row


class DrawGroup(NamedTuple):
    """The draws of one slot in a step: one, or after drafts one per draft and one more, at consecutive positions."""

    slot: int
    row: int  # whose logits they are drawn from
    source: int  # which of the tokens with logits the first is drawn from; the next ones follow it
    position: int  # of the first
    num_drafts: int
    num_wanted: int  # proposals to make for the next step
    first: int  # number of the first draw within the step

    @property
    def size(self) -> int:
        return self.num_drafts + 1


def draw_groups(rows: Sequence[Row]) -> list[DrawGroup]:
    """The draws that a step's rows ask for, in the order of the result."""
    groups: list[DrawGroup] = []
    end = first = 0
    for index, row in enumerate(rows):
        end += row.num_logits
        assert not row.num_drafts or len(row.draw_slots) == 1, "samples that share logits cannot have drafts"
        source, position = end - 1 - row.num_drafts, row.start + row.num_new - row.num_drafts
        for slot in row.draw_slots:
            # Samples that fork have pages of their own from the next step on: a drafter could not keep them apart in this one.
            num_wanted = row.num_wanted if slot == row.slot else 0
            group = DrawGroup(slot, index, source, position, row.num_drafts, num_wanted, first)
            groups.append(group)
            first += group.size
    return groups


def has_drafts(rows: Sequence[Row]) -> bool:
    return any(row.num_drafts for row in rows)


def is_repeated(rows: Sequence[Row], before: Sequence[Row]) -> bool:
    """Whether steps of fixed shape differ in where their rows begin, and in the pages they are in, alone."""
    if len(rows) != len(before):
        return False
    for row, last in zip(rows, before, strict=True):
        if row.slot != last.slot or row.num_new != last.num_new or row.num_wanted != last.num_wanted:
            return False
    return True


def draws_follow_rows(rows: Sequence[Row], groups: Sequence[DrawGroup]) -> bool:
    """Whether there is one draw for each token of the step, in their order and for the slots they belong to."""
    return len(groups) == len(rows) and all(
        group.slot == row.slot and group.size == row.num_new for row, group in zip(rows, groups, strict=True)
    )


def moved(row: Row, count: int) -> Row:
    """An open row that begins `count` tokens later."""
    assert 0 <= count <= row.num_open, f"slot {row.slot}: {count} drafts accepted of {row.num_open}"
    return row.later(count)._replace(num_open=0)
