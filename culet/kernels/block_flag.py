"""A flag for the launches inside a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BlockFlag:
    """Call it for a block in which it is set: `with flag(): ...`. Blocks may be nested."""

    def __init__(self) -> None:
        self.is_set = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before, self.is_set = self.is_set, True
        try:
            yield
        finally:
            self.is_set = before
