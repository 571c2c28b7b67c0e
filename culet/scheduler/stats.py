"""A frozen snapshot of the scheduler's counters and gauges."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from culet.scheduler.media.features import FeatureLedger
from culet.scheduler.page_allocator import PageAllocator
from culet.scheduler.sequence import Sequence
from culet.types import FinishReason

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # bounds of the histogram of step sizes


@dataclass
class Counters:
    """Counts of events since the start."""

    steps: int = 0
    step_tokens: int = 0  # new tokens of all steps, of prompts and outputs
    steps_at: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))  # steps by number of tokens
    preemptions: int = 0
    parked: int = 0  # those whose pages were saved in host memory
    restored: int = 0  # those that went on from there
    restored_tokens: int = 0  # computed tokens that they did not compute again
    forks: int = 0
    cancelled: int = 0
    timed_out: int = 0
    finished: int = 0  # all finished samples, including cancelled and timed-out ones
    verifies: int = 0  # rows with drafts that were verified
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafts that equal the token the target drew
    rolled_back_tokens: int = 0  # rejected drafts
    rollbacks: int = 0  # verifies that rejected at least one draft
    dropped_tokens: int = 0  # drawn after a stop, or for a sequence that had already ended
    prefix_queries: int = 0  # requests that have started
    prefix_query_tokens: int = 0  # of their prompts
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0
    restart_hits: int = 0  # the same for sequences that start again, and for samples that start by themselves
    restart_hit_tokens: int = 0
    encoded_items: int = 0  # images, video frames and clips of audio that towers encoded
    encoded_tokens: int = 0  # their soft tokens
    chunks_in_legs: int = 0  # chunks with images that ran in several steps, some of the layers in each
    feature_hits: int = 0  # media in prompts whose features an earlier chunk had already used
    drafted_at: list[int] = field(default_factory=list)  # verified drafts by position in a round, from 0
    accepted_at: list[int] = field(default_factory=list)  # accepted drafts by position

    def count_step(self, num_tokens: int) -> None:
        """Count one step with this many new tokens."""
        self.steps += 1
        self.step_tokens += num_tokens
        self.steps_at[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def count_preemption(self, *, is_parked: bool) -> None:
        """Count one sequence that was preempted."""
        self.preemptions += 1
        self.parked += is_parked

    def count_end(self, reason: FinishReason) -> None:
        """Count one sequence that has ended."""
        self.finished += 1
        self.cancelled += reason is FinishReason.CANCEL
        self.timed_out += reason is FinishReason.TIMEOUT

    def count_verify(self, num_drafts: int, num_accepted: int) -> None:
        """Count one verified row."""
        self.verifies += 1
        self.drafted_tokens += num_drafts
        self.accepted_tokens += num_accepted
        self.rolled_back_tokens += num_drafts - num_accepted
        self.rollbacks += num_accepted < num_drafts
        missing = num_drafts - len(self.drafted_at)
        if missing > 0:
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
        for place in range(num_drafts):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < num_accepted

    @property
    def tokens_per_verify(self) -> float:
        """Average tokens per verify, including the target's own token, or 0 before the first verify."""
        return 1.0 + self.accepted_tokens / self.verifies if self.verifies else 0.0

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Share of accepted drafts, by position in a round."""
        return tuple(kept / count if count else 0.0 for kept, count in zip(self.accepted_at, self.drafted_at, strict=True))

    def since(self, before: Counters) -> Counters:
        """Return the counts since `before`, an earlier copy."""
        change: dict[str, Any] = {}
        for entry in fields(self):
            now, then = getattr(self, entry.name), getattr(before, entry.name)
            if isinstance(now, list):
                then = [*then, *[0] * (len(now) - len(then))]
                change[entry.name] = [a - b for a, b in zip(now, then, strict=True)]
            else:
                change[entry.name] = now - then
        return Counters(**change)

    def copy(self) -> Counters:
        lists: dict[str, Any] = {
            entry.name: list(value) for entry in fields(self) if isinstance(value := getattr(self, entry.name), list)
        }
        return replace(self, **lists)


@dataclass(frozen=True)
class SchedulerStats:
    """The current state, and the counts since the start."""

    num_running: int
    num_waiting: int  # sequences in the queue, not counting samples that wait for their prompt
    num_pages: int
    num_free_pages: int
    num_resume_point_pages: int  # held only by resume points, so available when needed
    num_held_pages: Mapping[str, int]  # held by running sequences, per KV group (a shared page counts once)
    num_resume_points: int
    counters: Counters
    verify_seconds: float = 0.0  # device time of steps with drafts to verify
    draft_seconds: float = 0.0  # device time of drafting
    kernels_compiled: int = 0  # since the startup ended, each of which held up a step
    num_features: int = 0  # images, video frames and clips of audio whose features are cached
    feature_bytes: int = 0  # size of these features
    num_tokens: int = 0  # of running and waiting sequences: prompts, and what is drawn so far
    num_host_pages: int = 0  # pages in host memory
    num_free_host_pages: int = 0


def take_snapshot(
    running: Collection[Sequence],
    waiting: Collection[Sequence],
    allocator: PageAllocator,
    held_pages: Mapping[str, int],
    features: FeatureLedger | None,
    counters: Counters,
) -> SchedulerStats:
    """Return the state of a scheduler with these sequences."""
    arena, prefix = allocator.arena, allocator.prefix
    return SchedulerStats(
        num_running=len(running),
        num_waiting=len(waiting),
        num_pages=arena.num_pages,
        num_free_pages=arena.num_free,
        num_resume_point_pages=arena.num_reclaimable,
        num_held_pages=held_pages,
        num_resume_points=0 if prefix is None else prefix.num_resume_points,
        counters=counters.copy(),
        num_features=0 if features is None else features.num_held,
        feature_bytes=0 if features is None else features.num_bytes,
        num_tokens=sum(len(seq.tokens) for seq in (*running, *waiting)),
        num_host_pages=allocator.host.num_pages,
        num_free_host_pages=allocator.host.num_free,
    )
