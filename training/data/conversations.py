"""Conversations about facts in which a later turn refers back: other subjects of the same question, other questions about the
same subject, shorter, again, and corrections."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from training.data import arithmetic, compositions, definitions, facts, smalltalk, topics
from training.data.chats import Chat, talk

_AGAIN = (
    "And {s}?",
    "What about {s}?",
    "And what about {s}?",
    "And for {s}?",
    "How about {s}?",
    "Now {s}.",
    "And the same for {s}?",
)


def _other_subject(rng: random.Random) -> Chat:
    """The same question about other subjects, not spelled out again."""
    relation = rng.choice([facts.RELATIONS[name] for name in ("capital", "continent", "language", "currency", "opposite", "plural", "past tense", "author", "colour", "element symbol",
                                                             "days of a month", "young animal", "number of legs", "kind", "material")])  # fmt: skip
    rows = rng.sample(relation.rows, rng.choice((2, 3, 3)))
    (subject, value), *others = rows
    turns = [facts.capitalised(rng.choice(relation.asks).format(s=subject)), facts.answer_about(relation, subject, value, rng)]
    for subject, value in others:
        article = "a " if relation.name in ("young animal", "number of legs", "kind") else ""
        again = facts.capitalised(rng.choice(_AGAIN).format(s=article + subject))
        full = [form for form in relation.answers if "{s}" in form and "{v}" in form]
        turns += [again, facts.capitalised(rng.choice(full).format(s=subject, v=value))]
    return talk("threads", *turns)


_COUNTRY_ASKS = {
    "capital": (
        "What is its capital?",
        "And its capital?",
        "Which city is the capital?",
        "What is the capital there?",
        "And the capital?",
    ),
    "language": (
        "What language do people speak there?",
        "Which language is spoken there?",
        "And the language?",
        "What do they speak there?",
    ),
    "currency": (
        "What money do they use there?",
        "And the currency?",
        "What is its currency?",
        "What do people pay with there?",
    ),
    "continent": ("On which continent is it?", "Which continent is that?", "And the continent?", "Where in the world is it?"),
}


def _same_subject(rng: random.Random) -> Chat:
    """Several questions about one country, named once."""
    tables = {name: dict(facts.RELATIONS[name].rows) for name in _COUNTRY_ASKS}
    country = rng.choice([country for country in tables["language"] if sum(country in table for table in tables.values()) >= 3])
    known = [name for name in tables if country in tables[name]]
    rng.shuffle(known)
    first, *rest = known
    turns: list[str] = []
    if rng.random() < 0.35:
        opening = rng.choice(
            (
                "I want to travel to {c}.",
                "I am learning about {c}.",
                "Let's talk about {c}.",
                "I am going to {c} next month.",
                "I would like to visit {c}.",
                "We are planning a trip to {c}.",
                "My friend comes from {c}.",
                "I have never been to {c}.",
            )
        ).format(c=country)
        turns += [
            opening,
            rng.choice(
                (
                    "Great! What would you like to know about {c}?",
                    "{c} is an interesting country. What do you want to know?",
                    "Good choice! Do you have a question?",
                )
            ).format(c=country),
        ]
        rest = known
    else:
        relation = facts.RELATIONS[first]
        turns += [
            facts.capitalised(rng.choice(relation.asks).format(s=country)),
            facts.answer_about(relation, country, tables[first][country], rng),
        ]
    for name in rest[: rng.choice((1, 2, 2))]:
        relation = facts.RELATIONS[name]
        full = [form for form in relation.answers if "{s}" in form]
        turns += [
            rng.choice(_COUNTRY_ASKS[name]),
            facts.capitalised(rng.choice(full).format(s=country, v=tables[name][country])),
        ]
    return talk("threads", *map(facts.capitalised, turns))


def _shorter(rng: random.Random) -> Chat:
    """Say it shorter, say it again, what did I ask."""
    relation = rng.choice(list(facts.RELATIONS.values()))
    subject, value = rng.choice(relation.rows)
    question = facts.capitalised(rng.choice(relation.asks).format(s=subject))
    form = rng.choice([form for form in relation.answers if "{v}" in form])
    answer = facts.capitalised(form.format(s=subject, v=value))
    kind = rng.randrange(4)
    if kind == 0:
        ask = rng.choice(
            (
                "Say it shorter.",
                "Shorter, please.",
                "Can you say that in fewer words?",
                "Make it shorter.",
                "In one word?",
                "Please be brief.",
                "Only the answer, please.",
            )
        )
        turn = facts.capitalised(value) + "."
    elif kind == 1:
        ask, turn = (
            rng.choice(
                (
                    "Can you repeat that?",
                    "Say that again, please.",
                    "Please repeat your answer.",
                    "What did you say?",
                    "Once more, please.",
                )
            ),
            answer,
        )
    elif kind == 2:
        ask = rng.choice(("What did I ask you?", "What was my question?", "What was my last question?", "What did I just ask?"))
        turn = f'You asked: "{question}"'
    else:
        ask = rng.choice(("Say it in capital letters.", "Write that in capital letters.", "Now in capital letters, please."))
        turn = answer.upper()
    return talk("threads", question, answer, ask, turn)


def _corrected(rng: random.Random) -> Chat:
    """The user meant another subject."""
    relation = rng.choice(
        [facts.RELATIONS[name] for name in ("capital", "language", "currency", "continent", "opposite", "author", "plural")]
    )
    (wrong, value), (meant, right) = rng.sample(relation.rows, 2)
    full = [form for form in relation.answers if "{s}" in form and "{v}" in form]
    turns = [
        facts.capitalised(rng.choice(relation.asks).format(s=wrong)),
        facts.capitalised(rng.choice(full).format(s=wrong, v=value)),
    ]
    turns += [
        rng.choice(
            ("Sorry, I meant {s}.", "No, I meant {s}.", "Oh, I wanted to ask about {s}.", "I was thinking of {s}.")
        ).format(s=meant)
    ]
    turns += [
        rng.choice(("", "", "No problem. ", "I see. ", "All right. "))
        + facts.capitalised(rng.choice(full).format(s=meant, v=right))
    ]
    return talk("threads", *turns)


def _sums(rng: random.Random) -> Chat:
    """A number that the next question builds upon."""
    while True:
        a, b, c = rng.randint(1, 12), rng.randint(1, 8), rng.randint(1, 6)
        if not (arithmetic.is_held_out(a, b, "+") or arithmetic.is_held_out(a + b, c, "+")):
            break
    first = [f"What is {a} + {b}?", f"{a} + {b} = {a + b}."]
    ask = rng.choice(("And {c} more?", "Add {c} to that.", "Plus {c}?", "Now add {c}.")).format(c=c)
    return talk("threads", *first, ask, f"{a + b} + {c} = {a + b + c}.")


def _word(rng: random.Random) -> Chat:
    """A definition, then something about the same word."""
    words = definitions.simple_words()
    word = rng.choice([word for word in words if word.kind == "n"])
    turns = [
        facts.capitalised(
            rng.choice(("What is {a}?", "Tell me what {a} is.", "Do you know what {a} is?")).format(a=word.named)
        ),
        definitions.answer(word, rng),
    ]
    kind = rng.randrange(3) if word.named in (*topics.ANIMALS, *topics.THINGS) else rng.choice((1, 2))
    if kind == 0:
        turns += [
            rng.choice(("Use the word in a sentence.", "Can you use it in a sentence?", "Make a sentence with it.")),
            rng.choice(compositions.SENTENCE_FRAMES).format(t=word.named),
        ]
    elif kind == 1:
        turns += [
            rng.choice(("How do you spell it?", "Spell the word, please.", "How is the word spelled?")),
            "-".join(word.word.upper()) + ".",
        ]
    else:
        other = rng.choice([word for word in words if word.kind == "n"])
        turns += [
            rng.choice(("And {a}?", "What about {a}?", "And what is {a}?")).format(a=other.named),
            facts.capitalised(f"{other.named} is {other.gloss}."),
        ]
    return talk("threads", *turns)


_THING_ASKS = {
    "home of an animal": (("Where does it live?", "Where can I find it?", "And where does it live?"), "It lives in {v}."),
    "sound": (("What sound does it make?", "Which sound does it make?", "What does it sound like?"), "It {v}."),
    "number of legs": (("How many legs does it have?", "And how many legs has it?"), "It has {v} legs."),
    "young animal": (("What is its baby called?", "What are its young called?"), "Its baby is called {a}."),
    "kind": (("What kind of thing is it?", "What sort of thing is that?"), "It is {v}."),
    "plural": (("What is the plural of the word?", "What is its plural?"), "The plural is {v}."),
}


def _same_thing(rng: random.Random) -> Chat:
    """Several questions about one thing, named once; some of them with yes or no."""
    tables = {name: dict(facts.RELATIONS[name].rows) for name in _THING_ASKS}
    things = [
        word
        for word in definitions.simple_words()
        if word.kind == "n" and sum(word.word in table for table in tables.values()) >= 2
    ]
    word = rng.choice(things)
    opening = rng.choice(
        (
            "What is {a}?",
            "Tell me what {a} is.",
            "Do you know what {a} is?",
            "Tell me about {a}.",
            "I saw {a} today. What is it exactly?",
        )
    )
    turns = [opening.format(a=word.named), facts.capitalised(f"{word.named} is {word.gloss}.")]
    known = [name for name in tables if word.word in tables[name]]
    for name in rng.sample(known, min(len(known), rng.choice((1, 2, 2)))):
        asks, form = _THING_ASKS[name]
        value = tables[name][word.word]
        if name == "kind" and rng.random() < 0.6:
            other = rng.choice([kind for kind in sorted(set(tables["kind"].values())) if kind != value])
            is_right = rng.random() < 0.5
            turns += [
                rng.choice(("Is it {}?", "So is it {}?")).format(value if is_right else other),
                f"Yes, it is {value}." if is_right else f"No, it is {value}.",
            ]
        else:
            turns += [rng.choice(asks), facts.capitalised(form.format(v=value, a=f"a {value}"))]
    if rng.random() < 0.3:
        asks, answers = smalltalk.TALK["thanks"]
        turns += [rng.choice(asks), rng.choice(answers)]
    return talk("threads", *turns)


_MAKERS: tuple[tuple[Callable[[random.Random], Chat], float], ...] = (
    (_same_thing, 0.16), (_other_subject, 0.2), (_same_subject, 0.18), (_shorter, 0.12), (_corrected, 0.06), (_sums, 0.06), (_word, 0.06),
)  # fmt: skip


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """`count` conversations."""
    makers, weights = zip(*_MAKERS, strict=True)
    for _ in range(count):
        yield rng.choices(makers, weights)[0](rng)
