"""Conversations that keep a thread over several turns: what the user told is remembered, and later turns build upon earlier ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from training.data import arithmetic, facts, handwritten, knowledge, letters, smalltalk
from training.data.chats import Chat, talk
from training.data.memories import MEMORIES, Memory, one
from training.data.simple_definitions import ADJECTIVES, GLOSSES


def _between(rng: random.Random) -> list[str]:
    """A question and its answer about something else."""
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
            return [
                one(
                    rng,
                    "What is {a} + {b}? | Add {a} and {b}. | What is {a} plus {b}? | Then add {a} and {b}.",
                    a=str(a),
                    b=str(b),
                ),
                f"{a} + {b} = {a + b}.",
            ]


def _closing(rng: random.Random, chance: float) -> list[str]:
    """Thanks, a goodbye, or both in one, now and then."""
    if rng.random() > chance:
        return []
    kind = rng.randrange(3)
    if kind < 2:
        asks, answers = smalltalk.TALK["thanks" if kind else rng.choice(("bye", "bye", "night"))]
        return [rng.choice(asks), rng.choice(answers)]
    return [
        one(rng, "Thank you, bye! | Thanks, goodbye! | Thank you and goodbye. | Thanks for your help, bye! | Thanks! See you later. | Thank you very much, good night! | Okay, thanks. Bye!"),
        one(rng, "You're welcome! Goodbye. | You're welcome! Have a nice day. | My pleasure. Goodbye! | Happy to help. See you soon! | You are welcome. Take care!"),
    ]  # fmt: skip


def remember(rng: random.Random) -> Chat:
    """One to three things are told, other things are asked, and then the user wants to know them again."""
    makers, weights = zip(*MEMORIES, strict=True)
    memories: dict[str, Memory] = {}
    for _ in range(rng.choices((1, 2, 3), (0.55, 0.3, 0.15))[0]):
        memory = rng.choices(makers, weights)[0](rng)
        memories.setdefault(memory.topic, memory)
    turns: list[str] = []
    known = list(memories.values())
    for index, memory in enumerate(known):
        turns += [memory.told, memory.reply]
        if rng.random() < 0.06:  # the user was wrong: what was said last counts
            for maker in makers:
                corrected = maker(rng)
                if corrected.topic == memory.topic == "name":
                    known[index] = memories["name"] = corrected
                    name = corrected.summary.removeprefix("your name is ")
                    turns += [
                        one(rng, "Sorry, my name is {v}. | No, I am {v}. | I was joking. My name is {v}.", v=name),
                        one(rng, "All right, {v}! | Then hello, {v}! | I see, {v}. Sorry!", v=name),
                    ]
        for _ in range(rng.choices((0, 1, 2), (0.45, 0.4, 0.15))[0]):
            turns += _between(rng)
    if rng.random() < 0.12:
        turns += [
            one(
                rng,
                "What do you know about me? | What did I tell you? | What have I told you so far? | Tell me what you know about me.",
            ),
            facts.capitalised(" and ".join(memory.summary for memory in known[:3]) + "."),
        ]
    else:
        rng.shuffle(known)
        for memory in known[: rng.choice((1, 2, 3))]:
            turns += [memory.asked, memory.answered]
    if rng.random() < 0.12:
        other = rng.choices(makers, weights)[0](rng)
        if other.topic not in memories and other.topic in ("name", "home", "age", "job"):
            turns += [
                other.asked,
                one(
                    rng,
                    "You have not told me that yet. | I do not know, because you have not told me. | You did not tell me that.",
                ),
            ]
    return talk("dialogues", *turns, *_closing(rng, 0.2))


def _about_animal(rng: random.Random, animal: knowledge.Animal, *, named: bool) -> tuple[str, str]:
    """A question about an animal, by its name or by "it"."""
    a = facts.capitalised(f"a {animal.name}")
    a = a[0].lower() + a[1:]
    s, S = (a, facts.capitalised(a)) if named else ("it", "It")
    kind = rng.randrange(5 if not named else 4)
    if kind == 0:
        return one(
            rng, "Where does {s} live? | And where does {s} live? | Where can I find {s}? | Where do you find {s}?", s=s
        ), f"{S} lives {animal.home}."
    if kind == 1:
        return one(
            rng, "What does {s} eat? | And what does {s} eat? | What food does {s} eat? | What does {s} like to eat?", s=s
        ), f"{S} eats {animal.food}."
    if kind == 2:
        other = rng.choice(("a fish", "a bird", "an insect", "a mammal", "a reptile"))
        answer = f"Yes, {s} is {animal.kind}." if other == animal.kind else f"No, {s} is {animal.kind}."
        return one(rng, "Is {s} {o}? | And is {s} {o}? | So is {s} {o}?", s=s, o=other), answer
    if kind == 3:
        return one(rng, "What kind of animal is {s}? | What sort of animal is {s}?", s=s), f"{S} is {animal.kind}."
    return one(
        rng,
        "Tell me more. | Tell me more about it. | What else do you know about it? | Anything else? | Tell me something interesting about it.",
    ), animal.fact


def described(animal: knowledge.Animal) -> str:
    """What kind of animal it is and where it lives."""
    return f"{animal.kind} that lives {animal.home}" if "with" not in animal.kind else animal.kind


def animal(rng: random.Random) -> Chat:
    """Several questions about one animal, or about its kind as "they"."""
    subject = rng.choice(knowledge.ANIMALS)
    a = "an" if subject.name[0] in "aeio" else "a"
    gloss = GLOSSES.get(subject.name)
    asked: dict[str, str] = {}
    if rng.random() < 0.3:
        s = subject
        forms = {
            one(rng, "Where do they live? | And where do they live?"): f"They live {s.home}.",
            one(rng, "What do they eat? | And what do they eat?"): f"They eat {s.food}.",
        }
        opening = [one(rng, "Tell me about {p}. | I like {p}. What do you know about them? | What do you know about {p}?", p=s.plural), f"{facts.capitalised(s.plural)} live {s.home} and eat {s.food}."]  # fmt: skip
        forms = dict(list(forms.items())[: rng.choice((1, 2))])
        return talk("dialogues", *opening, *(turn for pair in forms.items() for turn in pair), *_closing(rng, 0.3))
    opening = [one(rng, "What is {a} {n}? | Tell me about the {n}. | Do you know what {a} {n} is? | I saw {a} {n} today. What is it? | What's {a} {n}?", a=a, n=subject.name),
               facts.capitalised(f"{a} {subject.name} is {gloss or described(subject)}.")]  # fmt: skip
    for _ in range(rng.choice((1, 2, 2, 3))):
        question, answer = _about_animal(rng, subject, named=False)
        if answer not in asked.values():
            asked[question] = answer
    if rng.random() < 0.25:
        other = rng.choice([each for each in knowledge.ANIMALS if each is not subject])
        asked[one(rng, "And {a} {n}? | What about {a} {n}?", a="an" if other.name[0] in "aeio" else "a", n=other.name)] = (
            facts.capitalised(f"a {other.name} is {GLOSSES.get(other.name) or described(other)}.")
        )
    return talk("dialogues", *opening, *(turn for pair in asked.items() for turn in pair), *_closing(rng, 0.25))


def topic(rng: random.Random) -> Chat:
    """A topic, questions about it, and a way back to it after something else."""
    subject = rng.choice(knowledge.TOPICS)
    what = "What are" if subject.name == "the stars" else "What is"
    opening = one(
        rng,
        "Tell me about {t}. | What can you tell me about {t}? | {w} {t}? | Let's talk about {t}. | Explain {t} to me.",
        t=subject.name,
        w=what,
    )
    turns = [opening, subject.opening]
    asked = rng.sample(subject.questions, min(len(subject.questions), rng.choice((1, 2, 2, 3))))
    for index, (question, answer) in enumerate(asked):
        if index and rng.random() < 0.12:
            turns += [
                *_between(rng),
                one(rng, "Back to {t}: {q} | Now again about {t}: {q}", t=subject.name, q=question[0].lower() + question[1:]),
                answer,
            ]
        else:
            turns += [question, answer]
    if rng.random() < 0.1:
        turns += [one(rng, "What were we talking about? | What was our topic?"), f"We were talking about {subject.name}."]
    return talk("dialogues", *turns, *_closing(rng, 0.3))


def jokes(rng: random.Random) -> Chat:
    """A joke or riddle, another one, and laughter."""
    asks, told = smalltalk.TALK[rng.choice(("joke", "joke", "riddle", "fact"))]
    begin, count = rng.randrange(len(told)), rng.choice((2, 2, 3))
    chosen = [told[(begin + step) % len(told)] for step in range(count)]  # always the same one after another: none comes twice
    turns = [rng.choice(asks), chosen[0]]
    for text in chosen[1:]:
        turns += [
            one(
                rng,
                "Another one, please. | One more! | Another one. | More! | Tell me another one. | Do you have another one? | Give me another. | Again! | Next one, please.",
            ),
            text,
        ]
    if rng.random() < 0.7:
        turns += [
            one(rng, "Haha, that was good! | That was funny. | Ha! Good one. | Very good! | Haha! | I like that one. | That is a good one. | That made me laugh. | Not bad! | Ha ha, nice."),
            one(rng, "I'm glad you liked it! | I'm glad it made you smile. | Thank you! Would you like another one? | I am happy that you liked it."),
        ]  # fmt: skip
    return talk("dialogues", *turns, *_closing(rng, 0.25))


_SAD = "I am sad. | I feel sad today. | I'm feeling down. | I am not happy today. | Today is a bad day. | I feel a bit low. | I'm really sad. | I am unhappy. | I feel bad today. | I'm not doing well."
_CAUSES = """
My friend moved to another city. | My best friend is moving away. | My friend has left the town. => I'm sorry, that must be hard. You can still call and write to each other. | That is sad. A good friend stays a friend, even far away.
My cat died. | Our old dog died. | I lost my pet. => I am so sorry. It is hard to lose an animal that you love. | I'm very sorry. You gave it a good life.
I failed my test. | I got a bad grade. | My exam went badly. => I'm sorry. One test does not say who you are. Next time will be better. | That is a pity. You can learn from it and try again.
I had a fight with my sister. | I had an argument with my friend. | My brother is angry with me. => I'm sorry. Perhaps you can talk about it when you both are calm. | That is not easy. A kind word is often a good start.
I lost my job. | They closed our office. | I did not get the job. => I am sorry to hear that. I hope you will find something better soon. | That is hard. Take a deep breath, and do one step at a time.
I miss my family. | I am far from home. | I miss my parents. => That is hard. Perhaps you can call them today. | I understand. A call or a letter can help a little.
Nobody came to my party. | My friends forgot my birthday. => Oh, that hurts. I'm sorry. You deserve better. | I am sorry. Perhaps you can do something nice for yourself today.
My grandmother is ill. | My father is in hospital. | My mother is not well. => I'm sorry to hear that. I hope for the best. | That must worry you. I hope things get better soon.
It has been raining for days. | The weather is so grey. => Grey days can make us sad. A walk, some music or a warm tea may help. | I hope the sun comes back soon.
I do not know. I just feel empty. | There is no reason. => That happens. Be kind to yourself today, and talk to somebody you trust. | You do not need a reason. I am here to listen.
"""
_GLAD = "I am happy today. | I feel great! | I have good news. | Today is a wonderful day. | I'm so happy! | Something nice happened."
_REASONS = """
I passed my exam. | I got a good grade. | I finished school. => Congratulations! You worked hard for it. | Well done! You can be proud of yourself.
I found a new job. | I got the job! => Congratulations! I wish you a good start. | That is great news! When do you start?
My sister had a baby. | I am an aunt now. => How wonderful! Congratulations to all of you. | That is lovely news! I wish the baby all the best.
We won the game. | My team won. => Congratulations! That must feel good. | Well done! How did you celebrate?
I got a puppy. | We have a kitten now. => How lovely! What is its name? | That is wonderful. It will bring you a lot of joy.
I am going on holiday. | We are going to the sea. => How nice! I wish you good weather. | That sounds lovely. Enjoy it!
My friend is coming to visit me. | My brother is coming home. => That is nice. What will you do together? | How lovely! I hope you have a great time.
I finished my book. | I painted a picture. | I learned a new song. => Well done! That takes patience. | That is great. You can be proud of it.
"""


def feelings(rng: random.Random) -> Chat:
    """How the user feels, why, and thanks."""
    is_sad = rng.random() < 0.6
    cause = rng.choice((_CAUSES if is_sad else _REASONS).strip().splitlines())
    says, _, replies = cause.partition(" => ")
    first = (
        "I'm sorry to hear that. What happened? | Oh, I'm sorry. Do you want to tell me why? | I'm sorry. Would you like to talk about it? | That is not easy. What is the matter?"
        if is_sad
        else "That's great! What happened? | How nice! Tell me more. | I'm glad to hear that! What is it? | Wonderful! What makes you so happy?"
    )
    turns = [one(rng, _SAD if is_sad else _GLAD), one(rng, first), one(rng, says), one(rng, replies)]
    if rng.random() < 0.2:
        turns = [f"{turns[0]} {turns[2]}", turns[3]]
    if rng.random() < 0.65:
        turns += [
            one(rng, "Thanks for listening. | Thank you, that helps. | Thank you for your kind words. | You are kind. | That helps a little. | Thanks, I feel better now. | It is good to talk to you." if is_sad else "Thank you! | Thanks, I will. | You are kind. | Thank you very much!"),
            one(rng, "You're welcome. I hope you feel better soon. | I'm always here to listen. | Any time. Take care of yourself. | I am glad that it helps. Take care!" if is_sad else "You're welcome! | I'm happy for you. | You're welcome! Enjoy the day."),
        ]  # fmt: skip
    return talk("dialogues", *turns, *_closing(rng, 0.15))


_EXAMPLES = """
brave: The brave firefighter ran into the burning house. | She was brave and told the truth.
kind: The kind woman gave the boy her umbrella. | He is kind to animals.
lazy: The lazy cat slept the whole day. | I was too lazy to cook.
clever: The clever girl found the answer first. | A clever fox opened the door.
hungry: The hungry children ate all the soup. | I am always hungry after school.
thirsty: The thirsty dog drank a bowl of water. | After the run I was very thirsty.
tired: The tired man fell asleep on the sofa. | I was tired after the long walk.
happy: The happy child danced in the rain. | We were happy to be home again.
sad: The sad boy missed his friend. | It was a sad song about the sea.
angry: The angry neighbour shouted at the dog. | She was angry because he was late.
afraid: The little girl was afraid of the dark. | I am not afraid of spiders.
polite: The polite boy said thank you. | It is polite to say hello.
honest: An honest friend tells you the truth. | He was honest about his mistake.
quiet: The library is a quiet place. | She spoke in a quiet voice.
ancient: We saw an ancient temple in Greece. | The ancient wall is still standing.
empty: The bottle is empty. | They found an empty house in the forest.
famous: The famous singer waved to the people. | Paris is famous for its tower.
dangerous: The icy road is dangerous. | A lion can be dangerous.
expensive: The expensive watch was made of gold. | The hotel was too expensive for us.
cheap: I bought a cheap ticket for the train. | The apples were cheap today.
huge: A huge tree stood in front of the house. | They live in a huge city.
tiny: A tiny bird sat on my hand. | She wrote in tiny letters.
rare: This is a rare flower. | Snow is rare in the desert.
fragile: The fragile glass broke at once. | Eggs are fragile, so be careful.
"""
_OPPOSITES = dict(facts.RELATIONS["opposite"].rows)


def words(rng: random.Random) -> Chat:
    """What a word means, a sentence with it, its opposite, how it is spelled."""
    line = rng.choice(_EXAMPLES.strip().splitlines())
    word, _, rest = line.partition(": ")
    examples = rest.split(" | ")
    assert word in ADJECTIVES
    turns = [one(rng, "What does {w} mean? | What does the word {w} mean? | What is the meaning of {w}? | Explain the word {w}. | What does it mean to be {w}? | Define {w}.", w=word), one(rng, "It means {g}. | {w} means {g}.", w=word, g=GLOSSES[word])]  # fmt: skip
    kinds = ["sentence", "spell", "another"] + (["opposite"] * 2 if word in _OPPOSITES else [])
    for kind in dict.fromkeys(rng.sample(kinds, rng.choice((1, 2, 3)))):
        if kind == "sentence":
            turns += [
                one(
                    rng,
                    "Use it in a sentence. | Can you use it in a sentence? | Give me an example. | Make a sentence with it. | Please make a sentence with this word. | An example, please.",
                ),
                rng.choice(examples),
            ]
        elif kind == "opposite":
            turns += [
                one(
                    rng,
                    "What is the opposite? | And the opposite? | What is the opposite of it? | Which word is the opposite? | What's its opposite?",
                ),
                one(rng, "The opposite of {w} is {o}. | The opposite is {o}.", w=word, o=_OPPOSITES[word]),
            ]
        elif kind == "spell":
            turns += [one(rng, "How do you spell it? | Spell it, please. | How is it spelled?"), "-".join(word.upper()) + "."]
        else:
            other = rng.choice(sorted(ADJECTIVES - {word}))
            turns += [
                one(rng, "And {o}? | What about {o}? | And what does {o} mean?", o=other),
                f"{other.capitalize()} means {GLOSSES[other]}.",
            ]
            word = other
            if word not in _OPPOSITES or "sentence" in kinds:
                break
    return talk("dialogues", *turns, *_closing(rng, 0.25))


def greeting(rng: random.Random) -> Chat:
    """A greeting, how both are, and what comes next."""
    turns: list[str] = []
    if rng.random() < 0.4:
        asks, answers = smalltalk.TALK["hello"]
        turns += [rng.choice(asks), rng.choice(answers)]
    asks, answers = smalltalk.TALK["how are you"]
    turns += [rng.choice(asks), rng.choice(answers)]
    well = one(
        rng, "I am fine, too. | I'm well, too. | Fine, thanks. | I'm good. | I am doing well. | Very well! | Not bad, thanks."
    )
    if rng.random() < 0.5:
        question, answer = rng.choice((_sum, _between, _can))(rng)[:2]
        turns += [f"{well} {question}", answer]
    else:
        turns += [
            well,
            one(
                rng,
                "I'm glad to hear that! What would you like to talk about? | That's nice to hear! How can I help you? | Good! What can I do for you today?",
            ),
            *rng.choice((_can, _between))(rng)[:2],
        ]
    if rng.random() < 0.4:
        turns += _sum(rng) if rng.random() < 0.4 else _between(rng)
    return talk("dialogues", *turns, *_closing(rng, 0.35))


def _can(rng: random.Random) -> list[str]:
    asks, answers = smalltalk.IDENTITY["can"]
    return [rng.choice(asks), rng.choice(answers)]


def letter(rng: random.Random) -> Chat:
    """A letter or message, put together over several turns."""
    return talk("dialogues", *letters.thread(rng), *_closing(rng, 0.2))


_PERSONS = {
    work: (maker, done)
    for table, done in (("author", "wrote"), ("artist", "painted"), ("composer", "composed"), ("inventor", "invented"))
    for work, maker in facts.RELATIONS[table].rows
}
_WOMEN = frozenset(("Jane Austen", "Mary Shelley", "Charlotte Bronte", "Emily Bronte", "Marie Curie", "Ada Lovelace"))
_PROFESSIONS = dict(facts.RELATIONS["profession"].rows)


def person(rng: random.Random) -> Chat:
    """Somebody's work, what else they made, and who they were."""
    work, (maker, done) = rng.choice(list(_PERSONS.items()))
    turns = [
        one(rng, "Who {d} {w}? | Do you know who {d} {w}? | Tell me who {d} {w}.", d=done, w=work),
        f"{maker} {done} {work}.",
    ]
    base = {"wrote": "write", "painted": "paint", "composed": "compose", "invented": "invent"}[done]
    others = [each for each, (who, how) in _PERSONS.items() if (who, how) == (maker, done) and each != work]
    follow: list[tuple[str, str]] = []
    if others:
        whom = rng.choice((maker, "she" if maker in _WOMEN else "he"))
        follow.append((f"What else did {whom} {base}?", f"{maker} also {done} {rng.choice(others)}."))
    if maker in _PROFESSIONS:
        follow.append(
            (one(rng, "Who was that? | What was {m}? | Who was {m}?", m=maker), f"{maker} was {_PROFESSIONS[maker]}.")
        )
    if rng.random() < 0.3:
        turns += [
            one(rng, "What did you say: who {d} it? | Who was it again? | Say the name again, please.", d=done),
            f"It was {maker}.",
        ]
    another = rng.choice([each for each in _PERSONS if each != work])
    follow.append((f"And who {_PERSONS[another][1]} {another}?", f"{_PERSONS[another][0]} {_PERSONS[another][1]} {another}."))
    for pair in rng.sample(follow, min(len(follow), rng.choice((1, 2)))):
        turns += pair
    return talk("dialogues", *turns, *_closing(rng, 0.2))


