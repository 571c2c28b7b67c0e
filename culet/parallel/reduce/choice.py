"""What the GPUs of several ranks are able to do, and which way of adding is used for which size. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

ONE_SHOT_BYTES = 256 << 10  # the most bytes that are added in one shot
TWO_SHOT_BYTES = 15 << 20  # the most bytes that are added in two shots, unless there is no other way

PULL, PUSH = "pull", "push"
TORCH_OPS = "torch's own reductions"


class Method(Enum):
    """How a tensor is added over all ranks."""

    ONE_SHOT = "one-shot"  # every rank reads all terms
    TWO_SHOT = "two-shot"  # every rank adds a part of the tensor, and then reads the other parts
    LIBRARY = "library"  # NCCL, or gloo on CPUs


@dataclass(frozen=True)
class Reductions:
    """What was found at start."""

    direction: str = ""  # who moves the terms of a sum that is fused with a norm: readers (PULL) or writers (PUSH); "" if none
    has_torch_ops: bool = False  # torch's reductions over symmetric memory give right sums
    has_nccl: bool = True  # False if ranks share a GPU, which NCCL refuses
    reason: str = ""

    @property
    def is_symmetric(self) -> bool:
        return bool(self.direction) or self.has_torch_ops

    @property
    def names(self) -> str:
        """The ways of adding that are used, from small to large tensors."""
        ways = [f"fused with norms ({self.direction})"] if self.direction else []
        ways += [Method.ONE_SHOT.value, Method.TWO_SHOT.value] if self.has_torch_ops else []
        return ", ".join([*ways, *(["NCCL"] if self.has_nccl else [])])

    def method(self, num_bytes: int) -> Method:
        """Return how a tensor that is not fused with its reader is added."""
        if not self.has_torch_ops or (self.has_nccl and num_bytes > TWO_SHOT_BYTES):
            return Method.LIBRARY
        return Method.ONE_SHOT if num_bytes <= ONE_SHOT_BYTES else Method.TWO_SHOT


LIBRARY_ALONE = Reductions()


def choose_reductions(found: Sequence[Mapping[str, Any]], end: str, *, has_nccl: bool) -> Reductions:
    """Return what to use, given the reports of a probe and how it ended ("" if it ran to its end).

    A report has the name of a stage, and its seconds or its problem. A stage without a report was not reached.
    """
    problems = [f"{report['stage']}: {report['problem']}" for report in found if report["problem"]]
    seconds = {report["stage"]: report["seconds"] for report in found if not report["problem"]}
    times = {direction: seconds[direction] for direction in (PULL, PUSH) if direction in seconds}
    direction = min(times, key=lambda name: times[name]) if times else ""
    reasons = [f"{name} took {1e6 * time:.0f} us" for name, time in sorted(times.items())]
    reasons += problems + ([end] if end else [])
    return Reductions(direction, TORCH_OPS in seconds, has_nccl, "; ".join(reasons))
