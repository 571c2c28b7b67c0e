"""Deferred KV. If no drafts follow a token, a drafter's own KV for it is written later, together with many other tokens.

A drafter with its own KV (`Drafter.group`) computes it from **features**, the outputs of the target's forward pass at the
drafter's taps. A step with drafts or with a prompt's tokens writes that KV at once. A step of one new token for each sequence
(when drafting does not pay) only keeps the features, in a ring for each slot. The KV is written before anyone can read it:

- After a step that wants proposals, and after one that fills a ring, for all sequences of the step.
- After a step with tokens that a sequence entered with, because a resume point or another sample may take its pages.
- Before everything else in a plan, for slots that have no row in it or are entered again.

In the last case, the sequence has ended, was preempted, or waits. Its pages may already belong to another sequence. Steps run
in the order in which they are planned, and the new owner writes to the pages later in the same plan at the earliest, so
nothing is lost.

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
from culet.kernels.captures import Captures
from culet.kernels.dispatch import for_device
from culet.kernels.host_transfer import PackedArrays, on_device
from culet.kernels.replay import replayed
from culet.types import PageTable, Row, StepPlan

MAX_RING_LEN = 256  # most tokens of a sequence whose features are kept. More tokens mean fewer writes.
MIN_RING_LEN = 4
MAX_RING_BYTES = 64 << 20  # for the rings of all slots, unless MIN_RING_LEN tokens need more
WRITE_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # numbers of tokens that are written in fixed shapes
MAX_WRITE_BYTES = 16 << 20  # most bytes that the features of one write may take
Ints = NDArray[np.int64]
NOTHING: Ints = np.zeros((3, 0), dtype=np.int64)  # to write


def keeps_features(rows: Sequence[Row]) -> bool:
    """Return whether a step of `rows` keeps features instead of writing KV."""
    return all(row.num_new == 1 for row in rows)


@dataclass(slots=True)
class DeferredWrite:
    """Tokens of one slot whose features are in its ring and whose KV must still be written."""

    slot: int
    first: int  # position
    count: int
    table: PageTable  # table of the drafter's group, from the newest row of the slot

    def pieces(self, page_tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (slot, first position, count, page) for each page. Tokens that have left the window need no KV."""
        table, end = self.table, self.first + self.count
        begin = max(self.first, table.first * page_tokens)
        while begin < end:
            number = begin // page_tokens
            count = min(end, (number + 1) * page_tokens) - begin
            yield self.slot, begin, count, table.pages[number - table.first]
            begin += count


class Ledger:
    """Tracks which tokens of each slot have features in a ring but no KV, and when it must be written. Sees plans in order."""

    def __init__(self, group: int, ring_len: int) -> None:
        """Start empty. `group` is the index of the drafter's group among a row's tables."""
        self.group, self.ring_len = group, ring_len
        self._kept: dict[int, DeferredWrite] = {}  # by slot
        self._entered: dict[int, int] = {}  # number of tokens that each slot's sequence entered with

    def due_before(self, plan: StepPlan) -> list[DeferredWrite]:
        """Return the writes before everything else in `plan`, for slots without a row in it and slots that it enters again."""
        due = []
        if self._kept:
            stay = {row.slot for row in plan.rows}.difference([entry.slot for entry in plan.entries])
            due = [self._kept.pop(slot) for slot in [slot for slot in self._kept if slot not in stay]]
        for entry in plan.entries:
            self._entered[entry.slot] = len(entry.token_ids)
        return due

    def due_after(self, rows: Sequence[Row]) -> list[DeferredWrite]:
        """Return the writes after the forward pass of `rows`, before proposals are made."""
        is_due, is_kept = False, keeps_features(rows)
        for row in rows:
            kept, table = self._kept.get(row.slot), row.tables[self.group]
            if kept is not None:
                assert kept.first <= row.start <= kept.first + kept.count, (
                    f"slot {row.slot}: token {row.start} does not follow the kept tokens"
                )
                kept.count = row.start - kept.first  # fewer than before if the scheduler took the last row back
                kept.table = table
            if is_kept:
                if kept is None:
                    kept = self._kept[row.slot] = DeferredWrite(row.slot, row.start, 0, table)
                kept.count += 1
                is_due |= kept.count == self.ring_len or row.num_wanted > 0 or row.start < self._entered[row.slot]
        if is_kept and not is_due:
            return []
        return [self._kept.pop(row.slot) for row in rows if row.slot in self._kept]


