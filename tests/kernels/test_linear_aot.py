"""The `hopper_stream` kernels for the layers of all models compile for sm_90, fit it and spill nothing. Needs no GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter cannot compile", allow_module_level=True)

from triton import knobs

from culet.hardware import SHARED_BYTES
from culet.kernels.cross_compile import compile_for
from culet.kernels.triton.experts import hopper_grouped
from culet.kernels.triton.linear.hopper_products import describe_gated_product
from culet.kernels.triton.linear.hopper_stream import blocks_of
from culet.kernels.triton.linear.tiles import GATED, GELU_TIMES, PLAIN, SOFTCAP
from tests.kernels.linear_cases import Case, all_cases, class_cases

MEMORY_OF_A_MULTIPROCESSOR = 228 << 10  # on a Hopper GPU, shared by its programs
MEMORY_OF_THE_SYSTEM = 1 << 10  # reserved for each program


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Return what the assembler allocated: REG, STACK (for spilled registers), LOCAL and others."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in text.splitlines() if "STACK:" in line)
    return {name: int(value) for name, value in (word.rsplit(":", 1) for word in line.split() if ":" in word)}


def check_order(case: Case, stages: int, ptx: str) -> None:
    """Check that weights are requested before the wait, and tokens after it, before the next kernel may start."""
    before, waited = ptx.split("griddepcontrol.wait")
    waited, _ = waited.split("griddepcontrol.launch_dependents")
    copies = stages * case.tile.block_k // 64  # each copies 128 bytes of every row
    _, rest = blocks_of(case.num_tokens)
    assert before.count("cp.async.bulk.tensor") == copies * (2 if case.shape.epilogue == GATED else 1)
    assert waited.count("cp.async.bulk.tensor") == copies * (2 if rest else 1)


def check(case: Case, folder: Path) -> None:
    launch = case.on_meta()
    compiled = compile_for(launch, 90)
    assert compiled.metadata.shared <= SHARED_BYTES[90]
    used = resources(compiled.asm["cubin"], folder)
    assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
    assert used["REG"] <= launch.options["maxnreg"]
    check_order(case, launch.arguments["STAGES"], compiled.asm["ptx"])
    if case.shape.epilogue == GATED and case.tile.num_stages <= 4:  # few stages, so that two programs run at once
        assert 2 * (compiled.metadata.shared + MEMORY_OF_THE_SYSTEM) <= MEMORY_OF_A_MULTIPROCESSOR


def some_cases() -> list[Case]:
    """Return the cases with the fewest and the most tokens of each epilogue, and more of PLAIN, which has the most tiles."""
    found: dict[Case, None] = {}
    for epilogue in (PLAIN, GATED, GELU_TIMES, SOFTCAP):
        cases = sorted((case for case in class_cases() if case.shape.epilogue == epilogue), key=lambda case: case.num_tokens)
        found |= dict.fromkeys((cases[0], cases[-1]))
    plain = [case for case in class_cases() if case.shape.epilogue == PLAIN]
    return list(found | dict.fromkeys(plain[::6]))


@pytest.mark.parametrize("case", some_cases(), ids=str)
def test_kernels_fit_and_spill_nothing(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in all_cases() if case not in some_cases()], ids=str)
def test_every_kernel_fits_and_spills_nothing(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


def test_gated_product_fits_hopper(tmp_path: Path) -> None:
    x, weight, out = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((2520, 1152), (8608, 1152), (2520, 4304))
    )
    compiled = compile_for(describe_gated_product(x, weight, out), 90)
    assert compiled.metadata.shared <= SHARED_BYTES[90]
    used = resources(compiled.asm["cubin"], tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
    # Two products are in flight while the copies of an earlier step are released. One at a time would halve the speed.
    assert compiled.asm["ptx"].count("wgmma.wait_group.sync.aligned 2") == 2


@pytest.mark.parametrize("tiles", [hopper_grouped.FEW, hopper_grouped.MANY], ids=["few", "many"])
def test_grouped_experts_fit_hopper(tiles: hopper_grouped.TileSizes, tmp_path: Path) -> None:
    x, gate_up, down = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1000, 2816), (128, 1408, 2816), (128, 2816, 704))
    )
    weights, ids = (torch.empty(1000, 8, dtype=dtype, device="meta") for dtype in (torch.float32, torch.int32))
    launches = hopper_grouped.describe_hopper_grouped(x, weights, ids, gate_up, down, torch.empty_like(x), tile_sizes=tiles)
    for launch, in_flight in zip(launches[1:4], (None, 2, 1), strict=True):
        compiled = compile_for(launch, 90)
        assert compiled.metadata.shared <= SHARED_BYTES[90]
        used = resources(compiled.asm["cubin"], tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
        if in_flight is not None:  # in both warpgroups
            assert compiled.asm["ptx"].count(f"wgmma.wait_group.sync.aligned {in_flight}") == 2
