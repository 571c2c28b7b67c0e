"""Questions about a scene, with their answers."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.data.material.table import capitalised
from training.data.pictures.scenes import BIGGER, COLOURS, SHAPES, TABLE, Scene, Thing, Writing

ASKS, ANSWERS = TABLE["asks"], TABLE["answers"]
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
_PLACE_WORDS = {"top", "bottom", "left", "right", "middle"}
_MAX_DESCRIBED = 4


@dataclass(frozen=True)
class Question:
    """What somebody asks about a picture, and what the model answers. One of `wanted` must be in a right answer."""

    kind: str
    text: str
    answer: str
    wanted: tuple[str, ...]


def _ask(rng: random.Random, kind: str, answer: str, wanted: str, form: str = "", **values: str) -> Question:
    """Make a question of a kind. `form` names the phrasings where a kind has several."""
    text: str = rng.choice(ASKS[form or kind]).format(**values)
    text = capitalised(text)
    if rng.random() < 0.12:
        text = text[:1].lower() + text[1:].rstrip("?.")
    return Question(kind, text, capitalised(answer), (wanted,))


def _say(form: str, **values: str) -> str:
    text: str = ANSWERS[form].format(**values)
    return text


def questions(scene: Scene, rng: random.Random) -> list[Question]:
    """Return every question that has one right answer, in no order. There is always one."""
    found = [*_about_all(scene, rng)]
    if scene.writing is not None:
        found += _about_writing(scene.writing, rng)
    for thing in _named_by_shape(scene):
        found += _about_thing(scene, thing, rng)
    for thing in _named_by_colour(scene):
        answer = _say("shape", shape=thing.shape, colour=thing.colour)
        found.append(_ask(rng, "shape", answer, thing.shape, colour=thing.colour))
    if scene.things:
        found += [*_counts(scene, rng), *_presence(scene, rng)]
    return found


def questions_about(scene: Scene, rng: random.Random) -> list[Question]:
    """Return the questions about the subject of a gate's scene whose answer needs the thing to be seen."""
    subject = scene.subject
    if isinstance(subject, Writing):
        return [*_about_writing(subject, rng)]
    assert subject is not None
    found = []
    if subject in _named_by_shape(scene):
        found += [*_about_thing(scene, subject, rng)]
    if subject in _named_by_colour(scene):
        answer = _say("shape", shape=subject.shape, colour=subject.colour)
        found.append(_ask(rng, "shape", answer, subject.shape, colour=subject.colour))
    if len(scene.things) > 1:
        found += [*_counts(scene, rng)]
    neighbours = [question for thing in _named_by_shape(scene) for question in _neighbours(scene, thing, rng)]
    return found + [question for question in neighbours if subject.shape in question.wanted]


def _named_by_shape(scene: Scene) -> list[Thing]:
    count = Counter(thing.shape for thing in scene.things)
    return [thing for thing in scene.things if count[thing.shape] == 1]


def _named_by_colour(scene: Scene) -> list[Thing]:
    count = Counter(thing.colour for thing in scene.things)
    return [thing for thing in scene.things if count[thing.colour] == 1]


def _about_all(scene: Scene, rng: random.Random) -> Iterator[Question]:
    background = scene.background.name
    if background is not None:
        yield _ask(rng, "background", _say("background", colour=background), background)
    if len(scene.things) <= _MAX_DESCRIBED:
        answer = description(scene)
        yield _ask(rng, "describe", answer, answer)


def _about_writing(writing: Writing, rng: random.Random) -> Iterator[Question]:
    kind = writing.kind
    yield _ask(rng, kind, _say(kind, text=writing.text), writing.text)
    answer = _say("writing_colour", writing=kind, colour=writing.colour)
    yield _ask(rng, "writing colour", answer, writing.colour, "writing_colour", writing=kind)


def _about_thing(scene: Scene, thing: Thing, rng: random.Random) -> Iterator[Question]:
    shape, colour = thing.shape, thing.colour
    yield _ask(rng, "colour", _say("colour", shape=shape, colour=colour), colour, shape=shape)
    yield _ask(rng, "where", _say("where", shape=shape, place=thing.place), thing.place, shape=shape)
    if rng.random() < 0.5:
        yield _ask(
            rng, "yes or no", _say("is_colour", shape=shape, colour=colour), "yes", "is_colour", shape=shape, colour=colour
        )
    else:
        other = rng.choice([name for name in COLOURS if name != colour])
        answer = _say("is_not_colour", shape=shape, colour=colour)
        yield _ask(rng, "yes or no", answer, "no", "is_colour", shape=shape, colour=other)
    yield from _neighbours(scene, thing, rng)
    for other_thing in _named_by_shape(scene):
        if thing.size > BIGGER * other_thing.size:
            names = [shape, other_thing.shape]
            rng.shuffle(names)
            yield _ask(rng, "bigger", _say("bigger", shape=shape), shape, a=names[0], b=names[1])


