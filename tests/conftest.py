"""The order of the test files, and a quick collection."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

gc.disable()  # test files import large packages, and nothing they make is garbage

ROOT = Path(__file__).parents[1]
# The files that take longest start first, so that no process is left with a long one at the end.
LONGEST_FIRST = (
    "tests/parallel/test_ranks.py",
    "tests/engine/llm/test_llm.py",
    "tests/engine/drafting/test_round_kernels.py",
    "tests/kernels/test_draft_round_triton.py",
    "tests/kernels/test_attention_triton.py",
    "tests/engine/drafting/test_dflash_triton.py",
    "tests/models/test_mtp_triton.py",
    "tests/kernels/test_fused_triton.py",
    "tests/training/test_embedded_model.py",
    "tests/engine/drafting/test_drafting_embedded.py",
    "tests/engine/scheduler/test_scheduler_walk.py",
    "tests/engine/llm/test_look_ahead.py",
    "tests/engine/drafting/test_dflash.py",
    "tests/engine/runner/test_worker.py",
    "tests/serve/test_openapi.py",
    "tests/serve/test_faults.py",
    "tests/serve/test_structured_requests.py",
    "tests/serve/test_page.py",
    "tests/serve/test_start.py",
    "tests/unit/kernels/test_compiling.py",
    "tests/kernels/test_fused_aot.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {ROOT / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would start with the files that have most tests
