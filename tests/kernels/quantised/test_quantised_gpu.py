"""The kernels over quantised weights on a GPU compared with their eager twins in float32, at all models' shapes.

Decode steps are replayed, as in a graph, so that a Hopper GPU uses its own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from culet import hardware
from culet.kernels.eager import quantised as eager
from culet.kernels.replay import replayed
from culet.kernels.triton.linear import few_tokens as plain
from culet.kernels.triton.linear.tiles import GATED, PLAIN, SOFTCAP, Tile
from culet.kernels.triton.quantised import experts, linear, look_up, prefill
from culet.kernels.triton.quantised.few_tokens import describe
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.tiles import Product, choose_stream, choose_tile, choose_warps
from culet.kernels.types import QuantisedWeight
from culet.layers.weight.quantised.rounding import RoundedHead
from culet.layers.weight.weights import Weights
from culet.models.random_checkpoint import RandomDraw
from culet.models.random_weights import fill_randomly
from tests.kernels.linear_cases import Shape, shapes
from tests.kernels.quantised.cases import FORMATS, draw, errors

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOLERANCE = 5e-3  # ||a - b|| / ||b|| per token
EXACT = 2e-6  # the same for sums in float32 that are not rounded
TOKENS = (1, 2, 5, 8, 16, 32, 64, 1000, 8192)
MAIN = ("int4", "int8", "fp8", "nvfp4")
VOCABULARY = 262144
HEAD_ROWS = 4096  # of the head, where other ops read it


@pytest.fixture(autouse=True)
def nothing_in_the_workspace() -> Iterator[None]:
    """Parts are NaN before a test, and counters are zero after it."""
    torch.manual_seed(7)
    parts, arrivals = plain.workspace(torch.device(DEVICE, torch.cuda.current_device()))
    with torch.inference_mode():
        parts.fill_(math.nan)
    yield
    assert not arrivals.any()


@cache
def real_shapes() -> tuple[Shape, ...]:
    """Return every shape once, with a short head."""
    found: dict[tuple[int, int, bool], Shape] = {}
    for shape in shapes():
        rows = HEAD_ROWS if shape.epilogue == SOFTCAP else shape.num_rows
        found.setdefault((rows, shape.size_k, shape.epilogue == GATED), Shape(shape.name, rows, shape.size_k, shape.epilogue))
    return tuple(found.values())


def wanted_of(weight: QuantisedWeight, x: Tensor, is_gated: bool) -> Tensor:
    """Return the twin's outputs. Where the op rounds tokens to e4m3, the twin gets the rounded tokens."""
    matrix = PackedMatrix.of(weight)
    x = x.float()
    if linear.rounds_tokens(x.shape[0], matrix, x.device):
        rounded, scale = prefill.quantise_tokens(x)
        x = rounded.float() * scale
    return eager.gated_linear(x, weight) if is_gated else eager.linear(x, weight)


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("shape", real_shapes(), ids=lambda shape: f"{shape.name}-{shape.num_rows}x{shape.size_k}")
def test_real_shapes(shape: Shape, name: str) -> None:
    is_gated = shape.epilogue == GATED
    weight = draw(name, shape.weight_rows, shape.size_k, device=DEVICE, scale_dtype=torch.bfloat16)
    x = torch.randn(max(TOKENS), shape.size_k, dtype=torch.bfloat16, device=DEVICE)
    op = linear.gated_linear if is_gated else linear.linear
    for num_tokens in TOKENS:
        wanted = wanted_of(weight, x[:num_tokens], is_gated)
        with replayed():
            got = op(x[:num_tokens], weight)
        assert errors(got, wanted).max() <= TOLERANCE, f"{num_tokens} tokens"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kernel", [choose_stream, choose_warps, choose_tile])
