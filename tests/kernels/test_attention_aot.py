"""Every tile row compiles for its architecture and fits in shared memory. Needs no GPU.

The compiler itself rejects nothing. A tile that needs too much memory fails only when it is launched.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from culet.bench.attention_cases import SHAPES, AttentionShape
from culet.hardware import SHARED_BYTES
from culet.kernels.cross_compile import compile_for
from culet.kernels.triton.attention.decode import decode_launches
from culet.kernels.triton.attention.hopper_decode import hopper_decode_launches, hopper_decode_supports, hopper_decode_tile
from culet.kernels.triton.attention.hopper_patches import describe_patch_attention
from culet.kernels.triton.attention.hopper_prefill import hopper_prefill_launch, hopper_prefill_supports
from culet.kernels.triton.attention.prefill import prefill_launch
from culet.kernels.triton.attention.splits import Scratch, scratch_rows
from culet.kernels.triton.attention.tiles import (
    DECODE,
    PREFILL,
    DecodeTile,
    PrefillTile,
    decode_tile,
    find_row,
    prefill_tile,
    splits_by_waves,
)
from culet.kernels.triton.attention.token_shares import own_addresses_launch, own_keys_launch
from culet.kernels.triton.launch import Launch
from culet.kernels.types import PagedKV, RaggedRows, TokenShare

CAPABILITIES = (80, 89, 90, 100, 120)
# One for each kind of row in the tables. Other variants differ only in the number of KV heads.
ALL_SHAPES = {name: SHAPES[name] for name in ("31B.sliding", "31B.global", "12B.global", "E4B.sliding", "E4B.global")}
ALL_SHAPES["drafter"] = AttentionShape(32, 8, 128, None, False, 64)
QUICK = {("31B.sliding", 89), ("31B.global", 120), ("E4B.global", 80), ("12B.global", 89)}


def on_meta(
    shape: AttentionShape, num_rows: int, num_queries: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, PagedKV, RaggedRows]:
    def ints(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.int32, device="meta")

    num_planes = 1 if shape.latent else 2
    size = (num_planes, 8, shape.num_kv_heads, shape.page_tokens, shape.width)
    planes = torch.empty(size, dtype=dtype, device="meta")
    kv = PagedKV(planes, ints(num_rows, 64), ints(num_rows), shape.head_dim, shape.window)
    q_TNH = torch.empty(num_rows * num_queries, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device="meta")
    return q_TNH, kv, RaggedRows(ints(num_rows + 1), ints(num_rows))


def fresh_on_meta(shape: AttentionShape, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.empty(num_tokens, shape.num_kv_heads, shape.width, dtype=torch.bfloat16, device="meta")
    if shape.latent:
        return whole[..., shape.width - shape.head_dim :], whole[..., : shape.head_dim]
    return whole, torch.empty_like(whole)


def assert_fits(launch: Launch, capability: int) -> None:
    compiled = compile_for(launch, capability)
    assert compiled.asm["cubin"]
    used, limit = compiled.metadata.shared, SHARED_BYTES[capability]
    assert used <= limit, f"{used} bytes of shared memory on sm_{capability}, which has {limit}"


def check_decode(shape: AttentionShape, capability: int, max_queries: int, dtype: torch.dtype = torch.bfloat16) -> None:
    q_TNH, kv, rows = on_meta(shape, 8, max_queries, dtype)
    tile = find_row(DECODE, capability, kv, max_queries * shape.group).tile
    assert isinstance(tile, DecodeTile)
    scratch = Scratch.allocate(16, shape.head_dim, "meta")
    launches = decode_launches(q_TNH, kv, rows, max_queries=max_queries, out_TNH=q_TNH, tile=tile, scratch=scratch)
    for launch in launches:
        assert_fits(launch, capability)


def check_prefill(shape: AttentionShape, capability: int, *, with_fresh: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    q_TNH, kv, rows = on_meta(shape, 4, 256, dtype)
    tile = find_row(PREFILL, capability, kv).tile
    assert isinstance(tile, PrefillTile)
    fresh = fresh_on_meta(shape, q_TNH.shape[0]) if with_fresh else None
    tiles = torch.empty(16, 5, dtype=torch.int32, device="meta")
    assert_fits(prefill_launch(q_TNH, kv, rows, tiles, fresh=fresh, out_TNH=q_TNH, tile=tile), capability)


@pytest.mark.parametrize(("name", "capability"), sorted(QUICK))
def test_tiles_fit(name: str, capability: int) -> None:
    check_decode(ALL_SHAPES[name], capability, 1)


@pytest.mark.parametrize(("capability", "num_rows"), [pytest.param(89, 8, marks=pytest.mark.slow), (90, 32)])
def test_a_drafters_block_fits(capability: int, num_rows: int) -> None:
    """16 tokens of the 31B's DFlash drafter, which attend to each other in both directions."""
    shape = AttentionShape(64, 8, 128, None, False, 640)
    q_TNH, kv, rows = on_meta(shape, num_rows, 16)
    rows = replace(rows, visible_2T=torch.empty(2, q_TNH.shape[0], dtype=torch.int32, device="meta"))
    tile = find_row(DECODE, capability, kv, 16 * shape.group).tile
    assert isinstance(tile, DecodeTile)
    scratch = Scratch.allocate(16, shape.head_dim, "meta")
    for launch in decode_launches(q_TNH, kv, rows, max_queries=16, out_TNH=q_TNH, tile=tile, scratch=scratch):
        assert_fits(launch, capability)


