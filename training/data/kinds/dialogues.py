"""Conversations that keep a thread: the model remembers what the user told it, and later turns build on earlier ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from training.data.chats import Chat, talk
from training.data.kinds import arithmetic, facts, handwritten, smalltalk
from training.data.material import knowledge, letters
from training.data.material.memories import MEMORIES, Memory
from training.data.material.simple_definitions import ADJECTIVES, GLOSSES
from training.data.material.table import Table, capitalised, phrase

_TABLE = Table("dialogues")


def _between(rng: random.Random) -> list[str]:
    """Return a question about something else and its answer."""
    chance = rng.random()
    if chance < 0.35:
        relation = rng.choice(list(facts.RELATIONS.values()))
        subject, value = rng.choice(relation.rows)
        return [facts.ask_about(relation, subject, rng), facts.answer_about(relation, subject, value, rng)]
    if chance < 0.6:
        asks, answers = rng.choice(handwritten.WORLD if rng.random() < 0.7 else handwritten.ADVICE)
        return [rng.choice(asks), rng.choice(answers)]
    if chance < 0.75:
        return list(_about_animal(rng, rng.choice(knowledge.ANIMALS), named=True))
    if chance < 0.85:
        return _sum(rng)
    group = rng.choice((smalltalk.TALK["joke"], smalltalk.TALK["fact"], smalltalk.IDENTITY["who"], smalltalk.IDENTITY["can"]))
    return [rng.choice(group[0]), rng.choice(group[1])]


def _sum(rng: random.Random) -> list[str]:
    while True:
        a, b = rng.randint(1, 12), rng.randint(1, 8)
        if not arithmetic.is_held_out(a, b, "+"):
            return [_TABLE.say(rng, "what_is", a=str(a), b=str(b)), f"{a} + {b} = {a + b}."]


def _closing(rng: random.Random, chance: float) -> list[str]:
    """With probability `chance`, return thanks, a goodbye, or both."""
    if rng.random() > chance:
        return []
    kind = rng.randrange(3)
    if kind < 2:
        asks, answers = smalltalk.TALK["thanks" if kind else rng.choice(("bye", "bye", "night"))]
        return [rng.choice(asks), rng.choice(answers)]
    return [_TABLE.say(rng, "thank_you_bye"), _TABLE.say(rng, "youre_welcome_goodbye")]


def remember(rng: random.Random) -> Chat:
    """Make a chat in which the user tells one to three things, changes the subject, then asks for them again."""
    makers, weights = zip(*MEMORIES, strict=True)
    memories: dict[str, Memory] = {}
    for _ in range(rng.choices((1, 2, 3), (0.55, 0.3, 0.15))[0]):
        memory = rng.choices(makers, weights)[0](rng)
        memories.setdefault(memory.topic, memory)
    turns: list[str] = []
    known = list(memories.values())
    for index, memory in enumerate(known):
        turns += [memory.told, memory.reply]
        if rng.random() < 0.06:  # the user makes a correction, and the last statement counts
            for maker in makers:
                corrected = maker(rng)
                if corrected.topic == memory.topic == "name":
                    known[index] = memories["name"] = corrected
                    name = corrected.summary.removeprefix("your name is ")
                    turns += [_TABLE.say(rng, "sorry_my_name_is", v=name), _TABLE.say(rng, "all_right_name", v=name)]
        for _ in range(rng.choices((0, 1, 2), (0.45, 0.4, 0.15))[0]):
            turns += _between(rng)
    if rng.random() < 0.12:
        turns += [_TABLE.say(rng, "what_do_you_know"), capitalised(" and ".join(memory.summary for memory in known[:3]) + ".")]
    else:
        rng.shuffle(known)
        for memory in known[: rng.choice((1, 2, 3))]:
            turns += [memory.asked, memory.answered]
    if rng.random() < 0.12:
        untold = rng.choices(makers, weights)[0](rng)
        if untold.topic not in memories and untold.topic in ("name", "home", "age", "job"):
            turns += [untold.asked, _TABLE.say(rng, "you_have_not_told")]
    return talk("dialogues", *turns, *_closing(rng, 0.2))


def _about_animal(rng: random.Random, animal: knowledge.Animal, *, named: bool) -> tuple[str, str]:
    """Return a question about an animal, called by its name or "it", and the answer."""
    a = capitalised(f"a {animal.name}")
    a = a[0].lower() + a[1:]
    s, S = (a, capitalised(a)) if named else ("it", "It")
    kind = rng.randrange(5 if not named else 4)
    if kind == 0:
        return _TABLE.say(rng, "where_does_live", s=s), f"{S} lives {animal.home}."
    if kind == 1:
        return _TABLE.say(rng, "what_does_eat", s=s), f"{S} eats {animal.food}."
    if kind == 2:
        guess = rng.choice(("a fish", "a bird", "an insect", "a mammal", "a reptile"))
        answer = f"Yes, {s} is {animal.kind}." if guess == animal.kind else f"No, {s} is {animal.kind}."
        return _TABLE.say(rng, "is_it_a", s=s, o=guess), answer
    if kind == 3:
        return _TABLE.say(rng, "what_kind_of_animal", s=s), f"{S} is {animal.kind}."
    return _TABLE.say(rng, "tell_me_more"), animal.fact


def described(animal: knowledge.Animal) -> str:
    """Return what kind of animal it is and where it lives."""
    return f"{animal.kind} that lives {animal.home}" if "with" not in animal.kind else animal.kind


def animal(rng: random.Random) -> Chat:
    """Make a chat with several questions about one animal, or about its kind as "they"."""
    subject = rng.choice(knowledge.ANIMALS)
    a = "an" if subject.name[0] in "aeio" else "a"
    gloss = GLOSSES.get(subject.name)
    asked: dict[str, str] = {}
    if rng.random() < 0.3:
        s = subject
        forms = {
            _TABLE.say(rng, "where_do_they_live"): f"They live {s.home}.",
            _TABLE.say(rng, "what_do_they_eat"): f"They eat {s.food}.",
        }
        opening = [
            _TABLE.say(rng, "tell_me_about_them", p=s.plural),
            f"{capitalised(s.plural)} live {s.home} and eat {s.food}.",
        ]
        forms = dict(list(forms.items())[: rng.choice((1, 2))])
        return talk("dialogues", *opening, *(turn for pair in forms.items() for turn in pair), *_closing(rng, 0.3))
    opening = [
        _TABLE.say(rng, "what_is_animal", a=a, n=subject.name),
        capitalised(f"{a} {subject.name} is {gloss or described(subject)}."),
    ]
    for _ in range(rng.choice((1, 2, 2, 3))):
        question, answer = _about_animal(rng, subject, named=False)
        if answer not in asked.values():
            asked[question] = answer
    if rng.random() < 0.25:
        second = rng.choice([animal for animal in knowledge.ANIMALS if animal is not subject])
        asked[_TABLE.say(rng, "and_another_animal", a="an" if second.name[0] in "aeio" else "a", n=second.name)] = capitalised(
            f"a {second.name} is {GLOSSES.get(second.name) or described(second)}."
        )
    return talk("dialogues", *opening, *(turn for pair in asked.items() for turn in pair), *_closing(rng, 0.25))


def topic(rng: random.Random) -> Chat:
    """Make a chat about a topic, with questions and sometimes a return to it after a digression."""
    subject = rng.choice(knowledge.TOPICS)
    what = "What are" if subject.name == "the stars" else "What is"
    opening = _TABLE.say(rng, "tell_me_about_topic", t=subject.name, w=what)
    turns = [opening, subject.opening]
    asked = rng.sample(subject.questions, min(len(subject.questions), rng.choice((1, 2, 2, 3))))
    for index, (question, answer) in enumerate(asked):
        if index and rng.random() < 0.12:
            turns += [
                *_between(rng),
                _TABLE.say(rng, "back_to_topic", t=subject.name, q=question[0].lower() + question[1:]),
                answer,
            ]
        else:
            turns += [question, answer]
    if rng.random() < 0.1:
        turns += [_TABLE.say(rng, "what_were_we_talking"), f"We were talking about {subject.name}."]
    return talk("dialogues", *turns, *_closing(rng, 0.3))


def jokes(rng: random.Random) -> Chat:
    """Make a chat with a joke or riddle, another one, and laughter."""
    asks, told = smalltalk.TALK[rng.choice(("joke", "joke", "riddle", "fact"))]
    begin, count = rng.randrange(len(told)), rng.choice((2, 2, 3))
    chosen = [told[(begin + step) % len(told)] for step in range(count)]  # always in table order, so that no joke comes twice
    turns = [rng.choice(asks), chosen[0]]
    for text in chosen[1:]:
        turns += [_TABLE.say(rng, "another_one_please"), text]
    if rng.random() < 0.7:
        turns += [_TABLE.say(rng, "haha_that_was_good"), _TABLE.say(rng, "im_glad_you_liked")]
    return talk("dialogues", *turns, *_closing(rng, 0.25))


def feelings(rng: random.Random) -> Chat:
    """Make a chat about how the user feels and why, with a reply and thanks."""
    is_sad = rng.random() < 0.6
    cause = rng.choice(_TABLE["causes" if is_sad else "reasons"])
    turns = [
        _TABLE.say(rng, "sad" if is_sad else "glad"),
        _TABLE.say(rng, "why_sad" if is_sad else "why_glad"),
        phrase(rng, cause["says"]),
        phrase(rng, cause["replies"]),
    ]
    if rng.random() < 0.2:
        turns = [f"{turns[0]} {turns[2]}", turns[3]]
    if rng.random() < 0.65:
        turns += [
            _TABLE.say(rng, "thanks_for_listening" if is_sad else "thank_you"),
            _TABLE.say(rng, "youre_welcome_i_hope" if is_sad else "youre_welcome"),
        ]
    return talk("dialogues", *turns, *_closing(rng, 0.15))


_OPPOSITES = dict(facts.RELATIONS["opposite"].rows)


def words(rng: random.Random) -> Chat:
    """Make a chat about a word's meaning, a sentence with it, its opposite and its spelling."""
    word, examples = rng.choice(list(_TABLE["examples"].items()))
    turns = [_TABLE.say(rng, "what_does_word_mean", w=word), _TABLE.say(rng, "it_means", w=word, g=GLOSSES[word])]
    kinds = ["sentence", "spell", "another"] + (["opposite"] * 2 if word in _OPPOSITES else [])
    for kind in dict.fromkeys(rng.sample(kinds, rng.choice((1, 2, 3)))):
        if kind == "sentence":
            turns += [_TABLE.say(rng, "use_it_in_a"), rng.choice(examples)]
        elif kind == "opposite":
            turns += [
                _TABLE.say(rng, "what_is_the_opposite"),
                _TABLE.say(rng, "the_opposite_of_is", w=word, o=_OPPOSITES[word]),
            ]
        elif kind == "spell":
            turns += [_TABLE.say(rng, "how_do_you_spell"), "-".join(word.upper()) + "."]
        else:
            second_word = rng.choice(sorted(ADJECTIVES - {word}))
            turns += [
                _TABLE.say(rng, "and_another_word", o=second_word),
                f"{second_word.capitalize()} means {GLOSSES[second_word]}.",
            ]
            word = second_word
            if word not in _OPPOSITES or "sentence" in kinds:
                break
    return talk("dialogues", *turns, *_closing(rng, 0.25))