def _neighbours(scene: Scene, thing: Thing, rng: random.Random) -> Iterator[Question]:
    """Yield the questions for what is beside a thing. In a row or a column, neighbours are without doubt."""
    if scene.layout == "scattered":
        return
    index = scene.things.index(thing)
    before, after = ("left", "right") if scene.layout == "row" else ("above", "below")
    for direction, other in ((before, index - 1), (after, index + 1)):
        if 0 <= other < len(scene.things):
            found = scene.things[other]
            answer = _say("neighbour", shape=found.shape, colour=found.colour)
            yield _ask(rng, "beside", answer, found.shape, direction, shape=thing.shape)


def _count(rng: random.Random, scene: Scene, kind: str, name: str = "") -> Question:
    """Ask for the number of things of a shape or a colour, or of all of them."""
    if kind == "count shape":
        number, thing, things = sum(each.shape == name for each in scene.things), name, SHAPES[name]
    elif kind == "count colour":
        number, thing, things = sum(each.colour == name for each in scene.things), f"{name} shape", f"{name} shapes"
    else:
        number, thing, things = len(scene.things), "shape", "shapes"
    form = {0: "count_none", 1: "count_one"}.get(number, "count_many")
    answer = _say(form, thing=thing, things=things, number=_NUMBERS[number])
    values = {"shapes": things} if kind == "count shape" else {"colour": name}
    return _ask(rng, kind, answer, _NUMBERS[number], kind.replace(" ", "_"), **values)


def _counts(scene: Scene, rng: random.Random) -> Iterator[Question]:
    yield _count(rng, scene, "count all")
    shapes, colours = {thing.shape for thing in scene.things}, {thing.colour for thing in scene.things}
    is_absent = rng.random() < 0.12
    yield _count(rng, scene, "count shape", rng.choice([name for name in SHAPES if (name in shapes) != is_absent]))
    yield _count(rng, scene, "count colour", rng.choice([name for name in COLOURS if (name in colours) != is_absent]))


def _presence(scene: Scene, rng: random.Random) -> Iterator[Question]:
    shapes = {thing.shape for thing in scene.things}
    is_there = rng.random() < 0.5
    shape = rng.choice([name for name in SHAPES if (name in shapes) == is_there])
    answer = _say("there" if is_there else "not_there", shape=shape)
    yield _ask(rng, "yes or no", answer, "yes" if is_there else "no", "is_there", shape=shape)


def description(scene: Scene) -> str:
    """Return a sentence for everything in the picture, in reading order, with equal things together."""
    on = f" on a {scene.background.name} background" if scene.background.name else ""
    if scene.writing is not None:
        return capitalised(f"the {scene.writing.kind} {scene.writing.text} in {scene.writing.colour}{on}.")
    count = Counter((thing.colour, thing.shape) for thing in scene.things)
    named = [
        f"a {colour} {shape}" if number == 1 else f"{_NUMBERS[number]} {colour} {SHAPES[shape]}"
        for (colour, shape), number in count.items()
    ]
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    return capitalised(f"{listed}{on}.")


def is_right(kind: str, text: str, wanted: Sequence[str]) -> bool:
    """Return whether an answer is right. It must name what is wanted, and nothing that contradicts it."""
    said = re.findall(r"[a-z]+|\d+", text.lower())
    for answer in wanted:
        words = re.findall(r"[a-z]+|\d+", answer.lower())
        if kind == "describe":
            right = said == words
        elif kind == "where":
            right = set(said) & _PLACE_WORDS == set(words) & _PLACE_WORDS
        elif kind == "yes or no":
            right = said[:1] == words
        elif kind.startswith("count"):
            right = [word for word in said if word in _NUMBERS] == words
        else:
            right = words[0] in said and not (set(said) - set(words)) & _rivals(kind)
        if right:
            return True
    return False


def _rivals(kind: str) -> set[str]:
    """Return the words of which a right answer has only one."""
    if kind in ("colour", "writing colour", "background"):
        return set(COLOURS)
    return set(SHAPES) if kind in ("shape", "beside", "bigger") else set()
