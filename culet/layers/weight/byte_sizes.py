"""How many bytes weights take: in memory by precision, and in a checkpoint by stored type. No torch.

A loaded weight knows its own bytes (`num_bytes`). Code that has only a config asks here.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from culet.errors import CheckpointError
from culet.registry import lookup

# Bytes per value in memory, by the name of the precision in the settings, or 0 for those of activations. Scales are included
# where there is one for each group of values. One per row does not count: it adds less than 2 %.
_BYTES_PER_VALUE = {"auto": 0.0, "fp8": 1.0, "int4": 0.5 + 2 / 32}
# Bytes per element of stored tensors, by the name of their type in a safetensors header.
_STORED_BYTES: dict[str, float] = dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1)
_STORED_BYTES |= dict.fromkeys(("BF16", "F16", "I16", "U16"), 2)
_STORED_BYTES |= dict.fromkeys(("F32", "I32", "U32"), 4) | dict.fromkeys(("F64", "I64", "U64"), 8)
_STORED_BYTES |= {"Q4_0": 18 / 32, "Q8_0": 34 / 32, "Q6_K": 210 / 256}  # blocks of GGUF


def bytes_per_value(itemsize: int, precision: str = "auto") -> float:
    """Return the bytes of one value of a weight. `itemsize` is that of activations, which plain weights share."""
    return lookup("weight precision", precision, _BYTES_PER_VALUE) or itemsize


def stored_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor in a file. Raise if its type is unknown."""
    if dtype not in _STORED_BYTES:
        raise CheckpointError(f"a tensor is stored as {dtype}, a type that Culet does not know", hint="update Culet")
    return round(_STORED_BYTES[dtype] * prod(shape))
