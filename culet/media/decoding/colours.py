"""Turn pictures and arrays of any form into RGB pixels, with transparency over white. No torch.

Decoding processes read files with it, and a caller's own program reads its pictures with it. So both give the same pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N")
_GREY_STEPS = {"L;2": 85, "L;4": 17}  # a PNG's level of 2 or 4 bits times this is Pillow's of 8


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB. Transparency is composited over white, and 16-bit grey keeps its upper 8 bits."""
    if image.mode in _DEEP_GREY:
        deep = np.asarray(image)
        grey = (deep >> 8).astype(np.uint8)
        clear = image.info.get("transparency")  # one level of 16 bits
        if clear is not None:
            grey[deep == clear] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        # Pillow converts La only to LA.
        layers = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGBA", layers.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layers).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def clear_colour(image: Image.Image) -> Any:
    """Return the colour that counts as transparent, scaled like the pixels, or None. Call it before the image is loaded.

    Pillow scales the pixels of a PNG to 8 bits, but not this colour. After loading, the depth of the file is no longer known.
    """
    clear = image.info.get("transparency")
    tiles = getattr(image, "tile", None)
    depth = tiles[0].args if tiles and image.format == "PNG" else None
    if isinstance(clear, int) and isinstance(depth, str):
        return clear * _GREY_STEPS.get(depth, 1)
    if isinstance(clear, tuple) and depth == "RGB;16B":
        return tuple(level >> 8 for level in clear)
    return clear


def array_to_rgb(pixels: Any) -> Any:
    """Return uint8 pixels as [..., 3]. The last axis has 1 (grey), 3 (RGB) or 4 (RGBA) values."""
    if pixels.shape[-1] == 3:
        return pixels
    if pixels.shape[-1] == 1:
        return np.repeat(pixels, 3, axis=-1)
    height, width = pixels.shape[-3:-1]
    frames = pixels.reshape(-1, height, width, 4)
    return np.stack([np.asarray(to_rgb(Image.fromarray(frame))) for frame in frames]).reshape(*pixels.shape[:-1], 3)
