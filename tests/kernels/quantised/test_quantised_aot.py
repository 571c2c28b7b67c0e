"""The kernels over quantised weights compile for every architecture at real sizes, fit in shared memory and spill nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter cannot compile", allow_module_level=True)

from culet import hardware
from culet.hardware import CAPABILITIES, HOPPER, SHARED_BYTES, has_dependent_launch
from culet.kernels.cross_compile import compile_for
from culet.kernels.triton.launch import Launch
from culet.kernels.triton.linear.tiles import GATED, PLAIN, SOFTCAP
from culet.kernels.triton.quantised import experts, few_tokens, linear, look_up, prefill
from culet.kernels.triton.quantised.packed import PackedMatrix
from culet.kernels.triton.quantised.tiles import Product, choose_bits, choose_stream, choose_tile, choose_warps
from culet.kernels.types import Fp8Weight, Int4Weight, Int8Weight, Nvfp4Weight
from tests.kernels.test_linear_aot import resources

CHOICES = {"tiles": choose_tile, "warps": choose_warps, "stream": choose_stream, "bits": choose_bits}
HOPPER_KERNELS = ("stream", "bits")
MAX_SPILLED_BYTES = 256  # per thread
FORMATS = ("int4", "int4-zero", "int4-128", "int8", "fp8", "fp8-block", "nvfp4")
# The kernel, tokens, outputs, inputs and epilogue. They are those of the 31B, the 26B and E4B.
LINEAR = (
    ("stream", 1, 5376, 21504, PLAIN),
    ("stream", 8, 21504, 5376, GATED),
    ("stream", 32, 16384, 5376, PLAIN),
    ("stream", 32, 21504, 5376, GATED),
    ("bits", 1, 5376, 21504, PLAIN),
    ("bits", 1, 10240, 2560, GATED),
    ("bits", 8, 16384, 5376, PLAIN),
    ("bits", 8, 21504, 5376, GATED),
    ("bits", 8, 10240, 2560, GATED),
    ("bits", 8, 5376, 8192, PLAIN),
    ("warps", 1, 5376, 8192, PLAIN),
    ("warps", 16, 21504, 5376, GATED),
    ("warps", 4, 2816, 2112, PLAIN),
    ("tiles", 16, 2816, 2112, PLAIN),
    ("tiles", 64, 21504, 5376, GATED),
    ("tiles", 256, 16384, 5376, PLAIN),
)
# The head, at every number of tokens that needs another kernel.
HEADS = (
    ("bits", 1, 262144, 2560, SOFTCAP),
    ("bits", 8, 262144, 5376, SOFTCAP),
    ("stream", 8, 262144, 2816, SOFTCAP),
    ("stream", 32, 262144, 5376, SOFTCAP),
    ("warps", 1, 262144, 2560, SOFTCAP),
    ("warps", 16, 262144, 5376, SOFTCAP),
    ("tiles", 32, 262144, 2816, SOFTCAP),
    ("tiles", 256, 262144, 5376, SOFTCAP),
)
MAIN = [case for case in LINEAR if case[:2] in (("stream", 8), ("warps", 1), ("tiles", 64))]
BITS = [case if case[1] == 8 else pytest.param(case, marks=pytest.mark.slow) for case in LINEAR if case[0] == "bits"]


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def matrix_of(name: str, *shape: int) -> PackedMatrix:
    *lead, size = shape
    if name.startswith("int4"):
        has_zero, group = name == "int4-zero", 128 if name == "int4-128" and size % 128 == 0 else 32
        scale = meta(*lead, size // group, dtype=torch.float16 if has_zero else torch.bfloat16)
        zero = meta(*lead, size // group, dtype=torch.uint8) if has_zero else None
        return PackedMatrix.of(Int4Weight(meta(*lead, size // 8, dtype=torch.int32), scale, zero))
    if name == "int8":
        return PackedMatrix.of(Int8Weight(meta(*shape, dtype=torch.int8), meta(*lead, 1)))
    if name == "nvfp4":
        narrow = meta(*lead, size // 16, dtype=torch.float8_e4m3fn)
        packed, global_scale = meta(*lead, size // 2, dtype=torch.uint8), meta(*lead, 1, dtype=torch.float32)
        return PackedMatrix.of(Nvfp4Weight(packed, narrow, global_scale))
    rows, columns = (-(-lead[-1] // 128), -(-size // 128)) if name == "fp8-block" else (lead[-1], 1)
    scale = meta(*lead[:-1], rows, columns, dtype=torch.float32)
    return PackedMatrix.of(Fp8Weight(meta(*shape, dtype=torch.float8_e4m3fn), scale))


def linear_of(case: tuple[str, int, int, int, int], name: str, capability: int) -> Launch | None:
    """Return the launch that is chosen for a case, or None if the format needs another kernel."""
    kernel, num_tokens, num_rows, size, epilogue = case
    matrix = matrix_of(name, num_rows * (2 if epilogue == GATED else 1), size)
    tile = CHOICES[kernel](Product(num_tokens, num_rows, epilogue), matrix)
    if tile is None:
        return None
    extra: dict[str, Any] = {"pdl": has_dependent_launch(capability), "shared": SHARED_BYTES[capability]}
    out = meta(num_tokens, num_rows)
    if epilogue == SOFTCAP:
        out, extra["softcap"] = meta(num_tokens, num_rows, dtype=torch.float32), 30.0
    return few_tokens.describe(meta(num_tokens, size), matrix, out, tile, epilogue, **extra)


def experts_of(num_tokens: int, name: str, capability: int) -> list[Launch]:
    gate_up, down = matrix_of(name, 128, 1408, 2816), matrix_of(name, 128, 2816, 704)
    describe = experts.describe_assigned if num_tokens <= experts.ASSIGNED_TOKENS else experts.describe_grouped
    routed = meta(num_tokens, 8, dtype=torch.float32), meta(num_tokens, 8, dtype=torch.int32)
    pdl, shared, x = has_dependent_launch(capability), SHARED_BYTES[capability], meta(num_tokens, 2816)
    launches = describe(x, *routed, gate_up, down, x, pdl=pdl, shared=shared)
    return [launch for launch in launches if "words" in launch.arguments]


def check(launch: Launch, capability: int, folder: Path) -> None:
    compiled = compile_for(launch, capability)
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    # Where tensor cores read weights from registers, the widest tiles spill a little. On Hopper, only one does: gate and up
    # in blocks of fp8 with 32 tokens.
    spilled = resources(compiled.asm["cubin"], folder)["STACK"]
    assert spilled <= (24 if capability == HOPPER else MAX_SPILLED_BYTES), f"{spilled} bytes are spilled"


@pytest.mark.parametrize("name", ["int4", "fp8"])
@pytest.mark.parametrize("case", MAIN, ids=str)
def test_main_formats_on_hopper(case: tuple[str, int, int, int, int], name: str, tmp_path: Path) -> None:
    launch = linear_of(case, name, HOPPER)
    assert launch is not None
    check(launch, HOPPER, tmp_path)


@pytest.mark.parametrize("case", BITS, ids=str)
def test_bits_on_hopper(case: tuple[str, int, int, int, int], tmp_path: Path) -> None:
    """Whole and as parts. Nothing is spilled at all."""
    for keeps_parts in (False, True) if case[-1] == PLAIN else (False,):
        launch = linear_of(case, "int4", HOPPER)
        assert launch is not None
        if keeps_parts:
            launch.arguments |= {"y": meta(launch.grid[1], case[1], case[2], dtype=torch.float32), "KEEP_PARTS": True}
        compiled = compile_for(launch, HOPPER)
        assert compiled.metadata.shared <= SHARED_BYTES[HOPPER]
        assert resources(compiled.asm["cubin"], tmp_path)["STACK"] == 0


@pytest.mark.parametrize("name", ["int4", "fp8"])
@pytest.mark.parametrize(
    ("capability", "case"),
    [
        case
        if case[1] in (HEADS[0], HEADS[2], HEADS[-1]) and case[0] == HOPPER
        else pytest.param(*case, marks=pytest.mark.slow)
        for case in [(capability, case) for capability in CAPABILITIES for case in HEADS]
        if case[1][0] not in HOPPER_KERNELS or case[0] == HOPPER
    ],
    ids=str,
)
def test_heads(capability: int, case: tuple[str, int, int, int, int], name: str, tmp_path: Path) -> None:
    """No weight is cut: there are many programs without splitting the inputs."""
    launch = linear_of(case, name, capability)
    if launch is None:
        assert (case[0], name) == ("bits", "fp8")
        return
    assert launch.grid[1] == 1
    check(launch, capability, tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_need_no_copy_and_no_rounded_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other layers multiply many tokens by a copy in bfloat16, or round them to e4m3."""
    monkeypatch.setattr(hardware, "multiplies_fp8", lambda device: True)
    matrix = matrix_of(name, 262144, 2560)
    for num_tokens in (1, 33, 129, 256, 1000):
        assert linear._choose(meta(num_tokens, 2560), matrix, Product(num_tokens, 262144, SOFTCAP)) is not None
    for num_tokens in (33 if name == "fp8" else 129, 1000):
        assert linear._choose(meta(num_tokens, 2560), matrix, Product(num_tokens, 262144)) is None


@pytest.mark.parametrize(
    "capability", [HOPPER, *(pytest.param(each, marks=pytest.mark.slow) for each in CAPABILITIES if each != HOPPER)]
)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8-block"])
def test_lookups(name: str, capability: int, tmp_path: Path) -> None:
    matrix, ids = matrix_of(name, 262144, 5376), meta(8, dtype=torch.int64)
    check(
        look_up.describe_look_up(ids, matrix, 0, 0, 73.5, meta(8, 5376), has_dependent_launch(capability)), capability, tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_on_every_architecture(name: str, capability: int, tmp_path: Path) -> None:
    launches = [linear_of(case, name, capability) for case in LINEAR if case[0] not in HOPPER_KERNELS or capability == HOPPER]
    matrix = matrix_of(name, 16384, 5376)
    launches.append(prefill.describe_dequantise(matrix, meta(16384, 5376), has_dependent_launch(capability)))
    for num_tokens in (1, 2, 8, 1000, 8192) if name != "fp8-block" else ():
        launches += experts_of(num_tokens, name, capability)
    for launch in launches:
        if launch is not None:
            check(launch, capability, tmp_path)
