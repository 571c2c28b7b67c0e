"""What users tell about themselves, and how it is asked for later."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.data import facts, topics
from training.data.made_up import made_up_word

_NAMES = (
    "Adam Agnes Alan Albert Alfred Alina Amelia Andrea Anita Anton Arthur Astrid Aaron Barbara Beatrice Bernard Bianca Boris Brian Bruno Camilla Carl Cecilia Charlotte Chloe Chris Claire Colin "
    "Conrad Cora Daniel Daphne Dennis Dominic Donna Doris Edgar Edith Edward Eliza Ella Elsa Emil Emily Enzo Erica Esther Eva Evan Fiona Flora Florian Frida Gabriel Gina Gloria Gordon Gustav "
    "Hannah Harald Harry Hector Helga Henry Hilda Holly Ian Ingrid Irene Isaac Isabel Jacob James Jana Janet Jasmin Jasper Jenny Joan Joel John Jordan Joseph Judith Karen Kevin Klara Lars Lea Lena "
    "Leonard Liam Lily Linda Lisa Louis Louise Lukas Lydia Magnus Marco Margaret Mark Martha Martin Mateo Matilda Max Melissa Michael Milo Miriam Monica Nadia Nathan Nicole Nora Olivia Omar Otto "
    "Pablo Patricia Pedro Philip Phoebe Rachel Rafael Ralph Rebecca Rita Robert Robin Roger Roland Ronja Sandra Sara Sebastian Silvia Sofia Stella Stefan Susan Sven Tamara Teresa Theo Thomas Timo "
    "Toby Tobias Ursula Valentin Vanessa Viktor Viola Walter Werner Wilma Xenia Yara Yvonne Zara"
).split()
_COLOURS = "red blue green yellow purple orange pink black white brown grey turquoise".split()
_CITIES = tuple(city for _, city in facts.RELATIONS["capital"].rows)
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = "January February March April May June July August September October November December".split()
_FOODS = (
    "milk eggs bread butter cheese apples pears bananas tea sugar rice beans salt flour lemons onions potatoes carrots honey jam pasta soap paper candles yogurt tomatoes nuts grapes coffee oil pepper"
).split()
_FAVOURITES = {
    "food": "pizza | pasta | soup | rice | curry | pancakes | salad | sushi | potatoes | fish", "animal": "the cat | the dog | the horse | the owl | the dolphin | the fox | the elephant | the penguin",
    "season": "spring | summer | autumn | winter", "drink": "tea | coffee | juice | milk | water | lemonade", "sport": "football | tennis | swimming | running | cycling | hockey | chess",
    "subject at school": "history | maths | music | art | biology | English | sport", "fruit": "the apple | the pear | the cherry | the mango | the peach | the melon", "number": "3 | 7 | 8 | 11 | 13 | 21 | 42 | 99",
    "instrument": "the piano | the violin | the guitar | the flute | the drum", "day of the week": " | ".join(_DAYS), "flower": "the rose | the tulip | the lily | the sunflower", "book": "Dracula | Peter Pan | Hamlet | Moby Dick | Emma | Pinocchio",
}  # fmt: skip
_PETS = "dog cat horse rabbit parrot hamster goldfish turtle pony".split()
_PEOPLE = "brother sister mother father son daughter teacher boss neighbour best friend cousin aunt uncle doctor".replace(
    "best friend", "best_friend"
).split()
_THINGS = "keys glasses phone wallet book umbrella passport tickets gloves camera notebook".split()
_SPOTS = (
    "on the kitchen table | in the blue box | under the bed | in my coat | behind the door | on the top shelf | in the car | next to the lamp | in the garden shed | in the second drawer | under the red pillow | on the window sill"
).split(" | ")


def one(rng: random.Random, forms: str, **values: str) -> str:
    """One of the forms between bars, filled in, with a capital letter."""
    return facts.capitalised(rng.choice(forms.split(" | ")).format(**values))


def name_of(rng: random.Random) -> str:
    """A first name; now and then one that nobody has, so that it has to be copied."""
    return made_up_word(rng).capitalize() if rng.random() < 0.25 else rng.choice(_NAMES)


@dataclass(frozen=True)
class Memory:
    """Something the user tells about themselves: as it is told, the reply, the later question, its answer, the same for a summary."""

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
        one(rng, "My name is {v}. | I'm {v}. | Hi, I'm {v}. | Hello! My name is {v}. | Hi! My name is {v}. | Hello, I am {v}. | Good morning, I am {v}. | Hey, I'm {v}! | My friends call me {v}. | You can call me {v}. | "
            "I am {v}, nice to meet you. | Hi there! I'm {v}. | Good evening. My name is {v}. | {v} is my name. | Hello, my name's {v}. | Hi! I am called {v}.", v=v),
        one(rng, "Nice to meet you, {v}! | Hello, {v}! How can I help you? | Hi {v}! It is nice to meet you. | Hello {v}! What can I do for you? | Nice to meet you, {v}! What would you like to talk about? | Hi, {v}! How are you today?", v=v),
        one(rng, "What is my name? | Do you remember my name? | What's my name? | And what's my name? | Who am I? | What did I say my name was? | Can you tell me my name? | Do you still know my name? | Now tell me my name. | And my name? | "
            "What am I called? | Do you know who I am? | By the way, what is my name? | So, what is my name?"),
        one(rng, "Your name is {v}. | You are {v}. | You told me that your name is {v}. | Your name is {v}! | You are called {v}.", v=v),
        f"your name is {v}",
    )  # fmt: skip


def _favourite(rng: random.Random) -> Memory:
    k = rng.choice(["colour", *_FAVOURITES])
    v = rng.choice(_COLOURS if k == "colour" else _FAVOURITES[k].split(" | "))
    return Memory(
        f"favourite {k}",
        one(rng, "My favourite {k} is {v}. | I think my favourite {k} is {v}. | Of all, {v} is my favourite {k}. | You should know that my favourite {k} is {v}.", k=k, v=v),
        one(rng, "{v}? That is a good choice! | Nice! Why do you like {v}? | Good choice! Many people like {v}. | How nice! I will remember that. | I see, you like {v}.", v=v),
        one(rng, "What is my favourite {k}? | Do you remember my favourite {k}? | Which {k} do I like best? | What did I say about my favourite {k}? | And my favourite {k}?", k=k),
        one(rng, "Your favourite {k} is {v}. | You told me that your favourite {k} is {v}. | It is {v}. | {v} is your favourite {k}.", k=k, v=v),
        f"your favourite {k} is {v}",
    )  # fmt: skip


def _home(rng: random.Random) -> Memory:
    v = rng.choice(_CITIES) if rng.random() < 0.8 else made_up_word(rng).capitalize()
    return Memory(
        "home",
        one(rng, "I live in {v}. | My home is in {v}. | I have a small flat in {v}. | I moved to {v} last year. | We live in {v} now.", v=v),
        one(rng, "{v} sounds like a nice place! | How do you like it in {v}? | I see, you live in {v}. | Nice! What is it like in {v}?", v=v),
        one(rng, "Where do I live? | Do you remember where I live? | In which place do I live? | Which city do I live in? | Where is my home?"),
        one(rng, "You live in {v}. | You told me that you live in {v}. | Your home is in {v}.", v=v),
        f"you live in {v}",
    )  # fmt: skip


def _pet(rng: random.Random) -> Memory:
    k, v = rng.choice(_PETS), name_of(rng)
    return Memory(
        f"{k}'s name",
        one(rng, "I have a {k} named {v}. | My {k} is called {v}. | My {k}'s name is {v}. | We have a {k}. It is called {v}. | I just got a {k}, and its name is {v}.", k=k, v=v),
        one(rng, "{v} is a good name for a {k}! | How nice! I hope {v} is well. | What a lovely name! How old is {v}? | Hello to {v}! | How lovely! What does {v} like to do?", k=k, v=v),
        one(rng, "What is the name of my {k}? | What is my {k} called? | Do you remember my {k}'s name? | And what is my {k}'s name?", k=k),
        one(rng, "Your {k} is called {v}. | The name of your {k} is {v}. | Your {k}'s name is {v}.", k=k, v=v),
        f"your {k} is called {v}",
    )  # fmt: skip


def _person(rng: random.Random) -> Memory:
    k, v = rng.choice(_PEOPLE).replace("_", " "), name_of(rng)
    return Memory(
        f"{k}'s name",
        one(rng, "My {k} is called {v}. | My {k}'s name is {v}. | I have to call my {k} {v}. | My {k} {v} is visiting me today. | I am going out with {v}, my {k}.", k=k, v=v),
        one(rng, "How nice! Say hello to {v} from me. | {v} is a nice name. | I see, your {k} is called {v}. | I hope {v} is well.", k=k, v=v),
        one(rng, "What is the name of my {k}? | What is my {k} called? | Do you remember the name of my {k}? | Who is my {k}?", k=k),
        one(rng, "Your {k} is called {v}. | The name of your {k} is {v}. | Your {k}'s name is {v}.", k=k, v=v),
        f"your {k} is called {v}",
    )  # fmt: skip


def _age(rng: random.Random) -> Memory:
    v = str(rng.randint(7, 90))
    return Memory(
        "age",
        one(rng, "I am {v} years old. | I turned {v} this year. | I'm {v} years old. | Last week I turned {v}.", v=v),
        one(rng, "{v} is a good age! | I see, you are {v} years old. | Thank you for telling me. | {v}! I hope you had a nice birthday.", v=v),
        one(rng, "How old am I? | Do you remember how old I am? | What is my age? | And how old am I?"),
        one(rng, "You are {v} years old. | You told me that you are {v} years old. | You are {v}.", v=v),
        f"you are {v} years old",
    )  # fmt: skip


def _work(rng: random.Random) -> Memory:
    v = rng.choice(topics.JOBS)
    return Memory(
        "job",
        one(rng, "I work as {v}. | I am {v}. | My job? I am {v}. | I have worked as {v} for years. | I want to tell you that I am {v}.", v=v),
        one(rng, "That is an interesting job! | How nice! Do you like being {v}? | I see, you are {v}. | Being {v} must be interesting. What do you like about it?", v=v),
        one(rng, "What is my job? | What do I do for work? | Do you remember my job? | And what do I work as?"),
        one(rng, "You are {v}. | You told me that you are {v}. | You work as {v}.", v=v),
        f"you work as {v}",
    )  # fmt: skip


def _where(rng: random.Random) -> Memory:
    k, place = rng.choice(_THINGS), rng.choice(_SPOTS)
    v, verb = place.replace("my ", "your "), "are" if k.endswith("s") and k != "glass" else "is"
    put = "them" if verb == "are" else "it"
    return Memory(
        k,
        one(rng, "I put my {k} {p}. | My {k} {b} {p}. | Please remember that my {k} {b} {p}. | I left my {k} {p}.", k=k, p=place, b=verb),
        one(rng, "All right, your {k} {b} {v}. | I will remember that. | Okay! Your {k} {b} {v}. | Good to know.", k=k, v=v, b=verb),
        one(rng, "Where {b} my {k}? | Where did I put my {k}? | Do you remember where my {k} {b}? | I cannot find my {k}. Where {b} {i}?", k=k, b=verb, i="they" if verb == "are" else "it"),
        one(rng, "Your {k} {b} {v}. | You put {m} {v}. | You told me that your {k} {b} {v}.", k=k, v=v, b=verb, m=put),
        f"your {k} {verb} {v}",
    )  # fmt: skip


def _appointment(rng: random.Random) -> Memory:
    k = rng.choice(
        (
            "meeting",
            "exam",
            "party",
            "concert",
            "appointment with the dentist",
            "flight",
            "piano lesson",
            "dinner with Anna",
            "wedding",
            "job interview",
            "picnic",
        )
    )
    v = (
        f"on {rng.choice(_DAYS)}" + (f" at {rng.randint(1, 12)}" if rng.random() < 0.5 else "")
        if rng.random() < 0.6
        else f"on {rng.randint(1, 28)} {rng.choice(_MONTHS)}"
    )
    return Memory(
        k,
        one(rng, "My {k} is {v}. | Please remember: my {k} is {v}. | I have to tell you that my {k} is {v}.", k=k, v=v),
        one(rng, "All right: your {k} is {v}. | I will remember that. Good luck! | Okay, {v}. I hope it goes well.", k=k, v=v),
        one(rng, "When is my {k}? | Do you remember when my {k} is? | And when is my {k}? | On which day is my {k}?", k=k),
        one(rng, "Your {k} is {v}. | It is {v}. | You told me that your {k} is {v}.", k=k, v=v),
        f"your {k} is {v}",
    )  # fmt: skip


def _secret(rng: random.Random) -> Memory:
    k = rng.choice(("secret word", "code", "password of the game", "number of my room", "number of my house"))
    v = made_up_word(rng) if k in ("secret word", "password of the game") else str(rng.randint(21, 9999))
    your = f"the {k}".replace("my ", "your ")
    return Memory(
        k,
        one(rng, "The {k} is {v}. | Remember this: the {k} is {v}. | Let's say that the {k} is {v}. | Please note that the {k} is {v}.", k=k, v=v),
        one(rng, "All right, {y} is {v}. | I will remember it: {v}. | Okay, {v}. | Good, I noted {v}.", y=your, v=v),
        one(rng, "What is the {k}? | Do you remember the {k}? | What was the {k}? | Tell me the {k}, please.", k=k),
        facts.capitalised(one(rng, "{y} is {v}. | It is {v}. | You said that {y} is {v}.", y=your, v=v)),
        f"{your} is {v}",
    )  # fmt: skip


def _shopping(rng: random.Random) -> Memory:
    *rest, last = rng.sample(_FOODS, rng.choice((2, 3, 3, 4)))
    v = ", ".join(rest) + " and " + last
    return Memory(
        "shopping list",
        one(rng, "I want to buy {v}. | Please remember my shopping list: {v}. | My shopping list: {v}. | I need {v} from the shop. | We need {v}.", v=v),
        one(rng, "All right: {v}. | I will remember: {v}. | Okay, {v}. | Got it: {v}.", v=v),
        one(rng, "What is on my list? | What did I want to buy? | What do I need from the shop? | Can you repeat my list? | Read me my list, please."),
        one(rng, "You need {v}. | On your list: {v}. | You wanted to buy {v}. | Your list: {v}.", v=v),
        f"you want to buy {v}",
    )  # fmt: skip


MEMORIES: tuple[tuple[Callable[[random.Random], Memory], float], ...] = (
    (_name, 4), (_favourite, 2), (_home, 1), (_pet, 1.5), (_person, 1.5), (_age, 1), (_work, 1), (_where, 1.5), (_appointment, 1), (_secret, 1.5), (_shopping, 1.2),
)  # fmt: skip
