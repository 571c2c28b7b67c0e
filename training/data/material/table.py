"""The texts of the chats. `Table("letters")` reads tables/letters.toml."""

from __future__ import annotations

import functools
import random
import re
import tomllib
from collections.abc import ItemsView
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tables"


class Table:
    """Named lists of words and sentences. Arrays are tuples."""

    def __init__(self, name: str) -> None:
        self._entries = _read(name)

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def items(self) -> ItemsView[str, Any]:
        return self._entries.items()

    def say(self, rng: random.Random, key: str, **values: str) -> str:
        """Return one of the sentences under `key`, filled in."""
        return phrase(rng, self._entries[key], **values)


def phrase(rng: random.Random, forms: tuple[str, ...], **values: str) -> str:
    """Return one of the forms, filled in, with a capital letter."""
    return capitalised(rng.choice(forms).format(**values))


def capitalised(text: str) -> str:
    """Return `text` with a capital at the beginning, and "an" for "a" before a vowel."""
    text = re.sub(r"\b([Aa]) (?=[aeio](?!ne\b|u))", r"\1n ", text)
    return text[:1].upper() + text[1:]


@functools.cache
def _read(name: str) -> dict[str, Any]:
    with (FOLDER / f"{name}.toml").open("rb") as file:
        return {key: _frozen(value) for key, value in tomllib.load(file).items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(entry) for key, entry in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
