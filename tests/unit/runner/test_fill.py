"""Rows as tensors, compared with a plain loop over tokens, and the checks of their pages."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from culet.cache.spec import CacheLayout, KVSpec, plan_cache
from culet.errors import InternalError
from culet.kernels.host_transfer import PackedArrays
from culet.runner.checks import check_step
from culet.runner.fill import fill
from culet.types import PageTable, Row, StepPlan

WINDOW = 20
NUM_SLABS = 400
NONE = torch.empty(0, dtype=torch.int64)  # no placeholders


def make_layout() -> CacheLayout:
    sliding = [KVSpec(layer, 2, 8, 8, WINDOW, False, 4) for layer in range(3)]
    return plan_cache([*sliding, KVSpec(3, 1, 16, 4, None, True, 4)], page_multiple=4, slab_bytes=3 * 128 * 8)


LAYOUT = make_layout()


def make_row(slot: int, start: int, num_new: int, num_logits: int, pages: random.Random) -> Row:
    """Make a row like the scheduler's, with the store rule applied and pages behind the window freed."""
    end = start + num_new
    tables, store_from = [], []
    for group in LAYOUT.groups:
        size = group.page_tokens
        stored = start if group.window is None else max(start, end - group.window - max(num_logits, 1) + 1)
        first = min(group.first_visible(start), stored) // size if start else stored // size
        tables.append(PageTable(first, tuple(pages.randrange(NUM_SLABS) for _ in range(first, (end - 1) // size + 1))))
        store_from.append(stored)
    return Row(slot, start, num_new, num_logits, tuple(tables), tuple(store_from))


def make_tokens(num_slots: int = 16, room: int = 300) -> torch.Tensor:
    return torch.arange(num_slots * room).view(num_slots, room)


def check(*rows: Row) -> None:
    num_slots, room = make_tokens().shape
    check_step(StepPlan(7, (), (), rows), LAYOUT, num_slots=num_slots, room=room, num_slabs=NUM_SLABS)


def rows_of(kind: str, seed: int) -> list[Row]:
    chance = random.Random(seed)
    rows = []
    for slot in chance.sample(range(16), chance.randint(1, 9)):
        start = chance.choice((0, 3, 19, 20, 55, 150))
        num_new = 1 if kind == "decode" else chance.choice((1, 1, 5, 21, 90))
        logits = {"decode": 1, "prefill": chance.choice((0, 1)), "mixed": chance.choice((0, 1, min(4, num_new), num_new))}[kind]
        rows.append(make_row(slot, start, num_new, logits, chance))
    return rows


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("seed", range(12))
def test_fill(kind: str, seed: int) -> None:
    rows, tokens = rows_of(kind, seed), make_tokens()
    check(*rows)
    batch = fill(rows, LAYOUT, tokens, NONE)
    token = 0
    wanted = []
    for index, row in enumerate(rows):
        assert batch.row_begin_B1[index] == token
        assert batch.context_B[index] == row.start
        facts = batch.rows[index]
        assert (facts.start, facts.num_queries) == (row.start, row.num_new)
        for offset in range(row.num_new):
            position = row.start + offset
            assert batch.positions_T[token] == position
            assert batch.token_ids_T[token] == tokens[row.slot, position]
            for group in LAYOUT.groups:
                table, size = row.tables[group.index], group.page_tokens
                slot = -1
                if position >= row.store_from[group.index]:
                    slot = table.pages[position // size - table.first] * size + position % size
                assert batch.groups[group.index].kv_address_T[token] == slot
            if offset >= row.num_new - row.num_logits:
                wanted.append(token)
            token += 1
        for group in LAYOUT.groups:
            own, table = batch.groups[group.index], row.tables[group.index]
            assert own.first_B[index] == table.first * group.page_tokens
            assert own.pages_BP[index].tolist() == [*table.pages, *[0] * (own.pages_BP.shape[1] - len(table.pages))]
            all_stored = all(own.kv_address_T[i] >= 0 for i in range(token - row.num_new, token))
            assert facts.is_stored[group.index] == all_stored
            assert own.visible_2T is None
    assert batch.num_tokens == token == batch.row_begin_B1[-1]
    assert batch.logits_index_L.tolist() == wanted
    assert (batch.tail is None) == (len(wanted) == token)


def test_placeholders_are_embedded_as_token_0() -> None:
    """In all rows, and in the tail."""
    pages = random.Random(4)
    rows = [make_row(0, 3, 5, 1, pages), make_row(2, 20, 1, 1, pages)]
    plain = fill(rows, LAYOUT, make_tokens(), NONE).token_ids_T
    batch = fill(rows, LAYOUT, make_tokens(), plain[[1, 4, 5]])
    assert batch.token_ids_T.tolist() == [
        0 if index in (1, 4, 5) else token_id for index, token_id in enumerate(plain.tolist())
    ]
    assert batch.tail is not None
    assert batch.tail.token_ids_T.tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(12))
def test_tail(seed: int) -> None:
    rows = rows_of("mixed", seed)
    batch = fill(rows, LAYOUT, make_tokens(), NONE)
    tail = batch.tail
    if tail is None:
        assert all(row.num_logits == row.num_new for row in rows)
        return
    kept = [(index, row) for index, row in enumerate(rows) if row.num_logits]
    assert torch.equal(tail.token_ids_T, batch.token_ids_T[batch.logits_index_L])
    assert torch.equal(tail.positions_T, batch.positions_T[batch.logits_index_L])
    assert tail.logits_index_L.tolist() == list(range(tail.num_tokens))
    assert tail.row_begin_B1.diff().tolist() == [row.num_logits for _, row in kept]
    for place, (index, row) in enumerate(kept):
        first = row.start + row.num_new - row.num_logits
        assert tail.context_B[place] == first
        assert (tail.rows[place].start, tail.rows[place].num_queries) == (first, row.num_logits)
        assert all(tail.rows[place].is_stored)
        for own, whole in zip(tail.groups, batch.groups, strict=True):
            assert torch.equal(own.pages_BP[place], whole.pages_BP[index])
            assert own.first_B[place] == whole.first_B[index]
        # As the name promises, every key that the tail sees is in pages.
        for group in LAYOUT.groups:
            assert group.first_visible(first) >= row.store_from[group.index] or row.store_from[group.index] == row.start
    assert tail.tail is None


def test_no_logits_at_all() -> None:
    chance = random.Random(0)
    batch = fill([make_row(0, 0, 30, 0, chance)], LAYOUT, make_tokens(), NONE)
    assert batch.logits_index_L.numel() == 0
    assert batch.tail is not None
    assert batch.tail.num_tokens == 0
    assert batch.tail.rows == ()


def spoiled(row: Row, group: int, table: PageTable) -> Row:
    tables = list(row.tables)
    tables[group] = table
    return Row(row.slot, row.start, row.num_new, row.num_logits, tuple(tables), row.store_from)


def bad_rows() -> list[tuple[str, Row]]:
    row = make_row(2, 55, 5, 1, random.Random(0))
    sliding, glob = row.tables
    later = make_row(2, 70, 5, 1, random.Random(0))  # its last token starts a new page
    return [
        (
            "group sliding.*layers 0 to 2.*row 1.*page 400",
            spoiled(row, 0, PageTable(sliding.first, (400, *sliding.pages[1:]))),
        ),
        ("group global.*layers 3.*row 1.*page -1", spoiled(row, 1, PageTable(glob.first, (*glob.pages[:-1], -1)))),
        ("group global.*layers 3.*row 1.*context position 54", spoiled(row, 1, PageTable(glob.first, glob.pages[:-1]))),
        ("group global.*layers 3.*row 1.*new position 74", spoiled(later, 1, PageTable(0, later.tables[1].pages[:-1]))),
        (
            "group sliding.*layers 0 to 2.*row 1.*context position 36",
            spoiled(row, 0, PageTable(sliding.first + 1, sliding.pages[1:])),
        ),
        ("row 1: slot 16", Row(16, 55, 5, 1, row.tables, row.store_from)),
        ("row 1: got start 298", Row(2, 298, 5, 1, row.tables, row.store_from)),
        ("row 1: got start 55, 5 new tokens and 6 logits", Row(2, 55, 5, 6, row.tables, row.store_from)),
    ]


@pytest.mark.parametrize(("message", "row"), bad_rows())
def test_check_pages(message: str, row: Row, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path))
    good = make_row(1, 19, 1, 1, random.Random(5))
    with pytest.raises(InternalError, match=message) as caught:
        check(good, row)
    (dump,) = (tmp_path / "dumps").iterdir()
    assert str(dump) in caught.value.hint
    step = json.loads(dump.read_text())
    assert step["step_id"] == 7
    assert step["fault"] in caught.value.message
    assert [dumped["slot"] for dumped in step["rows"]] == [good.slot, row.slot]
    assert step["rows"][1]["tables"] == json.loads(json.dumps([asdict(table) for table in row.tables]))


@pytest.mark.parametrize(
    ("message", "saves", "loads"),
    [
        ("save with host page 3: page 400 is out of range", ((7, 2), (400, 3)), ()),
        ("save with page 8: host page 10 is out of range", ((7, 2), (8, 10)), ()),
        ("save: several pages have the same target", ((7, 2), (8, 2)), ()),
        ("load with host page 3: page -1 is out of range", ((7, 2),), ((3, -1),)),
        ("load with page 8: host page -1 is out of range", (), ((-1, 8),)),
        ("load: several pages have the same target", (), ((1, 8), (2, 8))),
    ],
)
def test_check_host_pages(
    message: str,
    saves: tuple[tuple[int, int], ...],
    loads: tuple[tuple[int, int], ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path))
    plan = StepPlan(7, (), (), (), saves=saves, loads=loads)
    sizes = {"num_slots": 1, "room": 1, "num_slabs": NUM_SLABS}
    check_step(replace(plan, saves=((7, 2),), loads=((2, 7),)), LAYOUT, **sizes, num_host_pages=10)
    with pytest.raises(InternalError, match=message):
        check_step(plan, LAYOUT, **sizes, num_host_pages=10)
    (dump,) = (tmp_path / "dumps").iterdir()
    step = json.loads(dump.read_text())
    assert (step["saves"], step["loads"]) == ([list(pair) for pair in saves], [list(pair) for pair in loads])


def test_arrays_travel_packed() -> None:
    """Arrays of any size that go to a GPU in one copy come out unchanged."""
    chance = np.random.default_rng(0)
    arrays = {
        "odd": chance.integers(0, 99, 5, dtype=np.int32),
        "long": chance.integers(-1, 2**40, 7, dtype=np.int64),
        "empty": np.zeros(0, dtype=np.int64),
        "table": chance.integers(0, 99, (3, 5), dtype=np.int32),
        "last": chance.integers(0, 99, 1, dtype=np.int64),
    }
    staged = PackedArrays()
    for name, array in arrays.items():
        staged.add(name, array)
    buffer = torch.zeros(staged.num_bytes, dtype=torch.uint8)
    staged.pack(buffer.numpy())
    for name, tensor in staged.unpack(buffer).items():
        assert tensor.dtype == torch.from_numpy(arrays[name]).dtype
        assert np.array_equal(tensor.numpy(), arrays[name])


def test_the_tables_of_an_unread_group_are_left_out() -> None:
    """The other groups and the tail are the same as with all tables."""
    pages = random.Random(3)
    rows = [make_row(slot, 20 + slot, 1, slot % 2, pages) for slot in range(4)]
    whole, part = (fill(rows, LAYOUT, make_tokens(), NONE, unread) for unread in (None, LAYOUT.groups[0]))
    assert whole.tail is not None
    assert part.tail is not None
    for expected, batch in ((whole, part), (whole.tail, part.tail)):
        assert batch.groups[0].pages_BP.numel() == 0
        assert torch.equal(expected.groups[1].pages_BP, batch.groups[1].pages_BP)
        assert torch.equal(expected.groups[1].kv_address_T, batch.groups[1].kv_address_T)
        assert torch.equal(expected.token_ids_T, batch.token_ids_T)
