"""Prompts for the teacher: templates times topics, in shuffled order.

Each has a system prompt that asks for short, plain answers. Some have follow-up turns.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from training.data.material import topics
from training.data.material.table import Table

_TABLE = Table("questions")

_SHORT = _TABLE["short"]
_WARM = _TABLE["warm"]
_STORY = _TABLE["story"]
_POEM = _TABLE["poem"]
_WRITE = _TABLE["write"]


@dataclass(frozen=True)
class Prompt:
    """What to ask. `follow_ups` are the user's next turns."""

    kind: str
    system: str
    first: str
    follow_ups: tuple[str, ...] = ()


_EXPLAIN = _TABLE["explain"]
_FOLLOW = _TABLE["follow"]
_WARM_FOLLOW = _TABLE["warm_follow"]
_STORY_FOLLOW = _TABLE["story_follow"]
_SENTENCES = _TABLE["sentences"]
_TASKS = _TABLE["tasks"]


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
    templates = _TABLE["how_can_i"]
    for template, activity in itertools.product(templates, topics.ACTIVITIES):
        yield Prompt("advice", _SHORT, template.format(activity), _some(rng, _FOLLOW, (0.5, 0.3, 0.2)))


def _chat(rng: random.Random) -> Iterator[Prompt]:
    for lead, event in itertools.product(("", "Hi! ", "Guess what: ", "Hello there. ", "You know, "), topics.EVENTS):
        text = lead + (event if lead.endswith((": ", ", ")) else event[0].upper() + event[1:]) + "."
        yield Prompt("chat", _WARM, text, _some(rng, _WARM_FOLLOW, (0.3, 0.3, 0.4)))
    for pair in topics.PAIRS:
        for template in _TABLE["which_do_you_like"]:
            yield Prompt(
                "chat",
                _WARM,
                template.format(pair.replace(" or ", " and ") if "between" in template else pair),
                _some(rng, _WARM_FOLLOW, (0.5, 0.3, 0.2)),
            )


def _tell(rng: random.Random) -> Iterator[Prompt]:
    templates = _TABLE["tell_me_a_short"]
    for hero in topics.HEROES:
        for template in templates * 8:
            text = template.format(hero, rng.choice(topics.PLACES), rng.choice(topics.FINDS))
            yield Prompt("story", _STORY, text, _some(rng, _STORY_FOLLOW, (0.6, 0.4)))


def _rhyme(rng: random.Random) -> Iterator[Prompt]:
    for thing in (*topics.NATURE, *topics.ANIMALS):
        yield Prompt("poem", _POEM, rng.choice(_TABLE["write_a_short_poem"]).format(thing))


def _name(rng: random.Random) -> Iterator[Prompt]:
    for template, group in itertools.product(_TABLE["name_three"], topics.GROUPS):
        yield Prompt(
            "name",
            _SHORT,
            template.format(group),
            _some(rng, ("Name one more.", "Which one do you like best?", "Thank you!"), (0.6, 0.4)),
        )


def _compare(rng: random.Random) -> Iterator[Prompt]:
    for template, pair in itertools.product(_TABLE["what_is_the_difference"], topics.DIFFERENCES):
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
        template = rng.choice(_TABLE["use_the_word_in"])
        yield Prompt("word", _SHORT, template.format(word))


def _some(rng: random.Random, follow_ups: tuple[str, ...], chances: tuple[float, ...]) -> tuple[str, ...]:
    """Return a random number of follow-ups."""
    (count,) = rng.choices(range(len(chances)), chances)
    return tuple(rng.sample(follow_ups, count))


def prompts(seed: int) -> list[Prompt]:
    """Return all prompts in shuffled order. `seed` determines the order and the follow-ups."""
    rng = random.Random(seed)
    makers = (_explain, _ask, _advise, _chat, _tell, _rhyme, _name, _compare, _rewrite, _use)
    shuffled = [prompt for maker in makers for prompt in maker(rng)]
    rng.shuffle(shuffled)
    return shuffled
