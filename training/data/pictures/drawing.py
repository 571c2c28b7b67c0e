"""Draw a scene as pixels. Pictures differ in size, aspect ratio, tint, noise, outlines and compression."""

from __future__ import annotations

import io
import math
import random
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from training.data.pictures.scenes import COLOURS, Scene, Thing, Writing

Colour = tuple[int, int, int]
Points = list[tuple[float, float]]
_JITTER = 16  # levels by which a colour differs from its name's
_NOISE_SIDE = 768


def _star(num_points: int = 5, inner: float = 0.42) -> Points:
    angles = [math.pi * index / num_points - math.pi / 2 for index in range(2 * num_points)]
    return [
        (math.cos(angle) * (inner if index % 2 else 1), math.sin(angle) * (inner if index % 2 else 1))
        for index, angle in enumerate(angles)
    ]


def _heart() -> Points:
    steps = [2 * math.pi * index / 40 for index in range(40)]
    return [
        (math.sin(t) ** 3, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16)
        for t in steps
    ]


# Corners in a square from -1 to 1. Circles and rings are ellipses.
_CORNERS: dict[str, Points] = {
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": [(0, -0.95), (0.95, 0.8), (-0.95, 0.8)],
    "diamond": [(0, -1), (0.68, 0), (0, 1), (-0.68, 0)],
    "cross": [
        *[(-0.33, -0.95), (0.33, -0.95), (0.33, -0.33), (0.95, -0.33), (0.95, 0.33), (0.33, 0.33)],
        *[(0.33, 0.95), (-0.33, 0.95), (-0.33, 0.33), (-0.95, 0.33), (-0.95, -0.33), (-0.33, -0.33)],
    ],
    "star": _star(),
    "heart": _heart(),
}


def draw_picture(scene: Scene, width: int, height: int, rng: random.Random) -> NDArray[np.uint8]:
    """Return the pixels of a scene, uint8 [height, width, 3]. `rng` decides everything that the scene leaves open."""
    image = _draw_background(scene, width, height, rng)
    pen = ImageDraw.Draw(image)
    outline_width = rng.choice((0, 0, 0, 2))
    for thing in scene.things:
        _draw_thing(pen, thing, width, height, outline_width, rng)
    if scene.writing is not None:
        _draw_writing(image, scene.writing, rng)
    if rng.random() < 0.5:
        left, top = rng.randrange(_NOISE_SIDE - width), rng.randrange(_NOISE_SIDE - height)
        image = Image.blend(image, _noise().crop((left, top, left + width, top + height)), rng.uniform(0.02, 0.12))
    if rng.random() < 0.08:
        image = _compressed(image, rng.randrange(45, 90))
    return np.asarray(image)


def _draw_background(scene: Scene, width: int, height: int, rng: random.Random) -> Image.Image:
    background = scene.background
    first = Image.new("RGB", (width, height), _jittered(background.first, rng))
    if background.first == background.second:
        return first
    second = Image.new("RGB", (width, height), _jittered(background.second, rng))
    ramp = _ramp() if rng.random() < 0.5 else _ramp().transpose(Image.Transpose.ROTATE_90)
    return Image.composite(first, second, ramp.resize((width, height)))


def _jittered(colour: Colour, rng: random.Random) -> Colour:
    red, green, blue = (min(255, max(0, level + rng.randint(-_JITTER, _JITTER))) for level in colour)
    return red, green, blue


