"""Track whether launches belong to a step of fixed shape, which a GPU captures once and replays.

In a replay, the host's part of a launch costs nothing. Kernels that take tensor descriptors need more work on the host, so
they are only worth choosing for a replay. A step of fixed shape that is not captured launches the same kernels to get the same
results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_is_replayed = False


@contextmanager
def replayed() -> Iterator[None]:
    """Treat launches inside this block as part of a step of fixed shape."""
    global _is_replayed
    before, _is_replayed = _is_replayed, True
    try:
        yield
    finally:
        _is_replayed = before


def is_replayed() -> bool:
    return _is_replayed
