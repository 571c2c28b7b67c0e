"""Everyday conversations in which the next turn hangs on the last: things and their colours, hobbies, worries, meals, running sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from training.data import arithmetic, facts, smalltalk
from training.data.chats import Chat, talk
from training.data.memories import name_of, one

_COLOURS = "red blue green yellow purple orange pink black white brown grey silver".split()
_THINGS = (
    "bicycle car coat hat bag lamp sofa phone chair guitar umbrella scarf kite cup clock dress shirt boat ball table".split()
)
_PETS = "dog cat horse rabbit parrot hamster turtle pony goat".split()


def _closing(rng: random.Random) -> list[str]:
    if rng.random() > 0.25:
        return []
    asks, answers = smalltalk.TALK[rng.choice(("thanks", "thanks", "bye"))]
    return [rng.choice(asks), rng.choice(answers)]


def thing(rng: random.Random) -> Chat:
    """Something new, its colour, its price, and questions about it later."""
    t, c, p = rng.choice(_THINGS), rng.choice(_COLOURS), str(rng.randint(5, 95) * 5)
    a = "an" if t[0] in "aeiou" else "a"
    turns = [
        one(rng, "I bought {a} {t}. | I have a new {t}. | I got {a} {t} for my birthday. | Yesterday I bought a new {t}. | Look, I have a new {t}! | I found a nice {t} in a shop.", a=a, t=t),
        one(rng, "How nice! What colour is it? | Great! Which colour does it have? | That is nice. What does it look like?"),
        one(rng, "It is {c}. | It's {c}. | {c}. | A {c} one. | It is {c}, and I love it.", c=c),
        one(rng, "A {c} {t} sounds lovely! | {c} is a nice colour for {a} {t}. | A {c} {t}! Enjoy it.", c=c, t=t, a=a),
    ]  # fmt: skip
    asked = [
        (
            one(rng, "What colour is my {t}? | Which colour does my {t} have? | Do you remember the colour of my {t}?", t=t),
            f"Your {t} is {c}.",
        )
    ]
    if rng.random() < 0.4:
        turns += [
            one(rng, "It cost {p} dollars. | I paid {p} dollars for it.", p=p),
            one(rng, "That is a fair price. | {p} dollars for {a} {t}? Not bad. | I hope you enjoy it.", p=p, a=a, t=t),
        ]
        asked.append((one(rng, "How much did my {t} cost? | What did I pay for my {t}?", t=t), f"Your {t} cost {p} dollars."))
    asked.append((one(rng, "What did I buy? | What did I tell you about? | What is new?"), f"You have a new {t}. It is {c}."))
    for pair in rng.sample(asked, rng.choice((1, 1, 2))):
        turns += pair
    return talk("everyday", *turns, *_closing(rng))


def pet(rng: random.Random) -> Chat:
    """A pet by its name, how it is, and its name and age again."""
    k, v, n = rng.choice(_PETS), name_of(rng), str(rng.randint(2, 18))
    is_ill = rng.random() < 0.5
    turns = [
        one(rng, "My {k} {v} is ill. | My {k} {v} does not feel well. | {v}, my {k}, is sick. | I am worried about my {k} {v}." if is_ill else "My {k} {v} is so funny. | My {k} {v} makes me laugh. | {v}, my {k}, is sleeping. | I love my {k} {v}.", k=k, v=v),
        one(rng, "I'm sorry to hear that. I hope {v} gets well soon. | Oh, poor {v}! Perhaps a vet can help. | I'm sorry. How old is {v}?" if is_ill else "{v} sounds lovely! How old is {v}? | How nice! Tell me more about {v}. | A {k} is good company. How old is {v}?", k=k, v=v),
    ]  # fmt: skip
    asked = [
        (
            one(rng, "What is my {k}'s name? | What is my {k} called? | What is the name of my {k}?", k=k),
            f"Your {k} is called {v}.",
        )
    ]
    if rng.random() < 0.7:
        turns += [
            one(rng, "{v} is {n} years old. | {n} years. | It is {n} years old.", v=v, n=n),
            one(rng, "{n} is a good age for a {k}. | I see, {v} is {n} years old.", n=n, k=k, v=v),
        ]
        asked.append((one(rng, "How old is {v}? | How old is my {k}?", v=v, k=k), f"{v} is {n} years old."))
    for pair in rng.sample(asked, rng.choice((1, len(asked)))):
        turns += pair
    return talk("everyday", *turns, *_closing(rng))


_HOBBIES = "the guitar, the piano, the violin, French, Spanish, English, chess, swimming, drawing, dancing, cooking, painting, tennis, the flute, the drums, knitting, baking, running, photography, singing".split(
    ", "
)


def hobby(rng: random.Random) -> Chat:
    """Something to learn: whether it is hard, how often, how long, where to begin."""
    h = rng.choice(_HOBBIES)
    turns = [
        one(
            rng,
            "I want to learn {h}. | I would like to learn {h}. | I am learning {h}. | I want to start with {h}. | My new hobby is {h}.",
            h=h,
        ),
        one(
            rng,
            "That is a great idea! Have you tried it before? | How nice! What do you want to know about it? | Good choice! {h} is a lot of fun. | That's great! Take it step by step.",
            h=h,
        ),
    ]
    pairs = [
        (one(rng, "Is it hard? | Is it difficult? | Is it hard to learn?"), one(rng, "The first steps are easy, but it takes time to be good at it. | A little, but with patience you can do it.")),
        (one(rng, "How often should I practise? | How much should I practise? | How often should I do it?"), one(rng, "A little every day is better than a lot once a week. | Twenty minutes a day are a good start.")),
        (one(rng, "How do I start? | Where should I begin? | What should I do first?"), one(rng, "Start with something simple, and find a good teacher or a good book. | Begin with the easy things, and have fun.")),
        (one(rng, "How long does it take? | When will I be good at it?"), one(rng, "After some months you will see that you get better. | It takes a while, but every week it gets easier.")),
        (one(rng, "Am I too old for it? | Am I too old to learn it?"), one(rng, "No, you are never too old to learn something new.")),
        (one(rng, "What do I want to learn? | What was my hobby again?"), f"You want to learn {h}."),
    ]  # fmt: skip
    for pair in rng.sample(pairs, rng.choice((1, 2, 3))):
        turns += pair
    return talk("everyday", *turns, *_closing(rng))


_WORRIES = "my exam, my test tomorrow, the interview, my first day at work, the trip, the flight, my speech, the wedding, my new school, the match on Sunday, the visit to the dentist, my driving test, the concert, school, work".split(
    ", "
)


def worry(rng: random.Random) -> Chat:
    """What lies ahead, how it feels, and good wishes."""
    w = rng.choice(_WORRIES)
    is_glad = rng.random() < 0.25
    f = rng.choice(
        ("excited", "happy", "glad") if is_glad else ("nervous", "stressed", "worried", "afraid", "anxious", "tense")
    )
    about = "of" if f == "afraid" else "about"
    turns = [
        one(rng, "I am {f} {b} {w}. | I'm so {f} {b} {w}. | I feel {f} {b} {w}. | I am a bit {f} {b} {w}." if f not in ("afraid",) else "I am {f} {b} {w}. | I'm a little {f} {b} {w}.", f=f, b=about, w=w),
        one(rng, "How nice! I hope it will be wonderful. | That's great! Enjoy it." if is_glad else
            "That is normal. Take a deep breath, and do one step at a time. | Many people feel like that. You can do it! | I understand. Prepare a little, sleep well, and it will be fine. | I'm sorry. What worries you most?"),
    ]  # fmt: skip
    if rng.random() < 0.5:
        turns += [
            one(rng, "Wish me luck, please. | Wish me luck. | Do you think it will go well? | Will it be all right?"),
            one(rng, "Good luck! I am sure you will do well. | I believe in you. Good luck!"),
        ]
    if rng.random() < 0.3:
        turns += [
            one(rng, "What am I {f} {b}? | What did I tell you?", f=f, b=about),
            f"You are {f} {about} {w.replace('my ', 'your ')}.",
        ]
    return talk("everyday", *turns, *_closing(rng))


_FOODS = "eggs, potatoes, rice, tomatoes, cheese, pasta, carrots, onions, mushrooms, fish, chicken, beans, spinach, bread, apples, peas, bananas, peppers".split(
    ", "
)
_DISHES = ("a soup", "a salad", "an omelette", "a big pan of vegetables", "a stew", "a pie")


def meal(rng: random.Random) -> Chat:
    """What can be made of what is there."""
    *rest, last = rng.sample(_FOODS, rng.choice((1, 2, 2, 3)))
    x = (", ".join(rest) + " and " + last) if rest else last
    d, e = rng.sample(_DISHES, 2)
    turns = [
        one(
            rng,
            "What can I cook with {x}? | I have {x}. What can I cook? | What can I make with {x}? | I only have {x}. Any ideas? | Give me an idea for a meal with {x}.",
            x=x,
        ),
        one(rng, "You could make {d} with {x}. | How about {d} with {x}? | Try {d} with {x}. It is easy.", d=d, x=x),
    ]
    if rng.random() < 0.5:
        turns += [
            one(rng, "Another idea? | I don't like that. | Something else, please. | Any other idea?"),
            one(rng, "Then try {e} with {x}. | How about {e} instead? | You could also make {e}.", e=e, x=x),
        ]
        d = e
    if rng.random() < 0.4:
        turns += [
            one(rng, "Good idea! | That sounds good. | I like that. | OK, that's a nice idea."),
            one(rng, "Enjoy your meal! | I hope it tastes good! | Have fun in the kitchen!"),
        ]
    elif rng.random() < 0.3:
        turns += [one(rng, "What do I have at home? | What did I say that I have?"), f"You have {x}."]
    return talk("everyday", *turns, *_closing(rng))


_TALES = (
    ("{n} went to the {p} to buy {x}, but they were too expensive, so {n} bought {y}.", "{n} wanted {x} but bought {y}."),
    ("{n} wanted to go to the {p}, but it was closed, so {n} went home and read a book.", "The {p} was closed, so {n} went home."),
    ("Yesterday {n} lost a key near the {p}, looked for it for two hours, and in the end found it in a pocket.", "{n} lost a key and found it in a pocket."),
    ("{n} and {m} wanted to have a picnic at the {p}, but then it began to rain, so they ate their {x} at home.", "It rained, so {n} and {m} ate at home."),
    ("Because the train was late, {n} missed the bus to the {p} and had to walk for an hour.", "The train was late, so {n} had to walk."),
    ("{n} planted {x} in the garden, watered them every day, and after two months could give some of them to {m}.", "{n} grew {x} and gave some to {m}."),
)  # fmt: skip


def summary(rng: random.Random) -> Chat:
    """A longer sentence, what it says, and who it was about."""
    long, short = rng.choice(_TALES)
    n, m = name_of(rng), name_of(rng)
    x, y = rng.sample("apples pears beans carrots plums grapes potatoes onions".split(), 2)
    values = {"n": n, "m": m, "x": x, "y": y, "p": rng.choice("market park museum library cinema lake zoo station".split())}
    text = long.format(**values)
    turns = [
        one(
            rng,
            "Summarise: {t} | Summarise this: {t} | Please summarise this text: {t} | Make this shorter: {t} | In one short sentence: {t} | What is the main point? {t}",
            t=text,
        ),
        facts.capitalised(short.format(**values)),
    ]
    if rng.random() < 0.3:
        turns += [one(rng, "Who is it about? | Who was it about?"), f"It is about {n}."]
    return talk("everyday", *turns)


def running_sum(rng: random.Random) -> Chat:
    """A sum, then more and less of it."""
    total, turns = rng.randint(1, 14), [""]
    first = True
    for _ in range(rng.choice((2, 3, 3))):
        sign = "+" if first or rng.random() < 0.5 else "-"
        step = rng.randint(1, 9)
        if arithmetic.is_held_out(total, step, sign) or (sign == "-" and step > total):
            continue
        result = total + step if sign == "+" else total - step
        if first:
            turns = [
                one(
                    rng, "What is {a} + {b}? | {a} + {b}? | Add {a} and {b}. | What is {a} plus {b}?", a=str(total), b=str(step)
                )
            ]
        elif sign == "+":
            turns.append(one(rng, "And {b} more? | Add {b} to that. | Plus {b}? | Now add {b}. | And plus {b}?", b=str(step)))
        else:
            turns.append(
                one(rng, "And minus {b}? | Take {b} away. | Minus {b}? | Now take away {b}. | And {b} less?", b=str(step))
            )
        turns.append(f"{total} {sign} {step} = {result}.")
        total, first = result, False
    if first:
        return running_sum(rng)
    return talk("everyday", *turns, *_closing(rng))


_GROUPS = {
    "fruits": "apples pears bananas cherries grapes lemons oranges peaches plums", "vegetables": "carrots potatoes onions beans peas cabbage spinach", "animals": "dogs cats horses cows lions bears foxes wolves",
    "colours": "red blue green yellow black white purple orange", "birds": "eagles owls sparrows crows swans ducks", "drinks": "water tea coffee milk juice lemonade", "sports": "football tennis swimming running cycling hockey",
    "flowers": "roses tulips daisies lilies sunflowers", "countries": "France Italy Spain Japan Brazil Egypt Canada India", "cities": "Paris Rome Berlin London Tokyo Madrid Oslo", "instruments": "pianos violins flutes drums guitars trumpets",
}  # fmt: skip


def members(rng: random.Random) -> Chat:
    """Some of a kind, and then another one."""
    kind = rng.choice(list(_GROUPS))
    count = rng.choice((2, 3, 3))
    *chosen, new = rng.sample(_GROUPS[kind].split(), count + 1)
    number = ("two", "three")[count - 2]
    turns = [
        one(
            rng,
            "Name {n} {k}. | Give me {n} {k}. | Give me a list of {n} {k}. | Tell me {n} {k}. | Can you name {n} {k}? | I need {n} {k}.",
            n=number,
            k=kind,
        ),
        facts.capitalised(", ".join(chosen[:-1]) + f" and {chosen[-1]}."),
    ]
    if rng.random() < 0.7:
        turns += [
            one(rng, "Another one. | One more. | Add another one. | And one more, please. | Do you know another one?"),
            facts.capitalised(rng.choice((f"{new}.", f"{', '.join(chosen)} and {new}."))),
        ]
    return talk("everyday", *turns, *_closing(rng))


_WORDS = {
    "French": "hello = bonjour; goodbye = au revoir; thank you = merci; please = s'il vous plait; yes = oui; no = non; water = eau; bread = pain; friend = ami; house = maison; cat = chat; dog = chien; good night = bonne nuit",
    "German": "hello = hallo; goodbye = auf Wiedersehen; thank you = danke; please = bitte; yes = ja; no = nein; water = Wasser; bread = Brot; friend = Freund; house = Haus; cat = Katze; dog = Hund; good night = gute Nacht",
    "Spanish": "hello = hola; goodbye = adios; thank you = gracias; please = por favor; yes = si; no = no; water = agua; bread = pan; friend = amigo; house = casa; cat = gato; dog = perro; good night = buenas noches",
    "Italian": "hello = ciao; goodbye = arrivederci; thank you = grazie; please = per favore; yes = si; no = no; water = acqua; bread = pane; friend = amico; house = casa; cat = gatto; dog = cane; good night = buona notte",
}  # fmt: skip
TRANSLATIONS = {
    language: {word.strip(): other.strip() for word, _, other in (pair.partition("=") for pair in words.split(";"))}
    for language, words in _WORDS.items()
}


def translation(rng: random.Random) -> Chat:
    """A word in another language, and then in one more."""
    language, other = rng.sample(list(TRANSLATIONS), 2)
    word, second = rng.sample(list(TRANSLATIONS[language]), 2)
    turns = [
        one(
            rng,
            'Translate "{w}" into {l}. | How do you say {w} in {l}? | What is {w} in {l}? | What is the {l} word for {w}? | Translate {w} to {l}.',
            w=word,
            l=language,
        ),
        one(rng, '"{w}" in {l} is "{v}". | In {l}, you say "{v}".', w=word, l=language, v=TRANSLATIONS[language][word]),
    ]
    if rng.random() < 0.5:
        turns += [one(rng, "And in {l}? | What about {l}?", l=other), f'In {other}, you say "{TRANSLATIONS[other][word]}".']
    elif rng.random() < 0.5:
        turns += [one(rng, 'And {w}? | And "{w}"?', w=second), f'In {language}, you say "{TRANSLATIONS[language][second]}".']
    return talk("everyday", *turns, *_closing(rng))


_MAKERS: tuple[tuple[Callable[[random.Random], Chat], float], ...] = (
    (thing, 0.16), (pet, 0.14), (hobby, 0.14), (worry, 0.13), (meal, 0.1), (summary, 0.08), (running_sum, 0.1), (members, 0.07), (translation, 0.08),
)  # fmt: skip


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """`count` conversations."""
    makers, weights = zip(*_MAKERS, strict=True)
    for _ in range(count):
        yield rng.choices(makers, weights)[0](rng)