def greeting(rng: random.Random) -> Chat:
    """Make a chat with a greeting, how both are, and a question."""
    turns: list[str] = []
    if rng.random() < 0.4:
        asks, answers = smalltalk.TALK["hello"]
        turns += [rng.choice(asks), rng.choice(answers)]
    asks, answers = smalltalk.TALK["how are you"]
    turns += [rng.choice(asks), rng.choice(answers)]
    well = _TABLE.say(rng, "i_am_fine_too")
    if rng.random() < 0.5:
        question, answer = rng.choice((_sum, _between, _can))(rng)[:2]
        turns += [f"{well} {question}", answer]
    else:
        turns += [well, _TABLE.say(rng, "im_glad_to_hear"), *rng.choice((_can, _between))(rng)[:2]]
    if rng.random() < 0.4:
        turns += _sum(rng) if rng.random() < 0.4 else _between(rng)
    return talk("dialogues", *turns, *_closing(rng, 0.35))


def _can(rng: random.Random) -> list[str]:
    asks, answers = smalltalk.IDENTITY["can"]
    return [rng.choice(asks), rng.choice(answers)]


def letter(rng: random.Random) -> Chat:
    """Make a chat in which a letter is written over several turns."""
    return talk("dialogues", *letters.thread(rng), *_closing(rng, 0.2))


