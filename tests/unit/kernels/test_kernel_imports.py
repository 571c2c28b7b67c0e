"""Triton kernels and their eager twins share types and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import culet.kernels

ROOT = Path(culet.kernels.__file__).parent


def imported(folder: str) -> set[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py"))
    return set(re.findall(r"(?:from|import) (culet\.[\w.]+)", text))


def test_eager_twins_do_not_import_triton_kernels():
    assert {name for name in imported("eager") if not name.startswith("culet.kernels.eager")} == {"culet.kernels.types"}


def test_triton_kernels_do_not_import_eager_twins():
    names = imported("triton")
    assert "culet.kernels.types" in names
    assert not any(name.startswith("culet.kernels.eager") for name in names)
