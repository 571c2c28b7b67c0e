"""Single requests: sentences, stories, shorter forms, lists, greetings, comparisons, and answers from a given text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from training.data.chats import Chat, talk
from training.data.kinds import facts, handwritten, smalltalk
from training.data.material import knowledge, topics
from training.data.material.made_up import made_up_word
from training.data.material.memories import name_of
from training.data.material.simple_definitions import ADJECTIVES, GLOSSES, MASS, THE
from training.data.material.table import Table, capitalised

_TABLE = Table("requests")

_LIST_ITEMS = _TABLE["list_items"]


def _named(word: str) -> str:
    article = (
        ""
        if word in MASS or word == "data"
        else "the "
        if word in THE
        else "an "
        if word[0] in "aeio" or word in ("umbrella", "uncle")
        else "a "
    )
    return article + word


def sentences(rng: random.Random) -> Chat:
    """Make a chat of one, two or three sentences about something, and sometimes one more."""
    thing = rng.choice(list(knowledge.SENTENCES))
    count = rng.choice((1, 2, 2, 2, 3))
    first, *rest = knowledge.SENTENCES[thing]
    others = sorted(rng.sample(range(len(rest)), count))  # one spare; sentences with "it" or "they" stay after the first
    chosen = [first, *(rest[index] for index in others)]
    alone = [text for text in chosen if not re.match(r"(?:It|They|Many of|Some|A happy|Everybody|Everything|Nobody)\b", text)]
    if count == 1:
        chosen[0] = rng.choice(alone)
        chosen[1] = next(text for text in (first, *rest) if text != chosen[0])
    number = ("one sentence", "two sentences", "three sentences")[count - 1]
    ask = _TABLE.say(rng, "write_about", n=number, t=thing)
    turns = [ask, " ".join(chosen[:count])]
    if rng.random() < 0.25:
        turns += [_TABLE.say(rng, "one_more_sentence_please"), chosen[-1]]
    return talk("requests", *turns)


_ALWAYS = _TABLE["endings"]
_LEADS_LONG = _TABLE["long_openings"]


def shorten(rng: random.Random) -> Chat:
    """Make a chat that shortens a long sentence."""
    cause = rng.choice(_TABLE["because"])
    subject, adjective, end = cause["subject"], rng.choice(cause["adjectives"]), rng.choice(cause["results"])
    lead, plain = rng.choice(_LEADS_LONG), end
    if rng.random() < 0.4:
        end = re.sub(r"^we ", rng.choice(("we all ", "all of us ")), end)
    first = subject if not lead else subject[0].lower() + subject[1:]
    kind = rng.randrange(3)
    short = f"{subject} was {adjective}, so {plain}."
    if kind == 0:
        whole = f"{lead}{first} was so {adjective} that {end}{rng.choice(_ALWAYS)}."
    elif kind == 1:
        whole = f"{lead}{first} was very, very {adjective}, and because of that {end}{rng.choice(_ALWAYS)}."
    else:
        reason = f"{subject[0].lower() + subject[1:]} was {adjective}"
        whole = f"{capitalised(end)}{rng.choice(_ALWAYS[:2])}, and the reason for this was that {reason}."
    turns = [capitalised(rng.choice(_TABLE["shorten"]).format(whole)), short]
    if rng.random() < 0.2:
        turns += [_TABLE.say(rng, "even_shorter_please"), f"{subject} was {adjective}."]
    return talk("requests", *turns)


def say(rng: random.Random) -> Chat:
    """Make a chat with greetings and phrases to say, to the user or to somebody else."""
    kind = rng.randrange(6)
    name = name_of(rng)
    if kind == 0:
        what = rng.choice(_TABLE["greetings"])
        return talk("requests", _TABLE.say(rng, "say_to_somebody", w=what, n=name), f"{capitalised(what)}, {name}!")
    if kind == 1:
        what, answer = rng.choice(_TABLE["sayings"])
        return talk("requests", _TABLE.say(rng, "say_to_me", w=what), answer)
    if kind == 2:
        text = " ".join(made_up_word(rng) if rng.random() < 0.5 else rng.choice(_LIST_ITEMS) for _ in range(rng.randint(1, 6)))
        return talk("requests", _TABLE.say(rng, "say_2", w=text), text)
    if kind == 3:
        word, times = rng.choice((rng.choice(_LIST_ITEMS), made_up_word(rng))), rng.choice((2, 3, 4))
        return talk(
            "requests", _TABLE.say(rng, "say_times", w=word, n=("two", "three", "four")[times - 2]), " ".join([word] * times)
        )
    if kind == 4:
        wish, answer = rng.choice(_TABLE["wishes"])
        return talk("requests", _TABLE.say(rng, "wish_me", w=wish), answer)
    asks, answers = rng.choice(handwritten.WORLD)
    question, answer = rng.choice(asks), rng.choice(answers)
    return talk("requests", question, answer, _TABLE.say(rng, "please_repeat_that"), answer)


def lists(rng: random.Random) -> Chat:
    """Make a chat with items as a list, then with items added or removed."""
    items = rng.sample(_LIST_ITEMS, rng.choice((2, 3, 3, 4, 5)))
    if rng.random() < 0.2:
        items[0] = made_up_word(rng)
    text = ", ".join(items[:-1]) + " and " + items[-1]
    shown = "\n".join(f"- {item}" for item in items)
    is_line = rng.random() < 0.4
    if is_line:
        shown = ", ".join(items)
    ask = _TABLE.say(rng, "my_list_please_write" if is_line else "make_a_list_of", x=text)
    turns = [ask, shown]
    for _ in range(rng.choice((0, 1, 1, 2))):
        if rng.random() < 0.6 or len(items) < 3:
            new = rng.choice([item for item in _LIST_ITEMS if item not in items])
            items = [*items, new]
            turns.append(_TABLE.say(rng, "add_to_list", x=new))
        else:
            gone = rng.choice(items)
            items = [item for item in items if item != gone]
            turns.append(_TABLE.say(rng, "remove_from_list", x=gone))
        turns.append(", ".join(items) if is_line else "\n".join(f"- {item}" for item in items))
    if rng.random() < 0.25:
        turns += [_TABLE.say(rng, "how_many_things"), f"There are {len(items)} things on the list."]
    return talk("requests", *turns)


_KINDS = _TABLE["kinds"]


def difference(rng: random.Random) -> Chat:
    """Make a chat about the difference between two things of a kind."""
    group = [word for word in rng.choice(_KINDS) if word in GLOSSES]
    first, second = rng.sample(group, 2)
    a, b = _named(first), _named(second)
    ask = _TABLE.say(rng, "what_is_the_difference", a=a, b=b)
    return talk("requests", ask, f"{capitalised(a)} is {GLOSSES[first]}, and {b} is {GLOSSES[second]}.")


def child(rng: random.Random) -> Chat:
    """Make a chat that explains a thing in simple words."""
    word = rng.choice([word for word in GLOSSES if word not in ADJECTIVES])
    a = _named(word)
    ask = _TABLE.say(rng, "explain_to_a_child", a=a)
    end = rng.choice(
        ("", "", " Ask me if you want to know more.", " Have you seen one?" if a.startswith("a") and word not in MASS else "")
    )
    return talk("requests", ask, f"{capitalised(a)} is {GLOSSES[word]}.{end}")


def both(rng: random.Random) -> Chat:
    """Make a chat with two questions, or a greeting and a question, in one turn."""
    kind = rng.randrange(3)
    if kind == 0:
        who, can = rng.choice(smalltalk.IDENTITY["who"][1]), rng.choice(smalltalk.IDENTITY["can"][1])
        first = "I am Culet's built-in model, a small program." if len(who) > 70 else who
        return talk("requests", _TABLE.say(rng, "who_are_you_and"), f"{first} {can}")
    relations = list(facts.RELATIONS.values())
    chosen = [(relation, *rng.choice(relation.rows)) for relation in rng.sample(relations, 2)]
    asks = [capitalised(rng.choice(relation.asks).format(s=subject)) for relation, subject, _ in chosen]
    full = [
        capitalised(
            rng.choice([form for form in relation.answers if "{s}" in form] or relation.answers).format(s=subject, v=value)
        )
        for relation, subject, value in chosen
    ]
    if kind == 1:
        return talk("requests", f"{asks[0]} And {asks[1][0].lower() + asks[1][1:]}", f"{full[0]} {full[1]}")
    return talk("requests", _TABLE.say(rng, "hello_first") + " " + asks[0], _TABLE.say(rng, "hello_back") + " " + full[0])


def reading(rng: random.Random) -> Chat:
    """Make a chat with questions about a text given by the user or the system prompt."""
    entry = rng.choice(_TABLE["notes"])
    pairs = entry["questions"]
    values = {
        "n": name_of(rng),
        "m": name_of(rng),
        "d": rng.choice(_TABLE["days"]),
        "h": rng.choice(("8", "9", "10", "half past nine", "3", "noon", "7")),
        "k": rng.choice(("two", "three", "four", "five")),
        "c": rng.choice(_TABLE["colours"]),
        "t": rng.choice(_TABLE["things"]),
        "v": rng.choice(("Paris", "Oslo", "Rome", "Lima", "Cairo", made_up_word(rng).capitalize())),
        "p": rng.choice(("a bakery", "the library", "a hospital", "the zoo", "a school", "the station")),
        "x": str(rng.randint(5, 99)),
    }
    note = entry["text"].format(**values)
    chosen = [
        (question.format(**values), answer.format(**values))
        for question, answer in rng.sample(pairs, rng.choice((1, 2, len(pairs))))
    ]
    rest = [turn for pair in chosen[1:] for turn in pair]
    if rng.random() < 0.3:
        return talk("requests", *chosen[0], *rest, system=_TABLE.say(rng, "answer_the_users_questions", t=note))
    lead = _TABLE.say(rng, "read_this", t=note, q=chosen[0][0])
    return talk("requests", lead, chosen[0][1], *rest)


_MANNERS = (("in_capitals", str.upper), ("in_small_letters", str.lower))


def system(rng: random.Random) -> Chat:
    """Make a chat whose system prompt changes the answer: its manner, the user's name, or a word to add."""
    relation = rng.choice(list(facts.RELATIONS.values()))
    subject, value = rng.choice(relation.rows)
    question, answer = (
        capitalised(rng.choice(relation.asks).format(s=subject)),
        facts.answer_about(relation, subject, value, rng),
    )
    kind = rng.randrange(4)
    if kind == 0:
        prompts, manner = rng.choice(_MANNERS)
        return talk("requests", question, manner(answer), system=_TABLE.say(rng, prompts))
    if kind == 1:
        name = name_of(rng)
        prompt = _TABLE.say(rng, "the_users_name_is", n=name)
        if rng.random() < 0.5:
            asks = _TABLE.say(rng, "what_is_my_name")
            return talk("requests", asks, _TABLE.say(rng, "your_name_is", n=name), system=prompt)
        return talk("requests", _TABLE.say(rng, "hello_named"), _TABLE.say(rng, "hello_how_can_i", n=name), system=prompt)
    if kind == 2:
        word = made_up_word(rng) if rng.random() < 0.6 else rng.choice(_LIST_ITEMS)
        where = rng.choice(("begin", "end"))
        prompt = _TABLE.say(rng, "every_answer_with_the", w=where, v=where, x=word)
        return talk(
            "requests",
            question,
            f"{word.capitalize()}. {answer}" if where == "begin" else f"{answer} {word.capitalize()}.",
            system=prompt,
        )
    return talk("requests", question, capitalised(value) + ".", system=_TABLE.say(rng, "answer_with_the_answer"))


