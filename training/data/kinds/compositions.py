"""Answers that combine several facts: "tell me about", yes or no, comparisons, opinions, sentences on request."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from training.data.chats import Chat, talk
from training.data.kinds import definitions
from training.data.kinds.facts import LEADS, RELATIONS
from training.data.material import topics
from training.data.material.simple_definitions import ADJECTIVES, GLOSSES
from training.data.material.table import Table, capitalised

_TABLE = Table("compositions")

_ABOUT = _TABLE["about"]
_TABLES = {name: dict(relation.rows) for name, relation in RELATIONS.items()}
_SIZES = _TABLE["sizes"]
_SPEEDS = _TABLE["speeds"]
_SHOPS = _TABLE["shops"]
_ABLE = _TABLE["able"]


def _named(word: str) -> str:
    """Return the word with its article."""
    return definitions.Word(word, "n", "").named


def _plural(thing: str) -> str:
    """Return the plural of "a thing". A word without an article stays unchanged."""
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


_TIMES = (*(f"{kind} {part}" for part in _TABLE["parts_of_days"] for kind in _TABLE["kinds_of_days"]), *_TABLE["other_likes"])
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
    capital = rng.choice(_TABLE["capital_is"]).format(_TABLES["capital"][country])
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
    return rng.choice(_TABLE["who_was"]).format(person), text


def _yes_no(rng: random.Random) -> tuple[str, str] | None:
    """Make a yes-or-no question, such as "Is a rose a flower?" or "Is a rose a bird?"."""
    word, kind = rng.choice(RELATIONS["kind"].rows)
    named = capitalised(f"a {word}")
    lower = named[0].lower() + named[1:]
    if rng.random() < 0.5:
        return f"Is {lower} {kind}?", rng.choice(_TABLE["yes_it_is"]).format(n=lower, N=named, k=kind)
    groups = [
        ("a fish", "a mammal", "an animal", "a bird", "an insect", "a reptile", "an amphibian"),
        ("a fruit", "a vegetable", "a flower", "a tree"),
    ]
    own = next((group for group in groups if kind in group), ())
    wrong_kind = rng.choice([value for _, value in RELATIONS["kind"].rows if value != kind and value not in own])
    return f"Is {lower} {wrong_kind}?", rng.choice(_TABLE["no_it_is"]).format(n=lower, N=named, k=kind, o=wrong_kind)


def _able(rng: random.Random) -> tuple[str, str] | None:
    what = rng.choice(list(_ABLE))
    is_able = rng.random() < 0.5
    word = rng.choice(_ABLE[what]["able" if is_able else "unable"])
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
    question = rng.choice(_TABLE["where_can_i_buy"]).format(thing)
    return question, rng.choice(_TABLE["you_can_buy_at"]).format(t=thing, s=shop)


def _opinion(rng: random.Random) -> tuple[str, str] | None:
    thing = rng.choice(_LIKES)
    question = rng.choice(_TABLE["do_you_like"]).format(thing)
    answers = _TABLE["opinions"]
    return question, rng.choice(answers).format(t=thing)


SENTENCE_FRAMES = _TABLE["sentence_frames"]


def _sentence(rng: random.Random) -> tuple[str, str] | None:
    thing = rng.choice((*topics.ANIMALS, *topics.THINGS, *topics.NATURE, *topics.FOODS))
    question = rng.choice(_TABLE["write_a_sentence_about"]).format(thing)
    return question, rng.choice(SENTENCE_FRAMES).format(t=thing)


def _likes(rng: random.Random) -> tuple[str, str] | None:
    """Make a statement of what the user likes, fears or dreams of, and a fitting reply."""
    thing = _plural(rng.choice((*topics.FOODS, *topics.NATURE, *topics.IDEAS, *topics.ANIMALS)))
    says = rng.choice(_TABLE["i_like"]).format(thing)
    replies = {
        "not": _TABLE["reply_to_dislike"],
        "afraid": _TABLE["reply_to_fear"],
        "dreamt": _TABLE["reply_to_dream"],
    }
    chosen = next((reply for word, reply in replies.items() if word in says), _TABLE["reply_to_like"])
    return says, rng.choice(chosen).format(t=thing, T=capitalised(thing))


_MAKERS: tuple[tuple[Callable[[random.Random], tuple[str, str] | None], int], ...] = (
    (_animal, 4),
    (_thing, 6),
    (_country, 4),
    (_person, 3),
    (_yes_no, 4),
    (_able, 3),
    (_compare, 4),
    (_shop, 1),
    (_opinion, 4),
    (_sentence, 3),
    (_likes, 4),
)


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield `count` chats of one to three such questions."""
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
