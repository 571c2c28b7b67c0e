"""Budgets for thoughts, by effort. No torch."""

from __future__ import annotations

from culet.errors import ConfigError

EFFORTS = ("minimal", "low", "medium", "high", "xhigh")


def read_thinking_budgets(text: str) -> dict[str, int]:
    """Parse `effort=tokens,...`. Efforts that are not named have no budget. Errors name the bad part."""
    budgets: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in EFFORTS:
            raise ConfigError(f"thinking-budgets: unknown effort {name!r}", hint=f"known efforts: {', '.join(EFFORTS)}")
        if not value.isdecimal() or not 0 < int(value) < 2**31:
            problem = f"thinking-budgets: {name}: got {value!r}, expected a whole number above 0"
            raise ConfigError(problem, hint="example: low=1024,medium=4096; an effort that is left out has no budget")
        budgets[name] = int(value)
    return budgets
