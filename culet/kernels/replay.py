"""Whether launches belong to a step of fixed shape, which on a GPU is captured once and replayed.

In a replay the host's part of a launch costs nothing, so kernels that need more of it can be chosen: those that take tensor
descriptors. A step of fixed shape that is not captured launches the same kernels, so that its results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_is_replayed = False


@contextmanager
def replayed() -> Iterator[None]:
    """Inside, launches belong to a step of fixed shape."""
    global _is_replayed
    before, _is_replayed = _is_replayed, True
    try:
        yield
    finally:
        _is_replayed = before


def is_replayed() -> bool:
    return _is_replayed
