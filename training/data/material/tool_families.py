"""Families of tools: their names and parameters, how users ask for them, what they return, and how the answer states it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.data.material.table import Table

_TABLE = Table("tool_families")
CITIES, NAMES, ITEMS, COMPANIES = _TABLE["cities"], _TABLE["names"], _TABLE["items"], _TABLE["companies"]
DAYS, TIMES, TOPICS = _TABLE["days"], _TABLE["times"], _TABLE["topics"]
TEST_NAMES: dict[str, tuple[str, ...]] = _TABLE["test_names"]  # `check_overlap.py` checks that no training chat has one of them
Values = tuple[str, ...] | str  # words to choose from, or "int LOW HIGH"


@dataclass(frozen=True)
class Family:
    """Tools of one kind. A parameter is (type, description, values)."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    parameters: dict[str, tuple[str, str, Values]]
    asks: tuple[str, ...]
    result: dict[str, Values]
    answers: tuple[str, ...]


def _values(values: Values) -> Values:
    """Return the words themselves if `values` is the name of a list."""
    return _TABLE[values] if isinstance(values, str) and not values.startswith("int ") else values


def _family(entry: dict[str, Any]) -> Family:
    parameters = {
        name: (parameter["type"], parameter["description"], _values(parameter["values"]))
        for name, parameter in entry["parameters"].items()
    }
    result = {name: _values(values) for name, values in entry["result"].items()}
    return Family(**{**entry, "parameters": parameters, "result": result})


FAMILIES = {name: _family(entry) for name, entry in _TABLE["families"].items()}
