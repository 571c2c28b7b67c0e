"""`hopper_grouped` and the router on a GPU compared with their eager twins in float32, at the sizes of the 26B-A4B."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from culet.kernels.captures import Captures, side_by_side
from culet.kernels.dispatch import triton_kernels
from culet.kernels.eager import ops
from culet.kernels.replay import replayed
from culet.kernels.triton.experts import expert_mlp, hopper_grouped, route
from tests.kernels.test_linear_gpu import DEVICE, IS_HOPPER, assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]

E, D, K, EPS = 128, 2816, 8, 1e-6
COUNTS = (1, 128, 767, 768, 1000, 1535, 3000, 6144, 8192)


def draw(num_tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, D, dtype=torch.bfloat16, device=DEVICE)
    gate_up = torch.randn(E, 2 * width, D, dtype=torch.bfloat16, device=DEVICE) / D**0.5
    down = torch.randn(E, D, width, dtype=torch.bfloat16, device=DEVICE) / width**0.5
    ids = torch.rand(num_tokens, E, device=DEVICE).topk(K).indices.to(torch.int32)
    return x, torch.rand(num_tokens, K, device=DEVICE), ids, gate_up, down


def twin(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return ops.experts(x.float(), weights, ids, gate_up.float(), down.float())


@pytest.mark.parametrize("width", [704, 352, 200])  # of one rank, of two, and one that fills no tile
def test_experts(width: int) -> None:
    for num_tokens in COUNTS:
        given = draw(num_tokens, width)
        assert hopper_grouped.supports(given[0], *given[3:])
        wanted = twin(*given)
        assert_close(expert_mlp.experts(*given), wanted)
        for tiles in (hopper_grouped.FEW, hopper_grouped.MANY):
            y = torch.full_like(given[0], math.nan)
            for launch in hopper_grouped.describe_hopper_grouped(*given, y, tile_sizes=tiles):
                launch.run()
            assert_close(y, wanted)


@pytest.mark.parametrize("num_tokens", [1, 8, 32, 128])
def test_a_graph_runs_the_experts_beside_the_dense_mlp(num_tokens: int) -> None:
    """The dense MLP and the router both split K, so a workspace that they shared would give wrong sums."""
    on_gpu = triton_kernels()
    x, _, _, gate_up, down = draw(num_tokens, 704)
    router = torch.randn(E, D, device=DEVICE) / D**0.5
    dense_up = torch.randn(2 * 2112, D, dtype=torch.bfloat16, device=DEVICE) / D**0.5
    dense_down = torch.randn(D, 2112, dtype=torch.bfloat16, device=DEVICE) / 2112**0.5

    def routed() -> tuple[Tensor, Tensor]:
        weights, ids = on_gpu.route(x, router, torch.ones(E, device=DEVICE), K, EPS)
        return on_gpu.experts(x, weights, ids, gate_up, down), ids

    def dense() -> Tensor:
        return on_gpu.linear_parts(on_gpu.gated_linear(x, dense_up), dense_down)

    def both() -> tuple[Tensor, ...]:
        (y, ids), parts = side_by_side(routed, dense, x.device)
        return y, ids, parts

    with replayed():
        graph, found = Captures(x.device).capture(both)
        for _ in range(50):
            x.normal_()
            graph.replay()
            for mine, wanted in zip(found, both(), strict=True):
                assert torch.equal(mine, wanted)


def test_experts_that_nobody_or_everybody_chooses() -> None:
    x, weights, _, gate_up, down = draw(1000, 704)
    given = x, weights, torch.arange(K, dtype=torch.int32, device=DEVICE).flip(0).repeat(1000, 1), gate_up, down
    assert_close(expert_mlp.experts(*given), twin(*given))


def test_a_token_that_is_not_a_number_spoils_no_other() -> None:
    x, *rest = draw(1000, 704)
    wanted = expert_mlp.experts(x, *rest)
    x[300] = math.nan
    y = expert_mlp.experts(x, *rest)
    assert y[300].isnan().all()
    y[300] = wanted[300]
    assert torch.equal(y, wanted)


def test_the_same_in_a_graph() -> None:
    x, *rest = draw(1000, 704)
    expected = expert_mlp.experts(x, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = expert_mlp.experts(x, *rest)
    for _ in range(3):
        y.fill_(math.nan)
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("num_tokens", [17, 1000, 1536, 2000, 4096, 8192])
def test_route(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    x, scale = torch.randn(num_tokens, D, dtype=torch.bfloat16, device=DEVICE), torch.rand(E, device=DEVICE) + 0.5
    router = torch.randn(E, D, device=DEVICE) / D**0.5
    weights, ids = route.route(x, router, scale, K, EPS)
    logits = torch.nn.functional.rms_norm(x.double(), (D,), eps=EPS) @ router.double().t()
    best, wanted_ids = logits.topk(K)
    wanted = best.softmax(1) * scale[wanted_ids]
    same = (ids == wanted_ids).all(1)
    assert same.sum() >= num_tokens - 2  # two logits may be equal to the last bit of a float32 sum
    assert (weights[same] - wanted[same]).abs().max() < 1e-5
