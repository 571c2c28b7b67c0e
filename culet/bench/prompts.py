"""Prompts of random tokens. No torch."""

from __future__ import annotations

import random

from culet.bench.workloads import Workload

_FIRST_WORD = 1000  # ids below are special tokens and bytes, in vocabularies that have more


def make_prompts(row: Workload, vocab_size: int, *, seed: int) -> list[list[int]]:
    """A prompt for each sequence of a row; equal seeds give equal prompts."""
    draw = random.Random(f"{seed} {row.num_seqs} {row.prompt_len}")
    first = _FIRST_WORD if vocab_size > 2 * _FIRST_WORD else 0
    return [draw.choices(range(first, vocab_size), k=row.prompt_len) for _ in range(row.num_seqs)]
