"""`hopper_products` on a GPU compared with its eager twin in float32. Memory around the operands is NaN."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from culet.kernels.eager import fused as eager_fused
from culet.kernels.triton.linear import few_tokens, hopper_products
from culet.kernels.triton.linear.tiles import GATED
from tests.kernels.linear_cases import Shape
from tests.kernels.test_linear_gpu import DEVICE, GUARD, IS_HOPPER, Operands, assert_close, guarded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]

# The layers of all models, the towers' layer, and sides that fill no tile: (outputs, inputs).
LAYERS = {
    "E2B": (6144, 1536),
    "E4B": (10240, 2560),
    "12B": (15360, 3840),
    "26B-A4B": (2112, 2816),
    "31B": (21504, 5376),
    "tower": (4304, 1152),
    "odd": (200, 136),
}


@pytest.mark.parametrize("num_tokens", [1, 127, 300, 1000, 2500])
@pytest.mark.parametrize("layer", LAYERS)
def test_gated_product(layer: str, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    operands = Operands.draw(Shape(layer, *LAYERS[layer], GATED), num_tokens)
    out, around = guarded(num_tokens, LAYERS[layer][0])
    hopper_products.describe_gated_product(operands.x, operands.weight, out).run()
    assert_close(out, operands.twin(GATED))
    assert around[:GUARD].isnan().all()
    assert around[-GUARD:].isnan().all()


def test_the_op_uses_it_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def count(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> object:
        used.append(x.shape[0])
        return describe(x, weight, out)

    describe = hopper_products.describe_gated_product
    monkeypatch.setattr(hopper_products, "describe_gated_product", count)
    weight = torch.randn(20480, 2560, dtype=torch.bfloat16, device=DEVICE) / 50
    for num_tokens in (130, 1000, 4000):
        x = torch.randn(num_tokens, 2560, dtype=torch.bfloat16, device=DEVICE)
        assert_close(few_tokens.gated_linear(x, weight), eager_fused.gated_linear(x.float(), weight.float()))
    assert used == [1000, 4000]


def test_the_same_in_a_graph() -> None:
    weight = torch.randn(8608, 1152, dtype=torch.bfloat16, device=DEVICE) / 34
    x = torch.randn(2520, 1152, dtype=torch.bfloat16, device=DEVICE)
    expected = few_tokens.gated_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = few_tokens.gated_linear(x, weight)
    x.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(y, expected.flip(0))
