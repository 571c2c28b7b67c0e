"""Builders that raise in a ProcessWorker's process. They import no torch, so the process starts quickly."""

from __future__ import annotations

from culet.errors import ConfigError


def refuse(number: int) -> None:
    raise ConfigError(f"got {number}", hint="take another number")


def fail() -> None:
    raise KeyError("no such thing")
