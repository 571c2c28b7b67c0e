"""Rows of the decoder compared with transformers', in float32, for every kind of checkpoint, alone and packed."""

from __future__ import annotations

import functools

import pytest
import torch

from culet.media.items import MediaItem
from culet.models.checkpoint import open_checkpoint
from culet.models.towers import Towers, load_towers
from tests.models.towers import tiny_towers as tiny

CPU = torch.device("cpu")
TOLERANCE = 1e-5


@functools.cache
def towers(shape: str, dtype: str = "float32", run_dtype: str = "float32") -> Towers:
    checkpoint = open_checkpoint(str(tiny.checkpoint_folder(shape, dtype)))
    loaded = load_towers(checkpoint, dtype=getattr(torch, run_dtype), device=CPU, progress=False)
    assert loaded is not None
    return loaded


def difference(shape: str, items: list[MediaItem]) -> float:
    """Return the largest difference from transformers, relative to the size of its rows."""
    found = towers(shape).encode(items)
    worst = 0.0
    for item, rows in zip(items, found, strict=True):
        expected = tiny.oracle_rows(tiny.oracle(shape), item)
        assert rows.shape == expected.shape == (item.num_tokens, tiny.HIDDEN)
        worst = max(worst, float((rows - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("shape", tiny.SHAPES)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 2)])
def test_one_image(shape, size):
    assert difference(shape, [tiny.image(*size)]) < TOLERANCE


@pytest.mark.parametrize("num_frames", [1, 3, 4, 5, 48, 49, 99, 131])
def test_one_clip(num_frames):
    assert difference("E4B", [tiny.clip(num_frames)]) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 25])
def test_one_waveform(num_tokens):
    assert difference("12B", [tiny.waveform(num_tokens)]) < TOLERANCE
