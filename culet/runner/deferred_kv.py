"""A drafter's own KV of tokens that nobody drafts behind: what it is made of is kept, and written many tokens at a time.

A drafter with KV of its own (`Drafter.group`) makes it of **features**: what the target's forward pass leaves at its taps. A
step with drafts or with a prompt's tokens writes it at once. A step of one new token for each sequence, as where drafts do not
pay, only keeps the features, in a ring for each slot; they are written before anybody could read the KV:

- behind a step after which proposals are wanted, and behind one that fills a ring: then for all sequences of the step;
- behind a step with tokens that a sequence has entered with: its pages may become a checkpoint's, or its other samples';
- where a slot has no row in a plan, or is entered anew: before anything else of that plan.

The last is where a sequence has ended and its pages are a checkpoint's, or where it was preempted, or merely waits. Steps run
in the order they are planned: who has got one of its pages meanwhile writes there later in that same plan at the earliest, so
nothing is lost by it.

Shapes: M tokens to write · T new tokens of a step · S slots and a spare one · N places of a ring · X taps side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup
from culet.drafters.base import Drafter
from culet.kernels.dispatch import for_device
from culet.kernels.host_transfer import PackedArrays, on_device
from culet.kernels.replay import replayed
from culet.runner.fixed_steps import Captures
from culet.types import PageTable, Row, StepPlan

MAX_ROOM = 256  # tokens of a sequence whose features are kept: the more, the seldomer they are written
MIN_ROOM = 4
MAX_RING_BYTES = 64 << 20  # beyond MIN_ROOM tokens for each slot
WRITE_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # tokens written at a time: what gets a graph,
MAX_WRITE_BYTES = 16 << 20  # if their features take no more
Ints = NDArray[np.int64]
NOTHING: Ints = np.zeros((3, 0), dtype=np.int64)  # to write


def keeps(rows: Sequence[Row]) -> bool:
    """Whether a step of `rows` keeps features instead of writing KV."""
    return all(row.num_new == 1 for row in rows)


@dataclass(slots=True)
class LateWrite:
    """Tokens of one slot whose features wait in its ring."""

    slot: int
    first: int  # position
    count: int
    table: PageTable  # of the drafter's group, as the newest row of the slot has it

    def pieces(self, page_tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """Its tokens as (slot, first position, count, page), one for each page; what has left the window needs no KV."""
        table, end = self.table, self.first + self.count
        begin = max(self.first, table.first * page_tokens)
        while begin < end:
            number = begin // page_tokens
            count = min(end, (number + 1) * page_tokens) - begin
            yield self.slot, begin, count, table.pages[number - table.first]
            begin += count


class Ledger:
    """Which tokens of each slot have features in a ring and no KV yet, and when they must get it. Plans come in their order."""

    def __init__(self, group: int, room: int) -> None:
        """`group` is the drafter's among a row's tables, `room` the places of a ring."""
        self.group, self.room = group, room
        self._kept: dict[int, LateWrite] = {}  # by slot
        self._ahead = 0  # steps that all of these have gone on by since they were counted
        self._least_room = 0  # places that were free then in the fullest ring
        self._entered: dict[int, int] = {}  # by slot: tokens that its sequence came with

    def left(self, plan: StepPlan) -> list[LateWrite]:
        """What to write before anything else of `plan`: of slots without a row in it, and of those that it enters anew."""
        self._count()
        found = []
        if self._kept:
            stay = {row.slot for row in plan.rows}.difference([entry.slot for entry in plan.entries])
            found = [self._kept.pop(slot) for slot in [slot for slot in self._kept if slot not in stay]]
        for entry in plan.entries:
            self._entered[entry.slot] = len(entry.token_ids)
        return found

    def due(self, rows: Sequence[Row]) -> list[LateWrite]:
        """What to write behind the forward pass of `rows`, and before proposals are made."""
        self._count()
        is_due, is_kept = False, keeps(rows)
        for row in rows:
            kept, table = self._kept.get(row.slot), row.tables[self.group]
            if kept is not None:
                assert kept.first + kept.count == row.start, f"slot {row.slot}: token {row.start} does not follow those kept"
                kept.table = table
            if is_kept:
                if kept is None:
                    kept = self._kept[row.slot] = LateWrite(row.slot, row.start, 0, table)
                kept.count += 1
                is_due |= kept.count == self.room or row.num_wanted > 0 or row.start < self._entered[row.slot]
        if is_kept and not is_due:
            self._least_room = self.room - max((kept.count for kept in self._kept.values()), default=self.room)
            return []
        return [self._kept.pop(row.slot) for row in rows if row.slot in self._kept]

    def has_same_tables(self, rows: Sequence[Row], before: Sequence[Row]) -> bool:
        """Whether the pages of the drafter's own KV are those of the step before."""
        return all(row.tables[self.group] is last.tables[self.group] for row, last in zip(rows, before, strict=True))

    def goes_on(self) -> bool:
        """Whether a step like the one before, a token further, in the same pages, has nothing to write.

        Then it needs neither of the above.
        """
        if self._ahead + 1 >= self._least_room:  # no room is left, or the step before wrote
            return False
        self._ahead += 1
        return True

    def _count(self) -> None:
        """Note what `goes_on` has left for later."""
        if self._ahead:
            for kept in self._kept.values():
                kept.count += self._ahead
        self._ahead = self._least_room = 0


