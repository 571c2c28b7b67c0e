"""The norm that adds up the terms of several ranks compiles for every architecture at the models' real sizes. Needs no GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter cannot compile", allow_module_level=True)

from culet.hardware import SHARED_BYTES
from culet.kernels.cross_compile import compile_for
from culet.kernels.triton.launch import Launch
from culet.kernels.triton.norms.residual import describe_residual, describe_residual_of_ranks
from culet.kernels.types import PeerBuffers

EPS = 1e-6


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def launch_of(size: int, num_ranks: int, *, num_deltas: int, is_pushed: bool, pdl: bool) -> Launch:
    x, w = meta(8, size), meta(size, dtype=torch.float32)
    data = (meta(2, 8, num_ranks, num_deltas * size),) * num_ranks
    turn, addresses = meta(8, dtype=torch.int32), meta(2 * num_ranks, dtype=torch.int64)
    peers = PeerBuffers(1, data, (), turn, addresses, is_pushed)
    parts = meta(4, 8, size, dtype=torch.float32)
    deltas, weights = ((parts,), (w,)) if num_deltas == 1 else ((x, x), (w, w, w))
    residual = describe_residual(x, deltas, weights, w[:1], (w,), EPS, (x, x), pdl)
    return describe_residual_of_ranks(residual, peers)


@pytest.mark.parametrize("capability", [90, *(pytest.param(number, marks=pytest.mark.slow) for number in (80, 89, 100, 120))])
def test_it_compiles(capability: int) -> None:
    for size, num_ranks, num_deltas in ((5376, 2, 1), (2816, 4, 2)):
        for is_pushed in (False, True):
            launch = launch_of(size, num_ranks, num_deltas=num_deltas, is_pushed=is_pushed, pdl=capability >= 90)
            compiled = compile_for(launch, capability)
            assert compiled.metadata.shared <= SHARED_BYTES[capability]
            # Signals are stores and loads, which GPUs on PCIe can do, not atomic operations.
            code = compiled.asm["ptx"]
            assert code.count("st.release.sys") == num_ranks
            assert code.count("ld.acquire.sys") == num_ranks
            assert "atom." not in code
