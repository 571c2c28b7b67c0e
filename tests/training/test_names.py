"""The names of soft tokens: they are where things and letters are drawn, and a tower learns them."""

from __future__ import annotations

import random
import string
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from training.data.pictures.drawing import draw_picture, letter_places
from training.data.pictures.labels import NAMES, NUM_CLASSES, UNCLEAR, soft_labels
from training.data.pictures.scenes import COLOURS, Background, Scene, Thing, Writing
from training.learning.see_losses import name_loss
from training.models.shapes import MINI_TOWER
from training.models.tower import Tower

WHITE = Background("white", COLOURS["white"], COLOURS["white"])
SIDE, GRID = 384, 8  # a square picture has eight by eight soft tokens
SHAPE, COLOUR, LETTER = range(3)


def writing(text: str, *, x: float = 0.5, width: float = 0.9, turn: float = 0.0, is_bitmap: bool = False) -> Writing:
    return Writing(text, "black", x, 0.5, width, is_bitmap, False, turn)


def labels_of(*things: Thing, text: Writing | None = None) -> NDArray[np.int8]:
    labels = soft_labels(Scene(things, text, WHITE, "scattered"), SIDE, SIDE, GRID, GRID)
    assert labels.shape == (GRID * GRID, len(NAMES))
    return labels.reshape(GRID, GRID, len(NAMES))


def test_a_thing_names_the_soft_tokens_that_it_covers() -> None:
    """A large star in the middle covers four by four soft tokens, and a small ring at the top right covers one."""
    star = Thing("star", "red", 1, 1, 0.5, 0.5, 1.5, 0)
    ring = Thing("ring", "green", 0, 2, 0.93, 0.05, 0.1, 0)
    expected = np.zeros((GRID, GRID, 3), np.int8)
    expected[2:6, 2:6, SHAPE], expected[2:6, 2:6, COLOUR] = 1 + NAMES[SHAPE].index("star"), 1 + NAMES[COLOUR].index("red")
    expected[0, 7, SHAPE], expected[0, 7, COLOUR] = 1 + NAMES[SHAPE].index("ring"), 1 + NAMES[COLOUR].index("green")
    assert np.array_equal(labels_of(star, ring), expected)
    assert not labels_of().any()


def test_a_word_names_one_soft_token_for_each_letter() -> None:
    labels = labels_of(text=writing("cat"))
    named = np.argwhere(labels[..., LETTER])
    assert [str(NAMES[LETTER][labels[row, column, LETTER] - 1]) for row, column in named] == ["c", "a", "t"]
    assert {int(row) for row, _ in named} == {GRID // 2}
    assert all(b - a >= 2 for a, b in pairwise(int(column) for _, column in named))
    assert np.array_equal(labels[..., COLOUR] > 0, labels[..., LETTER] > 0)
    assert set(labels[..., COLOUR].flat) == {0, 1 + NAMES[COLOUR].index("black")}
    assert not labels[..., SHAPE].any()


def test_two_letters_in_one_soft_token_are_unclear() -> None:
    labels = labels_of(text=writing("it", x=4.5 / GRID, width=0.08))
    assert np.argwhere(labels[..., LETTER]).tolist() == [[4, 4]]
    assert labels[4, 4, LETTER] == UNCLEAR
    assert labels[4, 4, COLOUR] == 1 + NAMES[COLOUR].index("black"), "the colour is clear"


def test_every_letter_and_digit_has_a_name() -> None:
    for text in (*string.ascii_lowercase, *string.digits):
        assert (labels_of(text=writing(text, width=0.1))[..., LETTER] > 0).sum() == 1
    assert NUM_CLASSES == (9, 12, 37)


@pytest.mark.parametrize("turn", [0.0, 8.0, -8.0])
@pytest.mark.parametrize(("text", "is_bitmap"), [("hat", False), ("807", True), ("time", False)])
def test_letters_are_where_their_ink_is(text: str, is_bitmap: bool, turn: float) -> None:
    """Columns without ink divide the picture into letters, whose middles are compared."""
    width, height = 600, 400
    shown = writing(text, turn=turn, is_bitmap=is_bitmap)
    pixels = draw_picture(Scene((), shown, WHITE, "scattered"), width, height, random.Random(3))
    is_ink = pixels.max(-1) < 110
    columns = np.flatnonzero(is_ink.any(0))
    letters = [run for run in np.split(columns, np.flatnonzero(np.diff(columns) > 4) + 1) if len(run) > 4]
    places = letter_places(shown, width, height)
    assert len(letters) == len(places) == len(text)
    for run, (x, y) in zip(letters, places, strict=True):
        rows = np.flatnonzero(is_ink[:, run].any(1))
        assert abs((run[0] + run[-1]) / 2 / width - x) < 0.04
        assert abs((rows[0] + rows[-1]) / 2 / height - y) < 0.08
    if turn:
        assert (places[0][1] > places[-1][1]) == (turn > 0), "a text that is turned against the clock rises"


def pictures_and_names() -> tuple[torch.Tensor, torch.Tensor]:
    """Return two pictures of one star each, and the names of their soft tokens."""
    things = [Thing("star", colour, 0, 0, x, 0.5, 1.2, 0) for colour, x in (("red", 0.3), ("blue", 0.7))]
    drawn = [draw_picture(Scene((thing,), None, WHITE, "scattered"), SIDE, SIDE, random.Random(1)) for thing in things]
    labels = [labels_of(thing).reshape(-1, len(NAMES)) for thing in things]
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(np.stack(labels))


def test_a_tower_learns_names() -> None:
    torch.manual_seed(0)
    tower, (pictures, labels) = Tower(MINI_TOWER), pictures_and_names()
    optimiser = torch.optim.Adam(tower.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        loss = name_loss(tower, tower.pooled(pictures, torch.float32), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_what_is_unclear_teaches_nothing() -> None:
    torch.manual_seed(0)
    tower, (_, labels) = Tower(MINI_TOWER), pictures_and_names()
    pooled = torch.randn(*labels.shape[:2], MINI_TOWER.hidden_size, requires_grad=True)
    labels[0, 5] = UNCLEAR
    name_loss(tower, pooled, labels).backward()
    assert pooled.grad is not None
    is_taught = pooled.grad.abs().sum(-1) > 0
    assert not is_taught[0, 5]
    assert int(is_taught.sum()) == is_taught.numel() - 1
