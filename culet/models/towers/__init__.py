"""The vision and audio towers of Gemma 4: from decoded media to rows that the decoder reads as input embeddings."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from culet.models.towers.towers import Towers, load_towers

__all__ = ["Towers", "load_towers"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `culet plan` can read tower specs without torch.
    if name in __all__:
        return getattr(import_module("culet.models.towers.towers"), name)
    raise AttributeError(f"module 'culet.models.towers' has no attribute {name!r}")
