"""What conversations are about: animals, topics with follow-up questions, and sentences about everyday things."""

from __future__ import annotations

from dataclasses import dataclass

from training.data.material.table import Table

_TABLE = Table("knowledge")


@dataclass(frozen=True)
class Animal:
    """An animal. `home` begins with its preposition, and `fact` calls the animal "it"."""

    name: str
    plural: str
    kind: str
    home: str
    food: str
    fact: str


@dataclass(frozen=True)
class Topic:
    """A topic with pairs of questions and answers about it."""

    name: str
    opening: str
    questions: tuple[tuple[str, str], ...]


ANIMALS = tuple(Animal(*cells) for cells in _TABLE["animals"])
TOPICS = tuple(Topic(**topic) for topic in _TABLE["topics"])
SENTENCES: dict[str, tuple[str, ...]] = _TABLE["sentences"]
