"""The tiles from `choose_stream` are valid, and are used only where the kernel supports them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from culet.hardware import SHARED_BYTES
from culet.kernels.beside_steps import beside_steps
from culet.kernels.replay import is_replayed, replayed
from culet.kernels.triton import device
from culet.kernels.triton.launch import cdiv
from culet.kernels.triton.linear import few_tokens
from culet.kernels.triton.linear.hopper_products import MIN_USED, used_area
from culet.kernels.triton.linear.hopper_stream import blocks_of
from culet.kernels.triton.linear.tiles import (
    GATED,
    GELU_TIMES,
    MAX_ARRIVALS,
    MAX_PARTS,
    PLAIN,
    SOFTCAP,
    Tile,
    choose_stream,
    choose_tile,
)
from tests.kernels.linear_cases import Case, Shape, shapes

HOPPER, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


def check(num_tokens: int, shape: Shape) -> Tile | None:
    """Check that the tile, if any, meets the kernel's requirements."""
    tile = choose_stream(num_tokens, shape.num_rows, shape.size_k, shape.epilogue)
    if tile is None:
        return None
    assert tile.kernel == "stream"
    assert tile.block_n % 64 == 0
    assert tile.block_n % (16 * tile.num_warps) == 0  # 16 weight rows per warp
    assert tile.block_k % 64 == 0  # 128 bytes, the width of a row of shared memory
    assert shape.size_k % (tile.block_k * tile.split_k) == 0
    columns, rest = blocks_of(num_tokens)
    rows = tile.block_n * (2 if shape.epilogue == GATED else 1) + columns + rest
    assert tile.num_stages >= 1
    assert tile.num_stages * tile.block_k * rows * 2 <= SHARED_BYTES[90]
    if tile.split_k > 1:
        assert shape.epilogue in (PLAIN, GELU_TIMES)
        assert tile.split_k * num_tokens * shape.num_rows <= MAX_PARTS
        assert 2 * cdiv(shape.num_rows, tile.block_n) <= MAX_ARRIVALS
    return tile


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: shape.name)
def test_tiles_of_the_models_are_valid(shape: Shape) -> None:
    tiles = [check(num_tokens, shape) for num_tokens in range(1, 200)]
    assert all(tile is None for tile in tiles[128:])


def test_every_kind_of_layer_has_a_tile() -> None:
    served = {shape.epilogue for shape in shapes() if any(check(num_tokens, shape) for num_tokens in range(1, 129))}
    assert served == {PLAIN, GATED, GELU_TIMES, SOFTCAP}


@given(st.integers(1, 300), st.integers(1, 300_000), st.integers(1, 1024).map(lambda k: 32 * k), st.sampled_from(range(4)))
def test_tiles_of_any_shape_are_valid(num_tokens: int, num_rows: int, size_k: int, epilogue: int) -> None:
    tile = check(num_tokens, Shape("any", num_rows, size_k, epilogue))
    if tile is not None:
        Case(Shape("any", num_rows, size_k, epilogue), num_tokens, tile).on_meta()  # raises if a requirement is not met


@pytest.mark.parametrize(("num_tokens", "num_rows", "size_k"), [(96, 15_000, 2112), (32, 70_000, 256), (8, 70_000, 2112)])
def test_no_split_beyond_the_workspace(num_tokens: int, num_rows: int, size_k: int) -> None:
    narrow = choose_stream(num_tokens, 2048, size_k)
    assert narrow is not None
    assert narrow.split_k > 1
    tile = choose_stream(num_tokens, num_rows, size_k)
    assert (tile is None) == (narrow.split_k * num_tokens * num_rows > MAX_PARTS)


@pytest.mark.parametrize(
    ("num_tokens", "blocks"),
    [(1, (16, 0)), (16, (16, 0)), (17, (32, 0)), (64, (64, 0)), (65, (64, 16)), (80, (64, 16)), (81, (64, 32)),
     (96, (64, 32)), (97, (128, 0)), (128, (128, 0))],
)  # fmt: skip
def test_tokens_are_in_one_or_two_blocks(num_tokens: int, blocks: tuple[int, int]) -> None:
    assert blocks_of(num_tokens) == blocks


def test_all_tokens_have_a_column() -> None:
    for num_tokens in range(1, 129):
        columns, rest = blocks_of(num_tokens)
        assert num_tokens <= columns + rest
        assert all(size & (size - 1) == 0 and (size == 0 or size >= 16) for size in (columns, rest))
        assert rest == 0 or num_tokens > columns == 64


