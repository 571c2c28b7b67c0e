"""Budgets for thoughts, by effort. No torch."""

from __future__ import annotations

from culet.limits import read_numbers

EFFORTS = ("minimal", "low", "medium", "high", "xhigh")


def read_thinking_budgets(text: str) -> dict[str, int]:
    """Parse `effort=tokens,...`. Efforts that are not named have no budget. Errors name the bad part."""
    hint = "example: low=1024,medium=4096; an effort that is left out has no budget"
    return read_numbers("thinking-budgets", text, EFFORTS, hint=hint)
