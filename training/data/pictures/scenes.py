"""What a picture shows, drawn at random from a seed: shapes, a word or a number, their colours and places, and the background.

Some combinations never occur in training: one in eight pairs of shape and colour, one in six pairs of word and colour, and one
in six numbers of two and more digits. Every scene of the gate has such a combination, and `subject` is the thing that has it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

from training.data.material.table import Table

TABLE = Table("pictures")
COLOURS: dict[str, tuple[int, int, int]] = TABLE["colours"]
SHAPES: dict[str, str] = TABLE["shapes"]
WORDS: tuple[str, ...] = TABLE["words"]
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
MAX_THINGS = 6
BIGGER = 1.5  # how much larger a thing is than another that it is compared with
_MIN_CONTRAST = 110.0  # between the colours of things and of the background
_TINTS = ((255, 255, 255), (240, 236, 225), (226, 238, 246), (232, 246, 230), (252, 236, 236), (240, 232, 248), (215, 215, 215))


@dataclass(frozen=True)
class Thing:
    """A shape. Its place and size are shares of the picture's cell in a grid of three by three."""

    shape: str
    colour: str
    row: int
    column: int
    x: float  # of the centre, as a share of the picture's width
    y: float
    size: float  # as a share of the shorter side of a cell
    turn: float  # in degrees

    @property
    def place(self) -> str:
        name: str = TABLE["places"][f"{ROWS[self.row]}_{COLUMNS[self.column]}"]
        return name


@dataclass(frozen=True)
class Writing:
    """A word or a number."""

    text: str
    colour: str
    x: float
    y: float
    width: float  # as a share of the picture's width
    is_bitmap: bool  # in the font with visible pixels
    is_upper: bool
    turn: float

    @property
    def kind(self) -> str:
        return "number" if self.text.isdigit() else "word"


@dataclass(frozen=True)
class Background:
    """One named colour, or a run from one pale tint to another, which has no name."""

    name: str | None
    first: tuple[int, int, int]
    second: tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn."""

    things: tuple[Thing, ...]
    writing: Writing | None
    background: Background
    layout: str  # scattered, row or column
    subject: Thing | Writing | None = None  # what has a held-out combination


def _share(text: str) -> float:
    return int.from_bytes(hashlib.sha256(f"pictures {text}".encode()).digest()[:4]) / 2**32


@cache
def is_held_out(kind: str, colour: str) -> bool:
    """Return whether a shape or a word never has this colour in training. A number's colour does not matter."""
    if kind in SHAPES:
        return _share(f"{kind} {colour}") < 1 / 8
    if kind.isdigit():
        return len(kind) > 1 and _share(kind) < 1 / 6
    return _share(f"{kind} {colour}") < 1 / 6


def scene_content(scene: Scene) -> tuple[object, ...]:
    """Return what a scene shows and where, without the exact places and sizes. Equal scenes look alike."""
    things = tuple((thing.shape, thing.colour, thing.row, thing.column) for thing in scene.things)
    writing = scene.writing and (scene.writing.text, scene.writing.colour)
    return things, writing, scene.background.name


def held_out_in(scene: Scene) -> Iterator[str]:
    """Yield the held-out combinations of a scene."""
    for thing in scene.things:
        if is_held_out(thing.shape, thing.colour):
            yield f"{thing.colour} {thing.shape}"
    if scene.writing is not None and is_held_out(scene.writing.text, scene.writing.colour):
        yield f"{scene.writing.colour} {scene.writing.text}"


@lru_cache(maxsize=1024)
def _contrasts(colour: str, background: Background) -> bool:
    return min(_distance(COLOURS[colour], side) for side in (background.first, background.second)) > _MIN_CONTRAST


@lru_cache(maxsize=1024)
def _pairs(background: Background, is_for_gate: bool) -> tuple[tuple[str, str], ...]:
    """Return the visible pairs of shape and colour of training, or those held out for the gate."""
    pairs = (pair for pair in product(SHAPES, COLOURS) if _contrasts(pair[1], background))
    return tuple(pair for pair in pairs if is_held_out(*pair) == is_for_gate)