_PERSONS = {
    work: (maker, done)
    for table, done in (("author", "wrote"), ("artist", "painted"), ("composer", "composed"), ("inventor", "invented"))
    for work, maker in facts.RELATIONS[table].rows
}
_WOMEN = frozenset(_TABLE["women"])
_PROFESSIONS = dict(facts.RELATIONS["profession"].rows)


def person(rng: random.Random) -> Chat:
    """Make a chat about a person's work, what else they made, and who they were."""
    work, (maker, done) = rng.choice(list(_PERSONS.items()))
    turns = [_TABLE.say(rng, "who_made", d=done, w=work), f"{maker} {done} {work}."]
    base = {"wrote": "write", "painted": "paint", "composed": "compose", "invented": "invent"}[done]
    others = [title for title, made_by in _PERSONS.items() if made_by == (maker, done) and title != work]
    follow: list[tuple[str, str]] = []
    if others:
        whom = rng.choice((maker, "she" if maker in _WOMEN else "he"))
        follow.append((f"What else did {whom} {base}?", f"{maker} also {done} {rng.choice(others)}."))
    if maker in _PROFESSIONS:
        follow.append((_TABLE.say(rng, "who_was_that", m=maker), f"{maker} was {_PROFESSIONS[maker]}."))
    if rng.random() < 0.3:
        turns += [_TABLE.say(rng, "what_did_you_say", d=done), f"It was {maker}."]
    another = rng.choice([title for title in _PERSONS if title != work])
    follow.append((f"And who {_PERSONS[another][1]} {another}?", f"{_PERSONS[another][0]} {_PERSONS[another][1]} {another}."))
    for pair in rng.sample(follow, min(len(follow), rng.choice((1, 2)))):
        turns += pair
    return talk("dialogues", *turns, *_closing(rng, 0.2))


