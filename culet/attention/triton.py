"""Attention with Culet's Triton kernels on NVIDIA GPUs. It serves every Gemma 4 shape and any mix of rows in one step.

Rows with few query tokens (decode, verify, tails) share one call that is split along the keys. The call depends only on
shapes, so its CUDA graph can be replayed at other lengths. Rows with many query tokens are divided into tiles on the host. On
Hopper, decoding with a latent cache and prefill by the text rule have their own kernels.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup
from culet.kernels.captures import side_by_side
from culet.kernels.triton.attention.decode import decode_launches
from culet.kernels.triton.attention.hopper_decode import hopper_decode_launches, hopper_decode_supports, hopper_decode_tile
from culet.kernels.triton.attention.hopper_parts import KEYS
from culet.kernels.triton.attention.hopper_prefill import hopper_prefill_launch, hopper_prefill_rows, hopper_prefill_supports
from culet.kernels.triton.attention.prefill import prefill_launch, query_tiles
from culet.kernels.triton.attention.splits import Scratch, scratch_rows
from culet.kernels.triton.attention.tiles import DecodeTile, PrefillTile, decode_tile, prefill_tile
from culet.kernels.triton.device import device_facts, is_hopper
from culet.kernels.triton.launch import Launch, is_only_warming
from culet.kernels.types import PagedKV, RaggedRows

MANY_ROWS = 1 << 10  # enough rows to get the tile for a full GPU
FEW_QUERIES = 16  # rows with up to this many query tokens are split along their keys
MANY_BYTES = 128 << 20  # if the rows with few query tokens read this much, the others run beside them

LongRow = tuple[int, int, int, int]  # row, its first token, number of query tokens, position of the first token


@dataclass(frozen=True)
class _LongTiles:
    """Query tiles of the rows with many query tokens, grouped by kernel."""

    paged_X5: Tensor | None  # the Hopper kernel, all keys from pages
    fresh_X5: Tensor | None  # the Hopper kernel, all keys from the fresh tensors
    general_X5: Tensor | None  # the general kernel, by the text rule
    masked_X5: Tensor | None  # the general kernel, by intervals per token


@dataclass
class _Plan:
    """The plan for a batch. All layers of the group share it."""

    batch: ForwardBatch
    max_queries: int  # in rows with few query tokens, rounded up to a power of two, or 0 without such rows
    few_bytes: int  # keys and values that these rows read in a layer
    is_few_masked: bool  # whether one of these rows has intervals per token
    long_rows: list[LongRow]  # by the text rule
    masked_rows: list[LongRow]  # with intervals per token
    tiles: dict[bool, _LongTiles] = field(default_factory=dict)  # by whether the fresh keys belong to this batch


class TritonBackend:
    """Attention for the layers of one KV group."""

    is_capturable: ClassVar[bool] = True

    def __init__(self, group: KVGroup, num_heads: int) -> None:
        self.group = group
        self.num_heads = num_heads
        # All keys of such a short row are in pages, because the last `window` new tokens always are.
        self.few_queries = min(FEW_QUERIES, group.window or FEW_QUERIES)
        self._plans: list[_Plan] = []  # for the step's batch and its tail, found by identity
        self._scratch: Scratch | None = None
        self._warmed_rows: dict[tuple[int, bool], int] = {}  # most rows compiled so far, by `max_queries` and whether masked

    def plan(self, batch: ForwardBatch, pool: Pool) -> None:
        """Sort the rows by kernel. If all rows have few query tokens, there is no device work."""
        has_masks = batch.groups[self.group.index].visible_2T is not None
        ends = accumulate(row.num_queries for row in batch.rows)
        max_few, num_few_keys, is_few_masked = 0, 0, False
        long_rows: list[LongRow] = []
        masked_rows: list[LongRow] = []
        for index, (row, end) in enumerate(zip(batch.rows, ends, strict=True)):
            is_masked = has_masks and (not row.is_text or self.group.spec.token_shares > 1)
            if row.num_queries > self.few_queries:
                facts = (index, end - row.num_queries, row.num_queries, row.start)
                (masked_rows if is_masked else long_rows).append(facts)
            elif row.num_queries:
                max_few, is_few_masked = max(max_few, row.num_queries), is_few_masked or is_masked
                num_few_keys += min(row.start + row.num_queries, self.group.window or sys.maxsize)
        max_queries = min(self.few_queries, 1 << (max_few - 1).bit_length()) if max_few else 0
        few_bytes = num_few_keys * self.group.spec.bytes_per_token
        self._plans = [*self._plans[-1:], _Plan(batch, max_queries, few_bytes, is_few_masked, long_rows, masked_rows)]

    def run(self, layer: int, batch: ForwardBatch, pool: Pool, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        """Launch the kernels of one layer."""
        plan = self._find(batch, pool)
        facts = batch.groups[self.group.index]
        kv = PagedKV(pool.planes(layer), facts.pages_BP, facts.first_B, self.group.spec.head_dim, self.group.window)
        rows = RaggedRows(batch.row_begin_B1, batch.context_B)
        masked = RaggedRows(batch.row_begin_B1, batch.context_B, facts.visible_2T)
        out_TNH = q_TNH.new_empty(q_TNH.shape)

        def run_few() -> None:
            if plan.max_queries:
                self._run_few(plan.max_queries, q_TNH, kv, masked if plan.is_few_masked else rows, out_TNH)

        if not (plan.long_rows or plan.masked_rows):
            run_few()
            return out_TNH
        fresh = (k_TGH, v_TGH) if k_TGH.shape[0] == batch.num_tokens else None
        tile, tiles = self._long_tiles(plan, q_TNH, kv, has_fresh=fresh is not None)
        launches: list[Launch] = []
        if tiles.paged_X5 is not None:
            launches.append(hopper_prefill_launch(q_TNH, kv, tiles.paged_X5, fresh=None, out_TNH=out_TNH))
        if tiles.fresh_X5 is not None:
            launches.append(hopper_prefill_launch(q_TNH, kv, tiles.fresh_X5, fresh=fresh, out_TNH=out_TNH))
        if tiles.general_X5 is not None:
            launches.append(prefill_launch(q_TNH, kv, rows, tiles.general_X5, fresh=fresh, out_TNH=out_TNH, tile=tile))
        if tiles.masked_X5 is not None:
            launches.append(prefill_launch(q_TNH, kv, masked, tiles.masked_X5, fresh=fresh, out_TNH=out_TNH, tile=tile))

        def run_long() -> None:
            for launch in launches:
                launch.run()

        # A chunk has few programs that take long, and leaves most of the memory's bandwidth to the other rows.
        side_by_side(run_few, run_long, q_TNH.device, is_long=plan.few_bytes >= MANY_BYTES, is_urgent=True)
        return out_TNH

    def run_share(self, layer: int, batch: ForwardBatch, pool: Pool, q_TNH: Tensor) -> tuple[Tensor, Tensor]:
        """Launch the general kernels of one layer over this rank's tokens. Each query has an interval of visible keys."""
        plan = self._find(batch, pool)
        facts = batch.groups[self.group.index]
        assert facts.context_B is not None, "ranks that share tokens need a batch of their own"
        kv = PagedKV(pool.planes(layer), facts.pages_BP, facts.first_B, self.group.spec.head_dim, self.group.window)
        rows = RaggedRows(batch.row_begin_B1, facts.context_B, facts.visible_2T)
        # The kernels do not write rows without keys.
        out_TNH = q_TNH.new_zeros(q_TNH.shape)
        lse_TN = torch.full(q_TNH.shape[:2], -torch.inf, dtype=torch.float32, device=q_TNH.device)
        if plan.max_queries:
            self._run_few(plan.max_queries, q_TNH, kv, rows, out_TNH, lse_TN)
        if plan.masked_rows:
            tile, tiles = self._long_tiles(plan, q_TNH, kv, has_fresh=False)
            assert tiles.masked_X5 is not None
            launch = prefill_launch(q_TNH, kv, rows, tiles.masked_X5, fresh=None, out_TNH=out_TNH, tile=tile, lse_TN=lse_TN)
            launch.run()
        return out_TNH, lse_TN

    def _find(self, batch: ForwardBatch, pool: Pool) -> _Plan:
        for plan in reversed(self._plans):
            if plan.batch is batch:
                return plan
        self.plan(batch, pool)
        return self._plans[-1]

    def _run_few(
        self,
        max_queries: int,
        q_TNH: Tensor,
        kv: PagedKV,
        rows: RaggedRows,
        out_TNH: Tensor,
        lse_TN: Tensor | None = None,
    ) -> None:
        if self._scratch is None:
            self._scratch = self._allocate(q_TNH, kv)
        for launch in self._few_launches(max_queries, q_TNH, kv, rows, out_TNH, lse_TN):
            launch.run()
        if is_only_warming():
            self._warm_fewer_rows(max_queries, q_TNH, kv, rows, out_TNH, lse_TN)

    def _few_launches(
        self, max_queries: int, q_TNH: Tensor, kv: PagedKV, rows: RaggedRows, out_TNH: Tensor, lse_TN: Tensor | None
    ) -> list[Launch]:
        is_masked = rows.visible_2T is not None
        use_hopper, tile = self._decode_tile(q_TNH, kv, max_queries, rows.num_rows, has_intervals=is_masked)
        arguments: dict[str, Any] = {"max_queries": max_queries, "out_TNH": out_TNH, "tile": tile, "scratch": self._scratch}
        if use_hopper:
            return hopper_decode_launches(q_TNH, kv, rows, **arguments)
        return decode_launches(q_TNH, kv, rows, **arguments, lse_TN=lse_TN)

    def _warm_fewer_rows(
        self, max_queries: int, q_TNH: Tensor, kv: PagedKV, rows: RaggedRows, out_TNH: Tensor, lse_TN: Tensor | None
    ) -> None:
        """Compile the kernels for smaller numbers of rows as well, because the number of rows decides which kernels run."""
        kind = max_queries, rows.visible_2T is not None
        for num_rows in range(self._warmed_rows.get(kind, 0) + 1, rows.num_rows):
            fewer = RaggedRows(rows.row_begin_B1, rows.context_B[:1].expand(num_rows), rows.visible_2T)
            for launch in self._few_launches(max_queries, q_TNH, kv, fewer, out_TNH, lse_TN):
                launch.run()
        self._warmed_rows[kind] = max(rows.num_rows, self._warmed_rows.get(kind, 0))

    def _decode_tile(
        self, q_TNH: Tensor, kv: PagedKV, max_queries: int, num_rows: int = 1, *, has_intervals: bool
    ) -> tuple[bool, DecodeTile]:
        """Return whether to use the Hopper kernel for a latent cache, and the tile."""
        num_sms = device_facts(q_TNH.device)[1]
        can_use_hopper = _can_use_hopper(q_TNH) and not has_intervals
        packed = max_queries * self.num_heads // kv.num_kv_heads
        # Up to 16 packed rows, both kernels move about 4 TB/s, and the general one is 2 us faster for one sequence.
        if can_use_hopper and packed > 16 and hopper_decode_supports(kv):
            return True, hopper_decode_tile(num_sms)
        return False, decode_tile(q_TNH, kv, max_queries, num_rows)

    def _allocate(self, q_TNH: Tensor, kv: PagedKV) -> Scratch:
        """Allocate scratch memory that is large enough for any call. Graphs keep its address, so this happens once."""
        group = self.num_heads // kv.num_kv_heads
        tiles = [
            (queries, self._decode_tile(q_TNH, kv, queries, rows, has_intervals=intervals)[1])
            for queries in (1, 2, 4, 8, 16)
            for rows in (1, MANY_ROWS)
            for intervals in (False, True)
        ]
        sizes = [scratch_rows(tile, kv.num_kv_heads, group, queries) for queries, tile in tiles]
        return Scratch.allocate(max(sizes), kv.head_dim, q_TNH.device)

    def _long_tiles(self, plan: _Plan, q_TNH: Tensor, kv: PagedKV, *, has_fresh: bool) -> tuple[PrefillTile, _LongTiles]:
        """Assign the queries to kernels, once per step. The Hopper kernel needs the text rule and a single source of keys."""
        tile = prefill_tile(q_TNH, kv)
        if has_fresh in plan.tiles:
            return tile, plan.tiles[has_fresh]
        group, window = self.num_heads // kv.num_kv_heads, kv.window
        rows = [*plan.long_rows, *plan.masked_rows]
        is_stored = all(plan.batch.rows[row].is_stored[self.group.index] for row, _, _, _ in rows)
        assert has_fresh or is_stored, "rows whose keys are not all in pages need their fresh keys"
        can_use_hopper = _can_use_hopper(q_TNH)
        can_page = can_use_hopper and is_stored and window is None and hopper_prefill_supports(kv, group, fresh=False)
        can_take_fresh = can_use_hopper and has_fresh and hopper_prefill_supports(kv, group, fresh=True)
        per_tile = tile.rows // group
        masked = query_tiles(plan.masked_rows, per_tile, window)
        paged = fresh = None
        if can_page or can_take_fresh:
            everything = query_tiles(plan.long_rows, hopper_prefill_rows(kv.head_dim) // group, window)
            sees_fresh = everything[:, 4] == 0
            if window is not None:
                sees_fresh |= everything[:, 1] >= window - 1
            # Whole tiles from pages are as fast as fresh ones, and all rows then need only one launch. Half tiles are slower.
            sees_fresh &= can_take_fresh and not (can_page and kv.page_tokens % KEYS == 0)
            fresh, rest = everything[sees_fresh], everything[~sees_fresh]
            paged, rest = (rest, rest[:0]) if can_page else (None, rest)
            general = _split(rest, hopper_prefill_rows(kv.head_dim) // group, per_tile)
        else:
            general = query_tiles(plan.long_rows, per_tile, window)
        sent = [_send(tiles, q_TNH.device) for tiles in (paged, fresh, general, masked)]
        plan.tiles[has_fresh] = _LongTiles(*sent)
        return tile, plan.tiles[has_fresh]


def _can_use_hopper(q_TNH: Tensor) -> bool:
    """Return whether the Hopper kernels support these queries."""
    return is_hopper(q_TNH.device) and q_TNH.dtype == torch.bfloat16


def _split(tiles_X5: np.ndarray, have: int, want: int) -> np.ndarray:
    """Divide tiles of `have` query tokens into tiles of `want` tokens. Drop tiles past a row's end."""
    assert have % want == 0, f"tiles of {have} query tokens cannot be divided into tiles of {want}"
    parts = np.repeat(tiles_X5, have // want, axis=0)
    parts[:, 1] += np.tile(np.arange(have // want, dtype=parts.dtype) * want, len(tiles_X5))
    return np.ascontiguousarray(parts[parts[:, 1] < parts[:, 3]])


def _send(tiles: np.ndarray | None, device: torch.device) -> Tensor | None:
    if tiles is None or not len(tiles):
        return None
    host = torch.from_numpy(tiles)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
