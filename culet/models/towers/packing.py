"""Bring images and clips to the device, packed one after the other without padding.

The pixels of a soft token, and the patches of a soft token, are adjacent. So pooling reads nine rows in a row, and attention
does not mind, because it sees a set of patches with positions.

Shapes: T patches of all images · V values of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from culet.errors import BadRequest, InternalError
from culet.media.items import MediaItem, MediaKind

CHANNELS = 3
_LEVELS = 256
_IMAGE_SCALE = 0.00392156862745098  # images are multiplied by 1 / 255, and frames of a video are divided by 255


def pixel_values() -> Tensor:
    """Return the value in [0, 1] of each pixel level, float32 [2 * 256], for images and then for frames of a video.

    The two differ in the last bit of some values. A table has the same bits on every device, and division has not.
    """
    levels = torch.arange(_LEVELS, dtype=torch.uint8)
    return torch.cat((levels * _IMAGE_SCALE, levels / 255.0))


@dataclass(frozen=True)
class PackedImages:
    """The patches of several images on the device."""

    levels_TV: Tensor  # int32, indices of `pixel_values`. A patch's values are ordered row, column, channel.
    x_T: Tensor  # int64, column of each patch in its image
    y_T: Tensor
    lengths: list[int]  # number of patches of each image


def pack_images(items: Sequence[MediaItem], patch: int, pooling: int, num_positions: int, device: torch.device) -> PackedImages:
    """Pack images whose sides are multiples of `patch * pooling` pixels."""
    grids = [_grid(item, patch * pooling, pooling, num_positions) for item in items]
    lengths = [rows * columns * pooling**2 for rows, columns in grids]
    pixels = _to_device([item.data for item in items], device)
    size = CHANNELS * patch**2
    levels_TV = torch.empty(sum(lengths), size, dtype=torch.int32, device=device)
    first_patch = first_byte = 0
    for item, (rows, columns), length in zip(items, grids, lengths, strict=True):
        image = pixels[first_byte : first_byte + length * size].view(rows, pooling, patch, columns, pooling, patch, CHANNELS)
        target = levels_TV[first_patch : first_patch + length]
        target.view(rows, columns, pooling, pooling, patch, patch, CHANNELS).copy_(image.permute(0, 3, 1, 4, 2, 5, 6))
        if item.kind is MediaKind.VIDEO:
            target.add_(_LEVELS)
        first_patch, first_byte = first_patch + length, first_byte + len(item.data)
    x_T, y_T = torch.cat([_places(rows, columns, pooling, device) for rows, columns in grids], 1)
    return PackedImages(levels_TV, x_T, y_T, lengths)


def pack_rows(items: Sequence[MediaItem], num_columns: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return the float32 rows of several clips, one below the other, and their number in each clip."""
    for item in items:
        if len(item.shape) != 2 or item.shape[1] != num_columns or len(item.data) != 4 * prod(item.shape):
            raise _misfit(item, f"[rows, {num_columns}] of float32")
    rows = _to_device([item.data for item in items], device).view(torch.float32)
    return rows.view(-1, num_columns), [item.shape[0] for item in items]


def _grid(item: MediaItem, token_pixels: int, pooling: int, num_positions: int) -> tuple[int, int]:
    """Return the rows and columns of an image in soft tokens. Raise if the tower cannot read it."""
    if len(item.shape) != 3 or item.shape[2] != CHANNELS or len(item.data) != prod(item.shape):
        raise _misfit(item, f"[height, width, {CHANNELS}] of uint8")
    height, width, _ = item.shape
    rows, columns = height // token_pixels, width // token_pixels
    if not rows or not columns or height % token_pixels or width % token_pixels or rows * columns != item.num_tokens:
        raise _misfit(item, f"sides that are multiples of {token_pixels} pixels, and a soft token for each square of them")
    if max(rows, columns) * pooling > num_positions:
        problem = f"an image is {max(rows, columns) * pooling} patches long, but the model has positions for {num_positions}"
        raise BadRequest(problem, hint="send an image that is less narrow, or lower max_soft_tokens")
    return rows, columns


def _misfit(item: MediaItem, expected: str) -> InternalError:
    got = f"{list(item.shape)}, {len(item.data)} bytes and {item.num_tokens} tokens"
    return InternalError(f"{item.kind}: got {got}, expected {expected}")


@lru_cache(maxsize=64)
def _places(rows: int, columns: int, pooling: int, device: torch.device) -> Tensor:
    """Return the column and the row of each patch of an image, int64 [2, T], soft token by soft token."""
    y, x = torch.meshgrid(torch.arange(rows * pooling), torch.arange(columns * pooling), indexing="ij")
    blocks = torch.stack((x, y)).view(2, rows, pooling, columns, pooling)
    return blocks.transpose(2, 3).reshape(2, -1).to(device)


def _to_device(parts: Sequence[bytes], device: torch.device) -> Tensor:
    """Return the joined parts on the device. This does not wait for the copy."""
    host = torch.empty(sum(map(len, parts)), dtype=torch.uint8, pin_memory=device.type == "cuda")
    target, begins = host.numpy(), np.cumsum([0, *map(len, parts)])

    def copy(index: int) -> None:
        target[begins[index] : begins[index + 1]] = np.frombuffer(parts[index], dtype=np.uint8)

    for _ in _copiers().map(copy, range(len(parts))):
        pass  # wait for all of them
    return host.to(device, non_blocking=True)


@cache
def _copiers() -> ThreadPoolExecutor:
    """Return threads that copy. One thread takes 4 ms to copy eight images, and the GPU waits for them."""
    return ThreadPoolExecutor(4, thread_name_prefix="pack-images")