def quiz(rng: random.Random) -> Chat:
    """Make a chat in which the model asks and says whether the user's answer is right."""
    turns = [_TABLE.say(rng, "ask_me_a_question")]
    tables = ("capital", "opposite", "plural", "young animal", "language", "continent", "past tense")
    for number in range(rng.choice((1, 2, 2, 3))):
        relation = facts.RELATIONS[rng.choice(tables)]
        (subject, value), (_, wrong) = rng.sample(relation.rows, 2)
        turns.append(("" if number else _TABLE.say(rng, "gladly") + " ") + capitalised(relation.asks[0].format(s=subject)))
        is_right = rng.random() < 0.6 or wrong == value
        said = value if is_right else wrong
        turns.append(_TABLE.say(rng, "guess", v=said))
        full = capitalised(
            next(form for form in relation.answers if "{s}" in form and "{v}" in form).format(s=subject, v=value)
        )
        if is_right:
            turns.append(_TABLE.say(rng, "that_is_right") + " " + full)
        else:
            turns.append(_TABLE.say(rng, "not_quite") + " " + full)
        turns.append(_TABLE.say(rng, "another_question_please"))
    return talk("dialogues", *turns[:-1])


def in_words(rng: random.Random) -> Chat:
    """Make a chat that repeats the last answer in a given number of words."""
    beast = rng.choice(knowledge.ANIMALS)
    named = capitalised(f"a {beast.name}")
    shown = named[0].lower() + named[1:]
    short = rng.choice((f"{named} is {beast.kind}.", f"{named} lives {beast.home}.", f"{named} eats {beast.food}."))
    if rng.random() < 0.4:
        subject = rng.choice([topic for topic in knowledge.TOPICS if ". " in topic.opening])
        shown, short = subject.name, subject.opening.split(". ")[0].rstrip(".") + "."
        long = subject.opening
    else:
        long = (
            f"{named} is {beast.kind} that lives {beast.home}."
            if "with" not in beast.kind
            else f"{named} is {beast.kind}. {beast.fact}"
        )
    count = len(short.split())
    if count >= len(_TABLE["numbers"]):
        return in_words(rng)
    turns = [_TABLE.say(rng, "describe", s=shown), long]
    turns += [_TABLE.say(rng, "say_it_in_words", n=_TABLE["numbers"][count]), short]
    return talk("dialogues", *turns)


_MAKERS: tuple[tuple[Callable[[random.Random], Chat], float], ...] = (
    (remember, 0.32),
    (animal, 0.12),
    (topic, 0.15),
    (jokes, 0.05),
    (feelings, 0.08),
    (words, 0.06),
    (greeting, 0.07),
    (letter, 0.07),
    (person, 0.04),
    (quiz, 0.04),
    (in_words, 0.04),
)


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield `count` conversations."""
    makers, weights = zip(*_MAKERS, strict=True)
    for _ in range(count):
        yield rng.choices(makers, weights)[0](rng)
