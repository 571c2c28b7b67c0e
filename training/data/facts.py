"""Facts in tables, and chats about them in many phrasings. The phrasings of the quality gate are not among these."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from training.data.chats import Chat, talk
from training.data.fact_tables import TABLES


@dataclass(frozen=True)
class Relation:
    """Rows (subject, value), how one asks for the value ({s}), and how one answers ({s}, {v})."""

    name: str
    rows: tuple[tuple[str, str], ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]


def _rows(text: str) -> tuple[tuple[str, str], ...]:
    rows = []
    for item in " ".join(text.split()).split(";"):
        subject, _, value = item.partition("=")
        if value:
            rows.append((subject.strip(), value.strip()))
    return tuple(rows)


RELATIONS = {
    name: Relation(name, _rows(rows), tuple(asks.split(" | ")), tuple(answers.split(" | ")))
    for name, (rows, asks, answers) in TABLES.items()
}
# Put before a question now and then. The gate uses none of them.
LEADS = (
    "Please tell me: ", "I have a question: ", "Quick question: ", "Hi! ", "Hello! ", "Hey, ", "Can you help me? ", "I would like to know: ",
    "Help me with my homework: ", "Okay, next question. ", "Listen: ", "Good morning! ", "Let me ask you something: ", "I wonder: ", "A little quiz for you: ", "Tell me, please: ", "Maybe you know this: ",
    "We talked about this at school: ", "I need to know this: ", "Can I ask you something? ", "For a quiz: ", "One more thing: ", "Sorry, I forgot. ", "My friend asked me: ", "Just curious: ",
)  # fmt: skip
TAILS = (
    " Thanks!",
    " Please answer briefly.",
    " I forgot.",
    " Do you know?",
    " I am not sure.",
    " Thank you.",
    " Please help me.",
)
SHORT_SYSTEMS = (
    "Answer with one word if you can.",
    "Be very brief: give only the answer.",
    "Reply with the answer alone.",
    "Answer as briefly as possible.",
)
_SURE = ("", "", "", "", "", "Sure! ", "Of course. ", "Good question! ", "Yes: ", "Certainly. ")


def capitalised(text: str) -> str:
    """With a capital at the beginning, and "an" where it belongs."""
    text = re.sub(r"\b([Aa]) (?=[aeio](?!ne\b|u))", r"\1n ", text)
    return text[:1].upper() + text[1:]


def ask_about(relation: Relation, subject: str, rng: random.Random) -> str:
    """A question, perhaps with a lead or a tail, or written carelessly."""
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
    """One question and answer about a row."""
    question = ask_about(relation, subject, rng)
    if rng.random() < 0.06:
        return talk("facts", question, capitalised(value) + ".", system=rng.choice(SHORT_SYSTEMS))
    answer = answer_about(relation, subject, value, rng)
    return talk("facts", question, rng.choice(_SURE) + answer if rng.random() < 0.3 else answer)


def make(rng: random.Random, repeats: int) -> Iterator[Chat]:
    """Each fact `repeats` times, each time in another phrasing as far as there are any; small tables more often."""
    for relation in RELATIONS.values():
        times = repeats if len(relation.rows) > 30 else round(repeats * 1.5)
        for subject, value in relation.rows:
            for _ in range(times):
                yield fact_chat(relation, subject, value, rng)


def make_series(rng: random.Random, count: int) -> Iterator[Chat]:
    """Several facts in one chat: other subjects of a relation, or other relations."""
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
