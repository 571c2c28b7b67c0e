"""Answers put together from several facts: "tell me about", yes or no, comparisons, opinions, sentences on request."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from training.data import definitions, topics
from training.data.chats import Chat, talk
from training.data.facts import LEADS, RELATIONS, capitalised
from training.data.simple_definitions import ADJECTIVES, GLOSSES

_ABOUT = (
    "Tell me about {}.", "What do you know about {}?", "Tell me something about {}.", "Can you tell me about {}?", "I want to learn about {}.", "Describe {}.", "Please describe {} in simple words.",
    "What can you tell me about {}?", "Explain {} to a child.", "Give me some facts about {}.",
)  # fmt: skip
_TABLES = {name: dict(relation.rows) for name, relation in RELATIONS.items()}
# From the smallest to the largest; from the slowest to the fastest.
_SIZES = "ant bee mouse frog bird cat dog goat sheep lion horse cow giraffe elephant whale".split()
_SPEEDS = "snail turtle frog chicken pig cow dog wolf horse lion cheetah".split()
_SHOPS = {
    "bread": "a bakery", "books": "a bookshop", "flowers": "a flower shop", "medicine": "a pharmacy", "meat": "a butcher's shop", "fruit": "a market", "shoes": "a shoe shop", "stamps": "a post office", "milk": "a supermarket",
    "toys": "a toy shop", "a bicycle": "a bicycle shop", "furniture": "a furniture shop", "tickets": "a ticket office", "fish": "a fish market", "clothes": "a clothes shop", "a newspaper": "a kiosk",
}  # fmt: skip
_ABLE = {
    "fly": ("bird bee butterfly owl eagle bat fly parrot", "dog cat horse fish elephant snake penguin cow"), "swim": ("fish duck frog dolphin penguin whale shark turtle", "chicken spider ant"),
    "climb trees": ("monkey cat squirrel bear", "cow fish horse elephant sheep"), "live in water": ("fish shark whale dolphin octopus crab", "cat horse lion chicken camel"), "bark": ("dog", "cat cow fish bird"),
    "give milk": ("cow goat sheep", "chicken duck fish spider"), "lay eggs": ("chicken duck snake turtle fish frog", "dog cat cow horse lion"),
}  # fmt: skip


def _named(word: str) -> str:
    """The word with its article."""
    return definitions.Word(word, "n", "").named


def _plural(thing: str) -> str:
    """Several of "a thing"; what has no article of its own stays as it is."""
    word = re.sub(r"^an? ", "", thing)
    if word == thing:
        return thing
    regular = (
        re.sub(r"y$", "ie", word)
        if re.search(r"[^aeiou]y$", word)
        else word + "e"
        if re.search(r"(?:s|x|ch|sh)$", word)
        else word
    )
    return _TABLES["plural"].get(word, regular + "s")


_TIMES = (
    *(
        f"{kind} {what}"
        for what in ("days", "mornings", "evenings", "nights", "weekends")
        for kind in ("snowy", "sunny", "cold", "warm", "windy", "busy", "quiet", "long", "hot", "foggy", "free", "dark")
    ),
    *("Mondays", "Sundays", "holidays", "birthdays", "long walks", "old films", "big cities", "small towns", "surprises", "love songs", "fairy tales", "board games", "early trains"),
)  # fmt: skip
_LIKES = (*map(_plural, (*topics.ANIMALS, *topics.FOODS, *topics.NATURE, *topics.THINGS)), *_TIMES * 3)


def _animal(rng: random.Random) -> tuple[str, str] | None:
    word = rng.choice(
        [word for word in GLOSSES if any(word in _TABLES[name] for name in ("number of legs", "sound", "young animal"))]
    )
    sentences = [f"{capitalised(_named(word))} is {GLOSSES[word]}."]
    extra = []
    if word in _TABLES["young animal"]:
        extra.append(f"Its young is called {_named(_TABLES['young animal'][word])}.")
    if word in _TABLES["number of legs"]:
        extra.append(f"It has {_TABLES['number of legs'][word]} legs.")
    if word in _TABLES["home of an animal"] and _TABLES["home of an animal"][word] not in GLOSSES[word]:
        extra.append(f"It lives in {_TABLES['home of an animal'][word]}.")
    rng.shuffle(extra)
    thing = _plural(_named(word)) if rng.random() < 0.3 else _named(word)
    return rng.choice(_ABOUT).format(thing), " ".join(sentences + extra[: rng.choice((1, 1, 2))])


def _thing(rng: random.Random) -> tuple[str, str] | None:
    word = rng.choice([word for word in GLOSSES if word not in ADJECTIVES])
    named = _named(word)
    sentences = [f"{capitalised(named)} is {GLOSSES[word]}."]
    if named in _TABLES["material"] and _TABLES["material"][named] not in GLOSSES[word]:
        sentences.append(f"It is made of {_TABLES['material'][named]}.")
    if named in _TABLES["colour"] and _TABLES["colour"][named] not in GLOSSES[word]:
        sentences.append(f"It is {_TABLES['colour'][named]}.")
    if word in _TABLES["kind"] and _TABLES["kind"][word] not in GLOSSES[word]:
        sentences.append(f"It is {_TABLES['kind'][word]}.")
    return rng.choice(_ABOUT).format(named), " ".join(sentences)


def _country(rng: random.Random) -> tuple[str, str] | None:
    country = rng.choice([country for country in _TABLES["continent"] if country in _TABLES["capital"]])
    first = f"{capitalised(country)} is a country in {_TABLES['continent'][country]}."
    capital = rng.choice(("Its capital is {}.", "The capital is {}.")).format(_TABLES["capital"][country])
    rest = [capital]
    if country in _TABLES["language"]:
        rest.append(f"People there speak {_TABLES['language'][country]}.")
    if country in _TABLES["currency"]:
        rest.append(f"They pay with {_TABLES['currency'][country]}.")
    return rng.choice(_ABOUT).format(country), " ".join([first, *rest[: rng.choice((1, 2, 2, 3))]])


def _person(rng: random.Random) -> tuple[str, str] | None:
    person = rng.choice(list(_TABLES["profession"]))
    text = f"{person} was {_TABLES['profession'][person]}."
    works = [f"wrote {work}" for work, author in _TABLES["author"].items() if author.endswith(person.split()[-1])]
    works += [f"painted {work}" for work, artist in _TABLES["artist"].items() if artist == person]
    works += [f"composed {work}" for work, composer in _TABLES["composer"].items() if composer == person]
    if works:
        text += f" {person} {rng.choice(works)}." if rng.random() < 0.5 else f" This is who {rng.choice(works)}."
    return rng.choice(
        ("Who was {}?", "Tell me about {}.", "What do you know about {}?", "What was {} famous for?", "Who is {}?")
    ).format(person), text


def _yes_no(rng: random.Random) -> tuple[str, str] | None:
    """Is a rose a flower? Is a rose a bird?"""
    word, kind = rng.choice(RELATIONS["kind"].rows)
    named = capitalised(f"a {word}")
    lower = named[0].lower() + named[1:]
    if rng.random() < 0.5:
        return f"Is {lower} {kind}?", rng.choice(("Yes, {n} is {k}.", "Yes, it is.", "Yes. {N} is {k}.")).format(
            n=lower, N=named, k=kind
        )
    groups = [
        ("a fish", "a mammal", "an animal", "a bird", "an insect", "a reptile", "an amphibian"),
        ("a fruit", "a vegetable", "a flower", "a tree"),
    ]
    own = next((group for group in groups if kind in group), ())
    other = rng.choice([value for _, value in RELATIONS["kind"].rows if value != kind and value not in own])
    return f"Is {lower} {other}?", rng.choice(("No, {n} is {k}.", "No, it is {k}.", "No. {N} is {k}, not {o}.")).format(
        n=lower, N=named, k=kind, o=other
    )


def _able(rng: random.Random) -> tuple[str, str] | None:
    what = rng.choice(list(_ABLE))
    is_able = rng.random() < 0.5
    word = rng.choice(_ABLE[what][0 if is_able else 1].split())
    named = capitalised(f"a {word}")
    lower = named[0].lower() + named[1:]
    answer = (f"Yes, {lower} can {what}.", "Yes, it can.") if is_able else (f"No, {lower} cannot {what}.", "No, it cannot.")
    return f"Can {lower} {what}?", rng.choice(answer)


def _compare(rng: random.Random) -> tuple[str, str] | None:
    order, more, less = rng.choice(((_SIZES, "bigger", "smaller"), (_SPEEDS, "faster", "slower")))
    first, second = rng.sample(range(len(order)), 2)
    if abs(first - second) < 2:
        return None
    a, b = (capitalised(f"a {order[index]}") for index in (first, second))
    a, b = a[0].lower() + a[1:], b[0].lower() + b[1:]
    word = rng.choice((more, more, less))
    winner, loser = (a, b) if (first > second) == (word == more) else (b, a)
    question = rng.choice((f"Which is {word}, {a} or {b}?", f"What is {word}: {a} or {b}?", f"Is {a} or {b} {word}?"))
    return question, f"{capitalised(winner)} is {word} than {loser}."


def _shop(rng: random.Random) -> tuple[str, str] | None:
    thing, shop = rng.choice(list(_SHOPS.items()))
    question = rng.choice(
        ("Where can I buy {}?", "Where do I get {}?", "I need {}. Where should I go?", "In which shop can I buy {}?")
    ).format(thing)
    return question, rng.choice(("You can buy {t} at {s}.", "Go to {s}.", "You get {t} at {s}.")).format(t=thing, s=shop)


def _opinion(rng: random.Random) -> tuple[str, str] | None:
    thing = rng.choice(_LIKES)
    question = rng.choice(
        ("Do you like {}?", "What do you think about {}?", "What do you think of {}?", "Are you interested in {}?")
    ).format(thing)
    answers = (
        "I am a program, so I cannot say that I like {t}. But we can talk about that.", "I find {t} interesting. What do you think?", "Many people like {t}. Do you?", "I am a program and know {t} only from texts. Do you like {t}?",
        "We can talk about {t}, if you like. What would you like to know?",
    )  # fmt: skip
    return question, rng.choice(answers).format(t=thing)


SENTENCE_FRAMES = (
    "Yesterday I saw {t} on my way home.", "There is a picture of {t} in my book.", "My grandmother told me a story about {t}.", "Last night I dreamed of {t}.", "The children wanted to know everything about {t}.", "I would like to draw a picture of {t}.",
    "I have to write about {t} for school.", "We talked about {t} the whole evening.",
)  # fmt: skip


def _sentence(rng: random.Random) -> tuple[str, str] | None:
    thing = rng.choice((*topics.ANIMALS, *topics.THINGS, *topics.NATURE, *topics.FOODS))
    question = rng.choice(
        (
            "Write a sentence about {}.",
            "Write one sentence with {}.",
            "Make a sentence with {}.",
            "Give me a sentence about {}.",
            "Can you write a sentence about {}?",
        )
    ).format(thing)
    return question, rng.choice(SENTENCE_FRAMES).format(t=thing)


def _likes(rng: random.Random) -> tuple[str, str] | None:
    """What the user likes or has, answered with the thing in mind."""
    thing = _plural(rng.choice((*topics.FOODS, *topics.NATURE, *topics.IDEAS, *topics.ANIMALS)))
    says = rng.choice(
        (
            "I like {}.",
            "I love {}.",
            "I often think about {}.",
            "I do not like {}.",
            "I am interested in {}.",
            "I dreamt of {}.",
            "I am afraid of {}.",
        )
    ).format(thing)
    replies = {
        "not": ("I see. Why do you not like {t}?", "That is all right. What do you like instead?"), "afraid": ("I understand. Many people feel like that.", "That is nothing to be ashamed of. Would you like to talk about it?"),
        "dreamt": ("How interesting! What happened in your dream?", "Dreams can be strange. Was it a nice one?"),
    }  # fmt: skip
    chosen = next(
        (reply for word, reply in replies.items() if word in says),
        (
            "How nice! What do you like about {t}?",
            "That is interesting. Tell me more about {t}.",
            "I like to hear that. Since when?",
            "{T}? How nice! Why?",
        ),
    )
    return says, rng.choice(chosen).format(t=thing, T=capitalised(thing))


_MAKERS: tuple[tuple[Callable[[random.Random], tuple[str, str] | None], int], ...] = (
    (_animal, 4), (_thing, 6), (_country, 4), (_person, 3), (_yes_no, 4), (_able, 3), (_compare, 4), (_shop, 1), (_opinion, 4), (_sentence, 3), (_likes, 4),
)  # fmt: skip


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """`count` chats of one to three such questions."""
    makers, weights = zip(*_MAKERS, strict=True)
    for _ in range(count):
        turns: list[str] = []
        wanted = rng.choices((1, 2, 3), (0.7, 0.2, 0.1))[0]
        while len(turns) < 2 * wanted:
            pair = rng.choices(makers, weights)[0](rng)
            if pair is not None:
                question = rng.choice(LEADS) + pair[0] if rng.random() < 0.12 and pair[0].endswith("?") else pair[0]
                turns += [question.lower().rstrip("?.") if rng.random() < 0.08 else question, pair[1]]
        yield talk("compositions", *turns)
