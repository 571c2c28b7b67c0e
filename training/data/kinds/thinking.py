"""Chats with thinking on: a short thought, then the answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

from training.data.chats import Chat, talk
from training.data.kinds import definitions, facts, smalltalk
from training.data.material.table import Table

_TABLE = Table("thinking")

_FACT = _TABLE["fact"]
_TALK = _TABLE["talk"]


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield `count` chats about facts, words and small talk."""
    words = definitions.simple_words()
    relations = list(facts.RELATIONS.values())
    for _ in range(count):
        chance = rng.random()
        system = rng.choice(smalltalk.PLAIN_SYSTEMS) if rng.random() < 0.2 else None
        if chance < 0.55:
            relation = rng.choice(relations)
            subject, value = rng.choice(relation.rows)
            thought = rng.choice(_FACT).format(s=subject, v=value)
            yield talk(
                "thinking",
                facts.ask_about(relation, subject, rng),
                facts.answer_about(relation, subject, value, rng),
                thought=thought,
                system=system,
            )
        elif chance < 0.7:
            word = rng.choice(words)
            thought = rng.choice(_TABLE["i_explain_the_word"]).format(w=word.word)
            yield talk(
                "thinking", f"What does {word.word} mean?", definitions.answer(word, rng), thought=thought, system=system
            )
        elif chance < 0.85:
            name = rng.choice(list(_TALK))
            asks, answers = smalltalk.TALK[name]
            yield talk("thinking", rng.choice(asks), rng.choice(answers), thought=_TALK[name], system=system)
        else:
            asks, answers = smalltalk.IDENTITY[rng.choice(("who", "maker", "can", "limits"))]
            yield talk(
                "thinking",
                rng.choice(asks),
                rng.choice(answers),
                thought="The user asks about me. I am Culet's built-in model.",
                system=system,
            )
