"""Everyday words with definitions in simple words, written for this model."""

from __future__ import annotations

from training.data.material.table import Table

_TABLE = Table("simple_definitions")

GLOSSES: dict[str, str] = _TABLE["glosses"]
VERBS: dict[str, str] = _TABLE["verbs"]
ADJECTIVES = frozenset(_TABLE["adjectives"])  # glosses that are not nouns
MASS = frozenset(_TABLE["mass"])  # nouns without an article
THE = frozenset(_TABLE["the"])  # nouns with "the"
