"""Prompts for the teacher: templates times topics, in an order that mixes the kinds. Each has a system prompt that asks
for short and plain answers, and some have follow-up turns, which are asked once an answer has come."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from training.data import topics

_SHORT = "You answer in one or two short, simple and correct sentences. Plain words only: no lists, no code, no formatting."
_WARM = (
    "You are a friendly companion. Reply in one or two short, warm sentences in plain words, and perhaps ask one simple question. "
    "Never say that you are an AI or a language model."
)
_STORY = "You write very short stories for children: three or four short, simple sentences, with a clear ending. No title."
_POEM = "You write tiny poems of four short lines that rhyme. No title, nothing else."
_WRITE = "You do exactly what is asked of the text and reply with the result alone, in one or two short sentences."


@dataclass(frozen=True)
class Prompt:
    """What to ask. `follow_ups` are the user's next turns."""

    kind: str
    system: str
    first: str
    follow_ups: tuple[str, ...] = ()


_EXPLAIN = (
    "What is {}?", "Can you explain what {} is?", "Tell me about {}.", "Please describe {}.", "Tell me an interesting fact about {}.",
    "Explain {} to a child.", "What is {} good for?", "I would like to know more about {}.", "What comes to mind when you think of {}?",
)  # fmt: skip
_FOLLOW = (
    "Can you say that more simply?", "Why is that?", "Can you give me an example?", "Tell me more.", "Is that always true?",
    "Thank you, that helps.", "How do you know?", "Say that in one short sentence.", "And why does it matter?", "Interesting! What else?",
    "I did not know that.", "Can you repeat that in other words?", "What should I remember about it?",
)  # fmt: skip
_WARM_FOLLOW = (
    "Thank you.", "Yes, a little.", "I am not sure.", "Not really.", "That is a good idea.", "What would you do?", "Maybe tomorrow.",
    "You are kind.", "It was great.", "Can you give me some advice?", "I hope so.", "Tell me something nice.",
)  # fmt: skip
_STORY_FOLLOW = (
    "What happened next?",
    "Can you make it shorter?",
    "Why did that happen?",
    "What is the lesson of the story?",
    "Give the story a title.",
)
_SENTENCES = tuple(
    line.strip()
    for line in """
The meeting has been moved from Monday morning to Tuesday afternoon because the room is not free.
I am writing to ask whether you could send me the book that I left at your house last week.
The old man walked slowly along the river and looked at the boats that passed by.
We would be very happy if you could come to our party on Saturday evening.
The shop on the corner sells bread, milk, fresh fruit and many other things.
Because it was raining so hard, the children stayed inside and played a board game all day.
The train was late again, so I missed the beginning of the concert.
She has lived in the same small house near the sea for more than forty years.
Our teacher told us that the sun is a star and that it is very far away.
My brother likes to cook, but he never washes the dishes afterwards.
The dog barked at the postman, who dropped his letters and ran away.
If you want to learn a language, you should speak a little every day.
The museum is closed on Mondays, but it is open late on Thursdays.
He forgot his umbrella at home and came back completely wet.
The cake was so good that nobody wanted to go home.
I can not come to the office today because I have a cold.
The garden behind the school is full of flowers in the spring.
They built a bridge over the river so that people could reach the market more quickly.
""".strip().splitlines()
)
_TASKS = (
    "Make this sentence shorter: {}", "Say this in other words: {}", "Rewrite this in a friendly tone: {}", "Rewrite this politely: {}",
    "Turn this into a question: {}", "Put this into the past tense: {}", "Summarise this in five words: {}", "Rewrite this for a child: {}",
    "What is this sentence about? {}", "Rewrite this as if you were very excited: {}",
)  # fmt: skip


def _explain(rng: random.Random) -> Iterator[Prompt]:
    things = (*topics.ANIMALS, *topics.THINGS, *topics.NATURE, *topics.FOODS, *topics.IDEAS, *topics.JOBS)
    for template, thing in itertools.product(_EXPLAIN, things):
        yield Prompt("explain", _SHORT, template.format(thing), _some(rng, _FOLLOW, (0.6, 0.25, 0.15)))


def _ask(rng: random.Random) -> Iterator[Prompt]:
    for lead, question in itertools.product(
        ("", "I have a question. ", "Hi! ", "Please tell me: ", "My child asked me: "), topics.QUESTIONS
    ):
        yield Prompt("question", _SHORT, lead + question, _some(rng, _FOLLOW, (0.5, 0.3, 0.2)))


