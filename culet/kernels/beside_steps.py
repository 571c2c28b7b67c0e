"""Track whether launches run beside steps, on a stream of their own.

Kernels for few tokens sum parts in memory that all launches of a device share, so they may only run one after the other.
Launches beside steps use torch's kernels instead, which have memory for each stream. These also need no compilation for the
shapes of every short clip or small image.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_is_beside_steps = False


@contextmanager
def beside_steps() -> Iterator[None]:
    """Treat launches inside this block as launches that may run at the same time as a step."""
    global _is_beside_steps
    before, _is_beside_steps = _is_beside_steps, True
    try:
        yield
    finally:
        _is_beside_steps = before


def is_beside_steps() -> bool:
    return _is_beside_steps
