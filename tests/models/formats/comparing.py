"""Compare a model in a quantised format with its plain twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from culet.kernels.eager import quantised as eager
from culet.layers.weight.base import Matrix
from culet.layers.weight.plain import PlainExperts
from culet.layers.weight.quantised.matrices import QuantisedExperts, Tensors
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
from tests.models.harness import Harness

CPU = torch.device("cpu")
PROMPT = [2, *range(400, 430), 5, 7]


def load(folder: Path, quantization: str = "auto", head: str = "auto") -> Any:
    precisions = {"quantization": quantization, "head_quantization": head}
    return load_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU, progress=False, **precisions)


def logits_of(model: Any) -> Tensor:
    return Harness(model, num_slots=1).all_logits(PROMPT, (20, 12, 1))


def dequantised(tensors: Tensors) -> Tensor:
    """Return the float32 values of a quantised weight."""
    return eager.dequantise(tensors.held)


def assert_same_values(model: Any, twin: Any) -> int:
    """Compare every matrix and every expert, bit by bit. Return how many of the matrices are quantised."""
    modules, count = dict(model.named_modules()), 0
    for name, plain in twin.named_modules():
        module = modules.get(name)
        if isinstance(plain, Matrix) and module is not None and type(module) is not type(plain):
            eye = torch.eye(plain.layout.num_columns)
            assert torch.equal(module.linear(eye), plain.linear(eye)), name
            count += 1
        elif isinstance(plain, PlainExperts) and isinstance(module, QuantisedExperts):
            assert torch.equal(dequantised(module.gate_up), plain.gate_up), name
            assert torch.equal(dequantised(module.down), plain.down), name
            count += 1
    return count


def assert_same_model(folder: Path, twin: Path) -> int:
    """Compare the values of two checkpoints and the logits of their models. Return how many matrices are quantised."""
    model, plain = load(folder), load(twin)
    count = assert_same_values(model, plain)
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=1e-4)
    assert model.num_bytes < plain.num_bytes
    return count