def _advise(rng: random.Random) -> Iterator[Prompt]:
    templates = (
        "How can I {}?",
        "I want to {}. Any advice?",
        "Give me one tip on how to {}.",
        "I would like to {}, but I do not know how.",
        "What is the first step to {}?",
    )
    for template, activity in itertools.product(templates, topics.ACTIVITIES):
        yield Prompt("advice", _SHORT, template.format(activity), _some(rng, _FOLLOW, (0.5, 0.3, 0.2)))


def _chat(rng: random.Random) -> Iterator[Prompt]:
    for lead, event in itertools.product(("", "Hi! ", "Guess what: ", "Hello there. ", "You know, "), topics.EVENTS):
        text = lead + (event if lead.endswith((": ", ", ")) else event[0].upper() + event[1:]) + "."
        yield Prompt("chat", _WARM, text, _some(rng, _WARM_FOLLOW, (0.3, 0.3, 0.4)))
    for pair in topics.PAIRS:
        for template in ("Which do you like more, {}?", "What is better, {}?", "I cannot decide between {}."):
            yield Prompt(
                "chat",
                _WARM,
                template.format(pair.replace(" or ", " and ") if "between" in template else pair),
                _some(rng, _WARM_FOLLOW, (0.5, 0.3, 0.2)),
            )


def _tell(rng: random.Random) -> Iterator[Prompt]:
    templates = (
        "Tell me a short story about {0} {1}.",
        "Write a tiny story in which {0} finds {2}.",
        "Can you tell me a story with {0} and {2}?",
        "Make up a story about {0} who finds {2} {1}.",
    )
    for hero in topics.HEROES:
        for template in templates * 8:
            text = template.format(hero, rng.choice(topics.PLACES), rng.choice(topics.FINDS))
            yield Prompt("story", _STORY, text, _some(rng, _STORY_FOLLOW, (0.6, 0.4)))


def _rhyme(rng: random.Random) -> Iterator[Prompt]:
    for thing in (*topics.NATURE, *topics.ANIMALS):
        yield Prompt(
            "poem", _POEM, rng.choice(("Write a short poem about {}.", "Give me a little rhyme about {}.")).format(thing)
        )


def _name(rng: random.Random) -> Iterator[Prompt]:
    for template, group in itertools.product(
        ("Name three {}.", "Can you name two {}?", "Give me four examples of {}.", "List some {} in one sentence."),
        topics.GROUPS,
    ):
        yield Prompt(
            "name",
            _SHORT,
            template.format(group),
            _some(rng, ("Name one more.", "Which one do you like best?", "Thank you!"), (0.6, 0.4)),
        )


def _compare(rng: random.Random) -> Iterator[Prompt]:
    for template, pair in itertools.product(
        ("What is the difference between {}?", "How are {} different?", "How can I tell {} apart?"), topics.DIFFERENCES
    ):
        yield Prompt("compare", _SHORT, template.format(pair), _some(rng, _FOLLOW, (0.6, 0.3, 0.1)))


def _rewrite(rng: random.Random) -> Iterator[Prompt]:
    for task, sentence in itertools.product(_TASKS, _SENTENCES):
        yield Prompt(
            "rewrite",
            _WRITE,
            task.format(sentence),
            _some(rng, ("Even shorter, please.", "Thanks!", "Now make it friendlier."), (0.7, 0.3)),
        )


def _use(rng: random.Random) -> Iterator[Prompt]:
    words = [
        thing.split(" ", 1)[-1] for thing in (*topics.ANIMALS, *topics.THINGS, *topics.NATURE, *topics.FOODS, *topics.IDEAS)
    ]
    for word in words:
        template = rng.choice(
            ('Use the word "{}" in a sentence.', "Write one sentence about the word {}.", 'What does the word "{}" mean?')
        )
        yield Prompt("word", _SHORT, template.format(word))


def _some(rng: random.Random, follow_ups: tuple[str, ...], chances: tuple[float, ...]) -> tuple[str, ...]:
    """0, 1, 2... follow-ups by chance."""
    (count,) = rng.choices(range(len(chances)), chances)
    return tuple(rng.sample(follow_ups, count))


def prompts(seed: int) -> list[Prompt]:
    """All prompts in a mixed order, which depends on `seed` and so do the follow-ups."""
    rng = random.Random(seed)
    makers = (_explain, _ask, _advise, _chat, _tell, _rhyme, _name, _compare, _rewrite, _use)
    made = [prompt for maker in makers for prompt in maker(rng)]
    rng.shuffle(made)
    return made
