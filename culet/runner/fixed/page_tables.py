"""The page tables of fixed-shape steps on the device.

Graphs read from fixed addresses, so all buckets and draft rounds read the same tables. Most steps change no page, so tables
are sent only when they differ from those that the device holds.

Shapes: B rows · P columns · S slots · E entries of all tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from culet.attention.batch import GroupBatch
from culet.cache.spec import CacheLayout, KVGroup
from culet.kernels.host_transfer import PackedArrays
from culet.kernels.types import PageTables
from culet.types import PageTable, Row

Int32s = NDArray[np.int32]
RowTables = tuple[tuple[PageTable, ...], ...]  # by row and KV group


def aligned(count: int) -> int:
    """Round `count` 32-bit numbers up to a multiple of 16 bytes, so that every part of a tensor has the same alignment."""
    return -(-count // 4) * 4


def table_columns(group: KVGroup, max_len: int, max_queries: int) -> int:
    """Return how many columns a page table needs for any decode or verify row of a sequence of up to `max_len` tokens."""
    if group.reach is None:
        return group.pages_for(max_len + group.ahead)
    seen = min(max_len, group.reach - 1 + max_queries)
    return min(group.pages_for(max_len), (seen + group.page_tokens - 2) // group.page_tokens + 1)


class _SlotTables:
    """One group's page tables on the host, by slot. A table is written again only if it has changed."""

    def __init__(self, group: KVGroup, num_slots: int, num_columns: int) -> None:
        self.group = group
        self._pages_SP = np.zeros((num_slots, num_columns), dtype=np.int32)
        self._tables: list[PageTable | None] = [None] * num_slots

    def read(self, rows: Sequence[Row]) -> Int32s:
        """Return pages_BP, as wide as the longest table. Columns past a row's own table hold old entries."""
        slots, tables = [row.slot for row in rows], [row.tables[self.group.index] for row in rows]
        for slot, table in zip(slots, tables, strict=True):
            if self._tables[slot] != table:
                self._pages_SP[slot, : len(table.pages)] = table.pages
                self._tables[slot] = table
        return self._pages_SP[slots, : max([len(table.pages) for table in tables], default=1)]


class DeviceTables:
    """The page tables of the running step, on the device. Padding rows hold the pool's spare page."""

    def __init__(
        self,
        layout: CacheLayout,
        columns: Sequence[int],
        spare_page: int,
        *,
        num_rows: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        """Allocate the tables. `columns` are the widths of the groups' tables."""
        self.columns, self.spare_page = columns, spare_page
        self._slots = [_SlotTables(group, num_slots, count) for group, count in zip(layout.groups, columns, strict=True)]
        sizes = [aligned(num_rows * count) for count in columns]
        begins = np.cumsum([0, *sizes[:-1]]).tolist()
        facts = [(begin, n, group.page_tokens) for begin, n, group in zip(begins, columns, layout.groups, strict=True)]
        pages_E = torch.full((sum(sizes),), spare_page, dtype=torch.int32, device=device)
        self.packed = PageTables(pages_E, torch.tensor(facts, dtype=torch.int32, device=device))
        # Views of the same memory, one per group.
        self.groups = [
            part[: num_rows * count].view(num_rows, count) for part, count in zip(pages_E.split(sizes), columns, strict=True)
        ]
        self._held: tuple[int, int, RowTables] | None = None  # current content, as (rows, rows with padding, tables)

    def fit(self, rows: Sequence[Row]) -> bool:
        """Return whether the rows' page tables fit into these columns."""
        return all(
            max([len(row.tables[index].pages) for row in rows], default=0) <= width for index, width in enumerate(self.columns)
        )

    def stage(self, staged: PackedArrays, rows: Sequence[Row], num_rows: int, num_padded: int) -> bool:
        """Add the rows' tables to `staged` unless the device holds them. Return True if added. Then `spread` must follow.

        A step has up to `num_rows` sequences, and `num_padded` rows including padding.
        """
        wanted = num_rows, num_padded, tuple([row.tables for row in rows])
        if wanted == self._held:
            return False
        self._held = wanted
        for table in self._slots:
            pages_BP = table.read(rows)
            padded_BP = np.full((num_padded, pages_BP.shape[1]), self.spare_page, dtype=np.int32)
            padded_BP[: len(rows)] = pages_BP
            staged.add(f"pages{table.group.index}", padded_BP)
        return True

    def spread(self, sent: Mapping[str, Tensor], count: int, num_rows: int) -> None:
        """Copy the tables that were sent to the addresses that graphs read. The step has `count` of up to `num_rows` rows."""
        for index, table in enumerate(self.groups):
            pages_BP = sent[f"pages{index}"]
            table[: pages_BP.shape[0], : pages_BP.shape[1]].copy_(pages_BP)
            if count < num_rows:
                # A drafter's block may reach beyond the columns above. Padding must not find a sequence's pages there.
                table[count:num_rows].fill_(self.spare_page)

    def copy(self, groups: Sequence[GroupBatch], row_R: Tensor | None, count: int, num_rows: int) -> None:
        """Overwrite the tables with those of a batch, for a draft round or a tail of `count` rows, padded to `num_rows`.

        `row_R` are the rows of the batch, or None for its first `count` rows.
        """
        self._held = None
        for group, table in zip(groups, self.groups, strict=True):
            if not group.pages_BP.numel():  # the step leaves this group out
                continue
            pages_RP = group.pages_BP[:count] if row_R is None else group.pages_BP.index_select(0, row_R)
            if pages_RP.data_ptr() != table.data_ptr():  # otherwise the batch is a fixed-shape step, which reads these tables
                table[:count, : pages_RP.shape[1]].copy_(pages_RP)
            table[count:num_rows].fill_(self.spare_page)

    def clear(self) -> None:
        """Fill all tables with the spare page."""
        self._held = None
        for table in self.groups:
            table.fill_(self.spare_page)
