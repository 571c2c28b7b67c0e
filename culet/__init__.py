"""Culet: a serving engine for Google's Gemma 4 models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from culet.version import __version__

if TYPE_CHECKING:
    from culet.engine.async_llm import AsyncEngineArgs, AsyncLLM
    from culet.engine.llm import LLM
    from culet.types import SamplingParams, StructuredOutputs

__all__ = ["LLM", "AsyncEngineArgs", "AsyncLLM", "SamplingParams", "StructuredOutputs", "__version__"]

# Imported on first use, so that `culet --help` and `culet plan` do not load torch.
_LAZY = {
    "LLM": "culet.engine.llm",
    "AsyncEngineArgs": "culet.engine.async_llm",
    "AsyncLLM": "culet.engine.async_llm",
    "SamplingParams": "culet.types",
    "StructuredOutputs": "culet.types",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'culet' has no attribute {name!r}")
