"""Made-up words, which a model can only write by copying them."""

from __future__ import annotations

import random

_ONSETS = (*"bcdfghjklmnprstvwz", "br", "cl", "dr", "fl", "gr", "pl", "qu", "sk", "sp", "st", "tr")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
_CODAS = ("", "", "", "l", "n", "r", "s", "t", "x", "nd", "ck", "m")


def made_up_word(rng: random.Random) -> str:
    """Return a word of one to three syllables."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 3))))
