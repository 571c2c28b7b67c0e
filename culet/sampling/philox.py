"""Random numbers for sampling. Each (seed, sample, position) gives one uniform number, the same on every device.

Philox-4x32-10 (Salmon et al., 2011) is a counter-based generator. It has no state, so a draw does not depend on the rest of
the batch, on the step in which it is made, or on preemptions. The layout below is that of `tl.philox(seed, position, sample,
0, 0)` in Triton, so a GPU kernel reproduces the numbers bit for bit:

    key      k0 = low 32 bits of the seed, k1 = high 32 bits
    counter  c0 = position of the drawn token in the sequence (prompt included), c1 = sample, c2 = c3 = 0
    uniform  ((x0 >> 5) * 2**26 + (x1 >> 6)) * 2**-53 from the output words x0 and x1: 53 bits, in [0, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_FEW = 16  # up to this many numbers, a loop over Python's integers is faster than numpy

# 32-bit words, as Python's integers or as arrays of uint64. Their products do not overflow.
Words = TypeVar("Words", int, npt.NDArray[Any])


def philox(key: tuple[Words, Words], counter: tuple[Words, Words, Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Apply Philox-4x32-10 to each counter and key. Return four output words, elementwise for arrays of equal shape."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _LOW, (a >> 32) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> list[float]:
    """Return one number in [0, 1) for each (seed, sample, position)."""
    if len(seeds) <= _FEW:
        outputs = [
            philox((seed & _LOW, seed >> 32), (position & _LOW, sample & _LOW, 0, 0))
            for seed, sample, position in zip(seeds, samples, positions, strict=True)
        ]
        return [((x0 >> 5 << 26) + (x1 >> 6)) * 2.0**-53 for x0, x1, _, _ in outputs]
    seed = np.asarray(seeds, dtype=np.uint64)
    zero = np.zeros_like(seed)
    counter = (np.asarray(positions, dtype=np.uint64) & _LOW, np.asarray(samples, dtype=np.uint64) & _LOW, zero, zero)
    words0, words1, _, _ = philox((seed & _LOW, seed >> 32), counter)
    bits = ((words0 >> 5) << 26) + (words1 >> 6)
    many: list[float] = (bits.astype(np.float64) * 2.0**-53).tolist()
    return many
