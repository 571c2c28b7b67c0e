"""The cuBLAS kernel for products of many tokens: our choice if cuBLAS offers it, otherwise torch's."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from culet import hardware
from culet.kernels import cublaslt


class Library:
    """A stand-in for cuBLASLt that records calls. It lists algorithms with `tiles` at `listed` token counts (default: all)."""

    def __init__(self, *tiles: int, failing: str = "", listed: tuple[int, ...] = (), workspace: int = 4) -> None:
        self.tiles, self.failing, self.listed, self.workspace = tiles, failing, listed, workspace
        self.layouts: dict[int, tuple[int, int, int]] = {}
        self.calls: list[str] = []
        self.asked: list[int] = []  # token counts
        self.checked: list[tuple[Any, ...]] = []
        self.products: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        kind = name.removeprefix("cublasLt")

        def call(*arguments: Any) -> int:
            self.calls.append(kind)
            if kind == self.failing:
                return 13
            own = vars(Library).get(f"_{kind}")
            return 0 if own is None else own(self, *arguments)

        return call

    def _MatrixLayoutCreate(self, pointer: Any, kind: int, *size: Any) -> int:  # noqa: N802
        pointer._obj.value = len(self.layouts) + 1
        self.layouts[len(self.layouts) + 1] = tuple(number.value for number in size)
        return 0

    def _MatmulAlgoGetHeuristic(self, *arguments: Any) -> int:  # noqa: N802
        _, _, _, x, _, _, _, _, results, count = arguments
        num_tokens = self.layouts[x.value][1]
        self.asked.append(num_tokens)
        if self.listed and num_tokens not in self.listed:
            count._obj.value = 0
            return 0
        for index in range(len(self.tiles)):
            results[96 * index] = index
        count._obj.value = len(self.tiles)
        return 0

    def _MatmulAlgoConfigGetAttribute(self, algorithm: Any, attribute: int, value: Any, *_: Any) -> int:  # noqa: N802
        assert attribute == 1
        value._obj.value = self.tiles[algorithm.raw[0]]
        return 0

    def _MatmulAlgoCheck(self, *arguments: Any) -> int:  # noqa: N802
        *_, weight, x, c, y, algorithm, result = arguments
        self.checked.append((*(self.layouts[layout.value] for layout in (weight, x, c, y)), algorithm.raw[0]))
        result[64:72] = self.workspace.to_bytes(8, sys.byteorder)
        return 0

    def _Matmul(self, *arguments: Any) -> int:  # noqa: N802
        self.products.append(arguments)
        return 0


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a library, with CPU tensors in place of GPU tensors."""

    def use(library: Library) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
        monkeypatch.setattr(cublaslt, "_is_supported", lambda *_: True)
        for name, value in (("WORKSPACE_BYTES", 64), ("MIN_TOKENS", 32), ("MIN_OUTPUTS", 48), ("MIN_INPUTS", 16)):
            monkeypatch.setattr(cublaslt, name, value)
        monkeypatch.setattr(torch, "device", lambda *_: "cpu")
        cublas = cublaslt._CublasLt(library, 0)
        monkeypatch.setattr(cublaslt, "_on_device", lambda device: cublas)

    return use


def tensors(num_tokens: int = 32, num_outputs: int = 48, size_k: int = 16) -> tuple[Tensor, Tensor]:
    return torch.empty(num_tokens, size_k, dtype=torch.bfloat16), torch.empty(num_outputs, size_k, dtype=torch.bfloat16)


def test_our_kernel_multiplies(serve: Any) -> None:
    library = Library(209, 23, cublaslt.TILE_128X160, 201)
    serve(library)
    x, weight = tensors()
    y = cublaslt.product(x, weight)
    assert y is not None
    assert y.shape == (32, 48)
    [(_, _, one, a, a_layout, b, b_layout, zero, c, c_layout, d, d_layout, algorithm, _, size, stream)] = library.products
    assert (one._obj.value, zero._obj.value) == (1.0, 0.0)
    assert (a.value, b.value) == (weight.data_ptr(), x.data_ptr())
    assert c.value == d.value == y.data_ptr()
    layouts = [library.layouts[layout.value] for layout in (a_layout, b_layout, c_layout, d_layout)]
    assert layouts == [(16, 48, 16), (16, 32, 16), (48, 32, 48), (48, 32, 48)]
    assert algorithm.raw[0] == 2
    assert (size.value, stream.value) == (64, 7)
    cublaslt.product(x, weight)
    assert library.checked == [(*layouts, 2)]  # each shape is planned once
    cublaslt.product(*tensors(num_tokens=64))
    assert library.checked[1:] == [((16, 48, 16), (16, 64, 16), (48, 64, 48), (48, 64, 48), 2)]
    assert library.asked == [cublaslt.LISTED_AT[0]]  # and each weight once
    cublaslt.product(*tensors(num_outputs=50))
    assert library.asked == [cublaslt.LISTED_AT[0]] * 2


