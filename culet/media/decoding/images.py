"""Decode and resize images. The pixels are those that transformers' processor gives, to the last bit."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFile, PngImagePlugin

from culet.media.decoding.colours import clear_colour, to_rgb
from culet.media.decoding.refusal import Refusal
from culet.media.spec import target_size

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

ImageFile.LOAD_TRUNCATED_IMAGES = False
# Pillow refuses a PNG whose profile or text has more than 1 MB once decompressed, and some programs write such files.
PngImagePlugin.MAX_TEXT_CHUNK = 16 << 20


def decode_image(data: bytes, max_pixels: int) -> np.ndarray[Any, Any]:
    """Return an encoded image as uint8 [height, width, 3], upright, with transparency over white. Of several frames, the first.

    Only the header is read before its size is checked.
    """
    Image.MAX_IMAGE_PIXELS = max_pixels  # some decoders learn the real size late, and then Pillow checks it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(image, max_pixels)
            clear = clear_colour(image)  # before EXIF, for which Pillow loads a PNG
            turn = _read_turn(image)
            image.load()
            if "transparency" in image.info:  # some are gone once their image is loaded
                image.info["transparency"] = clear
            _check_size(image, max_pixels)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise Refusal(f"the image has more than {max_pixels} pixels", "send a smaller image") from None
        except Image.UnidentifiedImageError:
            raise Refusal(f"this is not an image that can be read, expected {', '.join(FORMATS)}") from None
        except (Refusal, MemoryError):
            raise
        except Exception:  # decoders raise almost anything for a broken file
            raise Refusal("the image is damaged or incomplete", "check that the whole file was sent") from None
        rgb = to_rgb(image)
        return np.asarray(rgb if turn is None else rgb.transpose(turn))


def resize(pixels: np.ndarray[Any, Any], budget: int) -> np.ndarray[Any, Any]:
    """Return the image in the size that fits the budget. Both are uint8 [height, width, 3].

    The rounding to whole levels between the two passes is part of the result, so this works on uint8 and on a CPU.
    """
    height, width = pixels.shape[:2]
    size = target_size(height, width, budget)
    if size == (height, width):
        return np.ascontiguousarray(pixels)
    image_1CHW = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None]
    resized = F.interpolate(image_1CHW, size=size, mode="bicubic", antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _check_size(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width <= 0 or height <= 0:
        raise Refusal(f"the image is {width} x {height} pixels, expected at least 1 x 1")
    if width * height > max_pixels:
        raise Refusal(f"the image is {width} x {height} pixels, expected at most {max_pixels} pixels", "send a smaller image")


def _read_turn(image: Image.Image) -> Image.Transpose | None:
    """Return how to turn the image upright, by its EXIF data. Damaged EXIF data counts as none."""
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:
        return None
