"""Groups of ranks and tiny models, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.parallel.jobs import write_model
from tests.parallel.ranks import Ranks


@pytest.fixture(scope="package")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """Start groups of ranks on first use."""
    started: dict[int, Ranks] = {}

    def start(size: int) -> Ranks:
        if size not in started:
            started[size] = Ranks(size, tmp_path_factory.mktemp(f"ranks{size}"))
        return started[size]

    yield start
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="package")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Write tiny checkpoints on first use."""
    folder: Path = tmp_path_factory.mktemp("models")
    return cache(lambda shape: write_model(folder, shape))
