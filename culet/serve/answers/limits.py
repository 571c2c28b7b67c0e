"""Bound the size of answers that are larger than what the model writes.

Log-probabilities and repeated prompts multiply: `n` samples, each with the prompt, each token with its most likely
alternatives. The size is bounded before any work begins. What is built is then counted, because a token's text may be longer
than usual.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from culet.errors import BadRequest, QueueFull
from culet.limits import Limits

_MEGABYTE = 1 << 20


class AnswerLimits:
    """The limits on one answer, and on all answers that are being built."""

    def __init__(self, limits: Limits) -> None:
        self.max_bytes = limits.answer_mb * _MEGABYTE
        self.max_total = limits.answers_mb * _MEGABYTE
        self.num_bytes = 0  # of all answers that are being built

    def check(self, num_bytes: int, what: str) -> None:
        """Raise if an answer may have more than the allowed bytes. `what` names the fields that could be lowered."""
        if num_bytes > self.max_bytes:
            raise BadRequest(
                f"{what}: the answer could have {num_bytes / _MEGABYTE:.0f} MB, "
                f"but the maximum is {self.max_bytes // _MEGABYTE} MB",
                hint="lower n, logprobs, max_tokens or the number of prompts, or raise the maximum with --limits answer_mb=N",
            )

    def open(self) -> AnswerSize:
        """Return a count for one answer. Use it with `with`, or close it."""
        return AnswerSize(self)


class AnswerSize:
    """Counts the bytes of one answer while it is built and sent."""

    def __init__(self, limits: AnswerLimits) -> None:
        self._limits = limits
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raise if the answer or all answers together become too large."""
        limits = self._limits
        limits.check(self._num_bytes + num_bytes, "logprobs")
        if limits.num_bytes + num_bytes > limits.max_total:
            raise QueueFull(
                f"the answers that are being built have more than {limits.max_total // _MEGABYTE} MB of log-probabilities",
                hint="try again later, or ask for fewer with n, logprobs or max_tokens",
            )
        self._num_bytes += num_bytes
        limits.num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        """Give back bytes that were counted, because their part of the answer is built again."""
        self._limits.num_bytes -= num_bytes
        self._num_bytes -= num_bytes

    def close(self) -> None:
        """Give back all bytes."""
        self.remove(self._num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
