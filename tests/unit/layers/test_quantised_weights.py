"""Quantised weights by themselves: shards of ranks, orders of rows and columns, experts, and the memory that loading needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from culet import hardware
from culet.errors import CheckpointError
from culet.kernels import dispatch
from culet.kernels.eager import quantised as eager
from culet.layers.weight.base import MatrixLayout, Projection, Split
from culet.layers.weight.placement import Placement
from culet.layers.weight.quantised.forms import Fp8, Int4, Int8, Nvfp4
from culet.layers.weight.quantised.matrices import QuantisedFormat
from culet.layers.weight.quantised.rounding import RoundedFormat, round_fp8, round_int4
from culet.layers.weight.quantised.scheme import Scheme, kind_of, rounding_of
from culet.layers.weight.quantised.sources import PackedInt4, PackedInt8, StoredFp8, StoredNvfp4
from culet.layers.weight.weights import Weights
from culet.parallel.rank import Rank

CPU = torch.device("cpu")
FORMATS: dict[str, Any] = {
    "int4": QuantisedFormat(Int4(32), PackedInt4(32, False)),
    "int4 with zero points": QuantisedFormat(Int4(64, None, True), PackedInt4(64, True)),
    "int4 per channel": QuantisedFormat(Int4(), PackedInt4(0, False)),
    "int8": QuantisedFormat(Int8(), PackedInt8(0)),
    "fp8": QuantisedFormat(Fp8(), StoredFp8("channel")),
    "fp8 in blocks": QuantisedFormat(Fp8(True), StoredFp8("block")),
    "nvfp4": QuantisedFormat(Nvfp4(has_divisor=True), StoredNvfp4(False)),
    "rounded to fp8": RoundedFormat("fp8"),
    "rounded to int4": RoundedFormat("int4"),
}
SCHEMES = {
    "int4": Scheme("int4", 32),
    "int4 with zero points": Scheme("int4", 64, has_zero=True),
    "int4 per channel": Scheme("int4"),
    "int8": Scheme("int8"),
    "fp8": Scheme("fp8"),
    "fp8 in blocks": Scheme("fp8", scales="block"),
    "nvfp4": Scheme("nvfp4", has_divisor=True),
    "rounded to fp8": rounding_of("fp8").scheme,
    "rounded to int4": rounding_of("int4").scheme,
}


def weights_for(name: str, index: int = 0, size: int = 1) -> Weights:
    all_reduce = (lambda parts: parts) if size > 1 else None
    return Weights(torch.float32, CPU, Rank(index, size), all_reduce, choose_format=lambda _: FORMATS[name])


def stored_for(places: dict[str, Placement]) -> dict[str, Tensor]:
    """Draw a stored tensor for every placement."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, place in places.items():
        if "I32" in place.types:
            found[name] = torch.randint(-(2**31), 2**31 - 1, place.shape, dtype=torch.int32, generator=generator)
        elif "U8" in place.types:
            found[name] = torch.randint(0, 256, place.shape, dtype=torch.uint8, generator=generator)
        elif "F8_E4M3" in place.types:
            found[name] = torch.rand(place.shape, generator=generator).to(torch.float8_e4m3fn)
        else:
            found[name] = torch.rand(place.shape, generator=generator) + 0.5
    return found


def fill(weight: Any, stored: dict[str, Tensor]) -> Any:
    for name, place in weight.placements().items():
        place.fill(stored[name])
    return weight


def layout(split: Split, *, order: bool = False) -> MatrixLayout:
    turned = torch.arange(256).view(4, 64).flip(1).flatten() if order else None
    columns = torch.arange(256).view(2, 2, 64).flip(1).flatten() if order else None
    projections = (Projection("a", 256, turned, unit=128), Projection("b", 256, unit=128))
    return MatrixLayout(projections, 256, split, columns, column_unit=128)


@pytest.mark.parametrize("name", FORMATS)
def test_schemes_know_the_bytes_of_weights(name: str) -> None:
    """Code without torch has only a scheme, and a loaded matrix says its own bytes."""
    scheme = SCHEMES[name]
    assert weights_for(name).matrix_of(layout(Split.NONE)).num_bytes == scheme.num_bytes(512, 256, 4)
    assert kind_of(scheme.number, scheme.bits) == scheme.kind


