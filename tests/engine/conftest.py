"""Each test process uses one thread. Tiny models gain nothing from more, and processes that each use all cores stall."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from culet.testing.tiny import write_checkpoint

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_compiles_while_serving(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An engine on a GPU compiles every kernel at its start. The test fails if one is compiled later."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        late = [record.getMessage() for record in caplog.get_records("call") if "compiled while serving" in record.getMessage()]
        assert not late


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random E2B with a tokenizer. Tests must not change it."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "E2B")
