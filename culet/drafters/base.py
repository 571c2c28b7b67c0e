"""What a drafter is to the runner. It proposes tokens; the target draws its own and keeps the proposals that agree.

Shapes: R sequences that drew in a step · K columns of proposals · S slots · L a slot's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from culet.attention.batch import ForwardBatch
from culet.cache.spec import KVSpec


@dataclass(frozen=True, slots=True)
class Drawers:
    """The sequences that drew in a step, in the order of StepResult.drawn, after rejected drafts were taken back."""

    slots: tuple[int, ...]
    tokens_SL: Tensor  # int32; the slots' tokens
    length_R: Tensor  # int64; tokens of each sequence now: the newest, at length - 1, has no KV yet
    source_R: Tensor  # int64; which of the tokens with logits the newest token was drawn from


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposals for the tokens after the newest one of each sequence."""

    token_ids_RK: Tensor  # int64
    counts: tuple[int, ...]  # how many of the K columns are meant, per sequence; at most the drafter's max_drafts


class Drafter(Protocol):
    """Proposes tokens from what the target's forward pass leaves behind."""

    taps: tuple[int, ...]  # target layers whose output to keep; -1 is the hidden state after the final norm
    reads_target_pages: bool  # True binds it to the target's cache layout
    max_drafts: int  # most tokens it proposes for a sequence

    def kv_specs(self) -> list[KVSpec]:
        """Layers of its own that need KV: [] where it reads the target's."""

    def commit(self, batch: ForwardBatch, tapped: Mapping[int, Tensor]) -> None:
        """After every forward pass of the target: write its own KV of the step's tokens. Rejected ones are written again."""

    def propose(self, batch: ForwardBatch, tapped: Mapping[int, Tensor], drawers: Drawers) -> Draft:
        """Proposals for every sequence that drew; without a wait for the device."""
