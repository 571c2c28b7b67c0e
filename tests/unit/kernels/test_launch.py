"""Launches find their compiled kernel by a key that is at least as fine as Triton's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from culet.kernels.triton import launch
from culet.kernels.triton.launch import Launch, only_warm


class Kernel:
    """A stand-in for a kernel that records its calls."""

    def __init__(self) -> None:
        self.device_caches: dict[int, Any] = {}
        self.params = [
            SimpleNamespace(name="x", is_constexpr=False, do_not_specialize=False),
            SimpleNamespace(name="count", is_constexpr=False, do_not_specialize=False),
            SimpleNamespace(name="length", is_constexpr=False, do_not_specialize=True),
            SimpleNamespace(name="BLOCK", is_constexpr=True, do_not_specialize=False),
        ]
        self.by_triton: list[dict[str, Any]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.warmed = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**given: Any) -> Any:
            self.by_triton.append(given)
            return SimpleNamespace(function="function", packed_metadata="packed", run=lambda *args: self.direct.append(args))

        return run

    def warmup(self, **given: Any) -> None:
        self.warmed += 1


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    for name in ("_compiled", "_warmed", "_parameters", "_prepared"):
        monkeypatch.setattr(launch, name, type(getattr(launch, name))())


MEMORY = torch.zeros(64, dtype=torch.float32)
BASE: dict[str, Any] = {"x": MEMORY, "count": 32, "length": 5, "BLOCK": 64}


def test_the_second_launch_bypasses_triton() -> None:
    kernel, other = Kernel(), torch.ones(64)
    Launch(kernel, (3,), BASE, {"num_warps": 4}).run()
    Launch(kernel, (5, 2), {"BLOCK": 64, "length": 9, "count": 48, "x": other}, {"num_warps": 4}).run()
    assert len(kernel.by_triton) == 1
    [(x, y, z, stream, function, packed, *rest)] = kernel.direct
    assert (x, y, z, stream, function, packed) == (5, 2, 1, 7, "function", "packed")
    assert rest == [None, None, None, other.data_ptr(), 48, 9, 64]  # in the kernel's order


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"x": MEMORY.to(torch.bfloat16)}, {}),
        ({"x": MEMORY[1:]}, {}),  # not aligned to 16 bytes
        ({"x": None}, {}),
        ({"count": 1}, {}),
        ({"count": 33}, {}),
        ({"count": 1 << 32}, {}),
        ({"length": 1 << 32}, {}),
        ({"BLOCK": 128}, {}),
        ({}, {"num_warps": 8}),
    ],
)
def test_the_key_differs_where_triton_compiles_another_kernel(change: dict[str, Any], options: dict[str, Any]) -> None:
    kernel = Kernel()
    for given, chosen in ((BASE, {"num_warps": 4}), (BASE | change, {"num_warps": 4} | options)):
        Launch(kernel, (1,), given, chosen).run()
    assert len(kernel.by_triton) == 2
    assert not kernel.direct


@pytest.mark.parametrize("value", [0.5, True, SimpleNamespace(block_shape=[16])], ids=["float", "bool", "unknown"])
def test_triton_launches_with_other_arguments(value: Any) -> None:
    kernel = Kernel()
    for _ in range(3):
        Launch(kernel, (1,), BASE | {"count": value}).run()
    assert len(kernel.by_triton) == 3


def a_descriptor(dtype: torch.dtype = torch.bfloat16, box: tuple[int, int] = (64, 64), swizzle: int = 128) -> TensorDescriptor:
    matrix = torch.zeros(256, 128, dtype=dtype)
    layout = NVMMASharedLayout(swizzle, 8 * dtype.itemsize, 2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(box), layout)


@pytest.mark.parametrize("change", [{"dtype": torch.float32}, {"box": (32, 64)}, {"swizzle": 64}])
def test_the_key_of_a_descriptor_is_what_it_fetches(change: dict[str, Any]) -> None:
    kernel = Kernel()
    first, again, other = a_descriptor(), a_descriptor(), a_descriptor(**change)
    for descriptor in (first, again, other):
        Launch(kernel, (1,), BASE | {"x": descriptor}).run()
    assert [given["x"] for given in kernel.by_triton] == [first, other]
    assert kernel.direct[0][9] is again  # at a different address


def test_a_kernel_is_warmed_once() -> None:
    kernel = Kernel()
    with only_warm():
        for length in range(4):
            Launch(kernel, (1,), BASE | {"length": length}).run()
        assert kernel.warmed == 1
        Launch(kernel, (1,), BASE | {"BLOCK": 128}).run()
    assert kernel.warmed == 2
    assert not kernel.by_triton


# Launches that differ only in tensors and grid


class Described:
    """Describes the same launch for other tensors and counts the calls."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.count = kernel, 0

    def run(self, x: torch.Tensor, grid: tuple[int, int] = (3, 1), key: str = "key") -> None:
        def describe() -> Launch:
            self.count += 1
            return Launch(self.kernel, grid, BASE | {"x": x}, {"num_warps": 4})

        launch.run_prepared((key,), grid, (x,), describe)


def test_a_prepared_launch_is_described_once() -> None:
    kernel = Kernel()
    described = Described(kernel)
    described.run(MEMORY)
    others = torch.ones(64), torch.ones(128)
    for other in others:
        described.run(other, (5, 2))
    assert described.count == 1
    assert len(kernel.by_triton) == 1
    for other, (x, y, z, stream, _, _, *rest) in zip(others, kernel.direct, strict=True):
        assert (x, y, z, stream) == (5, 2, 1, 7)
        assert rest == [None, None, None, other.data_ptr(), 32, 5, 64]
    described.run(MEMORY, key="another")
    assert described.count == 2


def test_a_prepared_launch_needs_aligned_tensors() -> None:
    kernel = Kernel()
    described = Described(kernel)
    described.run(MEMORY)
    described.run(MEMORY[1:])
    assert described.count == 2
    assert len(kernel.by_triton) == 2  # compiled for other alignments
    described.run(MEMORY)
    assert described.count == 2
    # In the other order nothing is prepared, because the first call says nothing about aligned tensors.
    described.run(MEMORY[1:], key="another")
    described.run(MEMORY, key="another")
    assert described.count == 4


def test_ambiguous_tensors_are_not_prepared() -> None:
    kernel = Kernel()
    for _ in range(2):  # either of the two tensors could be x
        launch.run_prepared(("key",), (1, 1), (MEMORY, MEMORY), lambda: Launch(kernel, (1,), BASE))
    for _ in range(2):  # neither is x
        launch.run_prepared(("other",), (1, 1), (torch.ones(4),), lambda: Launch(kernel, (1,), BASE))
    assert len(kernel.by_triton) == 1
    assert all(call[9] == MEMORY.data_ptr() for call in kernel.direct)
    assert launch._prepared == {("key",): None, ("other",): None}


def test_warming_prepares_nothing() -> None:
    kernel = Kernel()
    described = Described(kernel)
    with only_warm():
        described.run(MEMORY)
    assert (kernel.warmed, described.count, launch._prepared) == (1, 1, {})
    described.run(MEMORY)
    with only_warm():
        described.run(MEMORY)
    assert described.count == 3
