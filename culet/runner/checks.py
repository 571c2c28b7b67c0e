"""Check every page index and position of a step before anything is launched, if CULET_CHECK_PAGES is set.

On a GPU, a wild index causes an illegal access some kernels later, or it reads another sequence's memory. Here it raises a
Python error that names the group, the row, the value, and a file with the whole step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from culet import env
from culet.cache.spec import CacheLayout, KVGroup
from culet.errors import InternalError
from culet.runner.deferred_kv import DeferredWrite
from culet.types import Row, StepPlan


def check_step(
    plan: StepPlan, layout: CacheLayout, *, num_slots: int, room: int, num_slabs: int | None, num_host_pages: int = 0
) -> None:
    """Raise if a step would read or write outside its pages, or outside the `room` tokens of a slot."""
    faults = chain(_transfer_faults(plan, num_slabs, num_host_pages), _faults(plan, layout, num_slots, room, num_slabs))
    _refuse(plan, layout, next(faults, None))


def check_deferred(
    plan: StepPlan, writes: Sequence[DeferredWrite], layout: CacheLayout, group: KVGroup, *, num_slabs: int | None
) -> None:
    """Raise if a deferred write falls outside its pages. The writes may come before or after `plan`."""
    _refuse(plan, layout, next(_deferred_faults(writes, group, num_slabs), None))


def _refuse(plan: StepPlan, layout: CacheLayout, fault: str | None) -> None:
    if fault is not None:
        raise InternalError(
            f"step {plan.step_id}: {fault}", hint=f"this is a bug; report it with the step in {_dump(plan, layout, fault)}"
        )


def _deferred_faults(writes: Sequence[DeferredWrite], group: KVGroup, num_slabs: int | None) -> Iterator[str]:
    limit = "?" if num_slabs is None else str(num_slabs - 1)
    for write in writes:
        where = f"group {group.name} (layers {_span(group.layers)}), slot {write.slot}, deferred"
        end, last = write.first + write.count, (write.table.first + len(write.table.pages)) * group.page_tokens - 1
        if not 0 <= write.first < end <= last + 1:
            yield f"{where}: writes positions {write.first} to {end - 1}, but the pages end at {last}"
        elif (seen := group.first_visible(end)) < write.table.first * group.page_tokens:
            begin = write.table.first * group.page_tokens
            yield f"{where}: the next token sees position {seen}, but the pages begin at {begin}"
        else:
            for _, position, _, page in write.pieces(group.page_tokens):
                if page < 0 or (num_slabs is not None and page >= num_slabs):
                    yield f"{where}: position {position} is in page {page}, which is out of range (0 to {limit})"


def _transfer_faults(plan: StepPlan, num_slabs: int | None, num_host_pages: int) -> Iterator[str]:
    """Check the transfers from and to host memory. Two into the same page would depend on their order."""
    limit = "?" if num_slabs is None else str(num_slabs - 1)
    transfers = [("save", page, host_page) for page, host_page in plan.saves]
    transfers += [("load", page, host_page) for host_page, page in plan.loads]
    for kind, page, host_page in transfers:
        if page < 0 or (num_slabs is not None and page >= num_slabs):
            yield f"{kind} with host page {host_page}: page {page} is out of range (0 to {limit})"
        if not 0 <= host_page < num_host_pages:
            yield f"{kind} with page {page}: host page {host_page} is out of range (0 to {num_host_pages - 1})"
    for kind, targets in (("save", [target for _, target in plan.saves]), ("load", [target for _, target in plan.loads])):
        if len(set(targets)) < len(targets):
            yield f"{kind}: several pages have the same target, in {targets}"


def _faults(plan: StepPlan, layout: CacheLayout, num_slots: int, room: int, num_slabs: int | None) -> Iterator[str]:
    limit = "?" if num_slabs is None else str(num_slabs - 1)
    for entry in plan.entries:
        if not 0 <= entry.slot < num_slots or len(entry.token_ids) > room:
            got = f"got slot {entry.slot} with {len(entry.token_ids)} tokens"
            yield f"entry: {got}, expected a slot from 0 to {num_slots - 1} with at most {room} tokens"
    for pair in plan.copies:
        for page in pair:
            if page < 0 or (num_slabs is not None and page >= num_slabs):
                yield f"copy of page {pair[0]} to page {pair[1]}: page {page} is out of range (0 to {limit})"
    if (num_legs := sum(not row.leg.is_whole for row in plan.rows)) > 1:
        yield f"got {num_legs} rows with some of the layers, expected at most one"
    for number, row in enumerate(plan.rows):
        yield from _row_faults(number, row, num_slots, room)
        for group in layout.groups:
            table = row.tables[group.index]
            where = f"group {group.name} (layers {_span(group.layers)}), row {number} (slot {row.slot})"
            for page in table.pages:
                if page < 0 or (num_slabs is not None and page >= num_slabs):
                    yield f"{where}: page {page} is out of range (0 to {limit})"
            covered = table.first * group.page_tokens, (table.first + len(table.pages)) * group.page_tokens
            for kind, position in _touched(row, group):
                if not covered[0] <= position < covered[1]:
                    yield f"{where}: {kind} position {position} is outside the pages for {covered[0]} to {covered[1] - 1}"


def _row_faults(number: int, row: Row, num_slots: int, room: int) -> Iterator[str]:
    for slot in (row.slot, *row.draw_slots):
        if not 0 <= slot < num_slots:
            yield f"row {number}: slot {slot} is out of range (0 to {num_slots - 1})"
    end = row.start + row.num_open + row.num_new
    if row.start < 0 or row.num_open < 0 or row.num_new < 1 or end > room or not 0 <= row.num_logits <= row.num_new:
        start = f"start {row.start}" + (f" to {row.start + row.num_open}" if row.num_open else "")
        yield f"row {number}: got {start}, {row.num_new} new tokens and {row.num_logits} logits, with room for {room} tokens"

    if not 0 <= row.leg.begin < row.leg.end <= row.leg.of:
        yield f"row {number}: got layers {row.leg.begin}/{row.leg.of} to {row.leg.end}/{row.leg.of}"
    if not row.leg.is_last and (row.num_logits or row.draw_slots):
        yield f"row {number}: got {row.num_logits} logits and {len(row.draw_slots)} draws, expected none before its last layer"


def _touched(row: Row, group: KVGroup) -> Iterator[tuple[str, int]]:
    """Yield the kind and position of the outermost accesses of a row.

    They are the first and last positions that are read from the context and written for the new tokens, the last position that
    a drafter writes after them, and the first that it reads. An open row may begin later. It reads and writes as far as if all
    its open drafts were accepted.
    """
    first_read, store_from = group.first_visible(row.start), row.store_from[group.index]
    if first_read < row.start:
        yield "context", first_read
        yield "context", row.start - 1
    end = row.start + row.num_new
    if store_from < end:
        yield "new", max(row.start, store_from)
        yield "new", end + row.num_open - 1
    if group.ahead and row.draw_slots:
        yield "drafted", end + row.num_open + group.ahead - 1
    if row.num_wanted:
        # A drafter's query is at the last accepted token, and all drafts may be rejected.
        first_seen = group.first_visible(end - row.num_drafts - 1)
        yield "drafter's", first_seen if first_seen < row.start or first_seen >= store_from else -1


def _span(layers: tuple[int, ...]) -> str:
    return f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else str(layers[0])


def _dump(plan: StepPlan, layout: CacheLayout, fault: str) -> Path:
    """Write the step to the cache folder. It has the lengths of prompts, but not their tokens."""
    folder = Path(env.CACHE_DIR.get()).expanduser() / "dumps"
    path = folder / f"step-{plan.step_id}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    facts = {
        "fault": fault,
        "step_id": plan.step_id,
        "groups": [
            {"name": group.name, "layers": group.layers, "page_tokens": group.page_tokens, "window": group.window}
            for group in layout.groups
        ],
        "entries": [{"slot": entry.slot, "num_tokens": len(entry.token_ids)} for entry in plan.entries],
        "saves": plan.saves,
        "loads": plan.loads,
        "copies": plan.copies,
        "rows": [row._asdict() | {"tables": [asdict(table) for table in row.tables]} for row in plan.rows],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1))
    except OSError as error:
        return Path(f"no file ({path}: {error.strerror})")
    return path
