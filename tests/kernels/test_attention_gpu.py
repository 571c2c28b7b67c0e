"""A chunk beside decoding rows on a GPU, where both run at the same time."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("triton")

from culet.attention import triton as triton_module
from culet.bench.attention_cases import SHAPES, make_case
from tests.kernels.attention_backend import run_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CHUNKS = {"piece": [(1500, 52)], "prompts": [(0, 700), (900, 130)]}


@torch.inference_mode()
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("shape", ["31B.sliding", "31B.global", "26B.sliding", "26B.global"])
def test_chunks_beside_decoding_rows_get_the_same_values(shape: str, chunks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time, while the stream goes on to use them. One after the other they get the values expected."""
    spans = [*((1000 + 13 * row, 1) for row in range(76)), *CHUNKS[chunks]]
    case = make_case(SHAPES[shape], spans, device="cuda", seed=3)
    monkeypatch.setattr(triton_module, "MANY_BYTES", sys.maxsize)
    expected = run_backend(case, is_stored=True)
    assert not expected.isnan().any()
    monkeypatch.setattr(triton_module, "MANY_BYTES", 1)
    for _ in range(100):
        assert run_backend(case, is_stored=True).equal(expected)
