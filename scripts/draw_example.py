"""Draw the picture that the README shows to the built-in model: `python scripts/draw_example.py [FILE]`.

Training never shows an orange star or a green ring.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from PIL import Image

from training.data.pictures.drawing import draw_picture
from training.data.pictures.scenes import COLOURS, Background, Scene, Thing

FILE = Path(__file__).parents[1] / "docs/images/shapes.png"
SIZE = (480, 324)
ENLARGED = 1.5  # it is drawn larger and scaled down, which smooths its edges
SEED = 236  # for a picture without noise and outlines
SHAPES = (("heart", "red", 0.92), ("star", "orange", 0.92), ("ring", "green", 0.8))


def scene() -> Scene:
    """Return the three shapes in a row on white."""
    things = (
        Thing(shape, colour, 1, column, (column + 0.5) / 3, 0.5, size, 0) for column, (shape, colour, size) in enumerate(SHAPES)
    )
    return Scene(tuple(things), None, Background("white", COLOURS["white"], COLOURS["white"]), "row")


def main() -> None:
    width, height = (round(side * ENLARGED) for side in SIZE)
    drawn = Image.fromarray(draw_picture(scene(), width, height, random.Random(SEED)))
    drawn.resize(SIZE, Image.Resampling.LANCZOS).quantize(64).save(sys.argv[1] if len(sys.argv) > 1 else FILE, optimize=True)


if __name__ == "__main__":
    main()
