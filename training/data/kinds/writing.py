"""Small text tasks with exact answers (copying, spelling, sorting, tenses, politeness), and little stories."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from training.data.chats import Chat, talk
from training.data.kinds import facts, smalltalk
from training.data.material import topics
from training.data.material.table import Table, capitalised

_TABLE = Table("writing")

_PEOPLE = _TABLE["people"]
# base, third person, past, object
_ACTS = _TABLE["acts"]
_WHEN = _TABLE["when"]
_ORDERS = _TABLE["orders"]
_PLAIN_WORDS = _TABLE["plain_words"]


def _sentence(rng: random.Random, tense: int) -> tuple[str, str, str, tuple[str, ...]]:
    who, act, when = rng.choice(_PEOPLE), rng.choice(_ACTS), rng.choice(_WHEN)
    text = f"{who} {act[tense]} {act[3]}{when}."
    return text[0].upper() + text[1:], who, when, act


def _copy(rng: random.Random) -> tuple[str, str]:
    text = (
        _sentence(rng, rng.choice((1, 2)))[0] if rng.random() < 0.6 else " ".join(rng.sample(_PLAIN_WORDS, rng.randint(1, 5)))
    )
    return rng.choice(_TABLE["repeat_after_me"]).format(text), text


def _spell(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(_PLAIN_WORDS)
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(_TABLE["spell_the_word"]).format(word), "-".join(word.upper()) + "."
    if kind == 1:
        return rng.choice(_TABLE["what_is_the_first_letter"]).format(word), f"The first letter of {word} is {word[0].upper()}."
    if kind == 2:
        return f"What is the last letter of {word}?", f"The last letter of {word} is {word[-1].upper()}."
    return rng.choice(_TABLE["how_many_letters"]).format(word), f"The word {word} has {len(word)} letters."


def _case(rng: random.Random) -> tuple[str, str]:
    text = _sentence(rng, 1)[0] if rng.random() < 0.5 else rng.choice(_PLAIN_WORDS)
    if rng.random() < 0.6:
        return rng.choice(_TABLE["in_capital_letters"]).format(text), text.upper()
    return rng.choice(_TABLE["in_small_letters"]).format(text.upper()), text.lower()


def _order(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_PLAIN_WORDS, rng.choice((3, 3, 4)))
    if rng.random() < 0.6:
        return rng.choice(_TABLE["sort_these_words"]).format(", ".join(words)), ", ".join(sorted(words)) + "."
    numbers = [str(number) for number in rng.sample(range(1, 60), 3)]
    return rng.choice(_TABLE["sort_these_numbers"]).format(", ".join(numbers)), ", ".join(sorted(numbers, key=int)) + "."


def _tense(rng: random.Random) -> tuple[str, str]:
    text, who, when, act = _sentence(rng, 1)
    kind = rng.randrange(4)
    if kind == 0:
        new = f"{who} {act[2]} {act[3]}{when}."
        ask = rng.choice(_TABLE["into_past_tense"])
    elif kind == 1:
        new = f"does {who} {act[0]} {act[3]}{when}?"
        ask = rng.choice(_TABLE["turn_into_a_question"])
    elif kind == 2:
        new = f"{who} does not {act[0]} {act[3]}{when}."
        ask = rng.choice(_TABLE["make_this_negative"])
    else:
        new = f"{who} will {act[0]} {act[3]}{when}."
        ask = rng.choice(_TABLE["into_future_tense"])
    return ask.format(text), new[0].upper() + new[1:]


def _correct(rng: random.Random) -> tuple[str, str]:
    text, who, when, act = _sentence(rng, 1)
    wrong = f"{who} {act[0]} {act[3]}{when}"
    return rng.choice(_TABLE["correct_this_sentence"]).format(wrong), text


def _polite(rng: random.Random) -> tuple[str, str]:
    order = rng.choice(_ORDERS)
    text = order[0].upper() + order[1:]
    ask = rng.choice(_TABLE["say_this_politely"])
    return ask.format(text), rng.choice(_TABLE["could_you_please"]).format(order)


def _shorten(rng: random.Random) -> tuple[str, str]:
    text, who, _, act = _sentence(rng, 2)
    extra = rng.choice(_TABLE["empty_openings"])
    whole = extra + (text if who[0].isupper() else text[0].lower() + text[1:])
    short = f"{who} {act[2]} {act[3]}."
    return rng.choice(_TABLE["make_this_shorter"]).format(whole), short[0].upper() + short[1:]


def _who(rng: random.Random) -> tuple[str, str]:
    """Make a question about a given sentence and its answer."""
    text, who, when, act = _sentence(rng, 2)
    lead = rng.choice(_TABLE["given_sentence"]).format(text)
    kind = rng.randrange(3 if when else 2)
    if kind == 0:
        return f"{lead}Who {act[2]} {act[3]}?", f"{who[0].upper()}{who[1:]} {act[2]} {act[3]}."
    if kind == 1:
        return f"{lead}What did {who} {act[0]}?", f"{who[0].upper()}{who[1:]} {act[2]} {act[3]}."
    return f"{lead}When or where was that?", f"It was{when}." if "every" not in when else f"It is{when}."


def _list(rng: random.Random) -> tuple[str, str]:
    groups = _TABLE["groups"]
    name = rng.choice(list(groups))
    count = rng.choice((2, 3, 3, 4))
    chosen = rng.sample(groups[name], count)
    ask = rng.choice(_TABLE["name_some"]).format(n=("two", "three", "four")[count - 2], g=name)
    answer = ", ".join(chosen[:-1]) + " and " + chosen[-1]
    return ask, capitalised(rng.choice(_TABLE["these_are"]).format(answer, g=name))


_TASKS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _copy,
    _spell,
    _case,
    _order,
    _tense,
    _correct,
    _polite,
    _shorten,
    _who,
    _list,
)


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield tasks, and facts in the voice that a system prompt asks for."""
    for _ in range(count):
        if rng.random() < 0.12:
            relation = rng.choice(list(facts.RELATIONS.values()))
            subject, value = rng.choice(relation.rows)
            yield smalltalk.in_persona(
                rng, facts.ask_about(relation, subject, rng), facts.answer_about(relation, subject, value, rng)
            )
        else:
            turns: tuple[str, ...] = rng.choice(_TASKS)(rng)
            if rng.random() < 0.1:
                turns += rng.choice(_TASKS)(rng)
            yield talk("writing", *turns)


_STORIES = _TABLE["stories"]
_STORY_ASKS = _TABLE["story_asks"]


def make_stories(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield little stories with the requested hero, and sometimes a requested thing."""
    for _ in range(count):
        hero, find = rng.choice(topics.HEROES), rng.choice(topics.FINDS)
        pronoun = (
            "she"
            if "girl" in hero or "queen" in hero
            else "he"
            if any(word in hero for word in ("boy", "king", "knight", "giant", "man", "sailor", "shepherd"))
            else "it"
        )
        if any(word in hero for word in ("baker", "painter", "farmer", "librarian", "musician", "clockmaker")):
            pronoun = rng.choice(("he", "she"))
        story = rng.choice(_STORIES).format(
            h=hero,
            H=hero[0].upper() + hero[1:],
            t=re.sub(r"^an? ", "the ", hero),
            f=find,
            p=rng.choice(topics.PLACES),
            x=pronoun,
            X=pronoun.capitalize(),
        )
        yield talk("stories", rng.choice(_STORY_ASKS).format(h=hero, f=find), story)
