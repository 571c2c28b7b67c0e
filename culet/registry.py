"""Find backends, drafters and models by name, through tables of "module:Class" entries."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

from culet.errors import ConfigError


def load(path: str) -> Any:
    """Import the object that `"package.module:Name"` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


T = TypeVar("T")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`, or raise an error that lists the known names."""
    if name not in table:
        raise ConfigError(f"unknown {kind}: {name!r}", hint=f"use one of: {', '.join(sorted(table))}")
    return table[name]
