"""The order of the test files."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The files that take longest start first, so that no process is left with a long one at the end.
LONGEST_FIRST = ("tests/engine/drafting/test_round_kernels.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {ROOT / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would start with the files that have most tests