@dataclass
class _FixedWrite:
    """The buffers for one number of tokens, and the graph once it is captured."""

    buffer: Tensor  # uint8, holds the three tensors below, which are sent in one copy
    source_M: Tensor  # int64, places among all rings
    position_M: Tensor  # int64
    kv_address_M: Tensor  # int64, -1 means nowhere
    graph: torch.cuda.CUDAGraph | None = None


@dataclass
class DeferredKV:
    """The rings of all slots, and the drafter that computes KV from their content."""

    drafter: Drafter
    group: KVGroup
    pool: Pool
    ring_SNX: Tensor
    ledger: Ledger
    sizes: tuple[int, ...] = ()  # numbers of tokens that are written in fixed shapes, if any
    _fixed: dict[int, _FixedWrite] = field(default_factory=dict)  # by number of tokens

    @classmethod
    def create(
        cls, drafter: Drafter, pool: Pool, num_slots: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> DeferredKV | None:
        """Allocate rings for `num_slots` slots, including the spare one. Return None if the drafter has no KV of its own."""
        if drafter.group is None:
            return None
        width = len(drafter.taps) * hidden_size
        ring_len = MAX_RING_LEN
        while ring_len > MIN_RING_LEN and num_slots * ring_len * width * dtype.itemsize > MAX_RING_BYTES:
            ring_len //= 2
        ring_SNX = torch.zeros(num_slots, ring_len, width, dtype=dtype, device=device)
        return cls(drafter, drafter.group, pool, ring_SNX, Ledger(drafter.group.index, ring_len))

    @property
    def ring_len(self) -> int:
        return self.ring_SNX.shape[1]

    # Within a step

    def write_now(self, batch: ForwardBatch, tapped: Mapping[int, Tensor]) -> None:
        """Write the KV of a step's tokens."""
        self.drafter.commit(tapped, batch.positions_T, batch.groups[self.group.index].kv_address_T, self.pool)

    def keep(self, tapped: Mapping[int, Tensor], ring_T: Tensor) -> None:
        """Keep the features of a step's tokens at these places among all rings."""
        ops, ring = for_device(self.ring_SNX.device), self.ring_SNX.flatten(0, 1)
        ops.keep_taps([tapped[tap] for tap in self.drafter.taps], ring, ring_T)

    def keep_or_write(self, rows: Sequence[Row], batch: ForwardBatch, tapped: Mapping[int, Tensor]) -> None:
        """Call `keep` or `write_now` after a step of any shape."""
        if not keeps_features(rows):
            self.write_now(batch, tapped)
        elif len(rows) == 1:  # write straight into the ring, because with a small model on a CPU every operation counts
            place = rows[0].start % self.ring_len
            torch.cat([tapped[tap] for tap in self.drafter.taps], -1, out=self.ring_SNX[rows[0].slot, place : place + 1])
        else:
            places = [row.slot * self.ring_len + row.start % self.ring_len for row in rows]
            self.keep(tapped, on_device(places, self.ring_SNX.device))

    # Later

    def write(self, writes: Sequence[DeferredWrite]) -> None:
        """Write the KV of tokens whose features were kept. Do not wait for the device."""
        places_3M, most = self._places(writes), self._max_write
        for part in (places_3M[:, begin : begin + most] for begin in range(0, places_3M.shape[1], most)):
            count = part.shape[1]
            fixed = next((self._fixed[size] for size in self.sizes if size >= count), None)
            staged = _stage(part, count if fixed is None else fixed.source_M.shape[0])
            if fixed is None:
                self._commit(*staged.send(self.ring_SNX.device).values())
                continue
            staged.send_into(fixed.buffer)
            if fixed.graph is None:
                self._launch(fixed)
            else:
                fixed.graph.replay()

    @property
    def _max_write(self) -> int:
        """The most tokens to write at a time."""
        token_bytes = self.ring_SNX.shape[2] * self.ring_SNX.element_size()
        return max((size for size in WRITE_SIZES if size * token_bytes <= MAX_WRITE_BYTES), default=WRITE_SIZES[0])

    def _places(self, writes: Sequence[DeferredWrite]) -> Ints:
        """Return places among all rings, positions and KV addresses, [3, M]."""
        size = self.group.page_tokens
        pieces = [piece for write in writes for piece in write.pieces(size)]
        slot_M, first_M, count_M, page_M = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
        before_M = np.cumsum(count_M) - count_M
        slot_M, page_M, base_M = np.repeat(np.stack((slot_M, page_M, first_M - before_M)), count_M, axis=1)
        position_M = base_M + np.arange(base_M.shape[0])
        return np.stack((slot_M * self.ring_len + position_M % self.ring_len, position_M, page_M * size + position_M % size))

    def _launch(self, fixed: _FixedWrite) -> None:
        """Write one fixed number of tokens. This is captured, so it only launches kernels."""
        with replayed():
            self._commit(fixed.source_M, fixed.position_M, fixed.kv_address_M)

    def _commit(self, source_M: Tensor, position_M: Tensor, kv_address_M: Tensor) -> None:
        feature_MX = self.ring_SNX.flatten(0, 1).index_select(0, source_M)
        parts = feature_MX.chunk(len(self.drafter.taps), -1)
        self.drafter.commit(dict(zip(self.drafter.taps, parts, strict=True)), position_M, kv_address_M, self.pool)

    # Fixed shapes

    def use_fixed_sizes(self) -> None:
        """From now on, write only a few fixed numbers of tokens, so that they can be captured as CUDA graphs."""
        kept = self.ring_SNX.shape[0] * self.ring_len
        self.sizes = tuple(size for size in WRITE_SIZES if size <= self._max_write and size // 2 < max(kept, WRITE_SIZES[0]))
        for size in self.sizes:
            staged = _stage(NOTHING, size)
            buffer = torch.zeros(staged.num_bytes, dtype=torch.uint8, device=self.ring_SNX.device)
            sent = staged.unpack(buffer)
            self._fixed[size] = _FixedWrite(buffer, sent["source"], sent["position"], sent["kv_address"])

    def drop_fixed_sizes(self) -> None:
        """Go back to writing any number of tokens, and free the buffers and graphs."""
        self.sizes, self._fixed = (), {}

    @torch.inference_mode()
    def rehearse(self, size: int) -> None:
        """Write `size` tokens to nowhere, so that the kernels are compiled."""
        self._launch(self._reset(size))

    @torch.inference_mode()
    def capture(self, captures: Captures, sizes: Sequence[int] | None = None) -> None:
        """Capture `sizes` (default: all), the largest first."""
        for size in sorted(sizes or self.sizes, reverse=True):
            fixed = self._reset(size)
            fixed.graph, _ = captures.capture(partial(self._launch, fixed))

    def _reset(self, size: int) -> _FixedWrite:
        _stage(NOTHING, size).send_into(self._fixed[size].buffer)
        return self._fixed[size]

    @property
    def num_captured(self) -> int:
        return sum(fixed.graph is not None for fixed in self._fixed.values())


def _stage(places_3M: Ints, size: int) -> PackedArrays:
    """Stage the sources, positions and KV addresses of `size` tokens. Padding is written nowhere."""
    columns_3M = np.zeros((3, size), dtype=np.int64)
    columns_3M[2] = -1
    columns_3M[:, : places_3M.shape[1]] = places_3M
    staged = PackedArrays()
    for name, column_M in zip(("source", "position", "kv_address"), columns_3M, strict=True):
        staged.add(name, column_M)
    return staged
