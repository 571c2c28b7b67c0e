"""Attention by our own kernels on NVIDIA GPUs, sm_80 to sm_120: every Gemma 4 shape, any mix of rows in one step.

Rows of few query tokens (decode, verify, tails) go through one call that is split along the keys; it depends on shapes
alone, and can be captured in a CUDA graph and replayed at other lengths. Rows of many go through tiles planned on the
host. On Hopper the latent's decode and the text rule's prefill have kernels of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from culet.attention.batch import ForwardBatch
from culet.cache.pool import Pool
from culet.cache.spec import KVGroup
from culet.kernels.attention_inputs import PagedKV, RaggedRows
from culet.kernels.triton.decode import Scratch, decode_launches, scratch_rows
from culet.kernels.triton.hopper_decode import hopper_decode_launches, hopper_decode_serves, hopper_decode_tile
from culet.kernels.triton.hopper_prefill import hopper_prefill_launch, hopper_prefill_rows, hopper_prefill_serves
from culet.kernels.triton.prefill import prefill_launch, query_tiles
from culet.kernels.triton.tiles import DecodeTile, PrefillTile, decode_tile, device_facts, prefill_tile

FEW_QUERIES = 16  # rows with up to this many query tokens are split along their keys

LongRow = tuple[int, int, int, int]  # row, its first token, query tokens, position of the first


@dataclass(frozen=True)
class _LongTiles:
    """Query tiles of the rows with many query tokens, by the kernel that takes them."""

    hopper_X5: Tensor | None
    general_X5: Tensor | None
    hopper_reads_fresh: bool


@dataclass
class _Plan:
    """What a batch needs, worked out once for all layers of the group."""

    batch: ForwardBatch
    max_queries: int  # of the rows with few query tokens, rounded up to a power of two; 0: there are none
    long_rows: list[LongRow]
    tiles: dict[bool, _LongTiles] = field(default_factory=dict)  # by whether the fresh keys belong to this batch


class TritonBackend:
    """Attention for the layers of one KV group."""

    def __init__(self, group: KVGroup, num_heads: int) -> None:
        self.group = group
        self.num_heads = num_heads
        # A row this short is in pages whole, whatever the window: the last `window` new tokens always are.
        self.few_queries = min(FEW_QUERIES, group.window or FEW_QUERIES)
        self._plans: list[_Plan] = []  # the step's batch and its tail, found by identity: no plan outlives its step
        self._scratch: Scratch | None = None

    def plan(self, batch: ForwardBatch, pool: Pool) -> None:
        """Sort the rows by kernel. No device work where all rows have few query tokens."""
        few = [row.num_queries for row in batch.rows if 0 < row.num_queries <= self.few_queries]
        ends = accumulate(row.num_queries for row in batch.rows)
        long_rows = [
            (index, end - row.num_queries, row.num_queries, row.start)
            for index, (row, end) in enumerate(zip(batch.rows, ends, strict=True))
            if row.num_queries > self.few_queries
        ]
        max_queries = min(self.few_queries, 1 << (max(few) - 1).bit_length()) if few else 0
        self._plans = [*self._plans[-1:], _Plan(batch, max_queries, long_rows)]

    def run(self, layer: int, batch: ForwardBatch, pool: Pool, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        """Launch the kernels of one layer."""
        plan = self._find(batch, pool)
        facts = batch.groups[self.group.index]
        kv = PagedKV(pool.planes(layer), facts.pages_BP, facts.first_B, self.group.spec.head_dim, self.group.window)
        rows = RaggedRows(batch.row_begin_B1, batch.context_B, facts.visible_2T)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        if plan.max_queries:
            self._run_few(plan.max_queries, q_TNH, kv, rows, out_TNH)
        if plan.long_rows:
            fresh = (k_TGH, v_TGH) if k_TGH.shape[0] == batch.num_tokens else None
            self._run_long(plan, q_TNH, kv, rows, fresh, out_TNH)
        return out_TNH

    def _find(self, batch: ForwardBatch, pool: Pool) -> _Plan:
        for plan in reversed(self._plans):
            if plan.batch is batch:
                return plan
        self.plan(batch, pool)
        return self._plans[-1]

    def _run_few(self, max_queries: int, q_TNH: Tensor, kv: PagedKV, rows: RaggedRows, out_TNH: Tensor) -> None:
        if self._scratch is None:
            self._scratch = self._allocate(q_TNH, kv)
        is_hopper, tile = self._decode_tile(q_TNH, kv, max_queries, has_intervals=rows.visible_2T is not None)
        describe = hopper_decode_launches if is_hopper else decode_launches
        launches = describe(q_TNH, kv, rows, max_queries=max_queries, out_TNH=out_TNH, tile=tile, scratch=self._scratch)
        for launch in launches:
            launch.run()

    def _decode_tile(self, q_TNH: Tensor, kv: PagedKV, max_queries: int, *, has_intervals: bool) -> tuple[bool, DecodeTile]:
        """Whether Hopper's own kernel for the latent is taken, and the tile."""
        capability, num_sms = device_facts(q_TNH.device)
        is_hopper = q_TNH.is_cuda and capability == 90 and q_TNH.dtype == torch.bfloat16 and not has_intervals
        packed = max_queries * self.num_heads // kv.num_kv_heads
        # Up to 16 packed rows both move about 4 TB/s, and the general kernel needs 2 us less at one sequence.
        if is_hopper and packed > 16 and hopper_decode_serves(kv):
            return True, hopper_decode_tile(num_sms)
        return False, decode_tile(q_TNH, kv, max_queries)

    def _allocate(self, q_TNH: Tensor, kv: PagedKV) -> Scratch:
        """Room for any call: a graph keeps the address, so it is taken once."""
        group = self.num_heads // kv.num_kv_heads
        sizes = [
            scratch_rows(self._decode_tile(q_TNH, kv, queries, has_intervals=intervals)[1], kv.num_kv_heads, group, queries)
            for queries in (1, 2, 4, 8, 16)
            for intervals in (False, True)
        ]
        return Scratch.allocate(max(sizes), kv.head_dim, q_TNH.device)

    def _run_long(
        self, plan: _Plan, q_TNH: Tensor, kv: PagedKV, rows: RaggedRows, fresh: tuple[Tensor, Tensor] | None, out_TNH: Tensor
    ) -> None:
        tile = prefill_tile(q_TNH, kv)
        tiles = plan.tiles.get(fresh is not None)
        if tiles is None:
            tiles = plan.tiles[fresh is not None] = self._long_tiles(plan, q_TNH, kv, rows, tile, has_fresh=fresh is not None)
        if tiles.hopper_X5 is not None:
            source = fresh if tiles.hopper_reads_fresh else None
            hopper_prefill_launch(q_TNH, kv, tiles.hopper_X5, fresh=source, out_TNH=out_TNH).run()
        if tiles.general_X5 is not None:
            prefill_launch(q_TNH, kv, rows, tiles.general_X5, fresh=fresh, out_TNH=out_TNH, tile=tile).run()

    def _long_tiles(
        self, plan: _Plan, q_TNH: Tensor, kv: PagedKV, rows: RaggedRows, tile: PrefillTile, *, has_fresh: bool
    ) -> _LongTiles:
        """Hopper's own kernel takes keys from one source; what needs both, or intervals, goes to the general kernel."""
        group, window = self.num_heads // kv.num_kv_heads, kv.window
        stored = [plan.batch.rows[row].is_stored[self.group.index] for row, _, _, _ in plan.long_rows]
        assert has_fresh or all(stored), "rows whose keys are not all in pages need their fresh keys"
        is_hopper = q_TNH.is_cuda and device_facts(q_TNH.device)[0] == 90 and q_TNH.dtype == torch.bfloat16
        is_hopper = is_hopper and rows.visible_2T is None
        if is_hopper and all(stored) and window is None and hopper_prefill_serves(kv, group, fresh=False):
            per_tile = hopper_prefill_rows(kv.head_dim) // group
            return _LongTiles(_send(query_tiles(plan.long_rows, per_tile, window), q_TNH.device), None, False)
        general, fresh_only = query_tiles(plan.long_rows, tile.rows // group, window), None
        if is_hopper and has_fresh and hopper_prefill_serves(kv, group, fresh=True):
            per_tile = hopper_prefill_rows(kv.head_dim) // group
            everything = query_tiles(plan.long_rows, per_tile, window)
            is_fresh = everything[:, 4] == 0
            if window is not None:
                is_fresh |= everything[:, 1] >= window - 1
            fresh_only = everything[is_fresh]
            general = _split(everything[~is_fresh], per_tile, tile.rows // group)
        return _LongTiles(_send(fresh_only, q_TNH.device), _send(general, q_TNH.device), True)


def _split(tiles_X5: np.ndarray, have: int, want: int) -> np.ndarray:
    """Tiles of `have` query tokens as tiles of `want`, a divisor of it, without those past a row's end."""
    assert have % want == 0, f"tiles of {have} query tokens are no whole number of tiles of {want}"
    parts = np.repeat(tiles_X5, have // want, axis=0)
    parts[:, 1] += np.tile(np.arange(have // want, dtype=parts.dtype) * want, len(tiles_X5))
    return np.ascontiguousarray(parts[parts[:, 1] < parts[:, 3]])


def _send(tiles: np.ndarray | None, device: torch.device) -> Tensor | None:
    if tiles is None or not len(tiles):
        return None
    host = torch.from_numpy(tiles)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