@pytest.mark.parametrize(
    ("shape", "num_tokens", "tile", "message"),
    [
        (Shape("rows", 256, 2560), 129, Tile("stream", 64, 64, 4, 4), "do not fit into two blocks"),
        (Shape("rows", 256, 2560), 8, Tile("stream", 64, 64, 8, 4), "too few rows"),
        (Shape("inputs", 256, 2624), 8, Tile("stream", 64, 128, 4, 4), "does not divide"),
        (Shape("inputs", 256, 2560), 8, Tile("stream", 64, 64, 4, 4, 3), "does not divide"),
        (Shape("gate", 256, 2560, GATED), 8, Tile("stream", 64, 64, 4, 4, 2), "cannot be joined"),
        (Shape("parts", 1 << 16, 2560), 40, Tile("stream", 64, 64, 4, 4, 2), "more workspace"),
        (Shape("counters", 1 << 20, 2560), 1, Tile("stream", 64, 64, 4, 4, 2), "more arrival counters"),
    ],
)
def test_other_tiles_are_refused(shape: Shape, num_tokens: int, tile: Tile, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        Case(shape, num_tokens, tile).on_meta()


# --- where it is used ---


def tensor(num_rows: int, size: int, where: torch.device = HOPPER, **other: Any) -> torch.Tensor:
    """A stand-in for a matrix on a GPU, as `_tile_for` sees it."""
    facts = {"dtype": torch.bfloat16, "stride": (size, 1), "address": 1 << 20} | other
    found = SimpleNamespace(
        shape=(num_rows, size),
        device=where,
        dtype=facts["dtype"],
        is_cuda=where.type == "cuda",
        dim=lambda: 2,
        stride=lambda place: facts["stride"][place],
        data_ptr=lambda: facts["address"],
        is_contiguous=lambda: facts["stride"] == (size, 1),
    )
    return cast(torch.Tensor, found)


@pytest.fixture(autouse=True)
def one_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_hopper", lambda where: where == HOPPER)


def kernel_of(x: torch.Tensor, weight: torch.Tensor) -> str:
    tile = few_tokens._tile_for(x, weight, weight.shape[0], PLAIN)
    return "cublas" if tile is None else tile.kernel


def test_launches_beside_steps_use_torch() -> None:
    """The kernels for few tokens share their memory with those of a step, which may run at the same time."""
    assert kernel_of(tensor(8, 2560), tensor(3072, 2560)) == "tiles"
    with beside_steps(), replayed():
        assert kernel_of(tensor(8, 2560), tensor(3072, 2560)) == "cublas"
    assert kernel_of(tensor(8, 2560), tensor(3072, 2560)) == "tiles"


@pytest.mark.parametrize("num_tokens", [8, 32, 80])
def test_only_replayed_steps_on_hopper_use_it(num_tokens: int) -> None:
    other = choose_tile(num_tokens, 3072, 2560).kernel
    assert other != "stream"
    assert kernel_of(tensor(num_tokens, 2560), tensor(3072, 2560)) == other
    with replayed():
        assert kernel_of(tensor(num_tokens, 2560), tensor(3072, 2560)) == "stream"
        assert kernel_of(tensor(num_tokens, 2560, OTHER), tensor(3072, 2560, OTHER)) == other
        on_cpu = torch.device("cpu")
        assert kernel_of(tensor(num_tokens, 2560, on_cpu), tensor(3072, 2560, on_cpu)) == other
    assert kernel_of(tensor(num_tokens, 2560), tensor(3072, 2560)) == other


@pytest.mark.parametrize(
    "x", [{"stride": (2564, 1)}, {"address": (1 << 20) + 8}, {"stride": (1, 8)}, {"dtype": torch.float32}], ids=str
)
def test_not_used_for_tokens_that_the_copy_engine_cannot_read(x: dict[str, Any]) -> None:
    with replayed():
        assert kernel_of(tensor(8, 2560, stride=(5120, 1)), tensor(3072, 2560)) == "stream"
        assert kernel_of(tensor(8, 2560, **x), tensor(3072, 2560)) != "stream"


@pytest.mark.parametrize("weight", [{"address": (1 << 20) + 2}, {"dtype": torch.float8_e4m3fn}], ids=str)
def test_not_used_for_weights_that_it_cannot_read(weight: dict[str, Any]) -> None:
    with replayed():
        assert kernel_of(tensor(8, 2560), tensor(3072, 2560, **weight)) != "stream"


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "is_faster"),
    [
        (20160, 4304, True),
        (2520, 4304, True),
        (8000, 21504, True),
        (1000, 21504, True),
        (1000, 10240, True),
        (1000, 2112, False),  # a second round of four tiles
        (300, 21504, False),
        (300, 10240, False),
        (130, 10240, False),
    ],
)
def test_gated_products_are_chosen_where_they_were_faster(num_tokens: int, num_outputs: int, is_faster: bool) -> None:
    assert (used_area(num_tokens, num_outputs, 132) >= MIN_USED) == is_faster


def test_replayed_steps_nest_and_end() -> None:
    assert not is_replayed()
    with replayed():
        with replayed():
            assert is_replayed()
        assert is_replayed()
    with pytest.raises(ValueError, match="in a step"), replayed():
        raise ValueError("in a step")
    assert not is_replayed()
