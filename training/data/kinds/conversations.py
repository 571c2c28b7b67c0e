"""Conversations about facts in which later turns refer back: another subject, another question, shorter, again, corrections."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from training.data.chats import Chat, talk
from training.data.kinds import arithmetic, compositions, definitions, facts, smalltalk
from training.data.material import topics
from training.data.material.table import Table, capitalised

_TABLE = Table("conversations")

_AGAIN = _TABLE["again"]


def _other_subject(rng: random.Random) -> Chat:
    """Ask the same question about other subjects, in short form."""
    relation = rng.choice(
        [
            facts.RELATIONS[name]
            for name in (
                "capital",
                "continent",
                "language",
                "currency",
                "opposite",
                "plural",
                "past tense",
                "author",
                "colour",
                "element symbol",
                "days of a month",
                "young animal",
                "number of legs",
                "kind",
                "material",
            )
        ]
    )
    rows = rng.sample(relation.rows, rng.choice((2, 3, 3)))
    (subject, value), *others = rows
    turns = [capitalised(rng.choice(relation.asks).format(s=subject)), facts.answer_about(relation, subject, value, rng)]
    for subject, value in others:
        article = "a " if relation.name in ("young animal", "number of legs", "kind") else ""
        again = capitalised(rng.choice(_AGAIN).format(s=article + subject))
        full = [form for form in relation.answers if "{s}" in form and "{v}" in form]
        turns += [again, capitalised(rng.choice(full).format(s=subject, v=value))]
    return talk("threads", *turns)


_COUNTRY_ASKS = _TABLE["country_asks"]


def _same_subject(rng: random.Random) -> Chat:
    """Ask several questions about a country that is named only once."""
    tables = {name: dict(facts.RELATIONS[name].rows) for name in _COUNTRY_ASKS}
    country = rng.choice([country for country in tables["language"] if sum(country in table for table in tables.values()) >= 3])
    known = [name for name in tables if country in tables[name]]
    rng.shuffle(known)
    first, *rest = known
    turns: list[str] = []
    if rng.random() < 0.35:
        opening = rng.choice(_TABLE["i_want_to_travel"]).format(c=country)
        turns += [opening, rng.choice(_TABLE["great_what_would_you"]).format(c=country)]
        rest = known
    else:
        relation = facts.RELATIONS[first]
        turns += [
            capitalised(rng.choice(relation.asks).format(s=country)),
            facts.answer_about(relation, country, tables[first][country], rng),
        ]
    for name in rest[: rng.choice((1, 2, 2))]:
        relation = facts.RELATIONS[name]
        full = [form for form in relation.answers if "{s}" in form]
        turns += [rng.choice(_COUNTRY_ASKS[name]), capitalised(rng.choice(full).format(s=country, v=tables[name][country]))]
    return talk("threads", *map(capitalised, turns))


def _shorter(rng: random.Random) -> Chat:
    """Ask for a shorter answer, a repetition, or the user's own question."""
    relation = rng.choice(list(facts.RELATIONS.values()))
    subject, value = rng.choice(relation.rows)
    question = capitalised(rng.choice(relation.asks).format(s=subject))
    form = rng.choice([form for form in relation.answers if "{v}" in form])
    answer = capitalised(form.format(s=subject, v=value))
    kind = rng.randrange(4)
    if kind == 0:
        ask = rng.choice(_TABLE["say_it_shorter"])
        turn = capitalised(value) + "."
    elif kind == 1:
        ask, turn = (rng.choice(_TABLE["can_you_repeat_that"]), answer)
    elif kind == 2:
        ask = rng.choice(_TABLE["what_did_i_ask"])
        turn = f'You asked: "{question}"'
    else:
        ask = rng.choice(_TABLE["say_it_in_capital"])
        turn = answer.upper()
    return talk("threads", question, answer, ask, turn)


