"""Words that are none: whoever writes one has copied it."""

from __future__ import annotations

import random

_ONSETS = tuple(
    [
        "b",
        "br",
        "c",
        "cl",
        "d",
        "dr",
        "f",
        "fl",
        "g",
        "gr",
        "h",
        "j",
        "k",
        "l",
        "m",
        "n",
        "p",
        "pl",
        "qu",
        "r",
        "s",
        "sk",
        "sp",
        "st",
        "t",
        "tr",
        "v",
        "w",
        "z",
    ]
)
_VOWELS = tuple(["a", "e", "i", "o", "u", "ai", "ea", "oo"])
_CODAS = ("", "", "", "l", "n", "r", "s", "t", "x", "nd", "ck", "m")


def made_up_word(rng: random.Random) -> str:
    """A word that is none: whoever writes it has copied it."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 3))))