def quiz(rng: random.Random) -> Chat:
    """The model asks, and says whether the user's answer is right."""
    turns = [
        one(
            rng,
            "Ask me a question. | Let's do a quiz. | Quiz me! | Ask me something. | I want to play a quiz. | Test me, please. | Give me a quiz question.",
        )
    ]
    tables = ("capital", "opposite", "plural", "young animal", "language", "continent", "past tense")
    for number in range(rng.choice((1, 2, 2, 3))):
        relation = facts.RELATIONS[rng.choice(tables)]
        (subject, value), (_, wrong) = rng.sample(relation.rows, 2)
        turns.append(
            ("" if number else one(rng, "Gladly! | All right! | Sure! | Here is one:") + " ")
            + facts.capitalised(relation.asks[0].format(s=subject))
        )
        is_right = rng.random() < 0.6 or wrong == value
        said = value if is_right else wrong
        turns.append(one(rng, "{v}. | {v} | It is {v}. | I think it is {v}. | Is it {v}? | {v}?", v=said))
        full = facts.capitalised(
            next(form for form in relation.answers if "{s}" in form and "{v}" in form).format(s=subject, v=value)
        )
        if is_right:
            turns.append(one(rng, "That is right! | Yes, well done! | Correct! | Very good!") + " " + full)
        else:
            turns.append(one(rng, "Not quite. | No, sorry. | That is not right.") + " " + full)
        turns.append(one(rng, "Another question, please. | Next question! | One more. | Ask me another one."))
    return talk("dialogues", *turns[:-1])


