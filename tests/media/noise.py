"""Images and sounds of noise that are the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    """Return uint8 noise."""
    data = hashlib.shake_256(f"{seed}{shape}".encode()).digest(int(np.prod(shape)))
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def sound(num_samples: int, seed: int = 0) -> np.ndarray:
    """Return float32 noise in [-1, 1] with a tone in it."""
    hiss = noise(num_samples, seed=seed).astype(np.float64) / 127.5 - 1
    tone = np.sin(np.arange(num_samples) * (440 * 2 * np.pi / 16000))
    return (0.1 * hiss + 0.5 * tone).astype(np.float32)
