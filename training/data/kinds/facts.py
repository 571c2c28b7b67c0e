"""Tables of facts, and chats about them in many phrasings. The quality gate's phrasings are not used here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training.data.chats import Chat, talk
from training.data.material.table import Table, capitalised

_TABLE = Table("facts")
_RELATIONS = Table("relations")


@dataclass(frozen=True)
class Relation:
    """Rows (subject, value), questions for the value ({s}), and answers ({s}, {v})."""

    name: str
    rows: tuple[tuple[str, str], ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]


def _relation(name: str, entry: dict[str, Any]) -> Relation:
    if origin := entry.get("inverse_of"):
        rows = tuple((value, subject) for subject, value in _RELATIONS[origin]["rows"] if subject != value)
    else:
        rows = entry["rows"]
    return Relation(name, rows, entry["asks"], entry["answers"])


RELATIONS = {name: _relation(name, entry) for name, entry in _RELATIONS.items()}
LEADS = _TABLE["leads"]
TAILS = _TABLE["tails"]
SHORT_SYSTEMS = _TABLE["short_systems"]
_SURE = _TABLE["sure"]


def ask_about(relation: Relation, subject: str, rng: random.Random) -> str:
    """Return a question, sometimes with a lead or a tail, sometimes written carelessly."""
    question = capitalised(rng.choice(relation.asks).format(s=subject))
    if rng.random() < 0.3:
        lead = rng.choice(LEADS)
        question = lead + (question if lead.endswith(("! ", "? ", ". ", ": ")) else question[0].lower() + question[1:])
    if rng.random() < 0.15:
        question += rng.choice(TAILS)
    if rng.random() < 0.12:
        question = question.lower().rstrip("?")
    return question


def answer_about(relation: Relation, subject: str, value: str, rng: random.Random) -> str:
    return capitalised(rng.choice(relation.answers).format(s=subject, v=value))


def fact_chat(relation: Relation, subject: str, value: str, rng: random.Random) -> Chat:
    """Make a question about a row, with its answer."""
    question = ask_about(relation, subject, rng)
    if rng.random() < 0.06:
        return talk("facts", question, capitalised(value) + ".", system=rng.choice(SHORT_SYSTEMS))
    answer = answer_about(relation, subject, value, rng)
    return talk("facts", question, rng.choice(_SURE) + answer if rng.random() < 0.3 else answer)


def make(rng: random.Random, repeats: int) -> Iterator[Chat]:
    """Yield each fact `repeats` times in random phrasings, and small tables more often."""
    for relation in RELATIONS.values():
        times = repeats if len(relation.rows) > 30 else round(repeats * 1.5)
        for subject, value in relation.rows:
            for _ in range(times):
                yield fact_chat(relation, subject, value, rng)


def make_series(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield chats with several facts: other subjects of a relation, or other relations."""
    relations = list(RELATIONS.values())
    for _ in range(count):
        turns: list[str] = []
        relation = rng.choice(relations)
        for _ in range(rng.choice((2, 2, 3))):
            if rng.random() < 0.5:
                relation = rng.choice(relations)
            subject, value = rng.choice(relation.rows)
            turns += [ask_about(relation, subject, rng), answer_about(relation, subject, value, rng)]
        yield talk("facts", *turns)