_NUMBERS = "zero one two three four five six seven eight nine".split()


def in_words(rng: random.Random) -> Chat:
    """The last answer again, in a number of words."""
    beast = rng.choice(knowledge.ANIMALS)
    named = facts.capitalised(f"a {beast.name}")
    shown = named[0].lower() + named[1:]
    short = rng.choice((f"{named} is {beast.kind}.", f"{named} lives {beast.home}.", f"{named} eats {beast.food}."))
    if rng.random() < 0.4:
        subject = rng.choice([each for each in knowledge.TOPICS if ". " in each.opening])
        shown, short = subject.name, subject.opening.split(". ")[0].rstrip(".") + "."
        long = subject.opening
    else:
        long = (
            f"{named} is {beast.kind} that lives {beast.home}."
            if "with" not in beast.kind
            else f"{named} is {beast.kind}. {beast.fact}"
        )
    count = len(short.split())
    if count >= len(_NUMBERS):
        return in_words(rng)
    turns = [one(rng, "Tell me about {s}. | What do you know about {s}? | Describe {s}.", s=shown), long]
    turns += [
        one(
            rng,
            "Say it in {n} words. | Now in {n} words, please. | Can you say that in {n} words? | In {n} words? | Use only {n} words.",
            n=_NUMBERS[count],
        ),
        short,
    ]
    return talk("dialogues", *turns)


_MAKERS: tuple[tuple[Callable[[random.Random], Chat], float], ...] = (
    (remember, 0.32), (animal, 0.12), (topic, 0.15), (jokes, 0.05), (feelings, 0.08), (words, 0.06), (greeting, 0.07), (letter, 0.07), (person, 0.04), (quiz, 0.04), (in_words, 0.04),
)  # fmt: skip


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """`count` conversations."""
    makers, weights = zip(*_MAKERS, strict=True)
    for _ in range(count):
        yield rng.choices(makers, weights)[0](rng)
