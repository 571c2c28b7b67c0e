"""Which tokens of a drafter's own KV are deferred, and when they are written."""

from __future__ import annotations

import random

import pytest

from culet.runner.deferred_kv import DeferredWrite, Ledger
from culet.types import Entry, PageTable, Row, StepPlan
from tests.samplings import GREEDY

RING_LEN = 5


def facts(writes: list[DeferredWrite]) -> list[tuple[int, int, int]]:
    return [(write.slot, write.first, write.count) for write in writes]


def decode(slot: int, start: int, num_wanted: int = 0, table: PageTable | None = None) -> Row:
    return Row(slot, start, 1, 1, (table or PageTable(0, (slot,)),), (start,), 0, num_wanted, (slot,))


def enter(ledger: Ledger, *slots: int, num_tokens: int = 3) -> None:
    """Add sequences whose prompts are computed in the same step."""
    entries = tuple(Entry(slot, (7,) * num_tokens, num_tokens, GREEDY) for slot in slots)
    rows = tuple(Row(slot, 0, num_tokens, 1, (PageTable(0, (slot,)),), (0,), draw_slots=(slot,)) for slot in slots)
    ledger.due_before(StepPlan(0, entries, (), rows))
    assert ledger.due_after(rows) == []  # a prompt's KV is written at once


def step(ledger: Ledger, *rows: Row) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return what is written before a step and what is written after it."""
    return facts(ledger.due_before(StepPlan(1, (), (), rows))), facts(ledger.due_after(rows))


def test_a_full_ring_is_written_for_all() -> None:
    ledger = Ledger(0, RING_LEN)
    enter(ledger, 0, 1)
    for start in (3, 4, 5, 6):
        assert step(ledger, decode(0, start), decode(1, start)) == ([], [])
    assert step(ledger, decode(0, 7), decode(1, 7)) == ([], [(0, 3, 5), (1, 3, 5)])
    assert step(ledger, decode(0, 8), decode(1, 8)) == ([], [])


def test_wanted_proposals_need_the_kv() -> None:
    ledger = Ledger(0, RING_LEN)
    enter(ledger, 0, 1)
    assert step(ledger, decode(0, 3), decode(1, 3)) == ([], [])
    assert step(ledger, decode(0, 4), decode(1, 4, num_wanted=2)) == ([], [(0, 3, 2), (1, 3, 2)])


def test_a_slot_without_a_row_is_written_before_the_step() -> None:
    ledger = Ledger(0, RING_LEN)
    enter(ledger, 0, 1)
    step(ledger, decode(0, 3), decode(1, 3))
    assert step(ledger, decode(1, 4)) == ([(0, 3, 1)], [])


def test_a_slot_that_is_entered_again_is_written_first() -> None:
    ledger = Ledger(0, RING_LEN)
    enter(ledger, 0)
    step(ledger, decode(0, 3))
    row = decode(0, 5)
    entry = Entry(0, (8,) * 6, 6, GREEDY)
    assert facts(ledger.due_before(StepPlan(2, (entry,), (), (row,)))) == [(0, 3, 1)]
    assert facts(ledger.due_after((row,))) == [(0, 5, 1)]  # a token of its prompt, whose pages may be shared


def test_a_verify_writes_what_was_kept() -> None:
    ledger = Ledger(0, RING_LEN)
    enter(ledger, 0)
    step(ledger, decode(0, 3))
    verify = Row(0, 4, 3, 3, (PageTable(0, (9,)),), (4,), 2, 0, (0,))
    (write,) = ledger.due_after((verify,))
    assert (write.slot, write.first, write.count) == (0, 3, 1)
    assert write.table.pages == (9,)  # the pages of the newest row


def test_a_gap_is_our_fault() -> None:
    ledger = Ledger(0, RING_LEN)
    enter(ledger, 0)
    step(ledger, decode(0, 3))
    with pytest.raises(AssertionError, match="slot 0: token 5 does not follow"):
        step(ledger, decode(0, 5))


def test_pieces_are_cut_at_pages_and_begin_in_the_table() -> None:
    write = DeferredWrite(2, 5, 9, PageTable(1, (40, 41, 42)))
    assert list(write.pieces(4)) == [(2, 5, 3, 40), (2, 8, 4, 41), (2, 12, 2, 42)]
    behind_window = DeferredWrite(2, 5, 9, PageTable(2, (41, 42)))
    assert list(behind_window.pieces(4)) == [(2, 8, 4, 41), (2, 12, 2, 42)]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_written_once(seed: int) -> None:
    """Sequences come and go, and want proposals only now and then."""
    chance, ledger = random.Random(seed), Ledger(0, RING_LEN)
    starts: dict[int, int] = {}  # start of the next row, by slot
    kept: dict[int, list[int]] = {}  # positions whose features are in the ring, by slot
    num_written = 0
    for step_id in range(300):
        entries = []
        if chance.random() < 0.08:
            slot = chance.randrange(4)
            starts[slot] = chance.randint(3, 9)
            entries.append(Entry(slot, (7,) * starts[slot], starts[slot], GREEDY))
        if chance.random() < 0.05 and len(starts) > 1:
            del starts[chance.choice(list(starts))]
        wanted = 3 if chance.random() < 0.1 else 0
        rows = tuple(decode(slot, start, wanted) for slot, start in starts.items())
        before = ledger.due_before(StepPlan(step_id, tuple(entries), (), rows))
        for write in before:
            assert list(range(write.first, write.first + write.count)) == kept.pop(write.slot)
        assert set(kept) <= set(starts)
        for slot, start in starts.items():
            kept.setdefault(slot, []).append(start)
        for write in ledger.due_after(rows):
            assert list(range(write.first, write.first + write.count)) == kept.pop(write.slot)
            num_written += write.count
        assert not (wanted and kept)
        assert all(len(positions) < RING_LEN for positions in kept.values())
        starts = {slot: start + 1 for slot, start in starts.items()}
    assert num_written > 50