_ADJECTIVES = _TABLE["adjectives"]
_HEROES = _TABLE["heroes"]


def story(rng: random.Random) -> Chat:
    """Make a little story about the requested hero."""
    noun, second_noun = rng.sample(_HEROES, 2)
    adjective = rng.choice((*_ADJECTIVES, ""))
    hero = f"{adjective} {noun}".strip()
    hero = ("an " if hero[0] in "aeiou" else "a ") + hero
    friend = rng.choice(("little ", "young ", "")) + second_noun
    friend = ("an " if friend[0] in "aeiou" else "a ") + friend
    finds = [find for find in topics.FINDS if not re.search(r"child|friend|dragon|stranger|sound|song|light", find)]
    values = {
        "h": hero,
        "H": capitalised(hero),
        "n": noun,
        "m": second_noun,
        "g": friend,
        "f": rng.choice(finds),
        "p": rng.choice([place for place in topics.PLACES if place.startswith(("in ", "by ", "on a s", "on a h"))]),
    }
    text = " ".join(rng.choice(part).format(**values) for part in rng.choice(_TABLE["plots"])["parts"])
    ask = _TABLE.say(rng, "tell_me_a_story", h=hero)
    if friend in text and rng.random() < 0.5:
        ask = _TABLE.say(rng, "tell_me_a_story_of_two", h=hero, g=friend)
    turns = [ask, text]
    if rng.random() < 0.2:
        turns += [_TABLE.say(rng, "who_is_the_story").replace("What animal is it", "What is the story"), f"It is about {hero}."]
    elif rng.random() < 0.2:
        turns += [_TABLE.say(rng, "what_happened_then"), _TABLE.say(rng, "what_happened_next", n=noun)]
    elif rng.random() < 0.2:
        turns += [_TABLE.say(rng, "what_a_nice_story"), _TABLE.say(rng, "im_glad_you_liked")]
    return talk("requests", *turns)


_MAKERS: tuple[tuple[Callable[[random.Random], Chat], float], ...] = (
    (sentences, 0.13),
    (shorten, 0.13),
    (say, 0.14),
    (lists, 0.1),
    (difference, 0.09),
    (child, 0.07),
    (both, 0.08),
    (reading, 0.13),
    (system, 0.08),
    (story, 0.12),
)


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield `count` requests with their answers."""
    makers, weights = zip(*_MAKERS, strict=True)
    for _ in range(count):
        yield rng.choices(makers, weights)[0](rng)