def _draw_thing(
    pen: ImageDraw.ImageDraw, thing: Thing, width: int, height: int, outline_width: int, rng: random.Random
) -> None:
    radius = thing.size * min(width, height) / 6
    x, y = thing.x * width, thing.y * height
    fill = _jittered(COLOURS[thing.colour], rng)
    dark = (fill[0] // 2, fill[1] // 2, fill[2] // 2)
    box = (x - radius, y - radius, x + radius, y + radius)
    if thing.shape == "ring":
        pen.ellipse(box, outline=fill, width=max(2, round(radius * rng.uniform(0.25, 0.4))))
    elif thing.shape == "circle":
        pen.ellipse(box, fill=fill, outline=dark if outline_width else None, width=outline_width)
    else:
        cos, sin = math.cos(math.radians(thing.turn)), math.sin(math.radians(thing.turn))
        corners = [(x + radius * (px * cos - py * sin), y + radius * (px * sin + py * cos)) for px, py in _CORNERS[thing.shape]]
        pen.polygon(corners, fill=fill, outline=dark if outline_width else None, width=outline_width or 1)


def _draw_writing(image: Image.Image, writing: Writing, rng: random.Random) -> None:
    """Draw the text as a mask of the wanted width, turn it a little, and fill it with its colour."""
    is_bold = rng.random() < 0.4
    mask = _letters(_shown(writing), writing.is_bitmap, is_bold)
    method = Image.Resampling.NEAREST if writing.is_bitmap else Image.Resampling.BILINEAR
    size = _writing_size(writing, mask, image.width, image.height)
    mask = mask.resize(size, method).rotate(writing.turn, Image.Resampling.BILINEAR, expand=True)
    image.paste(_jittered(COLOURS[writing.colour], rng), _corner(writing, mask.size, image.size), mask)


def _shown(writing: Writing) -> str:
    return writing.text.upper() if writing.is_upper else writing.text


def _writing_size(writing: Writing, mask: Image.Image, image_width: int, image_height: int) -> tuple[int, int]:
    """Return the width and height of a text in the picture, before it is turned."""
    width = round(writing.width * image_width)
    height = round(width * mask.height / mask.width)
    if height > image_height * 0.45:
        width, height = round(width * image_height * 0.45 / height), round(image_height * 0.45)
    return max(1, width), max(1, height)


def _corner(writing: Writing, size: tuple[int, int], image_size: tuple[int, int]) -> tuple[int, int]:
    """Return the left upper corner of a text of this size. It stays inside the picture."""
    left, top = (
        round(share * whole - part / 2) for share, whole, part in zip((writing.x, writing.y), image_size, size, strict=True)
    )
    return min(max(left, 0), max(0, image_size[0] - size[0])), min(max(top, 0), max(0, image_size[1] - size[1]))


def letter_places(writing: Writing, width: int, height: int) -> list[tuple[float, float]]:
    """Return about where the middle of each letter is, as shares of the picture's width and height."""
    text, font = _shown(writing), _font(writing.is_bitmap)
    size = _writing_size(writing, _letters(text, writing.is_bitmap, False), width, height)
    left, top = _corner(writing, size, (width, height))
    slope, whole = math.tan(math.radians(writing.turn)), font.getlength(text)
    places = []
    for index, letter in enumerate(text):
        along = (font.getlength(text[:index]) + font.getlength(letter) / 2) / whole
        x = left + along * size[0]
        y = top + size[1] / 2 - (along - 0.5) * size[0] * slope  # Pillow turns against the clock
        places.append((x / width, y / height))
    return places


@cache
def _font(is_bitmap: bool) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default_imagefont() if is_bitmap else ImageFont.load_default(64)


@lru_cache(maxsize=2048)
def _letters(text: str, is_bitmap: bool, is_bold: bool) -> Image.Image:
    """Return a text as a mask, cut to its ink."""
    font = _font(is_bitmap)
    stroke = 3 if is_bold and not is_bitmap else 0
    left, top, right, bottom = map(round, font.getbbox(text))
    mask = Image.new("L", (right - left + 2 * stroke + 4, bottom - top + 2 * stroke + 4))
    ImageDraw.Draw(mask).text((stroke + 2 - left, stroke + 2 - top), text, fill=255, font=font, stroke_width=stroke)
    box = mask.getbbox()
    assert box is not None, f"the font has no ink for {text!r}"
    return mask.crop(box)


@cache
def _ramp() -> Image.Image:
    return Image.linear_gradient("L")


@cache
def _noise() -> Image.Image:
    """Return coloured noise, of which pictures use different parts."""
    levels = np.random.default_rng(0).integers(0, 256, (_NOISE_SIDE, _NOISE_SIDE, 3), np.uint8)
    return Image.fromarray(levels)


def _compressed(image: Image.Image, quality: int) -> Image.Image:
    """Return the image as it looks after JPEG compression."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")
