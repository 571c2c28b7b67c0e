"""Define Refusal: why a medium is not decoded, in Culet's own words. What a decoder says is never shown to a client."""

from __future__ import annotations


class Refusal(Exception):
    """A medium that cannot be decoded within the limits. The client can fix it."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