def test_the_kernel_comes_from_any_list_that_has_it(serve: Any) -> None:
    library = Library(23, cublaslt.TILE_128X160, listed=cublaslt.LISTED_AT[-1:])
    serve(library)
    assert cublaslt.product(*tensors()) is not None
    assert library.asked == list(cublaslt.LISTED_AT)


@pytest.mark.parametrize("cause", [{"failing": "MatmulAlgoCheck"}, {"workspace": 65}], ids=["refused", "too much memory"])
def test_torch_multiplies_numbers_of_tokens_that_the_kernel_does_not_support(
    serve: Any, caplog: pytest.LogCaptureFixture, cause: dict[str, Any]
) -> None:
    library = Library(cublaslt.TILE_128X160, **cause)
    serve(library)
    assert cublaslt.product(*tensors()) is None
    assert cublaslt.product(*tensors()) is None
    assert not library.products
    assert library.calls.count("MatmulAlgoCheck") == 1
    assert not caplog.records  # not a failure, since other token counts may be supported
    library.failing, library.workspace = "", 64
    assert cublaslt.product(*tensors(num_tokens=64)) is not None


@pytest.mark.parametrize("tiles", [(), (209, 23)])
def test_torch_multiplies_if_the_kernel_is_not_offered(serve: Any, tiles: tuple[int, ...]) -> None:
    library = Library(*tiles)
    serve(library)
    assert cublaslt.product(*tensors()) is None
    assert cublaslt.product(*tensors()) is None
    assert not library.products
    assert library.asked == list(cublaslt.LISTED_AT)
    assert library.calls.count("MatrixLayoutDestroy") == library.calls.count("MatrixLayoutCreate")


@pytest.mark.parametrize("size", [(31, 48, 16), (33, 48, 16), (48, 48, 16), (32, 47, 16), (32, 48, 15), (0, 48, 16)])
def test_torch_multiplies_small_products_and_odd_numbers_of_tokens(serve: Any, size: tuple[int, int, int]) -> None:
    library = Library(cublaslt.TILE_128X160)
    serve(library)
    assert cublaslt.product(*tensors(*size)) is None
    assert not library.products


@pytest.mark.parametrize("failing", ["Matmul", "MatmulAlgoGetHeuristic"])
def test_a_failure_is_reported_once(serve: Any, caplog: pytest.LogCaptureFixture, failing: str) -> None:
    library = Library(cublaslt.TILE_128X160, failing=failing)
    serve(library)
    with caplog.at_level("WARNING", logger="culet"):
        assert cublaslt.product(*tensors()) is None
        assert cublaslt.product(*tensors()) is None
    assert library.calls.count(failing) == 1
    assert len(caplog.records) == 1
    assert f"cublasLt{failing} returned 13" in caplog.text


def test_a_cpu_and_other_types_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = tensors()
    for name in ("MIN_TOKENS", "MIN_OUTPUTS", "MIN_INPUTS"):
        monkeypatch.setattr(cublaslt, name, 0)
    assert cublaslt.product(x, weight) is None
    assert not cublaslt._is_supported(x.float(), weight.float())
    assert not cublaslt._is_supported(x[:, :8], weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("num_tokens", [4096, 8192, 5001])
def test_products_on_a_gpu(num_tokens: int) -> None:
    """Check the products of the 31B's queries, keys and values, directly and through the op that layers call."""
    if not hardware.is_hopper(hardware.capability_of()):
        pytest.skip("the kernel is chosen on Hopper only")
    from culet.kernels.triton.linear.few_tokens import linear

    torch.manual_seed(0)
    x = torch.randn(num_tokens, 5376, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(16384, 5376, dtype=torch.bfloat16, device="cuda") * 5376**-0.5
    for _ in range(2):
        y = cublaslt.product(x, weight)
        assert (y is None) == (num_tokens == 5001)
        through_layers = linear(x, weight)
        assert y is None or torch.equal(through_layers, y)
        torch.testing.assert_close(through_layers.float(), (x @ weight.T).float(), rtol=1e-2, atol=1e-2)
        x = x.flip(0)  # the same shape again, which already has a plan
