"""Which compiled kernel a launch takes: told apart at least as finely as Triton does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from culet.kernels.triton import launch
from culet.kernels.triton.launch import Launch, only_warm


class Kernel:
    """A compiled kernel's stand-in that keeps what it is asked to do."""

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
    for name in ("_compiled", "_warmed", "_parameters"):
        monkeypatch.setattr(launch, name, type(getattr(launch, name))())


MEMORY = torch.zeros(64, dtype=torch.float32)
BASE: dict[str, Any] = {"x": MEMORY, "count": 32, "length": 5, "BLOCK": 64}


def test_the_second_launch_goes_past_triton() -> None:
    kernel, other = Kernel(), torch.ones(64)
    Launch(kernel, (3,), BASE, {"num_warps": 4}).run()
    Launch(kernel, (5, 2), {"BLOCK": 64, "length": 9, "count": 48, "x": other}, {"num_warps": 4}).run()
    assert len(kernel.by_triton) == 1
    [(x, y, z, stream, function, packed, *rest)] = kernel.direct
    assert (x, y, z, stream, function, packed) == (5, 2, 1, 7, "function", "packed")
    assert rest == [None, None, None, other, 48, 9, 64]  # in the kernel's order


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
def test_what_triton_compiles_anew_for_is_told_apart(change: dict[str, Any], options: dict[str, Any]) -> None:
    kernel = Kernel()
    for given, chosen in ((BASE, {"num_warps": 4}), (BASE | change, {"num_warps": 4} | options)):
        Launch(kernel, (1,), given, chosen).run()
    assert len(kernel.by_triton) == 2
    assert not kernel.direct


@pytest.mark.parametrize("value", [0.5, True, SimpleNamespace(block_shape=[16])], ids=["float", "bool", "descriptor"])
def test_other_arguments_are_left_to_triton(value: Any) -> None:
    kernel = Kernel()
    for _ in range(3):
        Launch(kernel, (1,), BASE | {"count": value}).run()
    assert len(kernel.by_triton) == 3


def test_a_kernel_is_warmed_once() -> None:
    kernel = Kernel()
    with only_warm():
        for length in range(4):
            Launch(kernel, (1,), BASE | {"length": length}).run()
        assert kernel.warmed == 1
        Launch(kernel, (1,), BASE | {"BLOCK": 128}).run()
    assert kernel.warmed == 2
    assert not kernel.by_triton
