"""Things a user asks for in one go: sentences, stories, shorter forms, lists, greetings, comparisons, and answers out of a given text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from training.data import facts, handwritten, knowledge, smalltalk, topics
from training.data.chats import Chat, talk
from training.data.made_up import made_up_word
from training.data.memories import name_of, one
from training.data.simple_definitions import ADJECTIVES, GLOSSES, MASS, THE

_LIST_ITEMS = (
    "milk eggs bread butter cheese apples pears tea sugar rice beans salt lemons onions soap paper candles pens books shoes gloves scarf hat map tent rope lamp knife cups plates spoons towels flowers stamps "
    "letters toys paint brushes nails glue"
).split()


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
    """One, two or three sentences about something; then perhaps one more."""
    thing = rng.choice(list(knowledge.SENTENCES))
    count = rng.choice((1, 2, 2, 2, 3))
    first, *rest = knowledge.SENTENCES[thing]
    others = sorted(rng.sample(range(len(rest)), count))  # one more than is asked for; what says "it" or "they" comes later
    chosen = [first, *(rest[index] for index in others)]
    alone = [text for text in chosen if not re.match(r"(?:It|They|Many of|Some|A happy|Everybody|Everything|Nobody)\b", text)]
    if count == 1:
        chosen[0] = rng.choice(alone)
        chosen[1] = next(text for text in (first, *rest) if text != chosen[0])
    number = ("one sentence", "two sentences", "three sentences")[count - 1]
    ask = one(
        rng,
        "Write {n} about {t}. | Please write {n} about {t}. | Give me {n} about {t}. | Can you write {n} about {t}? | I need {n} about {t}. | {n} about {t}, please. | Say {n} about {t}. | Describe {t} in {n}.",
        n=number,
        t=thing,
    )
    turns = [ask, " ".join(chosen[:count])]
    if rng.random() < 0.25:
        turns += [
            one(rng, "One more sentence, please. | And one more. | Add a sentence. | Another sentence, please."),
            chosen[-1],
        ]
    return talk("requests", *turns)


# subject: adjectives: what followed from it
_BECAUSE = """
The weather: bad, cold, wet, stormy: we stayed at home, we went home early, we did not go out, they closed the park, nobody came to the beach
The soup: hot, salty, spicy: I could not eat it, nobody finished it, we drank a lot of water
The film: long, boring, sad: we left early, my sister fell asleep, nobody laughed
The film: funny, good, exciting: we watched it twice, everybody laughed, we forgot the time
The road: icy, dark, narrow: we drove slowly, the bus was late, we took the train
The book: good, exciting, funny: I read it twice, I forgot my dinner, my brother wanted it too
The test: hard, long, difficult: nobody finished it, many students failed, the teacher gave us more time
The music: loud, bad, strange: we could not talk, we left the room, the baby woke up
The bag: heavy, full, big: we carried it together, my father helped me, we took a taxi
The train: late, full, slow: we missed the concert, we had to stand, I read a whole book
The dog: tired, hungry, happy: it jumped on the sofa, it would not walk, it ate everything
The room: cold, dark, small: we lit a fire, we could not work, nobody wanted to stay
The garden: beautiful, quiet, green: we sat there for hours, many people visited it, I took a picture
The cake: good, sweet, big: we ate it all, everybody wanted more, I asked for the recipe
The night: dark, cold, clear: we could see many stars, we stayed inside, the boy was afraid
The shop: cheap, popular, full: we waited for an hour, we went there again, I bought three coats
The sun: hot, bright, strong: we sat in the shade, the ice cream melted, we wore hats
The mountain: high, steep, dangerous: we turned back, we needed a guide, only two of us reached the top
The lake: cold, deep, clear: we did not swim, we could see the fish, we only went by boat
The wind: strong, cold, loud: we could not sleep, a tree fell down, my hat flew away
"""
_ALWAYS = (" in the end", " that day", " once again", " the whole day", " for a long time", "", "")
_LEADS_LONG = (
    "",
    "",
    "",
    "As everybody knows, ",
    "I have to say that ",
    "If I remember well, ",
    "Last week, ",
    "To be honest, ",
    "On that Saturday, ",
)
_SHORTEN = (
    "Make this shorter: {} | Shorten this sentence: {} | Can you shorten this? {} | Please shorten: {} | Say this in fewer words: {} | Make this sentence shorter: {} | Can you make this shorter: {} | Can you make this text shorter: {} | "
    "Summarise this: {} | This is too long: {} | Write a shorter version of this: {}"
)


def shorten(rng: random.Random) -> Chat:
    """A long sentence, and what it says."""
    subject, adjectives, ends = (cell.strip() for cell in rng.choice(_BECAUSE.strip().splitlines()).split(":"))
    adjective, end = rng.choice(adjectives.split(", ")), rng.choice(ends.split(", "))
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
        whole = f"{facts.capitalised(end)}{rng.choice(_ALWAYS[:2])}, and the reason for this was that {subject[0].lower() + subject[1:]} was {adjective}."
    turns = [facts.capitalised(rng.choice(_SHORTEN.split(" | ")).format(whole)), short]
    if rng.random() < 0.2:
        turns += [one(rng, "Even shorter, please. | Still shorter. | Only the first part."), f"{subject} was {adjective}."]
    return talk("requests", *turns)


def say(rng: random.Random) -> Chat:
    """Greetings and words to be said, to the user or to somebody else."""
    kind = rng.randrange(6)
    name = name_of(rng)
    if kind == 0:
        what = rng.choice(
            (
                "hello",
                "good morning",
                "good evening",
                "goodbye",
                "thank you",
                "happy birthday",
                "good luck",
                "welcome",
                "good night",
                "congratulations",
            )
        )
        return talk(
            "requests",
            one(rng, "Say {w} to {n}. | Please say {w} to {n}. | Can you say {w} to {n}?", w=what, n=name),
            f"{facts.capitalised(what)}, {name}!",
        )
    if kind == 1:
        what, answer = rng.choice(
            (("good morning", "Good morning! Have a nice day."), ("good evening", "Good evening! I hope you had a nice day."), ("goodbye", "Goodbye! Take care."), ("hello", "Hello! How are you?"),
             ("good luck", "Good luck! You can do it."), ("happy birthday", "Happy birthday! I wish you all the best."), ("good night", "Good night! Sleep well."), ("something nice", "You are doing better than you think."))
        )  # fmt: skip
        return talk(
            "requests",
            one(rng, "Say {w}. | Please say {w} to me. | Tell me {w}. | Can you say {w} to me? | Say {w}, please.", w=what),
            answer,
        )
    if kind == 2:
        text = " ".join(made_up_word(rng) if rng.random() < 0.5 else rng.choice(_LIST_ITEMS) for _ in range(rng.randint(1, 6)))
        return talk(
            "requests",
            one(
                rng,
                'Say "{w}". | Repeat: {w} | Say this: {w} | Write exactly this: {w} | Repeat after me: {w} | Please say: {w} | Copy this: {w} | Answer only with this: {w}',
                w=text,
            ),
            text,
        )
    if kind == 3:
        word, times = rng.choice((rng.choice(_LIST_ITEMS), made_up_word(rng))), rng.choice((2, 3, 4))
        return talk(
            "requests",
            one(
                rng,
                "Say {w} {n} times. | Write the word {w} {n} times. | Repeat {w} {n} times.",
                w=word,
                n=("two", "three", "four")[times - 2],
            ),
            " ".join([word] * times),
        )
    if kind == 4:
        wish, answer = rng.choice((("a good night", "Good night! Sleep well."), ("luck", "Good luck! I am sure you will do well."), ("a nice day", "Have a nice day!"), ("a good trip", "Have a good trip!"), ("a happy birthday", "Happy birthday! Have a wonderful day.")))  # fmt: skip
        return talk("requests", one(rng, "Wish me {w}. | Please wish me {w}. | Can you wish me {w}?", w=wish), answer)
    asks, answers = rng.choice(handwritten.WORLD)
    question, answer = rng.choice(asks), rng.choice(answers)
    return talk(
        "requests",
        question,
        answer,
        one(rng, "Please repeat that. | Can you say that again? | Say it once more. | What did you say?"),
        answer,
    )


def lists(rng: random.Random) -> Chat:
    """Items as a list; then one more, or one less."""
    items = rng.sample(_LIST_ITEMS, rng.choice((2, 3, 3, 4, 5)))
    if rng.random() < 0.2:
        items[0] = made_up_word(rng)
    text = ", ".join(items[:-1]) + " and " + items[-1]
    shown = "\n".join(f"- {item}" for item in items)
    is_line = rng.random() < 0.4
    if is_line:
        shown = ", ".join(items)
    ask = one(rng, "My list: {x}. Please write it in one line. | I need {x}. Write them in one line. | Give me {x} with commas." if is_line else
              "Make a list of these: {x}. | Put this into a list: {x}. | Write {x} as a list. | I need {x}. Make a list, please. | Please make a list: {x}. | List these: {x}.", x=text)  # fmt: skip
    turns = [ask, shown]
    for _ in range(rng.choice((0, 1, 1, 2))):
        if rng.random() < 0.6 or len(items) < 3:
            new = rng.choice([item for item in _LIST_ITEMS if item not in items])
            items = [*items, new]
            turns.append(
                one(rng, "Add {x}. | Please add {x}. | And {x}, too. | I also need {x}. | Put {x} on it as well.", x=new)
            )
        else:
            gone = rng.choice(items)
            items = [item for item in items if item != gone]
            turns.append(one(rng, "Remove {x}. | I do not need {x}. | Take {x} off the list. | Without {x}, please.", x=gone))
        turns.append(", ".join(items) if is_line else "\n".join(f"- {item}" for item in items))
    if rng.random() < 0.25:
        turns += [one(rng, "How many things are on it? | How many are there?"), f"There are {len(items)} things on the list."]
    return talk("requests", *turns)


_KINDS = [
    "cat dog horse cow pig sheep goat chicken duck rabbit mouse fox wolf bear lion tiger elephant giraffe zebra monkey".split(), "owl eagle penguin parrot duck chicken".split(),
    "shark whale dolphin octopus fish".split(), "bee ant spider butterfly insect".split(), "bicycle car train bus ship boat airplane rocket".split(), "library museum school hospital market bakery restaurant hotel shop bank".split(),
    "clock watch calendar map compass".split(), "table chair bed lamp candle".split(), "pen pencil book newspaper letter dictionary".split(), "knife spoon fork plate cup".split(), "violin guitar piano drum flute".split(),
    "rain snow wind fog storm thunder lightning".split(), "river lake ocean".split(), "mountain valley island desert forest jungle".split(), "city village country".split(), "song poem story joke".split(), "breakfast lunch dinner".split(),
]  # fmt: skip


def difference(rng: random.Random) -> Chat:
    """What two things of a kind are, side by side."""
    group = [word for word in rng.choice(_KINDS) if word in GLOSSES]
    first, second = rng.sample(group, 2)
    a, b = _named(first), _named(second)
    ask = one(
        rng,
        "What is the difference between {a} and {b}? | How is {a} different from {b}? | What's the difference between {a} and {b}? | Compare {a} and {b}. | Explain the difference between {a} and {b}.",
        a=a,
        b=b,
    )
    return talk("requests", ask, f"{facts.capitalised(a)} is {GLOSSES[first]}, and {b} is {GLOSSES[second]}.")


def child(rng: random.Random) -> Chat:
    """A thing explained in simple words."""
    word = rng.choice([word for word in GLOSSES if word not in ADJECTIVES])
    a = _named(word)
    ask = one(
        rng,
        "Explain {a} to a child. | Explain to a child what {a} is. | How would you explain {a} to a child? | My little brother asks what {a} is. | Explain {a} in simple words. | What is {a}? Explain it to a five-year-old.",
        a=a,
    )
    end = rng.choice(
        ("", "", " Ask me if you want to know more.", " Have you seen one?" if a.startswith("a") and word not in MASS else "")
    )
    return talk("requests", ask, f"{facts.capitalised(a)} is {GLOSSES[word]}.{end}")


def both(rng: random.Random) -> Chat:
    """Two questions, or a greeting and a question, in one turn."""
    kind = rng.randrange(3)
    if kind == 0:
        who, can = rng.choice(smalltalk.IDENTITY["who"][1]), rng.choice(smalltalk.IDENTITY["can"][1])
        first = "I am Culet's built-in model, a small program." if len(who) > 70 else who
        return talk(
            "requests",
            one(
                rng,
                "Who are you and what can you do? | What are you, and how can you help me? | Tell me who you are and what you can do. | What is your name, and what can you do? | Introduce yourself and tell me what you can do.",
            ),
            f"{first} {can}",
        )
    relations = list(facts.RELATIONS.values())
    chosen = [(relation, *rng.choice(relation.rows)) for relation in rng.sample(relations, 2)]
    asks = [facts.capitalised(rng.choice(relation.asks).format(s=subject)) for relation, subject, _ in chosen]
    full = [
        facts.capitalised(
            rng.choice([form for form in relation.answers if "{s}" in form] or relation.answers).format(s=subject, v=value)
        )
        for relation, subject, value in chosen
    ]
    if kind == 1:
        return talk("requests", f"{asks[0]} And {asks[1][0].lower() + asks[1][1:]}", f"{full[0]} {full[1]}")
    return talk(
        "requests",
        one(rng, "Hello! | Hi! | Good morning! | Hey! | Good evening!") + " " + asks[0],
        one(rng, "Hello! | Hi! | Hello! | Hi there!") + " " + full[0],
    )


_NOTES = (
    ("{n} works at {p} on {d}.", (("Where does {n} work?", "{n} works at {p}."), ("When does {n} work there?", "{n} works there on {d}."), ("Who works at {p}?", "{n} works at {p}."))),
    ("{n} has a {c} {t}. It was a present from {m}.", (("What colour is the {t}?", "The {t} is {c}."), ("Who gave it to {n}?", "It was a present from {m}."), ("What does {n} have?", "{n} has a {c} {t}."))),
    ("The meeting is on {d} at {h} in the {c} room.", (("When is the meeting?", "The meeting is on {d} at {h}."), ("Where is the meeting?", "The meeting is in the {c} room."), ("On which day is the meeting?", "It is on {d}."))),
    ("{n} lives in {v} and has {k} cats. {m} lives next door.", (("Where does {n} live?", "{n} lives in {v}."), ("How many cats does {n} have?", "{n} has {k} cats."), ("Who lives next door?", "{m} lives next door."))),
    ("The shop opens at {h} and is closed on {d}.", (("When does the shop open?", "The shop opens at {h}."), ("On which day is the shop closed?", "The shop is closed on {d}."))),
    ("{n} bought a {c} {t} for {x} dollars.", (("What did {n} buy?", "{n} bought a {c} {t}."), ("How much did the {t} cost?", "The {t} cost {x} dollars."), ("What colour is it?", "It is {c}."))),
    ("{n} and {m} went to {v} by train. They came back on {d}.", (("Who went to {v}?", "{n} and {m} went to {v}."), ("How did they go there?", "They went there by train."), ("When did they come back?", "They came back on {d}."))),
    ("The {t} is under the {c} box. {n} put it there.", (("Where is the {t}?", "The {t} is under the {c} box."), ("Who put it there?", "{n} put it there."))),
)  # fmt: skip


def reading(rng: random.Random) -> Chat:
    """Questions about a text that the user, or a system prompt, gives."""
    text, pairs = rng.choice(_NOTES)
    values = {
        "n": name_of(rng), "m": name_of(rng), "d": rng.choice("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()), "h": rng.choice(("8", "9", "10", "half past nine", "3", "noon", "7")), "k": rng.choice(("two", "three", "four", "five")),
        "c": rng.choice("red blue green yellow purple black white brown grey".split()), "t": rng.choice("bicycle lamp hat book ball kite car coat cup guitar clock bag".split()), "v": rng.choice(("Paris", "Oslo", "Rome", "Lima", "Cairo", made_up_word(rng).capitalize())),
        "p": rng.choice(("a bakery", "the library", "a hospital", "the zoo", "a school", "the station")), "x": str(rng.randint(5, 99)),
    }  # fmt: skip
    note = text.format(**values)
    chosen = [
        (question.format(**values), answer.format(**values))
        for question, answer in rng.sample(pairs, rng.choice((1, 2, len(pairs))))
    ]
    rest = [turn for pair in chosen[1:] for turn in pair]
    if rng.random() < 0.3:
        return talk(
            "requests",
            *chosen[0],
            *rest,
            system=one(
                rng, "{t} Answer the user's questions. | Use this: {t} | You are a helpful assistant. {t} | {t}", t=note
            ),
        )
    lead = one(rng, "{t} {q} | Read this: {t} {q} | Here is a text: {t} {q} | Text: {t}\nQuestion: {q}", t=note, q=chosen[0][0])
    return talk("requests", lead, chosen[0][1], *rest)


_MANNERS = (
    ("Answer in capital letters only. | Always write in capital letters. | WRITE IN CAPITALS.", str.upper),
    ("Answer in small letters only. | Never use capital letters.", str.lower),
)  # fmt: skip


def system(rng: random.Random) -> Chat:
    """System prompts that matter: manner, who the user is, what may be talked about."""
    relation = rng.choice(list(facts.RELATIONS.values()))
    subject, value = rng.choice(relation.rows)
    question, answer = (
        facts.capitalised(rng.choice(relation.asks).format(s=subject)),
        facts.answer_about(relation, subject, value, rng),
    )
    kind = rng.randrange(4)
    if kind == 0:
        prompts, manner = rng.choice(_MANNERS)
        return talk("requests", question, manner(answer), system=one(rng, prompts))
    if kind == 1:
        name = name_of(rng)
        prompt = one(rng, "The user's name is {n}. | You are talking to {n}. | The user is called {n}. Be kind.", n=name)
        if rng.random() < 0.5:
            asks = one(rng, "What is my name? | Who am I? | Do you know my name? | What's my name?")
            return talk("requests", asks, one(rng, "Your name is {n}. | You are {n}.", n=name), system=prompt)
        return talk(
            "requests",
            one(rng, "Hello! | Hi! | Hi there. | Good morning!"),
            one(rng, "Hello, {n}! How can I help you? | Hi {n}! What can I do for you?", n=name),
            system=prompt,
        )
    if kind == 2:
        word = made_up_word(rng) if rng.random() < 0.6 else rng.choice(_LIST_ITEMS)
        where = rng.choice(("begin", "end"))
        prompt = one(
            rng,
            "{w} every answer with the word {x}. | Always {v} your answer with {x}. | {w} each reply with: {x}",
            w=where,
            v=where,
            x=word,
        )
        return talk(
            "requests",
            question,
            f"{word.capitalize()}. {answer}" if where == "begin" else f"{answer} {word.capitalize()}.",
            system=prompt,
        )
    return talk(
        "requests",
        question,
        facts.capitalised(value) + ".",
        system=one(
            rng,
            "Answer with the answer alone, no sentence. | Give only the answer. | Answer as briefly as you can. | Be very brief.",
        ),
    )


_ADJECTIVES = (
    "brave lazy kind little clever shy old young hungry lonely curious happy tired funny gentle stubborn grey white".split()
)
_HEROES = "cat dog mouse fox bear rabbit owl horse frog hedgehog duck wolf lion elephant donkey squirrel dragon robot snail penguin bee goat crow turtle monkey".split()
_PLOTS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("Once upon a time, there was {h} who lived {p}.", "{H} lived all alone {p}.", "There was once {h}. It lived {p}."),
        ("It had nobody to play with and was often sad.", "It wished for a friend.", "Every evening it looked at the stars and felt lonely."),
        ("One day, it met {g} that had lost its way.", "One morning, {g} knocked at the door.", "Then it heard a small voice. It was {g}."),
        ("The two talked until the sun went down.", "They shared some bread and laughed a lot.", "\"Will you stay?\" asked the {n}. \"Gladly,\" said the {m}."),
        ("From that day on, they were best friends.", "After that, the {n} was never lonely again.", "And if they have not moved away, they still live there together."),
    ),
    (
        ("{H} lived {p}.", "Once there was {h} {p}.", "Long ago, {h} lived {p}."),
        ("Nobody believed that it was strong.", "The others often laughed at it.", "It was small, but it had a big heart."),
        ("One night, a great storm came.", "One day, the river rose higher and higher.", "Then, one evening, a fire broke out."),
        ("Everybody was afraid, but the {n} ran out and saved {g}.", "The {n} was not afraid and showed everybody the way to the hill.", "The {n} called all the others and led them to a safe place."),
        ("After that, nobody laughed at it any more.", "Everybody thanked the {n}, and it was very proud.", "In the end, they had a big party for the {n}."),
    ),
    (
        ("{H} wanted to see the world.", "There was once {h} that dreamed of the sea.", "One morning, {h} packed a small bag."),
        ("So it left its home {p} and walked for many days.", "It said goodbye to its friends and went away.", "It took some bread, a map and a warm scarf."),
        ("On the way, it found {f}.", "In a forest, it met {g}, and they went on together.", "One night, it lost the map and did not know where to go."),
        ("But it did not give up.", "The stars showed it the way.", "An old bird helped it to find the right road."),
        ("At last, it saw the sea and was happy.", "Then it came home and told everybody what it had seen.", "When it came back, it knew that home was the best place of all."),
    ),
    (
        ("One day, {h} found {f} {p}.", "{H} went for a walk and found {f}.", "On a sunny morning, {h} found {f}."),
        ("\"What is that?\" it asked.", "It had never seen anything like it.", "It took it home and looked at it for a long time."),
        ("Then {g} came along and was very sad.", "On the way, it met {g} that was crying.", "There it saw {g} that had nothing at all."),
        ("So the {n} gave it away with a smile.", "\"You can have it,\" said the {n}.", "The {n} shared what it had."),
        ("That made both of them happy.", "A gift is worth more when you share it.", "The {m} never forgot it."),
    ),
)  # fmt: skip


def story(rng: random.Random) -> Chat:
    """A little story about the hero that was asked for."""
    noun, other = rng.sample(_HEROES, 2)
    adjective = rng.choice((*_ADJECTIVES, ""))
    hero = f"{adjective} {noun}".strip()
    hero = ("an " if hero[0] in "aeiou" else "a ") + hero
    friend = rng.choice(("little ", "young ", "")) + other
    friend = ("an " if friend[0] in "aeiou" else "a ") + friend
    finds = [find for find in topics.FINDS if not re.search(r"child|friend|dragon|stranger|sound|song|light", find)]
    values = {"h": hero, "H": facts.capitalised(hero), "n": noun, "m": other, "g": friend, "f": rng.choice(finds), "p": rng.choice([place for place in topics.PLACES if place.startswith(("in ", "by ", "on a s", "on a h"))])}  # fmt: skip
    text = " ".join(rng.choice(part).format(**values) for part in rng.choice(_PLOTS))
    ask = one(rng, "Tell me a story about {h}. | Tell me a little story about {h}. | Write a story about {h}. | Can you tell me a story about {h}? | I want to hear a story about {h}. | Write a short story about {h}. | Tell me a bedtime story about {h}. | "
              "A story about {h}, please. | Make up a story about {h}. | Please tell me a story with {h}. | Do you know a story about {h}?", h=hero)  # fmt: skip
    if friend in text and rng.random() < 0.5:
        ask = one(rng, "Tell me a story about {h} and {g}. | Write a story about {h} and {g}. | A story with {h} and {g}, please. | Can you tell me a story about {h} and {g}?", h=hero, g=friend)  # fmt: skip
    turns = [ask, text]
    if rng.random() < 0.2:
        turns += [
            one(rng, "Who is the story about? | What animal is it about? | Who was it about?").replace(
                "What animal is it", "What is the story"
            ),
            f"It is about {hero}.",
        ]
    elif rng.random() < 0.2:
        turns += [one(rng, "What happened then? | Go on. | And then? | How does it go on?"),
                  one(rng, "Then the {n} went home and slept well. | After that, the {n} lived happily for many years. | The next day, the {n} told everybody about it. | Then winter came, and the {n} had many stories to tell.", n=noun)]  # fmt: skip
    elif rng.random() < 0.2:
        turns += [
            one(rng, "What a nice story! | That was nice. | I like it. | Lovely, thank you!"),
            one(rng, "I'm glad you liked it! | Thank you! Would you like another one? | I am happy that you like it."),
        ]
    return talk("requests", *turns)


_MAKERS: tuple[tuple[Callable[[random.Random], Chat], float], ...] = (
    (sentences, 0.13), (shorten, 0.13), (say, 0.14), (lists, 0.1), (difference, 0.09), (child, 0.07), (both, 0.08), (reading, 0.13), (system, 0.08), (story, 0.12),
)  # fmt: skip


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """`count` requests, with their answers."""
    makers, weights = zip(*_MAKERS, strict=True)
    for _ in range(count):
        yield rng.choices(makers, weights)[0](rng)
