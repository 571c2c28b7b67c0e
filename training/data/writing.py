"""Small tasks on texts whose answers code can make exactly (copying, spelling, ordering, tenses, politeness), and little stories."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from training.data import facts, smalltalk, topics
from training.data.chats import Chat, talk

_PEOPLE = (
    "Anna",
    "Tom",
    "Maria",
    "Ben",
    "my sister",
    "my brother",
    "the teacher",
    "the old man",
    "our neighbour",
    "Mia",
    "the doctor",
    "my friend",
    "Leo",
    "the girl",
    "the boy",
)
# base, third person, past, object
_ACTS = tuple(
    tuple(part.strip() for part in row.split(","))
    for row in """
    like, likes, liked, tea | read, reads, read, a book | buy, buys, bought, some bread | see, sees, saw, a bird | eat, eats, ate, an apple | drink, drinks, drank, water
    write, writes, wrote, a letter | play, plays, played, the piano | need, needs, needed, a new coat | visit, visits, visited, the museum | paint, paints, painted, the door
    cook, cooks, cooked, dinner | clean, cleans, cleaned, the kitchen | open, opens, opened, the window | find, finds, found, the key | help, helps, helped, the children
    learn, learns, learned, French | watch, watches, watched, a film | carry, carries, carried, the bags | wash, washes, washed, the car | love, loves, loved, music
    """.replace("\n", " | ").split("|")
    if row.strip()
)
_WHEN = (
    "",
    " in the morning",
    " at home",
    " after school",
    " in the garden",
    " every Sunday",
    " with a friend",
    " before lunch",
    " at the station",
)
_ORDERS = (
    "give me the salt",
    "open the door",
    "close the window",
    "tell me the time",
    "help me with my bag",
    "wait a minute",
    "be quiet",
    "send me the letter",
    "call me tomorrow",
    "show me the way",
    "speak slowly",
    "bring me a glass of water",
)
_PLAIN_WORDS = tuple(
    "apple bread chair dog egg fish garden house ink jam king lamp moon nose orange pen queen rain sun table uncle violin water yard zebra book cat door earth flower glass hat island "
    "juice kite lemon mouse night ocean paper ring ship tree wall window bird cloud dance eagle friend gold heart ice key leaf milk nest onion piano road star tiger".split()
)


def _sentence(rng: random.Random, tense: int) -> tuple[str, str, str, tuple[str, ...]]:
    who, act, when = rng.choice(_PEOPLE), rng.choice(_ACTS), rng.choice(_WHEN)
    text = f"{who} {act[tense]} {act[3]}{when}."
    return text[0].upper() + text[1:], who, when, act


def _copy(rng: random.Random) -> tuple[str, str]:
    text = (
        _sentence(rng, rng.choice((1, 2)))[0] if rng.random() < 0.6 else " ".join(rng.sample(_PLAIN_WORDS, rng.randint(1, 5)))
    )
    return rng.choice(
        ("Repeat after me: {}", "Say this: {}", "Please repeat: {}", "Write this down exactly: {}", "Copy this text: {}")
    ).format(text), text


def _spell(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(_PLAIN_WORDS)
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(('Spell the word "{}".', "Spell {}.", "How do you spell {}?")).format(word), "-".join(
            word.upper()
        ) + "."
    if kind == 1:
        return rng.choice(("What is the first letter of {}?", 'With which letter does "{}" begin?')).format(
            word
        ), f"The first letter of {word} is {word[0].upper()}."
    if kind == 2:
        return f"What is the last letter of {word}?", f"The last letter of {word} is {word[-1].upper()}."
    return rng.choice(("How many letters has the word {}?", "How many letters are in {}?")).format(
        word
    ), f"The word {word} has {len(word)} letters."


def _case(rng: random.Random) -> tuple[str, str]:
    text = _sentence(rng, 1)[0] if rng.random() < 0.5 else rng.choice(_PLAIN_WORDS)
    if rng.random() < 0.6:
        return rng.choice(
            ("Write this in capital letters: {}", "Put this in upper case: {}", "Make this all capitals: {}")
        ).format(text), text.upper()
    return rng.choice(("Write this in small letters: {}", "Put this in lower case: {}")).format(text.upper()), text.lower()


def _order(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_PLAIN_WORDS, rng.choice((3, 3, 4)))
    if rng.random() < 0.6:
        return rng.choice(
            ("Put these words in alphabetical order: {}", "Sort these words: {}", "Sort alphabetically: {}")
        ).format(", ".join(words)), ", ".join(sorted(words)) + "."
    numbers = [str(number) for number in rng.sample(range(1, 60), 3)]
    return rng.choice(("Sort these numbers: {}", "Put these numbers in order: {}")).format(", ".join(numbers)), ", ".join(
        sorted(numbers, key=int)
    ) + "."


def _tense(rng: random.Random) -> tuple[str, str]:
    text, who, when, act = _sentence(rng, 1)
    kind = rng.randrange(4)
    if kind == 0:
        new = f"{who} {act[2]} {act[3]}{when}."
        ask = rng.choice(
            ("Put this into the past tense: {}", "Write this in the past tense: {}", "Change this to the past: {}")
        )
    elif kind == 1:
        new = f"does {who} {act[0]} {act[3]}{when}?"
        ask = rng.choice(("Turn this into a question: {}", "Make a question out of this: {}", "Make this a question: {}"))
    elif kind == 2:
        new = f"{who} does not {act[0]} {act[3]}{when}."
        ask = rng.choice(("Make this negative: {}", "Say the opposite, with not: {}", "Put a not into this sentence: {}"))
    else:
        new = f"{who} will {act[0]} {act[3]}{when}."
        ask = rng.choice(("Put this into the future: {}", "Write this in the future tense: {}"))
    return ask.format(text), new[0].upper() + new[1:]


def _correct(rng: random.Random) -> tuple[str, str]:
    text, who, when, act = _sentence(rng, 1)
    wrong = f"{who} {act[0]} {act[3]}{when}"
    return rng.choice(
        ("Correct this sentence: {}", "Fix the grammar: {}", "What is wrong here? {}", "Please correct: {}")
    ).format(wrong), text


def _polite(rng: random.Random) -> tuple[str, str]:
    order = rng.choice(_ORDERS)
    text = order[0].upper() + order[1:]
    ask = rng.choice(
        (
            "Say this politely: {}!",
            "Make this polite: {}.",
            "Rewrite this in a polite way: {}.",
            "How can I say this more politely? {}.",
        )
    )
    return ask.format(text), rng.choice(("Could you please {}?", "Would you please {}?", "Please {}.")).format(order)


def _shorten(rng: random.Random) -> tuple[str, str]:
    text, who, _, act = _sentence(rng, 2)
    extra = rng.choice(
        (
            "As far as I can remember, ",
            "It is well known that ",
            "I would like to tell you that ",
            "To tell you the truth, ",
            "You may not believe it, but ",
        )
    )
    whole = extra + (text if who[0].isupper() else text[0].lower() + text[1:])
    short = f"{who} {act[2]} {act[3]}."
    return rng.choice(
        ("Make this shorter: {}", "Shorten this sentence: {}", "Summarise this: {}", "Say this in fewer words: {}")
    ).format(whole), short[0].upper() + short[1:]


def _who(rng: random.Random) -> tuple[str, str]:
    """Questions on a sentence that was given."""
    text, who, when, act = _sentence(rng, 2)
    lead = rng.choice(("Read this: {} ", "Here is a sentence: {} ", "{} ")).format(text)
    kind = rng.randrange(3 if when else 2)
    if kind == 0:
        return f"{lead}Who {act[2]} {act[3]}?", f"{who[0].upper()}{who[1:]} {act[2]} {act[3]}."
    if kind == 1:
        return f"{lead}What did {who} {act[0]}?", f"{who[0].upper()}{who[1:]} {act[2]} {act[3]}."
    return f"{lead}When or where was that?", f"It was{when}." if "every" not in when else f"It is{when}."


def _list(rng: random.Random) -> tuple[str, str]:
    groups = {
        "fruits": "apples pears bananas cherries grapes lemons oranges peaches plums", "vegetables": "carrots potatoes onions beans peas cabbage spinach",
        "animals": "dogs cats horses cows lions bears foxes wolves", "colours": "red blue green yellow black white purple orange", "birds": "eagles owls sparrows crows swans ducks",
        "tools": "hammers saws drills ladders screwdrivers", "musical instruments": "pianos violins flutes drums guitars trumpets", "drinks": "water tea coffee milk juice lemonade",
        "sports": "football tennis swimming running cycling hockey", "metals": "iron gold silver copper tin lead", "planets": "Mercury Venus Earth Mars Jupiter Saturn",
        "trees": "oaks pines birches maples willows", "flowers": "roses tulips daisies lilies sunflowers", "insects": "ants bees beetles flies moths butterflies",
    }  # fmt: skip
    name = rng.choice(list(groups))
    count = rng.choice((2, 3, 3, 4))
    chosen = rng.sample(groups[name].split(), count)
    ask = rng.choice(
        ("Name {n} {g}.", "Can you name {n} {g}?", "Give me {n} {g}.", "Tell me {n} {g}, please.", "List {n} {g}.")
    ).format(n=("two", "three", "four")[count - 2], g=name)
    answer = ", ".join(chosen[:-1]) + " and " + chosen[-1]
    return ask, facts.capitalised(rng.choice(("{} are {g}.", "{}.", "For example: {}.")).format(answer, g=name))


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
    """Tasks, and facts in the voice that a system prompt asks for."""
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


_STORIES = (
    "Once upon a time, there was {h} who lived {p}. One day, {x} found {f}. {X} did not know what to do with it, so {x} asked an old friend. Together they had a wonderful day.",
    "There was once {h}. Every evening, {x} sat {p} and looked at the stars. One night, {x} found {f} and smiled. From that day on, {x} was never lonely again.",
    "{H} went for a walk {p}. It was cold, and {x} was hungry. Then {x} found {f}, and a kind voice said: \"Come in and rest.\" {X} slept well that night.",
    "{H} wanted to see the world. {X} packed a small bag and left at dawn. On the way, {x} found {f}. It was not what {x} had been looking for, but it was even better.",
    "Long ago, {h} lived {p}. Nobody believed that {x} was brave. But when a storm came, {x} found {f} and saved everybody. After that, they all were friends.",
    "One morning, {h} woke up and heard a strange sound. {X} followed it and found {f}. \"So it was you,\" said {t}, and laughed. They had breakfast together.",
    "{H} had lost something {p}. {X} looked for it all day. In the end, {x} found {f} instead, and that made {x} very happy.",
    "{H} and a little bird were best friends. One day, they found {f} {p}. They shared it, and it made both of them glad.",
)  # fmt: skip
_STORY_ASKS = (
    "Tell me a story about {h}.", "Tell me a short story about {h}.", "Write a story about {h}.", "Can you tell me a story about {h}?", "I want to hear a story about {h}.", "Please write a short story about {h} and {f}.",
    "Make up a little story with {h} and {f}.", "Tell me a bedtime story about {h}.", "A story about {h}, please.",
)  # fmt: skip


def make_stories(rng: random.Random, count: int) -> Iterator[Chat]:
    """Little stories with the hero, and perhaps the thing, that was asked for."""
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
