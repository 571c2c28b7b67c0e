"""Prompts out of documents: chats cut where the model's turn begins, other text cut somewhere near its beginning."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from training.batches import Part

TURN, TURN_END = 105, 106  # <|turn> and <turn|>
SHORTEST, LONGEST_PLAIN = 16, 96  # tokens of a prompt out of plain text


def cut_prompts(parts: Mapping[str, Part], count: int, *, longest: int, seed: int) -> list[list[int]]:
    """`count` prompts of at most `longest` tokens, from the parts in turn; fewer where the text does not give as many."""
    random = np.random.default_rng(seed)
    orders = {name: random.permutation(len(part.ends)).tolist() for name, part in sorted(parts.items())}
    prompts: list[list[int]] = []
    while len(prompts) < count and any(orders.values()):
        for name, order in orders.items():
            if order and len(prompts) < count:
                part, document = parts[name], order.pop()
                begin = int(part.ends[document - 1]) if document else 0
                prompt = _cut(part.tokens[begin : int(part.ends[document])], part, begin, random)
                if 0 < len(prompt) <= longest:
                    prompts.append(prompt)
    return prompts


def _cut(tokens: np.ndarray, part: Part, begin: int, random: np.random.Generator) -> list[int]:
    """The tokens before a place where the model begins to write."""
    if TURN in tokens[:2].tolist() and part.learnt is not None:
        learnt = part.learnt[begin : begin + len(tokens)]
        starts = np.flatnonzero(learnt[1:] & ~learnt[:-1]) + 1
        return [] if not len(starts) else tokens[: int(random.choice(starts))].tolist()
    size = int(random.integers(SHORTEST, LONGEST_PLAIN + 1))
    return tokens[:size].tolist() if len(tokens) > size else []