@dataclass
class _Write:
    """One number of tokens: its buffers, and once captured the graph."""

    buffer: Tensor  # uint8; the three below, sent in one copy
    source_M: Tensor  # int64; places among all rings
    position_M: Tensor  # int64
    place_M: Tensor  # int64; in the group's memory; -1: nowhere
    graph: torch.cuda.CUDAGraph | None = None


@dataclass
class Features:
    """The rings of all slots, and the drafter that makes KV of what is in them."""

    drafter: Drafter
    group: KVGroup
    pool: Pool
    ring_SNX: Tensor
    ledger: Ledger
    sizes: tuple[int, ...] = ()  # numbers of tokens that are written in fixed shapes, if any
    _fixed: dict[int, _Write] = field(default_factory=dict)  # by number of tokens

    @classmethod
    def make(cls, drafter: Drafter, pool: Pool, num_slots: int, like_D: Tensor) -> Features | None:
        """For `num_slots` slots, the spare one among them, and features like `like_D`; None: the drafter has no KV."""
        if drafter.group is None:
            return None
        width = len(drafter.taps) * like_D.shape[-1]
        room = MAX_ROOM
        while room > MIN_ROOM and num_slots * room * width * like_D.element_size() > MAX_RING_BYTES:
            room //= 2
        ring_SNX = like_D.new_zeros(num_slots, room, width)
        return cls(drafter, drafter.group, pool, ring_SNX, Ledger(drafter.group.index, room))

    @property
    def room(self) -> int:
        return self.ring_SNX.shape[1]

    @property
    def _most(self) -> int:
        """Tokens to write at a time."""
        each = self.ring_SNX.shape[2] * self.ring_SNX.element_size()
        return max((size for size in WRITE_SIZES if size * each <= MAX_WRITE_BYTES), default=WRITE_SIZES[0])

    # Within a step

    def commit(self, batch: ForwardBatch, tapped: Mapping[int, Tensor]) -> None:
        """Write the KV of a step's tokens at once."""
        self.drafter.commit(tapped, batch.positions_T, batch.groups[self.group.index].kv_address_T, self.pool)

    def keep(self, tapped: Mapping[int, Tensor], ring_T: Tensor) -> None:
        """Keep the features of a step's tokens at these places among all rings."""
        ops, ring = for_device(self.ring_SNX.device), self.ring_SNX.flatten(0, 1)
        ops.keep_taps([tapped[tap] for tap in self.drafter.taps], ring, ring_T)

    def leave(self, rows: Sequence[Row], batch: ForwardBatch, tapped: Mapping[int, Tensor]) -> None:
        """Keep or write what a step of any shape has left."""
        if not keeps(rows):
            self.commit(batch, tapped)
            return
        places = [(row.slot, row.start % self.room) for row in rows]
        if len(places) == 1:  # straight into the ring: beside a small model on a CPU every operation counts
            ((slot, place),) = places
            torch.cat([tapped[tap] for tap in self.drafter.taps], -1, out=self.ring_SNX[slot, place : place + 1])
            return
        self.keep(tapped, on_device([slot * self.room + place for slot, place in places], self.ring_SNX.device))

    # Late

    def write(self, late: Sequence[LateWrite]) -> None:
        """Write the KV of tokens whose features were kept. Nothing here waits for the device."""
        places_3M = self._places(late)
        most = self._most
        for part in (places_3M[:, begin : begin + most] for begin in range(0, places_3M.shape[1], most)):
            count = part.shape[1]
            taken = next((self._fixed[size] for size in self.sizes if size >= count), None)
            staged = _stage(part, count if taken is None else taken.source_M.shape[0])
            if taken is None:
                self._commit(*staged.send(self.ring_SNX.device).values())
                continue
            staged.send_into(taken.buffer)
            if taken.graph is None:
                self._run(taken)
            else:
                taken.graph.replay()

    def _places(self, late: Sequence[LateWrite]) -> Ints:
        """[3, M]: places among all rings, positions, places in the group's memory."""
        size = self.group.page_tokens
        pieces = [piece for one in late for piece in one.pieces(size)]
        slot_M, first_M, count_M, page_M = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
        before_M = np.cumsum(count_M) - count_M
        slot_M, page_M, base_M = np.repeat(np.stack((slot_M, page_M, first_M - before_M)), count_M, axis=1)
        position_M = base_M + np.arange(base_M.shape[0])
        return np.stack((slot_M * self.room + position_M % self.room, position_M, page_M * size + position_M % size))

    def _run(self, taken: _Write) -> None:
        """What is captured: it only launches."""
        with replayed():
            self._commit(taken.source_M, taken.position_M, taken.place_M)

    def _commit(self, source_M: Tensor, position_M: Tensor, place_M: Tensor) -> None:
        feature_MX = self.ring_SNX.flatten(0, 1).index_select(0, source_M)
        parts = feature_MX.chunk(len(self.drafter.taps), -1)
        self.drafter.commit(dict(zip(self.drafter.taps, parts, strict=True)), position_M, place_M, self.pool)

    # Fixed shapes

    def use_fixed_sizes(self) -> None:
        """From now on write numbers of tokens of which there are few, so that they can be captured as CUDA graphs."""
        kept = self.ring_SNX.shape[0] * self.room
        self.sizes = tuple(size for size in WRITE_SIZES if size <= self._most and size // 2 < max(kept, WRITE_SIZES[0]))
        for size in self.sizes:
            staged = _stage(NOTHING, size)
            buffer = torch.zeros(staged.num_bytes, dtype=torch.uint8, device=self.ring_SNX.device)
            sent = staged.unpack(buffer)
            self._fixed[size] = _Write(buffer, sent["source"], sent["position"], sent["place"])

    def drop_fixed_sizes(self) -> None:
        """Write any number of tokens again; buffers and graphs are given back."""
        self.sizes, self._fixed = (), {}

    @torch.inference_mode()
    def rehearse(self, size: int) -> None:
        """Write one size to nowhere, so that its kernels are compiled."""
        self._run(self._reset(size))

    @torch.inference_mode()
    def capture(self, captures: Captures, sizes: Sequence[int] | None = None) -> None:
        """Capture `sizes` (default: all), the largest first."""
        for size in sorted(sizes or self.sizes, reverse=True):
            taken = self._reset(size)
            taken.graph, _ = captures.capture(partial(self._run, taken))

    def _reset(self, size: int) -> _Write:
        _stage(NOTHING, size).send_into(self._fixed[size].buffer)
        return self._fixed[size]

    @property
    def num_captured(self) -> int:
        return sum(one.graph is not None for one in self._fixed.values())


def _stage(places_3M: Ints, size: int) -> PackedArrays:
    """Sources, positions and places of `size` tokens; what pads them is written nowhere."""
    columns_3M = np.zeros((3, size), dtype=np.int64)
    columns_3M[2] = -1
    columns_3M[:, : places_3M.shape[1]] = places_3M
    staged = PackedArrays()
    for name, column_M in zip(("source", "position", "place"), columns_3M, strict=True):
        staged.add(name, column_M)
    return staged
