"""What users say about themselves, and how they ask for it later."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.data.kinds import facts
from training.data.material import topics
from training.data.material.made_up import made_up_word
from training.data.material.table import Table, capitalised

_TABLE = Table("memories")

_NAMES = _TABLE["names"]
_COLOURS = _TABLE["colours"]
_CITIES = tuple(city for _, city in facts.RELATIONS["capital"].rows)
_DAYS = _TABLE["days"]
_MONTHS = _TABLE["months"]
_FOODS = _TABLE["foods"]
_FAVOURITES = _TABLE["favourites"]
_PETS = _TABLE["pets"]
_PEOPLE = _TABLE["people"]
_THINGS = _TABLE["things"]
_SPOTS = _TABLE["spots"]


def name_of(rng: random.Random) -> str:
    """Return a first name, sometimes a made-up one that can only be copied."""
    return made_up_word(rng).capitalize() if rng.random() < 0.25 else rng.choice(_NAMES)


@dataclass(frozen=True)
class Memory:
    """Something the user says: their words, the reply, the later question, its answer, and a clause for a summary."""

    topic: str
    told: str
    reply: str
    asked: str
    answered: str
    summary: str


def _name(rng: random.Random) -> Memory:
    v = name_of(rng)
    return Memory(
        "name",
        _TABLE.say(rng, "name_told", v=v),
        _TABLE.say(rng, "name_reply", v=v),
        _TABLE.say(rng, "name_asked"),
        _TABLE.say(rng, "name_answered", v=v),
        f"your name is {v}",
    )


def _favourite(rng: random.Random) -> Memory:
    k = rng.choice(["colour", *_FAVOURITES])
    v = rng.choice(_COLOURS if k == "colour" else _FAVOURITES[k])
    return Memory(
        f"favourite {k}",
        _TABLE.say(rng, "favourite_told", k=k, v=v),
        _TABLE.say(rng, "favourite_reply", v=v),
        _TABLE.say(rng, "favourite_asked", k=k),
        _TABLE.say(rng, "favourite_answered", k=k, v=v),
        f"your favourite {k} is {v}",
    )


def _home(rng: random.Random) -> Memory:
    v = rng.choice(_CITIES) if rng.random() < 0.8 else made_up_word(rng).capitalize()
    return Memory(
        "home",
        _TABLE.say(rng, "home_told", v=v),
        _TABLE.say(rng, "home_reply", v=v),
        _TABLE.say(rng, "home_asked"),
        _TABLE.say(rng, "home_answered", v=v),
        f"you live in {v}",
    )


def _pet(rng: random.Random) -> Memory:
    k, v = rng.choice(_PETS), name_of(rng)
    return Memory(
        f"{k}'s name",
        _TABLE.say(rng, "pet_told", k=k, v=v),
        _TABLE.say(rng, "pet_reply", k=k, v=v),
        _TABLE.say(rng, "pet_asked", k=k),
        _TABLE.say(rng, "pet_answered", k=k, v=v),
        f"your {k} is called {v}",
    )


def _person(rng: random.Random) -> Memory:
    k, v = rng.choice(_PEOPLE), name_of(rng)
    return Memory(
        f"{k}'s name",
        _TABLE.say(rng, "person_told", k=k, v=v),
        _TABLE.say(rng, "person_reply", k=k, v=v),
        _TABLE.say(rng, "person_asked", k=k),
        _TABLE.say(rng, "person_answered", k=k, v=v),
        f"your {k} is called {v}",
    )


def _age(rng: random.Random) -> Memory:
    v = str(rng.randint(7, 90))
    return Memory(
        "age",
        _TABLE.say(rng, "age_told", v=v),
        _TABLE.say(rng, "age_reply", v=v),
        _TABLE.say(rng, "age_asked"),
        _TABLE.say(rng, "age_answered", v=v),
        f"you are {v} years old",
    )


def _work(rng: random.Random) -> Memory:
    v = rng.choice(topics.JOBS)
    return Memory(
        "job",
        _TABLE.say(rng, "work_told", v=v),
        _TABLE.say(rng, "work_reply", v=v),
        _TABLE.say(rng, "work_asked"),
        _TABLE.say(rng, "work_answered", v=v),
        f"you work as {v}",
    )


def _where(rng: random.Random) -> Memory:
    k, place = rng.choice(_THINGS), rng.choice(_SPOTS)
    v, verb = place.replace("my ", "your "), "are" if k.endswith("s") and k != "glass" else "is"
    put = "them" if verb == "are" else "it"
    return Memory(
        k,
        _TABLE.say(rng, "where_told", k=k, p=place, b=verb),
        _TABLE.say(rng, "where_reply", k=k, v=v, b=verb),
        _TABLE.say(rng, "where_asked", k=k, b=verb, i="they" if verb == "are" else "it"),
        _TABLE.say(rng, "where_answered", k=k, v=v, b=verb, m=put),
        f"your {k} {verb} {v}",
    )


def _appointment(rng: random.Random) -> Memory:
    k = rng.choice(_TABLE["appointments"])
    v = (
        f"on {rng.choice(_DAYS)}" + (f" at {rng.randint(1, 12)}" if rng.random() < 0.5 else "")
        if rng.random() < 0.6
        else f"on {rng.randint(1, 28)} {rng.choice(_MONTHS)}"
    )
    return Memory(
        k,
        _TABLE.say(rng, "appointment_told", k=k, v=v),
        _TABLE.say(rng, "appointment_reply", k=k, v=v),
        _TABLE.say(rng, "appointment_asked", k=k),
        _TABLE.say(rng, "appointment_answered", k=k, v=v),
        f"your {k} is {v}",
    )


def _secret(rng: random.Random) -> Memory:
    k = rng.choice(("secret word", "code", "password of the game", "number of my room", "number of my house"))
    v = made_up_word(rng) if k in ("secret word", "password of the game") else str(rng.randint(21, 9999))
    your = f"the {k}".replace("my ", "your ")
    return Memory(
        k,
        _TABLE.say(rng, "secret_told", k=k, v=v),
        _TABLE.say(rng, "secret_reply", y=your, v=v),
        _TABLE.say(rng, "secret_asked", k=k),
        capitalised(_TABLE.say(rng, "secret_answered", y=your, v=v)),
        f"{your} is {v}",
    )


def _shopping(rng: random.Random) -> Memory:
    *rest, last = rng.sample(_FOODS, rng.choice((2, 3, 3, 4)))
    v = ", ".join(rest) + " and " + last
    return Memory(
        "shopping list",
        _TABLE.say(rng, "shopping_told", v=v),
        _TABLE.say(rng, "shopping_reply", v=v),
        _TABLE.say(rng, "shopping_asked"),
        _TABLE.say(rng, "shopping_answered", v=v),
        f"you want to buy {v}",
    )


MEMORIES: tuple[tuple[Callable[[random.Random], Memory], float], ...] = (
    (_name, 4),
    (_favourite, 2),
    (_home, 1),
    (_pet, 1.5),
    (_person, 1.5),
    (_age, 1),
    (_work, 1),
    (_where, 1.5),
    (_appointment, 1),
    (_secret, 1.5),
    (_shopping, 1.2),
)