@pytest.mark.parametrize("capability", [90, *(pytest.param(number, marks=pytest.mark.slow) for number in (80, 89, 100, 120))])
def test_ranks_that_share_tokens(capability: int) -> None:
    """Intervals of visible keys, and the log of the softmax sum as a second output."""
    shape = SHAPES["12B.global"]
    q_TNH, kv, rows = on_meta(shape, 8, 4)
    rows = replace(rows, visible_2T=torch.empty(2, q_TNH.shape[0], dtype=torch.int32, device="meta"))
    lse_TN = torch.empty(q_TNH.shape[:2], device="meta")
    tile = find_row(DECODE, capability, kv, 4 * shape.group).tile
    assert isinstance(tile, DecodeTile)
    scratch = Scratch.allocate(16, shape.head_dim, "meta")
    launches = decode_launches(q_TNH, kv, rows, max_queries=4, out_TNH=q_TNH, tile=tile, scratch=scratch, lse_TN=lse_TN)
    prefill = find_row(PREFILL, capability, kv).tile
    assert isinstance(prefill, PrefillTile)
    tiles = torch.empty(16, 5, dtype=torch.int32, device="meta")
    launches.append(prefill_launch(q_TNH, kv, rows, tiles, fresh=None, out_TNH=q_TNH, tile=prefill, lse_TN=lse_TN))
    share, address_T = TokenShare(1, 2, 64, 512), torch.empty(q_TNH.shape[0], dtype=torch.int64, device="meta")
    assert rows.visible_2T is not None
    launches.append(own_addresses_launch(address_T, address_T, share))
    launches.append(own_keys_launch(address_T, rows.row_begin_B1, rows.visible_2T, rows.context_B, share))
    for launch in launches:
        assert_fits(launch, capability)


def test_prefill_tile_fits_the_smallest_shared_memory() -> None:
    check_prefill(SHAPES["31B.global"], 89, with_fresh=False)


