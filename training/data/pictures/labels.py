"""What each soft token of a picture shows: a shape, its colour, or a letter. The tower learns these names beside the answers.

Answers alone teach a tower slowly, since one word says little about seventy soft tokens.
"""

from __future__ import annotations

import string

import numpy as np
from numpy.typing import NDArray

from training.data.pictures.drawing import letter_places
from training.data.pictures.scenes import COLOURS, SHAPES, Scene

NAMES = (tuple(SHAPES), tuple(COLOURS), tuple(string.ascii_lowercase + string.digits))
NUM_CLASSES = tuple(len(names) + 1 for names in NAMES)  # class 0 is nothing of that kind
UNCLEAR = -1  # of a soft token with several letters
_SHAPE, _COLOUR, _LETTER = range(3)


def soft_labels(scene: Scene, width: int, height: int, rows: int, columns: int) -> NDArray[np.int8]:
    """Return the classes of all soft tokens, [rows * columns, kinds], of a scene drawn in width x height pixels."""
    labels = np.zeros((rows, columns, len(NAMES)), np.int8)
    centre_x, centre_y = (np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows
    for thing in scene.things:
        radius = thing.size * min(width, height) / 6
        is_inside = (np.abs(centre_y - thing.y) < radius / height)[:, None] & (np.abs(centre_x - thing.x) < radius / width)
        is_inside[_index(thing.y, rows), _index(thing.x, columns)] = True
        labels[is_inside, _SHAPE] = 1 + NAMES[_SHAPE].index(thing.shape)
        labels[is_inside, _COLOUR] = 1 + NAMES[_COLOUR].index(thing.colour)
    if scene.writing is not None:
        for letter, (x, y) in zip(scene.writing.text, letter_places(scene.writing, width, height), strict=True):
            place = labels[_index(y, rows), _index(x, columns)]
            place[_COLOUR] = 1 + NAMES[_COLOUR].index(scene.writing.colour)
            place[_LETTER] = UNCLEAR if place[_LETTER] else 1 + NAMES[_LETTER].index(letter)
    return labels.reshape(-1, len(NAMES))


def _index(share: float, count: int) -> int:
    return min(count - 1, max(0, int(share * count)))