@pytest.mark.parametrize("name", FORMATS)
def test_shards_of_two_ranks(name: str) -> None:
    x = torch.randn(3, 256)
    for split in (Split.ROWS, Split.COLUMNS):
        alone = weights_for(name).matrix_of(layout(split))
        stored = stored_for(alone.placements())
        whole = fill(alone, stored).linear(x)
        parts = [fill(weights_for(name, index, 2).matrix_of(layout(split)), stored) for index in range(2)]
        if split is Split.ROWS:
            got = [part.linear(x).unflatten(-1, (2, 128)) for part in parts]
            torch.testing.assert_close(torch.cat(got, -1).flatten(1), whole)
        else:
            got = [part.linear(x[:, 128 * index : 128 * (index + 1)]) for index, part in enumerate(parts)]
            torch.testing.assert_close(got[0] + got[1], whole, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_orders(name: str) -> None:
    """A matrix with reordered rows and columns gives the reordered result."""
    plain, turned = weights_for(name).matrix_of(layout(Split.NONE)), weights_for(name).matrix_of(layout(Split.NONE, order=True))
    stored, eye = stored_for(plain.placements()), torch.eye(256)
    value = fill(plain, stored).linear(eye).t()
    orders = layout(Split.NONE, order=True)
    row_order, column_order = orders.projections[0].order, orders.column_order
    assert row_order is not None
    assert column_order is not None
    wanted = torch.cat((value[:256][row_order], value[256:]))[:, column_order]
    assert torch.equal(fill(turned, stored).linear(eye).t(), wanted)
    assert torch.equal(turned.linear_rows(eye, slice(64, 300)), turned.linear(eye)[:, 64:300])
    gated = eager.gelu_mul(plain.linear(eye))
    torch.testing.assert_close(plain.gated_linear(eye), gated)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8 in blocks"])
def test_experts_of_two_ranks(name: str) -> None:
    def stack(weights: Weights) -> Any:
        return weights.experts("experts", 3, 64, 128)

    alone = stack(weights_for(name))
    stored = stored_for(alone.placements())
    x, chosen = torch.randn(4, 64) * 1e-3, torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    share = torch.rand(4, 2)
    whole = fill(alone, stored).experts(x, share, chosen)
    parts = [fill(stack(weights_for(name, index, 2)), stored).experts(x, share, chosen) for index in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))


def test_what_cannot_be_shared() -> None:
    quarter = MatrixLayout((Projection("a", 8),), 128, Split.COLUMNS)
    with pytest.raises(CheckpointError, match="32 columns, which groups of 64 do not divide"):
        weights_for("int4 with zero points", 0, 4).matrix_of(quarter)
    with pytest.raises(CheckpointError, match="do not divide experts of width 96"):
        weights_for("fp8 in blocks").experts("experts", 2, 128, 96)


def test_a_row_or_group_of_zeros() -> None:
    zeros = torch.zeros(2, 64)
    values, scale = round_fp8(zeros)
    assert torch.equal(eager.dequantise_fp8(values, scale.float()), zeros)
    values, scale = round_int4(zeros)
    assert torch.equal(eager.dequantise_int4(values, scale, None, 32), zeros)


def test_rounding_keeps_the_largest_values() -> None:
    wide = torch.randn(16, 64)
    fp8 = eager.dequantise_fp8(*(part.float() if part.dtype is torch.bfloat16 else part for part in round_fp8(wide)))
    assert float((fp8 - wide).abs().max()) <= float(wide.abs().max()) * 2.0**-4
    packed, scale = round_int4(wide)
    int4 = eager.dequantise_int4(packed, scale, None, 32)
    steps = scale.float().repeat_interleave(32, 1)
    assert float(((int4 - wide).abs() / steps).max()) <= 0.55  # half a step, and a little where the largest value is clipped


def test_loading_needs_the_weights_and_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantising at load reads one projection at a time. Larger temporary tensors are chunks of bounded size."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from culet.layers.weight.quantised import rounding

    monkeypatch.setattr(rounding, "_VALUES_AT_ONCE", 1 << 12)
    largest: list[int] = []

    class Meter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in _tensors(out):
                largest.append(tensor.untyped_storage().nbytes())
            return out

    matrix = weights_for("rounded to int4").matrix_of(layout(Split.NONE))
    stored = {name: torch.randn(place.shape).to(torch.bfloat16) for name, place in matrix.placements().items()}
    with Meter():
        fill(matrix, stored)
    assert max(largest) <= max(2 * 256 * 256, matrix.num_bytes)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def test_ops_on_a_gpu_have_twins() -> None:
    """Until a format has kernels, a GPU uses the eager twins."""
    for (name, op), (twin, kernel) in dispatch.FORMAT_OPS.items():
        assert callable(getattr(dispatch.for_device("cpu", name), op))
        if not kernel:
            assert getattr(dispatch.for_device("cuda", name), op).__module__ == f"culet.kernels.eager.{twin}"


@pytest.mark.parametrize("name", FORMATS)
def test_only_fp8_tensor_cores_need_no_wider_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_widened(has_cores: bool) -> bool:
        monkeypatch.setattr(hardware, "multiplies_fp8", lambda device: has_cores)
        return weights_for(name).matrix(Projection("up_proj", 256), num_columns=256).is_widened

    assert is_widened(has_cores=False)
    assert is_widened(has_cores=True) == (name not in ("fp8", "rounded to fp8"))
