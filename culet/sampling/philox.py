"""The random numbers of sampling: one uniform number per (seed, sample, position), the same on every device.

Philox-4x32-10 (Salmon et al., 2011) is a counter-based generator: no state, so a draw does not depend on what else is in
the batch, in which step it is made, or whether the sequence was preempted meanwhile. The layout below is that of
`tl.philox(seed, position, sample, 0, 0)` in Triton, so that a GPU kernel can repeat the numbers bit for bit:

    key      k0 = low 32 bits of the seed, k1 = high 32 bits
    counter  c0 = position of the drawn token in the sequence (prompt included), c1 = sample, c2 = c3 = 0
    uniform  ((x0 >> 5) * 2**26 + (x1 >> 6)) * 2**-53 from the output words x0 and x1: 53 bits, in [0, 1)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROUND_A, _ROUND_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_A, _KEY_B = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

Words = npt.NDArray[np.uint64]  # 32-bit words, kept in 64 bits so that products do not overflow


def philox(key: tuple[Words, Words], counter: tuple[Words, Words, Words, Words], num_rounds: int = 10) -> tuple[Words, ...]:
    """Philox-4x32 of each counter under its key: four output words, elementwise over arrays of equal shape."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(num_rounds):
        a, b = _ROUND_A * c0, _ROUND_B * c2
        c0, c1, c2, c3 = (b >> _WORD) ^ c1 ^ k0, b & _LOW, (a >> _WORD) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, sample, position)."""
    seed = np.asarray(seeds, dtype=np.uint64)
    zero = np.zeros_like(seed)
    counter = (np.asarray(positions, dtype=np.uint64) & _LOW, np.asarray(samples, dtype=np.uint64) & _LOW, zero, zero)
    x0, x1, _, _ = philox((seed & _LOW, seed >> _WORD), counter)
    bits = ((x0 >> np.uint64(5)) << np.uint64(26)) + (x1 >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
