"""Tables of the tiles that each attention kernel uses on each GPU, with the place and date of the measurement.

A row applies to some architectures and one shape of head. The first row that matches is used. Rows that are "not measured" have
not been timed. A test checks that they compile for their architecture and fit in its shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import triton
from torch import Tensor

from culet.hardware import ADA, AMPERE, AMPERE_RTX, BLACKWELL, BLACKWELL_RTX, CAPABILITIES, HOPPER
from culet.kernels.triton.device import device_facts
from culet.kernels.types import PagedKV

MOST_WAVES = 3  # waves of programs that a call with split rows may take
SPLIT_COST = 1 / 8  # cost of starting and joining a split, relative to the time of an unsplit row
# Most splits per row with a window. The first is used if the last program joins them, the second if a second kernel does.
FEW_SPLITS, MANY_SPLITS = 8, 32
JOINED_SUMS = 64  # partial sums that each thread of a joining program holds at a time
MOST_ROUNDS = 3  # rounds that a joining program may take. Beyond that, a second kernel with many programs per row is faster.


class Splits(NamedTuple):
    """How the rows of a call are split."""

    # With a window, splits per row, because rows are about equally long. Otherwise, splits of all rows together.
    target: int
    joins: bool  # whether the last program to arrive joins a row's splits. If not, a second kernel does.
    at_once: int  # splits that a joining program reads at a time


@dataclass(frozen=True)
class DecodeTile:
    """The tile of a decode kernel, packed query rows x keys, and the number of programs that fill the GPU."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 132
    min_tiles: int = 1  # fewest key tiles per split

    def unsplit(self, num_rows: int, num_kv_heads: int, group: int, max_queries: int) -> int:
        """Return the number of programs for `num_rows` rows of one split each."""
        return num_rows * num_kv_heads * -(-max_queries * group // self.rows)

    def most_splits(self, num_kv_heads: int, group: int, max_queries: int) -> int:
        """Return the most splits that all rows of a call can have together."""
        return max(1, MOST_WAVES * self.programs // self.unsplit(1, num_kv_heads, group, max_queries))

    def splits(self, kv: PagedKV, num_rows: int, group: int, max_queries: int) -> Splits:
        """Return how `num_rows` rows are split. A single row gets as many splits as fill the GPU."""
        unsplit = self.unsplit(num_rows, kv.num_kv_heads, group, max_queries)
        joined_rows = min(self.rows, triton.next_power_of_2(max_queries * group))
        at_once = max(1, min(8, JOINED_SUMS * 32 * self.warps // (joined_rows * kv.head_dim)))
        if kv.window is not None:
            splits = max(1, self.programs // unsplit)
            joins = num_rows > 1 and unsplit >= 16 and min(splits, FEW_SPLITS) <= MOST_ROUNDS * at_once
            splits = min(splits, FEW_SPLITS if joins else MANY_SPLITS)
            return Splits(splits, joins and splits > 1, at_once)
        splits = splits_by_waves(unsplit, self.programs)
        most = self.most_splits(kv.num_kv_heads, group, max_queries)
        return Splits(min(most, num_rows * splits), num_rows > 1 and splits <= MOST_ROUNDS * at_once, at_once)


def splits_by_waves(unsplit: int, programs: int) -> int:
    """Return the splits per row that finish all rows soonest if programs run in waves of `programs`.

    For example, if 132 of 160 unsplit rows run at a time, the last 28 leave most of the GPU idle.
    """
    waves = range(1, MOST_WAVES + 1)
    offers = [(wave * (1 / splits + SPLIT_COST), splits) for wave in waves if (splits := wave * programs // unsplit)]
    return min(offers, default=(0.0, 1))[1]


@dataclass(frozen=True)
class PrefillTile:
    """The tile of a prefill kernel, packed query rows x keys."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TileRow:
    """One row of a table. It maps architectures and shapes to a tile, and says where the tile was measured."""

    capabilities: tuple[int, ...]
    head_dim: int  # up to this head size
    latent: bool
    packed_rows: int  # up to this many packed query rows (decode only)
    tile: DecodeTile | PrefillTile
    measured: str
    per_sm: int = 1  # programs per multiprocessor that fill the GPU (decode only)
    is_fp8: bool = False  # whether the row is only for e4m3 pages. Other rows apply to these pages too.
    # Stages if unsplit rows fill the GPU. There are fewer, so that two programs fit in the place of one (decode only).
    crowded_stages: int = 0
    # Up to this many tokens per page (decode only). A tile within one page reads one table entry.
    page_tokens: int = 1 << 30


ANY = CAPABILITIES
NOT_HOPPER = tuple(capability for capability in ANY if capability != HOPPER)
SMALL = (AMPERE_RTX, ADA, BLACKWELL_RTX)  # 99 KB of shared memory
MANY = 1 << 30
UNMEASURED = "not measured"
H200 = "H200, 2026-11-15"

DECODE = (
    TileRow(ANY, 128, False, 16, DecodeTile(16, 32, 4, 2), UNMEASURED),
    # A DFlash drafter's block has 16 tokens and 4 or 8 query heads per KV head. With 16 rows per tile, keys would be read up to
    # 8 times.
    TileRow(ANY, 128, False, MANY, DecodeTile(64, 32, 4, 3), UNMEASURED),
    TileRow(ANY, 128, True, MANY, DecodeTile(16, 32, 4, 2), UNMEASURED),
    TileRow((HOPPER,), 256, False, 16, DecodeTile(16, 32, 4, 5), H200 + " (but not its splits)", per_sm=3, is_fp8=True),
    # These have two warps, and the first has five programs per multiprocessor. Programs of four warps waited too long for each
    # other, and reached half of the memory bandwidth at 8 rows of the 31B (128 unsplit programs).
    TileRow((HOPPER,), 256, False, 16, DecodeTile(16, 16, 2, 5), H200, per_sm=5, page_tokens=16),
    TileRow((HOPPER,), 256, False, 16, DecodeTile(16, 32, 2, 5), H200, per_sm=2),
    TileRow(ANY, 256, False, 16, DecodeTile(16, 32, 4, 3), UNMEASURED, per_sm=2),
    TileRow(ANY, 256, False, MANY, DecodeTile(32, 32, 4, 3), UNMEASURED, per_sm=2),
    TileRow((HOPPER,), 512, False, 16, DecodeTile(16, 32, 4, 5), H200, per_sm=2, is_fp8=True),
    TileRow((HOPPER,), 512, False, 16, DecodeTile(16, 32, 4, 5), H200, crowded_stages=3),
    TileRow(ANY, 512, False, 16, DecodeTile(16, 16, 4, 3), UNMEASURED),
    TileRow(ANY, 512, False, MANY, DecodeTile(32, 16, 4, 3), UNMEASURED),
    TileRow((HOPPER,), 512, True, 16, DecodeTile(16, 32, 4, 5), H200, per_sm=2, is_fp8=True),
    TileRow((HOPPER,), 512, True, 16, DecodeTile(16, 32, 4, 7), H200, crowded_stages=5),
    TileRow(ANY, 512, True, 16, DecodeTile(16, 32, 4, 3), UNMEASURED, per_sm=2),
    TileRow((HOPPER,), 512, True, MANY, DecodeTile(32, 32, 4, 3), H200, per_sm=2),
    TileRow(ANY, 512, True, MANY, DecodeTile(32, 16, 4, 3), UNMEASURED),
)
PREFILL = (
    TileRow(ANY, 128, False, MANY, PrefillTile(64, 32, 4, 2), UNMEASURED),
    TileRow(ANY, 128, True, MANY, PrefillTile(64, 32, 4, 2), UNMEASURED),
    TileRow((HOPPER,), 256, False, MANY, PrefillTile(128, 64, 8, 2), H200),
    TileRow((AMPERE, BLACKWELL), 256, False, MANY, PrefillTile(64, 64, 8, 2), UNMEASURED),
    TileRow(SMALL, 256, False, MANY, PrefillTile(64, 32, 4, 2), UNMEASURED),
    TileRow(SMALL, 512, False, MANY, PrefillTile(32, 32, 8, 2), UNMEASURED, is_fp8=True),
    TileRow(SMALL, 512, True, MANY, PrefillTile(32, 32, 8, 2), UNMEASURED, is_fp8=True),
    TileRow((HOPPER,), 512, False, MANY, PrefillTile(64, 32, 8, 2), H200),
    TileRow(NOT_HOPPER, 512, False, MANY, PrefillTile(64, 16, 8, 2), UNMEASURED),
    TileRow((HOPPER,), 512, True, MANY, PrefillTile(64, 32, 8, 2), H200),
    TileRow((AMPERE,), 512, True, MANY, PrefillTile(64, 32, 8, 2), UNMEASURED),
    TileRow((BLACKWELL,), 512, True, MANY, PrefillTile(32, 32, 8, 2), UNMEASURED),
    TileRow(SMALL, 512, True, MANY, PrefillTile(64, 16, 8, 2), UNMEASURED),
)


def find_row(table: tuple[TileRow, ...], capability: int, kv: PagedKV, packed_rows: int = 0) -> TileRow:
    """Return the first row of `table` that matches. Raise LookupError if none does."""
    for row in table:
        is_shape = kv.head_dim <= row.head_dim and kv.is_latent == row.latent
        is_size = packed_rows <= row.packed_rows and kv.page_tokens <= row.page_tokens
        is_kind = kv.planes.element_size() == 1 or not row.is_fp8
        if is_shape and is_size and is_kind and capability in row.capabilities:
            return row
    raise LookupError(
        f"no tile for head dim {kv.head_dim}, latent {kv.is_latent}, {packed_rows} packed rows on sm_{capability}"
    )


def decode_tile(q_TNH: Tensor, kv: PagedKV, max_queries: int, num_rows: int = 1) -> DecodeTile:
    """Return the tile for `num_rows` rows of up to `max_queries` query tokens."""
    capability, num_sms = device_facts(q_TNH.device)
    packed = max_queries * q_TNH.shape[1] // kv.num_kv_heads
    row = find_row(DECODE, capability, kv, packed)
    assert isinstance(row.tile, DecodeTile)
    tile = replace(row.tile, programs=row.per_sm * num_sms)
    # The number of rows is rounded up to a power of two, because kernels are compiled for powers of two.
    if row.crowded_stages and triton.next_power_of_2(num_rows) * kv.num_kv_heads * -(-packed // tile.rows) > tile.programs:
        tile = replace(tile, stages=row.crowded_stages, programs=2 * tile.programs)
    # The tables are for two bytes per element. With four, tiles would not fit in shared memory.
    return tile if q_TNH.element_size() <= 2 else replace(tile, keys=max(16, tile.keys // 2), stages=2)


def prefill_tile(q_TNH: Tensor, kv: PagedKV) -> PrefillTile:
    """Return the tile for long rows."""
    row = find_row(PREFILL, device_facts(q_TNH.device)[0], kv)
    assert isinstance(row.tile, PrefillTile)
    tile = row.tile
    if q_TNH.element_size() <= 2:
        return tile
    return replace(tile, rows=max(16, tile.rows // 2), keys=max(16, tile.keys // 2))  # as in `decode_tile`