def _corrected(rng: random.Random) -> Chat:
    """Correct the question to another subject."""
    relation = rng.choice(
        [facts.RELATIONS[name] for name in ("capital", "language", "currency", "continent", "opposite", "author", "plural")]
    )
    (wrong, value), (meant, right) = rng.sample(relation.rows, 2)
    full = [form for form in relation.answers if "{s}" in form and "{v}" in form]
    turns = [capitalised(rng.choice(relation.asks).format(s=wrong)), capitalised(rng.choice(full).format(s=wrong, v=value))]
    turns += [rng.choice(_TABLE["sorry_i_meant"]).format(s=meant)]
    turns += [
        rng.choice(("", "", "No problem. ", "I see. ", "All right. ")) + capitalised(rng.choice(full).format(s=meant, v=right))
    ]
    return talk("threads", *turns)


def _sums(rng: random.Random) -> Chat:
    """Ask for a sum that the next question continues."""
    while True:
        a, b, c = rng.randint(1, 12), rng.randint(1, 8), rng.randint(1, 6)
        if not (arithmetic.is_held_out(a, b, "+") or arithmetic.is_held_out(a + b, c, "+")):
            break
    first = [f"What is {a} + {b}?", f"{a} + {b} = {a + b}."]
    ask = rng.choice(_TABLE["and_more"]).format(c=c)
    return talk("threads", *first, ask, f"{a + b} + {c} = {a + b + c}.")


def _word(rng: random.Random) -> Chat:
    """Ask for a definition, then for something else about the same word."""
    words = definitions.simple_words()
    word = rng.choice([word for word in words if word.kind == "n"])
    turns = [capitalised(rng.choice(_TABLE["what_is_word"]).format(a=word.named)), definitions.answer(word, rng)]
    kind = rng.randrange(3) if word.named in (*topics.ANIMALS, *topics.THINGS) else rng.choice((1, 2))
    if kind == 0:
        turns += [rng.choice(_TABLE["use_the_word_in"]), rng.choice(compositions.SENTENCE_FRAMES).format(t=word.named)]
    elif kind == 1:
        turns += [
            rng.choice(("How do you spell it?", "Spell the word, please.", "How is the word spelled?")),
            "-".join(word.word.upper()) + ".",
        ]
    else:
        second_word = rng.choice([word for word in words if word.kind == "n"])
        turns += [
            rng.choice(_TABLE["and_another_word"]).format(a=second_word.named),
            capitalised(f"{second_word.named} is {second_word.gloss}."),
        ]
    return talk("threads", *turns)


_THING_ASKS = _TABLE["thing_asks"]


def _same_thing(rng: random.Random) -> Chat:
    """Ask several questions about a thing that is named only once. Some take yes or no."""
    tables = {name: dict(facts.RELATIONS[name].rows) for name in _THING_ASKS}
    things = [
        word
        for word in definitions.simple_words()
        if word.kind == "n" and sum(word.word in table for table in tables.values()) >= 2
    ]
    word = rng.choice(things)
    opening = rng.choice(_TABLE["what_is_thing"])
    turns = [opening.format(a=word.named), capitalised(f"{word.named} is {word.gloss}.")]
    known = [name for name in tables if word.word in tables[name]]
    for name in rng.sample(known, min(len(known), rng.choice((1, 2, 2)))):
        value = tables[name][word.word]
        if name == "kind" and rng.random() < 0.6:
            wrong_kind = rng.choice([kind for kind in sorted(set(tables["kind"].values())) if kind != value])
            is_right = rng.random() < 0.5
            turns += [
                rng.choice(_TABLE["is_it"]).format(value if is_right else wrong_kind),
                f"Yes, it is {value}." if is_right else f"No, it is {value}.",
            ]
        else:
            turns += [
                rng.choice(_THING_ASKS[name]["asks"]),
                capitalised(_THING_ASKS[name]["answer"].format(v=value, a=f"a {value}")),
            ]
    if rng.random() < 0.3:
        asks, answers = smalltalk.TALK["thanks"]
        turns += [rng.choice(asks), rng.choice(answers)]
    return talk("threads", *turns)


_MAKERS: tuple[tuple[Callable[[random.Random], Chat], float], ...] = (
    (_same_thing, 0.16),
    (_other_subject, 0.2),
    (_same_subject, 0.18),
    (_shorter, 0.12),
    (_corrected, 0.06),
    (_sums, 0.06),
    (_word, 0.06),
)


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield `count` conversations."""
    makers, weights = zip(*_MAKERS, strict=True)
    for _ in range(count):
        yield rng.choices(makers, weights)[0](rng)
