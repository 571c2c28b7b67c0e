"""Tile tables: which tile each kernel takes on which GPU, and where that was measured."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from culet.kernels.attention_inputs import PagedKV


@dataclass(frozen=True)
class DecodeTile:
    """A decode kernel's tile: packed query rows x keys, and how many programs fill the GPU."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 132
    min_tiles: int = 1  # key tiles that a split holds at least
    swapped: bool = False  # keys on the M side of the matrix unit, for wgmma at few query rows
    measured: str = "not measured"


@dataclass(frozen=True)
class PrefillTile:
    """A prefill kernel's tile: packed query rows x keys."""

    rows: int
    keys: int
    warps: int
    stages: int
    measured: str = "not measured"


def decode_tile(q_TNH: Tensor, kv: PagedKV, num_rows: int, max_queries: int) -> DecodeTile:
    return DecodeTile(16, 32, 4, 3)


def prefill_tile(q_TNH: Tensor, kv: PagedKV) -> PrefillTile:
    return PrefillTile(64, 64, 8, 2)