def _distance(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    return float(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5)


def draw_background(rng: random.Random) -> Background:
    chance = rng.random()
    if chance < 0.35:
        return Background("white", COLOURS["white"], COLOURS["white"])
    if chance < 0.7:
        name = rng.choice(tuple(COLOURS))
        return Background(name, COLOURS[name], COLOURS[name])
    first, second = rng.choice(_TINTS), rng.choice(_TINTS)
    return Background(None, first, second)


def draw_scene(rng: random.Random, *, is_for_gate: bool = False) -> Scene:
    """Draw a scene. One for the gate has a held-out combination, and one for training has none."""
    background = draw_background(rng)
    chance = rng.random()
    if chance < 0.28:
        writing = _draw_writing(rng, background, is_for_gate)
        return Scene((), writing, background, "scattered", writing if is_for_gate else None)
    return _draw_shapes(rng, background, is_for_gate)


def _draw_writing(rng: random.Random, background: Background, is_for_gate: bool) -> Writing:
    colours = [colour for colour in COLOURS if _contrasts(colour, background)]
    while True:
        text = str(rng.randrange(10 ** rng.choice((1, 2, 2, 3)))) if rng.random() < 0.45 else rng.choice(WORDS)
        colour = rng.choice(colours)
        if is_held_out(text, colour) == is_for_gate:
            break
    width = min(0.9, rng.uniform(0.16, 0.26) * (len(text) + 0.5))
    x, y = (rng.uniform(0.5 - spare / 2, 0.5 + spare / 2) for spare in (0.96 - width, 0.5))
    return Writing(text, colour, x, y, width, rng.random() < 0.3, rng.random() < 0.4, rng.uniform(-8, 8))


def _draw_shapes(rng: random.Random, background: Background, is_for_gate: bool) -> Scene:
    layout = rng.choices(("scattered", "row", "column"), (0.6, 0.2, 0.2))[0]
    cells, count = _draw_cells(rng, layout)
    pairs = _pairs(background, False)
    chosen = [rng.choice(pairs) for _ in range(count)]
    if layout != "scattered":  # neighbours are asked for by their shape
        while len({shape for shape, _ in chosen}) < count:
            chosen = [rng.choice(pairs) for _ in range(count)]
    elif count > 2 and rng.random() < 0.5:  # several of a kind, to be counted
        shape, colour = rng.choice(pairs)
        chosen = [(shape, colour) if rng.random() < 0.6 else pair for pair in chosen]
    if is_for_gate:
        special = _pairs(background, True)
        if not special:
            return draw_scene(rng, is_for_gate=True)
        index, pair = rng.randrange(count), rng.choice(special)
        others = [other if other[0] != pair[0] else _other_pair(rng, pairs, pair) for other in chosen]
        chosen = [*others[:index], pair, *others[index + 1 :]]
        if layout != "scattered" and len({shape for shape, _ in chosen}) < count:
            return draw_scene(rng, is_for_gate=True)
    things = tuple(_draw_thing(rng, pair, cell, count) for pair, cell in zip(chosen, cells, strict=True))
    return Scene(things, None, background, layout, things[index] if is_for_gate else None)


def _other_pair(rng: random.Random, pairs: tuple[tuple[str, str], ...], special: tuple[str, str]) -> tuple[str, str]:
    """Return a pair of another shape and colour, so that the held-out thing can be named by either."""
    return rng.choice([pair for pair in pairs if pair[0] != special[0] and pair[1] != special[1]])


def _draw_cells(rng: random.Random, layout: str) -> tuple[list[tuple[int, int]], int]:
    """Return the row and column of each thing, in reading order, and their number."""
    if layout == "scattered":
        count = rng.choices(range(1, MAX_THINGS + 1), (3, 3, 3, 2, 1.5, 1.5))[0]
        return sorted(rng.sample(list(product(range(3), range(3))), count)), count
    count, line = rng.choice((2, 3)), rng.randrange(3)
    places = [0, 2] if count == 2 and rng.random() < 0.5 else sorted(rng.sample(range(3), count))
    return [(line, place) if layout == "row" else (place, line) for place in places], count


def _draw_thing(rng: random.Random, pair: tuple[str, str], cell: tuple[int, int], count: int) -> Thing:
    shape, colour = pair
    row, column = cell
    size = rng.uniform(0.4, 0.92)
    if count == 1 and cell == (1, 1):
        size = rng.uniform(0.5, 2.4)  # it may fill the picture
    loose = max(0.0, 0.95 - size) / 2
    x, y = ((place + 0.5 + rng.uniform(-loose, loose)) / 3 for place in (column, row))
    return Thing(shape, colour, row, column, x, y, size, rng.uniform(-10, 10))
