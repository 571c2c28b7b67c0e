"""How the values of a matrix are stored: as a config describes them, or as `--quantization` makes them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from culet.hardware import Arch
from culet.registry import lookup

COMPRESSED_TENSORS, MODELOPT, MOBILE, GGUF = "compressed-tensors", "modelopt", "gemma", "gguf"
# By what a config calls the numbers, and their bits.
_KINDS = {("int", 2): "int2", ("int", 4): "int4", ("int", 8): "int8", ("float", 4): "nvfp4", ("float", 8): "fp8"}
_BLOCK = 128  # rows and columns of an fp8 block
_NVFP4_GROUP = 16  # columns that share a scale
_LEAST_GROUP = 8  # columns: an int4 word
_ROUNDED_GROUP = 32  # of `--quantization int4`
_SMALLER_GROUPS = (64, 32)  # that larger ones are divided into
_LARGE = 1 << 12  # rows and columns of a matrix that stands for most
# As measured for docs/log/accuracy.md.
_HEAD_COST = (
    "embeddings are rounded too, because the head is the embedding table; {} % of the built-in model's most likely tokens "
    "change, and larger models were not measured"
)


def kind_of(number: str, bits: int) -> str:
    """Return the kind of a scheme whose numbers have this many bits. `number` is int or float."""
    return _KINDS[number, bits]


def is_group(size: object) -> bool:
    """Return whether kernels can read groups of this many columns. A tile holds whole groups or a part of one."""
    return isinstance(size, int) and size >= _LEAST_GROUP and size & (size - 1) == 0


def sizes_in_memory(group: int) -> Iterator[int]:
    """Yield the sizes that groups may have in memory, largest first. Loading may move parts of a group to different places."""
    yield group
    yield from (size for size in _SMALLER_GROUPS if size < group and group % size == 0)


@dataclass(frozen=True)
class Scheme:
    """How the values of a matrix are stored."""

    kind: str  # int4, int8, fp8 or nvfp4
    group: int = 0  # columns that share a scale, for int4 and int8; 0 for all of them
    has_zero: bool = False
    scales: str = "channel"  # for fp8: channel, tensor or block
    is_packed: bool = True  # for int8
    has_divisor: bool = False  # for nvfp4: the global scale is stored as a divisor, which is kept beside its reciprocal

    @property
    def bits(self) -> int:
        return int(self.kind[-1])

    @property
    def number(self) -> str:
        """What a config calls the numbers: int or float."""
        return "int" if self.kind.startswith("int") else "float"

    @property
    def column_unit(self) -> int:
        """The number of columns that are stored together, in a group or a packed word."""
        if self.kind == "nvfp4":
            return _NVFP4_GROUP
        if self.kind == "fp8":
            return _BLOCK if self.scales == "block" else 1
        return self.group or (8 if self.kind == "int4" else 4 if self.is_packed else 1)

    def in_runs(self, run: int) -> Scheme:
        """Return the scheme in memory if loading moves runs of this many columns. If no groups fit, columns stay."""
        sizes = (size for size in sizes_in_memory(self.group) if run % size == 0) if self.group else ()
        return replace(self, group=next(iter(sizes), self.group))

    def bytes_per_value(self, itemsize: int) -> float:
        """Return the bytes of one value of a large matrix, with its share of the scales."""
        return self.num_bytes(_LARGE, _LARGE, itemsize) / _LARGE**2

    def num_bytes(self, num_rows: int, num_columns: int, itemsize: int) -> float:
        """Return the bytes of a matrix in memory, with its scales. `itemsize` is that of activations."""
        values, groups = num_rows * num_columns, num_rows * -(-num_columns // (self.group or num_columns))
        if self.kind == "int4":
            return values / 2 + groups * (itemsize + self.has_zero)
        if self.kind == "int8":
            return values + groups * itemsize
        if self.kind == "nvfp4":
            return values / 2 + values / _NVFP4_GROUP + 4 * num_rows * (1 + self.has_divisor)
        blocks = -(-num_rows // _BLOCK) * -(-num_columns // _BLOCK)
        return values + 4 * (blocks if self.scales == "block" else num_rows)


@dataclass(frozen=True)
class Rounding:
    """What plain weights become if they are quantised while they are loaded."""

    scheme: Scheme
    words: str  # for the log
    head_cost: str  # what rounding the head costs, for the log
    has_better_files: bool = False  # training with quantised weights gives better ones

    def fits(self, num_columns: int) -> bool:
        """Return whether whole groups hold a matrix with this many columns."""
        return num_columns % (self.scheme.group or 1) == 0


# By the name of the precision in the settings.
ROUNDINGS = {
    "fp8": Rounding(
        Scheme("fp8"),
        "each row of a matrix gets a scale; tables, norms and the router keep their precision",
        _HEAD_COST.format("1.2"),
    ),
    "int4": Rounding(
        Scheme("int4", _ROUNDED_GROUP),
        f"rounded to nearest in groups of {_ROUNDED_GROUP}; quantisation-aware training gives better files",
        _HEAD_COST.format("4.3"),
        has_better_files=True,
    ),
}


def rounding_of(precision: str) -> Rounding:
    return lookup("quantization", precision, ROUNDINGS)


@dataclass(frozen=True)
class HeadRounding:
    """Which table or matrix is the head, and the precision that it is quantised to while it is loaded."""

    name: str  # as in the model
    precision: str

    @property
    def scheme(self) -> Scheme:
        return rounding_of(self.precision).scheme


def is_widened(precision: str, arch: Arch) -> bool:
    """Return whether many tokens are multiplied by a wider copy of weights of a quantised precision."""
    return precision != "fp8" or not (arch.is_gpu and arch.has_e4m3)


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
