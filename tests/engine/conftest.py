"""Each test process uses one thread. Tiny models gain nothing from more, and processes that each use all cores stall."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_compiles_while_serving(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An engine on a GPU compiles every kernel at its start. The test fails if one is compiled later."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        late = [record.getMessage() for record in caplog.get_records("call") if "compiled while serving" in record.getMessage()]
        assert not late
