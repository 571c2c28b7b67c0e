"""How far this process has come with its start. It tells a slow start from one that hangs.

A worker process sends this to the engine with its signs of life, which come from a thread of their own and go on if the start
hangs.
"""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """The part of the start that is under way, and how often it has made progress."""

    part: str = "the beginning"
    num_marks: int = 0


_now = Progress()


def begin(part: str) -> None:
    """Note that a part of the start begins."""
    global _now
    _now = Progress(part, _now.num_marks + 1)


def mark_progress() -> None:
    """Note that the part makes progress, for example that another tensor was read."""
    global _now
    _now = _now._replace(num_marks=_now.num_marks + 1)


def progress() -> Progress:
    return _now
