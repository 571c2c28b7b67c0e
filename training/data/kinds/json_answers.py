"""Answers that are a JSON document for a schema or a description in the prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from training.data.chats import Chat, talk
from training.data.kinds import facts
from training.data.material.made_up import made_up_word
from training.data.material.simple_definitions import GLOSSES
from training.data.material.table import Table, capitalised
from training.data.material.tool_families import CITIES, DAYS, ITEMS, NAMES, TIMES

_TABLE = Table("json_answers")

Record = dict[str, Any]
Field = tuple[str, dict[str, Any]]
_COLOURS = _TABLE["colours"]
_PETS = _TABLE["pets"]
_JOBS = _TABLE["jobs"]
_SPORTS = _TABLE["sports"]
_FOODS = _TABLE["foods"]
_GOOD = _TABLE["good"]
_BAD = _TABLE["bad"]
_WHAT = _TABLE["judged"]
_STRING, _INTEGER, _BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def _person(rng: random.Random) -> tuple[str, list[tuple[str, dict[str, Any], Any]]]:
    name, age, city, job = rng.choice(NAMES), rng.randint(6, 90), rng.choice(CITIES), rng.choice(_JOBS)
    text = rng.choice(_TABLE["person"]).format(n=name, a=age, c=city, j=job)
    return text, [("name", _STRING, name), ("age", _INTEGER, age), ("city", _STRING, city), ("job", _STRING, job)]


def _pet(rng: random.Random) -> tuple[str, list[tuple[str, dict[str, Any], Any]]]:
    name, kind, colour, age = rng.choice(NAMES), rng.choice(_PETS), rng.choice(_COLOURS), rng.randint(1, 15)
    text = rng.choice(_TABLE["pet"]).format(n=name, k=kind, c=colour, a=age)
    return text, [("owner", _STRING, name), ("animal", _STRING, kind), ("color", _STRING, colour), ("age", _INTEGER, age)]


def _order(rng: random.Random) -> tuple[str, list[tuple[str, dict[str, Any], Any]]]:
    item, count, price, name = (
        rng.choice([i for i in ITEMS if not i.startswith("a ")]),
        rng.randint(1, 20),
        rng.randint(1, 90),
        rng.choice(NAMES),
    )
    text = rng.choice(_TABLE["order"]).format(n=name, i=item, c=count, p=price)
    return text, [
        ("customer", _STRING, name),
        ("item", _STRING, item),
        ("quantity", _INTEGER, count),
        ("price", _INTEGER, price),
    ]


def _event(rng: random.Random) -> tuple[str, list[tuple[str, dict[str, Any], Any]]]:
    title, day, time, place = (
        rng.choice(("lunch", "meeting", "party", "concert", "class", "dinner", "game")),
        rng.choice(DAYS[:7]),
        rng.choice(TIMES),
        rng.choice(CITIES),
    )
    text = rng.choice(_TABLE["event"]).format(t=title, d=day, h=time, p=place)
    return text, [("title", _STRING, title), ("day", _STRING, day), ("time", _STRING, time), ("place", _STRING, place)]


def _hobby(rng: random.Random) -> tuple[str, list[tuple[str, dict[str, Any], Any]]]:
    name, sport, food, likes = rng.choice(NAMES), rng.choice(_SPORTS), rng.choice(_FOODS), rng.random() < 0.5
    text = f"{name} plays {sport}" if sport in ("football", "tennis", "chess", "hockey") else f"{name} likes {sport}"
    text += f" and {'likes' if likes else 'does not like'} {food}."
    return text, [("name", _STRING, name), ("sport", _STRING, sport), ("food", _STRING, food), ("likes_food", _BOOLEAN, likes)]


def _country(rng: random.Random) -> tuple[str, list[tuple[str, dict[str, Any], Any]]]:
    capitals, continents, languages = (dict(facts.RELATIONS[name].rows) for name in ("capital", "continent", "language"))
    country = rng.choice([c for c in continents if c in capitals and c in languages])
    return f"the country {country}", [
        ("country", _STRING, country.removeprefix("the ")),
        ("capital", _STRING, capitals[country]),
        ("continent", _STRING, continents[country]),
        ("language", _STRING, languages[country]),
    ]


_RECORDS = (_person, _pet, _order, _event, _hobby, _country)
_EXTRACT = _TABLE["extract"]
_SCHEMA = _TABLE["schema"]


def schema_of(fields: list[Field]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(fields), "required": [name for name, _ in fields]}


def _said(text: str, schema: dict[str, Any], rng: random.Random, described: str | None = None) -> tuple[str | None, str]:
    """Return (system prompt, question) that give the text and the schema in one of several ways."""
    ask = rng.choice(_EXTRACT).format(t=text)
    if described and rng.random() < 0.3:
        return None, f"{ask} {rng.choice(('Use the keys', 'The keys are', 'Give the keys'))} {described}."
    rule = rng.choice(_SCHEMA).format(s=json.dumps(schema))
    chance = rng.random()
    if chance < 0.4:
        return rule, ask
    if chance < 0.7:
        return None, f"{rule}\n{ask}"
    return None, f"{ask}\n{rule}"


def _extract(rng: random.Random) -> Chat:
    text, fields = rng.choice(_RECORDS)(rng)
    chosen = rng.sample(fields, rng.choice((1, 2, 2, 3, 3, 4)))
    renamed = [(_renamed(name, rng), kind, value) for name, kind, value in chosen]
    schema = schema_of([(name, kind) for name, kind, _ in renamed])
    described = ", ".join(name for name, _, _ in renamed)
    if text.startswith("the country"):
        text = rng.choice(_TABLE["about_country"]).format(c=text)
    system, question = _said(text, schema, rng, described)
    return talk("json", question, json.dumps({name: value for name, _, value in renamed}), system=system)


_OTHER_NAMES = _TABLE["other_names"]


def _renamed(name: str, rng: random.Random) -> str:
    return rng.choice((name, name, *_OTHER_NAMES[name]))


_KEYS = tuple(word for word in GLOSSES if word.isalpha())


def _random_key(rng: random.Random) -> str:
    """Return a key that can only be copied from the schema."""
    return "_".join(made_up_word(rng) if rng.random() < 0.3 else rng.choice(_KEYS) for _ in range(rng.choice((1, 1, 2))))


def _list(rng: random.Random) -> Chat:
    """Make a chat whose answer is an array of words or numbers."""
    if rng.random() < 0.6:
        words = rng.sample(rng.choice((CITIES, NAMES, (*_COLOURS, *_FOODS, *_PETS, *_SPORTS))), rng.randint(2, 5))
        text, key, kind = (
            ", ".join(words[:-1]) + " and " + words[-1],
            _random_key(rng) if rng.random() < 0.5 else rng.choice(("items", "words", "things", "list")),
            _STRING,
        )
        value: list[Any] = words
    else:
        numbers = rng.sample(range(1, 99), rng.randint(2, 5))
        text, key, kind, value = (
            ", ".join(map(str, numbers)),
            _random_key(rng) if rng.random() < 0.5 else rng.choice(("numbers", "values", "list")),
            _INTEGER,
            list(numbers),
        )
    schema = schema_of([(key, {"type": "array", "items": kind})])
    system, question = _said(rng.choice(_TABLE["here_are_items"]).format(text), schema, rng, key)
    return talk("json", question, json.dumps({key: value}), system=system)


def _judge(rng: random.Random) -> Chat:
    """Make a chat whose answer is a word from an enum, or a boolean."""
    good = rng.random() < 0.5
    what = rng.choice(_WHAT)
    text = rng.choice(_TABLE["judgement"]).format(
        W=what.capitalize(), w=what, a=rng.choice(_GOOD if good else _BAD), n=rng.choice(NAMES)
    )
    if rng.random() < 0.65:
        key = _random_key(rng) if rng.random() < 0.3 else rng.choice(("sentiment", "mood", "opinion", "tone"))
        schema = schema_of(
            [(key, {"type": "string", "enum": rng.choice((["positive", "negative"], ["positive", "negative", "neutral"]))})]
        )
        answer: Record = {key: "positive" if good else "negative"}
    else:
        key = rng.choice(("is_positive", "liked", "good"))
        schema = schema_of([(key, _BOOLEAN)])
        answer = {key: good}
    system, question = _said(text, schema, rng)
    return talk("json", question, json.dumps(answer), system=system)


def _answer(rng: random.Random) -> Chat:
    """Make a chat whose answer is a fact under the requested key."""
    relation = rng.choice(
        [
            facts.RELATIONS[name]
            for name in (
                "capital",
                "opposite",
                "plural",
                "author",
                "colour",
                "young animal",
                "element symbol",
                "continent",
                "language",
            )
        ]
    )
    subject, value = rng.choice(relation.rows)
    key = _random_key(rng) if rng.random() < 0.4 else rng.choice(("answer", "result", "value", relation.name.replace(" ", "_")))
    schema = schema_of([(key, _STRING)])
    question = capitalised(rng.choice(relation.asks).format(s=subject))
    rule = rng.choice(_SCHEMA).format(s=json.dumps(schema))
    if rng.random() < 0.5:
        return talk("json", question, json.dumps({key: value}), system=rule)
    return talk("json", f"{question} {rule}", json.dumps({key: value}))


def _nested(rng: random.Random) -> Chat:
    """Make a chat whose answer is an object within an object, or a list of objects."""
    if rng.random() < 0.5:
        text, fields = rng.choice(_RECORDS[:5])(rng)
        first, *rest = rng.sample(fields, 3)
        outer = rng.choice(("data", "details", "info", "record"))
        inner = schema_of([(name, kind) for name, kind, _ in rest])
        schema = schema_of([(first[0], first[1]), (outer, inner)])
        answer: Record = {first[0]: first[2], outer: {name: value for name, _, value in rest}}
    else:
        people = [(rng.choice(NAMES), rng.randint(6, 90)) for _ in range(2)]
        text = " and ".join(f"{name} is {age}" for name, age in people) + "."
        key = rng.choice(("people", "friends", "persons"))
        schema = schema_of([(key, {"type": "array", "items": schema_of([("name", _STRING), ("age", _INTEGER)])})])
        answer = {key: [{"name": name, "age": age} for name, age in people]}
    system, question = _said(text, schema, rng)
    return talk("json", question, json.dumps(answer), system=system)


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield `count` chats."""
    makers, weights = (_extract, _list, _judge, _answer, _nested), (0.42, 0.24, 0.14, 0.1, 0.1)
    for _ in range(count):
        yield rng.choices(makers, weights)[0](rng)
