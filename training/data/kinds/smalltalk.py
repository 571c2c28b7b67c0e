"""Who the model is, greetings, feelings, jokes, thanks, goodbyes, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator

from training.data.chats import Chat, talk
from training.data.material.table import Table

_TABLE = Table("smalltalk")

NAME = "Culet's built-in model"


Group = tuple[tuple[str, ...], tuple[str, ...]]  # questions, and answers that fit any of them


def _group(entry: dict[str, tuple[str, ...]]) -> Group:
    return entry["asks"], entry["answers"]


IDENTITY = {name: _group(entry) for name, entry in _TABLE["identity"].items()}
TALK = {name: _group(entry) for name, entry in _TABLE["talk"].items()}
REFUSALS = _group(_TABLE["refusals"])
_PERSONAS = _TABLE["personas"]
_NAMES = _TABLE["names"]
_JOBS = _TABLE["jobs"]
_ASK_NAME = _TABLE["ask_name"]
PLAIN_SYSTEMS = _TABLE["plain_systems"]


def _pick(rng: random.Random, group: Group) -> list[str]:
    question = rng.choice(group[0])
    if rng.random() < 0.12:
        question = question.lower().rstrip(".!?")
    return [question, rng.choice(group[1])]


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield identity, talk and refusals as single turns, as conversations, and with system prompts."""
    groups = [*IDENTITY.values(), *TALK.values()]
    weights = [2 if group in (IDENTITY["who"], TALK["hello"], TALK["how are you"]) else 1 for group in groups]
    for _ in range(count):
        chance = rng.random()
        system = rng.choice(PLAIN_SYSTEMS) if rng.random() < 0.12 else None
        if chance < 0.1:
            yield talk("refusals", *_pick(rng, REFUSALS), system=system)
        elif chance < 0.2:
            yield _named(rng)
        elif chance < 0.45:
            yield talk("smalltalk", *_pick(rng, rng.choices(groups, weights)[0]), system=system)
        else:
            yield talk("smalltalk", *_conversation(rng), system=system)


def _conversation(rng: random.Random) -> list[str]:
    """Return a greeting, some talk, and sometimes thanks and a goodbye."""
    turns = _pick(rng, TALK["hello"]) if rng.random() < 0.5 else []
    if rng.random() < 0.5:
        asked = _pick(rng, TALK["how are you"])
        turns += asked
        if asked[1].endswith(("?",)) and "help" not in asked[1] and rng.random() < 0.7:
            turns += _pick(rng, TALK[rng.choice(("user is well", "user is unwell"))])
    for _ in range(rng.choice((0, 1, 1, 2))):
        turns += _pick(
            rng, rng.choice([*IDENTITY.values(), TALK["joke"], TALK["fact"], TALK["likes"], TALK["riddle"], REFUSALS])
        )
    if rng.random() < 0.4 or not turns:
        turns += _pick(rng, TALK["thanks"])
    if rng.random() < 0.3:
        turns += _pick(rng, TALK[rng.choice(("bye", "bye", "night"))])
    return turns[:8]


def _named(rng: random.Random) -> Chat:
    """Make a chat whose system prompt gives the model another name, which the answer uses."""
    name, job = rng.choice(_NAMES), rng.choice(_JOBS)
    system = rng.choice(_TABLE["named_systems"]).format(n=name, j=job)
    answer = rng.choice(_TABLE["named_answers"]).format(n=name, j=job)
    turns = [rng.choice(_ASK_NAME), answer]
    if rng.random() < 0.4:
        turns = [*_pick(rng, TALK["hello"])[:1], f"Hello! I am {name}. How can I help you?", *turns]
    return talk("smalltalk", *turns, system=system)


def in_persona(rng: random.Random, question: str, answer: str) -> Chat:
    """Make a question and its answer in the voice that a system prompt asks for."""
    persona = rng.choice([persona for persona in _PERSONAS if persona["openings"] or persona["ending"]])
    opening = rng.choice(persona["openings"]) if persona["openings"] else ""
    body = (
        answer[0].lower() + answer[1:]
        if opening.endswith(", ") and answer.startswith(("The ", "It ", "We ", "You ", "There ", "A ", "An "))
        else answer
    )
    return talk("smalltalk", question, opening + body + persona["ending"], system=persona["system"])
