"""Prompts from documents. Chats are cut where the model's turn begins, other text near its beginning."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from training.learning.batches import Part

TURN = 105  # <|turn>
SHORTEST, LONGEST_PLAIN = 16, 96  # tokens of a prompt from plain text


def cut_prompts(
    parts: Mapping[str, Part], weights: Mapping[str, float], count: int, *, longest: int, seed: int, chats_only: bool = False
) -> list[list[int]]:
    """Return `count` prompts of at most `longest` tokens, drawn from the parts by their weights.

    Return fewer if the text runs out.
    """
    random = np.random.default_rng(seed)
    orders = {name: random.permutation(len(part.ends)).tolist() for name, part in sorted(parts.items()) if weights.get(name)}
    prompts: list[list[int]] = []
    while len(prompts) < count and orders:
        names = list(orders)
        share = np.array([weights[name] for name in names])
        name = names[int(random.choice(len(names), p=share / share.sum()))]
        part, document = parts[name], orders[name].pop()
        begin = int(part.ends[document - 1]) if document else 0
        prompt = _cut(part.tokens[begin : int(part.ends[document])], part, begin, random, chats_only)
        if 0 < len(prompt) <= longest:
            prompts.append(prompt)
        if not orders[name]:
            del orders[name]
    return prompts


def _cut(tokens: NDArray[np.uint16], part: Part, begin: int, random: np.random.Generator, chats_only: bool) -> list[int]:
    """Return the tokens before a position where the model begins to write, or nothing if there is none."""
    if TURN in tokens[:2].tolist() and part.learnt is not None:
        learnt = part.learnt[begin : begin + len(tokens)]
        starts = np.flatnonzero(learnt[1:] & ~learnt[:-1]) + 1
        return [] if not len(starts) else tokens[: int(random.choice(starts))].tolist()
    size = int(random.integers(SHORTEST, LONGEST_PLAIN + 1))
    return tokens[:size].tolist() if len(tokens) > size and not chats_only else []
