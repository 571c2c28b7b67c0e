"""Which tokens of a drafter's own KV are written late, and when."""

from __future__ import annotations

import random

import pytest

from culet.runner.deferred_kv import LateWrite, Ledger
from culet.runner.draw_plan import is_repeated
from culet.types import Entry, PageTable, Row, StepPlan
from tests.samplings import GREEDY

ROOM = 5


def facts(late: list[LateWrite]) -> list[tuple[int, int, int, PageTable]]:
    return [(one.slot, one.first, one.count, one.table) for one in late]


@pytest.mark.parametrize("seed", range(20))
def test_steps_like_the_last_one_change_nothing(seed: int) -> None:
    """Sequences that come, go, change pages and want drafts now and then: with the short way for repeated steps or without."""
    chance, asked, short = random.Random(seed), Ledger(0, ROOM), Ledger(0, ROOM)
    places: dict[int, int] = {}  # start of the next row, by slot
    tables = {slot: (PageTable(0, (slot,) * 50),) for slot in range(4)}
    before: tuple[Row, ...] | None = None
    num_repeated = 0
    for step_id in range(300):
        entries = []
        if chance.random() < 0.08:
            slot = chance.randrange(4)
            places[slot] = chance.randint(3, 9)
            tables[slot] = (PageTable(0, (slot, step_id)),)
            entries.append(Entry(slot, (7,) * places[slot], places[slot], GREEDY))
        if chance.random() < 0.05 and len(places) > 1:
            del places[chance.choice(list(places))]
        if chance.random() < 0.05 and places:
            slot = chance.choice(list(places))
            tables[slot] = (PageTable(0, (slot, step_id)),)
        wanted = 3 if chance.random() < 0.1 else 0
        rows = tuple(Row(slot, start, 1, 1, tables[slot], (start,), 0, wanted, (slot,)) for slot, start in places.items())
        plan = StepPlan(step_id, tuple(entries), (), rows)
        want = facts(asked.left(plan)), facts(asked.due(rows))
        is_short = before is not None and not entries and bool(rows) and is_repeated(rows, before)
        is_short = is_short and short.has_same_tables(rows, before) and short.goes_on()
        num_repeated += is_short
        got = ([], []) if is_short else (facts(short.left(plan)), facts(short.due(rows)))
        assert got == want
        before = rows
        places = {slot: start + 1 for slot, start in places.items()}
    assert num_repeated > 20
