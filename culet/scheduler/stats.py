"""Counters and gauges of the scheduler, as one frozen snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Counters:
    """What has happened since the start."""

    steps: int = 0
    preemptions: int = 0
    forks: int = 0
    cancelled: int = 0
    timed_out: int = 0
    finished: int = 0  # every ended sample, the cancelled and timed out included
    verifies: int = 0  # rows with drafts whose result came
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafts that the target drew itself
    rolled_back_tokens: int = 0  # drafts that were not accepted
    rollbacks: int = 0  # verifies in which at least one draft was not accepted
    dropped_tokens: int = 0  # drawn after a stop, or for a sequence that had ended meanwhile
    prefix_queries: int = 0
    prefix_query_tokens: int = 0
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0


@dataclass(frozen=True)
class SchedulerStats:
    """How things stand, and what has happened since the start."""

    num_running: int
    num_waiting: int  # sequences in the queue; samples that wait for their prompt are not counted
    num_pages: int
    num_free_pages: int
    num_checkpoint_pages: int  # held by checkpoints alone: had when needed
    num_held_pages: Mapping[str, int]  # by running sequences, per KV group; a shared page counts once
    num_checkpoints: int
    counters: Counters
