"""Quantised weights of every format, and the shapes of all models' linear layers, for tests of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from culet.kernels.eager import quantised as eager
from culet.kernels.types import Fp8Weight, Int4Weight, Int8Weight, Nvfp4Weight, QuantisedWeight

FORMATS = ("int4", "int4-zero", "int4-64", "int4-128", "int4-row", "int8", "int8-32", "fp8", "fp8-block", "nvfp4")
NAMES = ("linear", "linear_parts", "gated_linear", "linear_gelu_times", "capped_head")


def draw(name: str, *shape: int, device: str = "cpu", scale_dtype: torch.dtype = torch.float32) -> QuantisedWeight:
    """Return a random weight [..., out, in]. Its values are around in^-0.5."""
    *lead, size = shape
    size_scale = size**-0.5

    def scales(*counts: int, dtype: torch.dtype = scale_dtype) -> Tensor:
        return ((torch.rand(counts, device=device) + 0.5) * size_scale).to(dtype)

    if name.startswith("int4"):
        group = {"int4-64": 64, "int4-128": 128, "int4-row": size}.get(name, 32)
        packed = eager.pack_int4(torch.randint(0, 16, shape, device=device))
        zero = torch.randint(0, 16, (*lead, size // group), dtype=torch.uint8, device=device) if "zero" in name else None
        return Int4Weight(packed, scales(*lead, size // group) * 0.2, zero)
    if name.startswith("int8"):
        weight = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        return Int8Weight(weight, scales(*lead, size // (32 if name == "int8-32" else size)) * 0.014)
    if name.startswith("fp8"):
        weight = torch.randn(shape, device=device).to(torch.float8_e4m3fn)
        rows, columns = (-(-lead[-1] // 128), -(-size // 128)) if name == "fp8-block" else (lead[-1], 1)
        return Fp8Weight(weight, scales(*lead[:-1], rows, columns, dtype=torch.float32))
    packed = torch.randint(0, 256, (*lead, size // 2), dtype=torch.uint8, device=device)
    narrow = (torch.rand(*lead, size // 16, device=device) * 2 + 0.01).to(torch.float8_e4m3fn)
    return Nvfp4Weight(packed, narrow, scales(*lead, 1, dtype=torch.float32))


def errors(got: Tensor, wanted: Tensor) -> Tensor:
    """Return ||got - wanted|| / ||wanted|| of every row, with parts summed. NaN is an infinite error."""
    got = got.float().sum(0) if got.dim() == 3 else got.float()
    assert got.shape == wanted.shape
    return ((got - wanted).norm(dim=1) / wanted.norm(dim=1)).nan_to_num(torch.inf)