@pytest.mark.parametrize(
    "name", ["E4B.global", *(pytest.param(name, marks=pytest.mark.slow) for name in ("31B.sliding", "31B.global"))]
)
def test_float32_fits_too(name: str) -> None:
    """A cache of four-byte elements on an H200, which is assumed if there is no GPU."""
    q_TNH, kv, rows = on_meta(ALL_SHAPES[name], 4, 1)
    q_TNH, kv = q_TNH.float(), replace(kv, planes=kv.planes.float())
    scratch = Scratch.allocate(16, kv.head_dim, "meta")
    tile = decode_tile(q_TNH, kv, 1)
    decode, *_ = decode_launches(q_TNH, kv, rows, max_queries=1, out_TNH=q_TNH, tile=tile, scratch=scratch)
    assert_fits(decode, 90)
    tiles = torch.empty(16, 5, dtype=torch.int32, device="meta")
    assert_fits(prefill_launch(q_TNH, kv, rows, tiles, fresh=None, out_TNH=q_TNH, tile=prefill_tile(q_TNH, kv)), 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", sorted(ALL_SHAPES))
def test_every_tile_fits(name: str, capability: int) -> None:
    for max_queries in (1, 4, 16):
        check_decode(ALL_SHAPES[name], capability, max_queries)
    check_prefill(ALL_SHAPES[name], capability, with_fresh=True)
    check_prefill(ALL_SHAPES[name], capability, with_fresh=False)


@pytest.mark.parametrize(
    ("name", "num_rows", "num_launches", "stages"),
    [
        ("26B.global", 4, 2, 7),  # few rows, with many splits each that a second kernel joins
        ("26B.global", 16, 1, 7),
        ("26B.global", 128, 1, 5),  # rows fill the GPU unsplit, with two programs per multiprocessor
        ("E4B.global", 64, 1, 5),
        ("E4B.global", 80, 1, 3),
        ("E4B.sliding", 4, 2, 5),
        ("E4B.sliding", 8, 1, 5),
        ("31B.sliding", 1, 2, 5),
        ("31B.sliding", 8, 1, 5),
        ("31B.sliding", 80, 1, 5),  # windows that fill the GPU, with nothing to join
    ],
)
def test_launches_of_a_call(name: str, num_rows: int, num_launches: int, stages: int) -> None:
    q_TNH, kv, rows = on_meta(SHAPES[name], num_rows, 1)
    tile = decode_tile(q_TNH, kv, 1, num_rows)
    assert tile.stages == stages
    scratch = Scratch.allocate(16, kv.head_dim, "meta")
    launches = decode_launches(q_TNH, kv, rows, max_queries=1, out_TNH=q_TNH, tile=tile, scratch=scratch)
    assert len(launches) == num_launches


def splits_of_rows(tile: DecodeTile, kv: PagedKV, group: int, max_queries: int, counts: list[int]) -> list[int]:
    """Return how the kernels split rows with these numbers of key tiles."""
    target, total = tile.splits(kv, len(counts), group, max_queries).target, sum(counts)
    is_even = kv.window is not None or len(counts) == 1
    found = []
    for count in counts:
        wanted = target if is_even else (count * target + total // 2) // total
        splits = max(1, min(wanted, count))
        found.append(-(-count // -(-count // splits)))
    return found


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("max_queries", [1, 4, 16])
def test_partial_sums_of_any_rows_fit_the_scratch(name: str, max_queries: int) -> None:
    shape, random = SHAPES[name], Random(0)
    for num_rows in (1, 2, 3, 5, 8, 17, 32, 48, 80, 100, 128, 200, 512, 1000):
        q_TNH, kv, _ = on_meta(shape, num_rows, max_queries)
        for tile in (decode_tile(q_TNH, kv, max_queries, num_rows), hopper_decode_tile(132)):
            room = scratch_rows(tile, shape.num_kv_heads, shape.group, max_queries)
            for longest in (1, 4, 1000):
                counts = [random.randint(1, longest) for _ in range(num_rows)]
                splits = splits_of_rows(tile, kv, shape.group, max_queries, counts)
                target = tile.splits(kv, num_rows, shape.group, max_queries).target
                # With a window, every row has its own places, whether it needs them or not.
                places = num_rows * target * (target > 1) if kv.window else sum(count for count in splits if count > 1)
                assert places * shape.num_kv_heads * max_queries * shape.group <= room


@pytest.mark.parametrize(
    ("unsplit", "programs", "splits"),
    [(2, 132, 66), (64, 132, 2), (128, 132, 1), (160, 132, 2), (160, 264, 3), (256, 264, 1), (320, 264, 2), (5000, 132, 1)],
)
def test_rows_are_split_by_waves(unsplit: int, programs: int, splits: int) -> None:
    assert splits_by_waves(unsplit, programs) == splits


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(("name", "capability"), [("31B.global", 89), pytest.param("31B.sliding", 90, marks=pytest.mark.slow)])
def test_fp8_pages_fit(name: str, capability: int) -> None:
    check_decode(SHAPES[name], capability, 1, FP8)
    check_prefill(SHAPES[name], capability, with_fresh=True, dtype=FP8)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES[1:])
@pytest.mark.parametrize("name", sorted(ALL_SHAPES))
def test_every_tile_fits_with_fp8_pages(name: str, capability: int) -> None:
    for max_queries in (1, 4, 16):
        check_decode(ALL_SHAPES[name], capability, max_queries, FP8)
    check_prefill(ALL_SHAPES[name], capability, with_fresh=True, dtype=FP8)
    check_prefill(ALL_SHAPES[name], capability, with_fresh=False, dtype=FP8)


def test_hopper_kernels_do_not_support_fp8_pages() -> None:
    _, kv, _ = on_meta(SHAPES["31B.global"], 8, 1, FP8)
    assert not hopper_decode_supports(kv)
    assert not hopper_prefill_supports(kv, SHAPES["31B.global"].group, fresh=False)
    assert hopper_prefill_supports(kv, SHAPES["31B.global"].group, fresh=True)


@pytest.mark.parametrize("name", ["31B.global", pytest.param("12B.global", marks=pytest.mark.slow)])
def test_hopper_decode_fits(name: str) -> None:
    shape = SHAPES[name]
    q_TNH, kv, rows = on_meta(shape, 8, 1)
    assert hopper_decode_supports(kv)
    scratch = Scratch.allocate(16, shape.head_dim, "meta")
    tile = hopper_decode_tile(132)
    for launch in hopper_decode_launches(q_TNH, kv, rows, max_queries=1, out_TNH=q_TNH, tile=tile, scratch=scratch):
        assert_fits(launch, 90)


@pytest.mark.parametrize(
    ("name", "with_fresh"),
    [
        ("31B.sliding", True),
        pytest.param("31B.global", False, marks=pytest.mark.slow),
        pytest.param("12B.global", False, marks=pytest.mark.slow),
        pytest.param("31B.global", True, marks=pytest.mark.slow),
        pytest.param("E4B.global", True, marks=pytest.mark.slow),
        pytest.param("E4B.sliding", True, marks=pytest.mark.slow),
        ("E4B.global", False),  # pages of 160 tokens, so half tiles
        pytest.param("E2B.global", False, marks=pytest.mark.slow),
    ],
)
def test_hopper_prefill_fits(name: str, with_fresh: bool) -> None:
    shape = SHAPES[name]
    q_TNH, kv, _ = on_meta(shape, 4, 256)
    assert hopper_prefill_supports(kv, shape.group, fresh=with_fresh)
    fresh = fresh_on_meta(shape, q_TNH.shape[0]) if with_fresh else None
    tiles = torch.empty(16, 5, dtype=torch.int32, device="meta")
    assert_fits(hopper_prefill_launch(q_TNH, kv, tiles, fresh=fresh, out_TNH=q_TNH), 90)


def test_attention_of_patches_fits_hopper():
    padded = torch.empty(5040, 16, 80, dtype=torch.bfloat16, device="meta")[..., :72]
    out = torch.empty(5040, 16, 72, dtype=torch.bfloat16, device="meta")
    for launch in describe_patch_attention(padded, padded, padded, out, 0, 2520, 2):
        assert_fits(launch, 90)
