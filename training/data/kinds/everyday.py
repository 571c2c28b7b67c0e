"""Everyday conversations in which each turn depends on the last: things, pets, hobbies, worries, meals, running sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from training.data.chats import Chat, talk
from training.data.kinds import arithmetic, smalltalk
from training.data.material.memories import name_of
from training.data.material.table import Table, capitalised

_TABLE = Table("everyday")

_COLOURS = _TABLE["colours"]
_THINGS = _TABLE["things"]
_PETS = _TABLE["pets"]


def _closing(rng: random.Random) -> list[str]:
    if rng.random() > 0.25:
        return []
    asks, answers = smalltalk.TALK[rng.choice(("thanks", "thanks", "bye"))]
    return [rng.choice(asks), rng.choice(answers)]


def thing(rng: random.Random) -> Chat:
    """Make a chat about a new thing, its colour and its price, with questions about it later."""
    t, c, p = rng.choice(_THINGS), rng.choice(_COLOURS), str(rng.randint(5, 95) * 5)
    a = "an" if t[0] in "aeiou" else "a"
    turns = [
        _TABLE.say(rng, "i_bought_thing", a=a, t=t),
        _TABLE.say(rng, "how_nice_what_colour"),
        _TABLE.say(rng, "it_is_colour", c=c),
        _TABLE.say(rng, "colour_sounds_lovely", c=c, t=t, a=a),
    ]
    asked = [(_TABLE.say(rng, "what_colour_is_my", t=t), f"Your {t} is {c}.")]
    if rng.random() < 0.4:
        turns += [_TABLE.say(rng, "it_cost_dollars", p=p), _TABLE.say(rng, "that_is_a_fair", p=p, a=a, t=t)]
        asked.append((_TABLE.say(rng, "how_much_did_my", t=t), f"Your {t} cost {p} dollars."))
    asked.append((_TABLE.say(rng, "what_did_i_buy"), f"You have a new {t}. It is {c}."))
    for pair in rng.sample(asked, rng.choice((1, 1, 2))):
        turns += pair
    return talk("everyday", *turns, *_closing(rng))


def pet(rng: random.Random) -> Chat:
    """Make a chat about a pet and how it is, then questions about its name and age."""
    k, v, n = rng.choice(_PETS), name_of(rng), str(rng.randint(2, 18))
    is_ill = rng.random() < 0.5
    turns = [
        _TABLE.say(rng, "pet_is_ill" if is_ill else "my_is_so_funny", k=k, v=v),
        _TABLE.say(rng, "im_sorry_to_hear" if is_ill else "sounds_lovely_how_old", k=k, v=v),
    ]
    asked = [(_TABLE.say(rng, "what_is_its_name", k=k), f"Your {k} is called {v}.")]
    if rng.random() < 0.7:
        turns += [_TABLE.say(rng, "is_years_old", v=v, n=n), _TABLE.say(rng, "is_a_good_age", n=n, k=k, v=v)]
        asked.append((_TABLE.say(rng, "how_old_is", v=v, k=k), f"{v} is {n} years old."))
    for pair in rng.sample(asked, rng.choice((1, len(asked)))):
        turns += pair
    return talk("everyday", *turns, *_closing(rng))


_HOBBIES = _TABLE["hobbies"]


def hobby(rng: random.Random) -> Chat:
    """Make a chat about something to learn: whether it is hard, how often, how long, and where to begin."""
    h = rng.choice(_HOBBIES)
    turns = [_TABLE.say(rng, "i_want_to_learn", h=h), _TABLE.say(rng, "that_is_a_great", h=h)]
    pairs = [
        (_TABLE.say(rng, "is_it_hard"), _TABLE.say(rng, "the_first_steps_are")),
        (_TABLE.say(rng, "how_often_should_i"), _TABLE.say(rng, "a_little_every_day")),
        (_TABLE.say(rng, "how_do_i_start"), _TABLE.say(rng, "start_with_something_simple")),
        (_TABLE.say(rng, "how_long_does_it"), _TABLE.say(rng, "after_some_months_you")),
        (_TABLE.say(rng, "am_i_too_old"), _TABLE.say(rng, "no_you_are_never")),
        (_TABLE.say(rng, "what_do_i_want"), f"You want to learn {h}."),
    ]
    for pair in rng.sample(pairs, rng.choice((1, 2, 3))):
        turns += pair
    return talk("everyday", *turns, *_closing(rng))


_WORRIES = _TABLE["worries"]


def worry(rng: random.Random) -> Chat:
    """Make a chat about something ahead, how the user feels about it, and good wishes."""
    w = rng.choice(_WORRIES)
    is_glad = rng.random() < 0.25
    f = rng.choice(
        ("excited", "happy", "glad") if is_glad else ("nervous", "stressed", "worried", "afraid", "anxious", "tense")
    )
    about = "of" if f == "afraid" else "about"
    turns = [
        _TABLE.say(rng, "i_am_afraid" if f == "afraid" else "i_am_feeling", f=f, b=about, w=w),
        _TABLE.say(rng, "how_nice_i_hope" if is_glad else "that_is_normal_take"),
    ]
    if rng.random() < 0.5:
        turns += [_TABLE.say(rng, "wish_me_luck_please"), _TABLE.say(rng, "good_luck_i_am")]
    if rng.random() < 0.3:
        turns += [_TABLE.say(rng, "what_am_i", f=f, b=about), f"You are {f} {about} {w.replace('my ', 'your ')}."]
    return talk("everyday", *turns, *_closing(rng))


_FOODS = _TABLE["foods"]
_DISHES = _TABLE["dishes"]


def meal(rng: random.Random) -> Chat:
    """Make a chat that suggests a meal from the given ingredients."""
    *rest, last = rng.sample(_FOODS, rng.choice((1, 2, 2, 3)))
    x = (", ".join(rest) + " and " + last) if rest else last
    d, e = rng.sample(_DISHES, 2)
    turns = [_TABLE.say(rng, "what_can_i_cook", x=x), _TABLE.say(rng, "you_could_make_with", d=d, x=x)]
    if rng.random() < 0.5:
        turns += [_TABLE.say(rng, "another_idea"), _TABLE.say(rng, "then_try_with", e=e, x=x)]
        d = e
    if rng.random() < 0.4:
        turns += [_TABLE.say(rng, "good_idea"), _TABLE.say(rng, "enjoy_your_meal")]
    elif rng.random() < 0.3:
        turns += [_TABLE.say(rng, "what_do_i_have"), f"You have {x}."]
    return talk("everyday", *turns, *_closing(rng))


_TALES = _TABLE["tales"]


def summary(rng: random.Random) -> Chat:
    """Make a chat that summarises a long sentence and says who it is about."""
    long, short = rng.choice(_TALES)
    n, m = name_of(rng), name_of(rng)
    x, y = rng.sample(_TABLE["produce"], 2)
    values = {"n": n, "m": m, "x": x, "y": y, "p": rng.choice(_TABLE["places"])}
    text = long.format(**values)
    turns = [_TABLE.say(rng, "summarise", t=text), capitalised(short.format(**values))]
    if rng.random() < 0.3:
        turns += [_TABLE.say(rng, "who_is_it_about"), f"It is about {n}."]
    return talk("everyday", *turns)


def running_sum(rng: random.Random) -> Chat:
    """Make a chat with a sum, then numbers added to it and taken away."""
    total, turns = rng.randint(1, 14), [""]
    first = True
    for _ in range(rng.choice((2, 3, 3))):
        sign = "+" if first or rng.random() < 0.5 else "-"
        step = rng.randint(1, 9)
        if arithmetic.is_held_out(total, step, sign) or (sign == "-" and step > total):
            continue
        result = total + step if sign == "+" else total - step
        if first:
            turns = [_TABLE.say(rng, "what_is", a=str(total), b=str(step))]
        elif sign == "+":
            turns.append(_TABLE.say(rng, "and_more", b=str(step)))
        else:
            turns.append(_TABLE.say(rng, "and_minus", b=str(step)))
        turns.append(f"{total} {sign} {step} = {result}.")
        total, first = result, False
    if first:
        return running_sum(rng)
    return talk("everyday", *turns, *_closing(rng))


_GROUPS = _TABLE["groups"]


def members(rng: random.Random) -> Chat:
    """Make a chat that names some members of a group, then one more."""
    kind = rng.choice(list(_GROUPS))
    count = rng.choice((2, 3, 3))
    *chosen, new = rng.sample(_GROUPS[kind], count + 1)
    number = ("two", "three")[count - 2]
    turns = [_TABLE.say(rng, "name_some", n=number, k=kind), capitalised(", ".join(chosen[:-1]) + f" and {chosen[-1]}.")]
    if rng.random() < 0.7:
        turns += [_TABLE.say(rng, "another_one"), capitalised(rng.choice((f"{new}.", f"{', '.join(chosen)} and {new}.")))]
    return talk("everyday", *turns, *_closing(rng))


TRANSLATIONS = _TABLE["translations"]


def translation(rng: random.Random) -> Chat:
    """Make a chat that translates a word, then into a second language or another word."""
    language, second_language = rng.sample(list(TRANSLATIONS), 2)
    word, second_word = rng.sample(list(TRANSLATIONS[language]), 2)
    turns = [
        _TABLE.say(rng, "translate_into", w=word, l=language),
        _TABLE.say(rng, "translated", w=word, l=language, v=TRANSLATIONS[language][word]),
    ]
    if rng.random() < 0.5:
        turns += [
            _TABLE.say(rng, "and_in_language", l=second_language),
            f'In {second_language}, you say "{TRANSLATIONS[second_language][word]}".',
        ]
    elif rng.random() < 0.5:
        turns += [
            _TABLE.say(rng, "and_word", w=second_word),
            f'In {language}, you say "{TRANSLATIONS[language][second_word]}".',
        ]
    return talk("everyday", *turns, *_closing(rng))


_MAKERS: tuple[tuple[Callable[[random.Random], Chat], float], ...] = (
    (thing, 0.16),
    (pet, 0.14),
    (hobby, 0.14),
    (worry, 0.13),
    (meal, 0.1),
    (summary, 0.08),
    (running_sum, 0.1),
    (members, 0.07),
    (translation, 0.08),
)


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield `count` conversations."""
    makers, weights = zip(*_MAKERS, strict=True)
    for _ in range(count):
        yield rng.choices(makers, weights)[0](rng)
