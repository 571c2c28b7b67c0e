"""Questions about the world, advice and everyday talk with answers written for this model: short, plain and correct."""

from __future__ import annotations

import random
from collections.abc import Iterator

from training.data.chats import Chat, talk
from training.data.kinds import smalltalk
from training.data.kinds.facts import LEADS
from training.data.material.table import Table

_TABLE = Table("handwritten")


WORLD, ADVICE, EVERYDAY = _TABLE["world"], _TABLE["advice"], _TABLE["everyday"]


def _ask(rng: random.Random, asks: tuple[str, ...]) -> str:
    question = rng.choice(asks)
    chance = rng.random()
    if chance < 0.12 and question.endswith("?"):
        return rng.choice(LEADS) + question
    if chance < 0.2:
        return question.lower().rstrip(".?!")
    return question


def _follow_up(rng: random.Random, turns: list[str]) -> list[str]:
    """Return a turn about the last answer that repeats it, confirms it, or repeats the question."""
    question, answer = turns[-2:]
    kind = rng.randrange(3)
    if kind == 0:
        return [rng.choice(_TABLE["can_you_repeat_that"]), answer]
    if kind == 1:
        asks, answers = smalltalk.TALK["agree"]
        return [rng.choice(asks), rng.choice(answers)]
    return [rng.choice(("What did I ask you?", "What was my question?", "What did I just say?")), f'You said: "{question}"']


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield single questions, and short conversations with thanks or a second question."""
    kinds = (WORLD, WORLD, ADVICE, EVERYDAY, EVERYDAY)
    for _ in range(count):
        turns: list[str] = []
        if rng.random() < 0.15:
            asks, answers = smalltalk.TALK["hello"]
            turns += [rng.choice(asks), rng.choice(answers)]
        for _ in range(rng.choices((1, 2, 3), (0.6, 0.28, 0.12))[0]):
            questions, replies = rng.choice(rng.choice(kinds))
            turns += [_ask(rng, questions), rng.choice(replies)]
            if rng.random() < 0.12:
                turns += _follow_up(rng, turns)
        if rng.random() < 0.15:
            asks, answers = smalltalk.TALK[rng.choice(("thanks", "bye", "compliment", "night"))]
            turns += [rng.choice(asks), rng.choice(answers)]
        yield talk("world", *turns, system=rng.choice(smalltalk.PLAIN_SYSTEMS) if rng.random() < 0.1 else None)
