"""All parts of a runner with fixed shapes: decode and verify steps, their draws, short prompts, draft rounds, and deferred KV.

This module creates, rehearses and captures the parts together. The runner calls them one after another within a step. They
share buffers: draws and rounds read the output of the step before them, a step also keeps or writes the drafter's KV
(`DeferredKV`), and rounds read the steps' page tables and may overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from culet.drafters.base import Drafter
from culet.kernels.captures import Captures
from culet.runner.deferred_kv import DeferredKV
from culet.runner.draft_round import draft_lengths
from culet.runner.fixed.prompts import FixedPrompts
from culet.runner.fixed.rounds import FixedRounds
from culet.runner.fixed.steps import Bucket, FixedSteps
from culet.runner.target import Target
from culet.types import Row

if TYPE_CHECKING:
    from culet.runner.fixed.draws import FixedDraws  # needs Triton


@dataclass
class FixedShapes:
    """The fixed-shape parts of a runner.

    `draws` is None on a CPU, `rounds` without a drafter, and `deferred` without a drafter that has its own KV.
    """

    steps: FixedSteps
    prompts: FixedPrompts
    draws: FixedDraws | None
    rounds: FixedRounds | None
    deferred: DeferredKV | None

    @classmethod
    def create(
        cls,
        target: Target,
        tokens_SL: Tensor,
        accepted_S: Tensor,
        drafter: Drafter | None,
        deferred: DeferredKV | None,
        max_prompt: int,
    ) -> FixedShapes:
        """Make all parts. Prompts of up to `max_prompt` tokens get fixed sizes."""
        lengths = () if drafter is None else draft_lengths(drafter.max_drafts)
        query_counts = (1, *(count + 1 for count in lengths))
        steps = FixedSteps(target, tokens_SL, accepted_S, query_counts=query_counts, deferred=deferred)
        draws: FixedDraws | None = None
        if target.device.type == "cuda":
            from culet.kernels.triton.sampling.draw import draw
            from culet.runner.fixed.draws import FixedDraws  # both need Triton

            draws = FixedDraws(target, steps.buckets, tokens_SL, accepted_S, draw)
        rounds = None
        if drafter is not None:
            hidden_size, dtype = target.model.spec.hidden_size, target.model.dtype
            rounds = FixedRounds(drafter, target.pool, tokens_SL, steps.tables, hidden_size=hidden_size, dtype=dtype)
        if deferred is not None:
            deferred.use_fixed_sizes()
        return cls(steps, FixedPrompts(target, tokens_SL, steps.tables, max_prompt), draws, rounds, deferred)

    def rehearse_step(self, rows: Sequence[Row], bucket: Bucket) -> None:
        """Run a step, its draws and the start of its round, so that their kernels are compiled. The results do not matter."""
        step = self.steps.rehearse(rows, bucket)
        if self.draws is not None and bucket in self.draws.buckets:
            self.draws.rehearse(step)
            if self.rounds is not None:
                self.rounds.rehearse_start(step, self.draws.drawn_in(bucket).out_X)

    def rehearse_rounds(self, num_seqs: Sequence[int] | None = None) -> None:
        """Run draft rounds with these numbers of sequences (default: all)."""
        if self.rounds is not None:
            for shape in self.rounds.shapes:
                if num_seqs is None or shape[0] in num_seqs:
                    self.rounds.rehearse(shape)

    def rehearse_deferred(self) -> None:
        """Run deferred writes of all sizes."""
        if self.deferred is not None:
            for size in self.deferred.sizes:
                self.deferred.rehearse(size)

    def rehearse_prompts(self) -> None:
        """Run prompts of all sizes."""
        for size in self.prompts.sizes:
            self.prompts.rehearse(size)
        if (tails := self.prompts.tails) is not None:
            for size in tails.sizes:
                tails.rehearse(size)

    def capture(self, captures: Captures) -> int:
        """Capture everything and return the number of graphs."""
        self.prompts.capture(captures)
        self.steps.capture(captures)
        self.capture_draws(captures)
        parts = [part for part in (self.prompts.tails, self.rounds, self.deferred) if part is not None]
        for part in parts:
            part.capture(captures)
        return self.num_captured

    def capture_draws(self, captures: Captures, buckets: Sequence[Bucket] | None = None) -> None:
        """Capture the draws of `buckets` (default: all) and the start of rounds after them. Their steps must be captured."""
        if self.draws is None:
            return
        steps = [self.steps[bucket] for bucket in buckets or self.draws.buckets if bucket in self.draws.buckets]
        self.draws.capture(captures, steps)
        if self.rounds is not None:
            for step in steps:
                self.rounds.capture_start(captures, step, self.draws.drawn_in(step.bucket).out_X)

    @property
    def num_captured(self) -> int:
        parts = (self.prompts, self.prompts.tails, self.steps, self.draws, self.rounds, self.deferred)
        return sum(part.num_captured for part in parts if part is not None)