@pytest.mark.parametrize("epilogue", [PLAIN, GATED])
def test_every_kernel_and_format(name: str, kernel: Any, epilogue: int) -> None:
    """Every count of tokens, with split inputs, twice. The last rows of outputs are cut off, except of blocks."""
    if kernel is choose_stream and not hardware.is_hopper(hardware.capability_of()):
        pytest.skip("needs a Hopper GPU")
    num_rows, size = (2048 if name == "fp8-block" else 2024), 2560
    weight = draw(name, num_rows * (2 if epilogue == GATED else 1), size, device=DEVICE, scale_dtype=torch.bfloat16)
    matrix = PackedMatrix.of(weight)
    x = torch.randn(32, size, dtype=torch.bfloat16, device=DEVICE)
    wanted = wanted_of(weight, x, epilogue == GATED)
    for num_tokens in (1, 3, 8, 9, 16, 31, 32):
        tile = kernel(Product(num_tokens, num_rows, epilogue), matrix)
        if tile is None:
            continue
        for _ in range(2):
            out = torch.full((num_tokens, num_rows), math.nan, dtype=torch.bfloat16, device=DEVICE)
            describe(
                x[:num_tokens], matrix, out, tile, epilogue, pdl=hardware.has_dependent_launch(hardware.capability_of())
            ).run()
            assert errors(out, wanted[:num_tokens]).max() <= TOLERANCE, f"{tile}, {num_tokens} tokens"


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not hardware.is_hopper(hardware.capability_of()), reason="needs a Hopper GPU"
)


@on_hopper
@pytest.mark.parametrize("epilogue", [PLAIN, GATED])
@pytest.mark.parametrize(("block_n", "stages", "split"), [(64, 2, 1), (64, 4, 1), (64, 4, 5), (64, 6, 2), (32, 3, 2)])
def test_tiles_of_bits(block_n: int, stages: int, split: int, epilogue: int) -> None:
    """Every count of tokens, twice. The last rows of outputs are cut off."""
    num_rows, size = 2024, 2560
    weight = draw("int4", num_rows * (2 if epilogue == GATED else 1), size, device=DEVICE, scale_dtype=torch.bfloat16)
    x = torch.randn(16, size, dtype=torch.bfloat16, device=DEVICE)
    wanted = wanted_of(weight, x, epilogue == GATED)
    tile = Tile("bits", block_n, 256, 4, stages, split)
    for num_tokens in (1, 2, 3, 5, 7, 8, 9, 13, 16):
        for _ in range(2):
            out = torch.full((num_tokens, num_rows), math.nan, dtype=torch.bfloat16, device=DEVICE)
            describe(x[:num_tokens], PackedMatrix.of(weight), out, tile, epilogue, pdl=True).run()
            assert errors(out, wanted[:num_tokens]).max() <= TOLERANCE, f"{num_tokens} tokens"


@on_hopper
@pytest.mark.parametrize("num_tokens", [1, 8, 16])
@pytest.mark.parametrize("stages", [4, 6])
@pytest.mark.parametrize(("num_rows", "size", "split"), [(5376, 8192, 2), (5376, 8192, 4), (5376, 21504, 3), (16384, 5376, 1)])
def test_no_product_of_bits_is_lost(num_rows: int, size: int, split: int, stages: int, num_tokens: int) -> None:
    """Float32 outputs are exact, and the same each time. One wrong tile in one step, 64 x 32 weights, is an error of 6e-3 here.

    In bfloat16, rounding would hide smaller errors.
    """
    weight = draw("int4", num_rows, size, device=DEVICE, scale_dtype=torch.bfloat16)
    x = torch.randn(num_tokens, size, dtype=torch.bfloat16, device=DEVICE)
    outs = []
    for _ in range(20):
        outs.append(torch.full((split, num_tokens, num_rows), math.nan, device=DEVICE))
        describe(x, PackedMatrix.of(weight), outs[-1], Tile("bits", 64, 256, 4, stages, split), pdl=True).run()
    assert errors(outs[0], wanted_of(weight, x, False)).max() <= EXACT
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("name", MAIN)
def test_epilogues(name: str) -> None:
    weight = draw(name, 2560, 2560, device=DEVICE, scale_dtype=torch.bfloat16)
    for num_tokens in (1, 8, 32, 48, 300):
        x = torch.randn(num_tokens, 2560, dtype=torch.bfloat16, device=DEVICE)
        factor = torch.randn(num_tokens, 2560, dtype=torch.bfloat16, device=DEVICE)
        matrix = PackedMatrix.of(weight)
        rounded = x
        if linear.rounds_tokens(num_tokens, matrix, x.device):
            narrow, scale = prefill.quantise_tokens(x)
            rounded = narrow.float() * scale
        with replayed():
            for op, extra in (("linear_parts", ()), ("linear_gelu_times", (factor,)), ("capped_head", (3.0,))):
                got = getattr(linear, op)(x, weight, *extra)
                wanted = getattr(eager, op)(rounded.float(), weight, *extra)
                assert errors(got, wanted).max() <= TOLERANCE, f"{op}, {num_tokens} tokens"


