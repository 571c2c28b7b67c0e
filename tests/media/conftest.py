"""One set of decoding processes for all tests of media."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from culet.media.items import MediaKind
from culet.media.limits import MediaLimits
from culet.media.reader import MediaReader
from culet.media.spec import MediaSpec

EVERY_KIND = frozenset(MediaKind)


@pytest.fixture(scope="session")
def reader() -> Iterator[MediaReader]:
    """A reader for a model that sees and hears, as E4B does. The time limit allows for a busy machine."""
    reader = MediaReader(MediaSpec(EVERY_KIND), MediaLimits(num_processes=1, time_limit_s=60.0))
    yield reader
    reader.close()
