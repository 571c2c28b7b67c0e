"""How a checkpoint's config describes the values of a matrix. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

COMPRESSED_TENSORS, MODELOPT, MOBILE, GGUF = "compressed-tensors", "modelopt", "gemma", "gguf"


@dataclass(frozen=True)
class Scheme:
    """How the values of a matrix are stored."""

    kind: str  # int4, int8, fp8 or nvfp4
    group: int = 0  # columns that share a scale, for int4 and int8; 0 for all of them
    has_zero: bool = False
    scales: str = "channel"  # for fp8: channel, tensor or block
    is_packed: bool = True  # for int8


class Description(Protocol):
    """What a config says about the modules of a checkpoint."""

    @property
    def method(self) -> str: ...

    @property
    def only_scheme(self) -> Scheme | None:
        """The scheme, if all quantised modules share one."""
        ...

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a linear module by its full name, or None if it is not quantised."""
        ...

    def bits_for(self, module: str) -> int:
        """Return the bits of a module of Google's QAT for phones."""
        ...