@pytest.mark.parametrize("name", ["int4", "fp8"])
@pytest.mark.parametrize("size", [2560, 5376])
def test_whole_heads(size: int, name: str) -> None:
    """All 262,144 rows, which repeat with a period that no tile has, in steps of every kernel."""
    few = draw(name, 4099, size, device=DEVICE, scale_dtype=torch.bfloat16)
    rows = torch.arange(VOCABULARY, device=DEVICE) % 4099
    parts = [None if each is None else each.view(torch.uint8)[rows].view(each.dtype) for each in few]
    weight, x = type(few)(*parts), torch.randn(256, size, dtype=torch.bfloat16, device=DEVICE)
    wanted = eager.capped_head(x.float(), few, 3.0)[:, rows]
    for num_tokens in (1, 8, 32, 256):
        with replayed():
            got = linear.capped_head(x[:num_tokens], weight, 3.0)
        assert errors(got, wanted[:num_tokens]).max() <= TOLERANCE, f"{num_tokens} tokens"
        assert (got - wanted[:num_tokens]).abs().max() < 0.05, f"{num_tokens} tokens"


@pytest.mark.parametrize("name", MAIN)
def test_lookups(name: str) -> None:
    """The bits of the twin, except in nvfp4, whose values the kernel rounds before the scale of the row."""
    weight = draw(name, 5000, 2560, device=DEVICE, scale_dtype=torch.bfloat16)
    for num_tokens in (1, 7, 1000):
        ids = torch.randint(0, 6000, (num_tokens,), device=DEVICE)
        for columns in (slice(None), slice(512, 1000)):
            given = ids, weight, 500, columns, 50.5, torch.bfloat16
            got, wanted = look_up.look_up(*given), eager.look_up(*given)
            if name == "nvfp4":
                torch.testing.assert_close(got, wanted, rtol=2**-6, atol=0.0)
            else:
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_drafts_of_a_rounded_table(name: str) -> None:
    """The best token of each row is that of the logits. On a GPU, candidates need ids."""
    weights = Weights(torch.bfloat16, torch.device(DEVICE), choose_format=lambda _: RoundedHead(name))
    table = weights.table("t", 5000, 2560)
    fill_randomly(table.placements(), RandomDraw(), weights.device)
    x = torch.randn(6, 15, 2560, dtype=torch.bfloat16, device=DEVICE)
    best = torch.full((6, 15), -1, device=DEVICE)
    weights.ops.pick_best(table.head_candidates(x, 30.0), best.view(-1))
    assert torch.equal(best, table.capped_head(x.flatten(0, 1), 30.0).argmax(-1).view(6, 15))


@pytest.mark.parametrize("name", MAIN)
def test_experts(name: str) -> None:
    """The experts of the 26B, of width 704."""
    gate_up, down = (
        draw(name, *shape, device=DEVICE, scale_dtype=torch.bfloat16) for shape in ((128, 1408, 2816), (128, 2816, 704))
    )
    for num_tokens in (1, 4, 5, 32, 64, 1000, 8192):
        x = torch.randn(num_tokens, 2816, dtype=torch.bfloat16, device=DEVICE)
        ids = torch.rand(num_tokens, 128, device=DEVICE).topk(8).indices.to(torch.int32)
        weights = torch.rand(num_tokens, 8, device=DEVICE)
        got = experts.experts(x, weights, ids, gate_up, down)
        wanted = eager.experts(x.float(), weights, ids, gate_up, down)
        assert errors(got, wanted).max() <= TOLERANCE, f"{num_tokens} tokens"


def test_a_graph_gives_the_same_bits() -> None:
    weight = draw("int4", 5376, 8192, device=DEVICE, scale_dtype=torch.bfloat16)
    x = torch.randn(8, 8192, dtype=torch.bfloat16, device=DEVICE)
    with replayed():
        wanted = linear.linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = linear.linear(x, weight)
    for _ in range(3):
        got.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, wanted)
