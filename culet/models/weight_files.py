"""Open the files of a checkpoint: safetensors, or GGUF. Headers are read first, and values on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from culet.errors import CheckpointError
from culet.layers.weight.byte_sizes import stored_bytes
from culet.layers.weight.quantised.gguf import BlockSlice
from culet.models.folder import GGUF_SUFFIX, read_json
from culet.models.quantised.gguf_file import read_gguf
from culet.models.quantised.gguf_folder import GGUF_FILE

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8  # at the beginning of a safetensors file: the length of its header
_NUM_LISTED = 5  # number of names that an error lists
_LISTED_CHARS = 100  # characters of each of them
_MAX_NAME_BYTES = 255  # of a file name, the limit of common file systems


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as its header describes it. Its values are read on request."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as in a safetensors header
    offset: int  # of its first byte in the file

    @property
    def num_bytes(self) -> int:
        return stored_bytes(self.dtype, self.shape)

    def read(self, index: int | None = None) -> Tensor:
        """Return the tensor, or one matrix of a stack."""
        return self.read_region((...,)) if index is None else self.read_region((slice(index, index + 1),))[0]

    def read_region(self, region: tuple[Any, ...]) -> Tensor:
        """Return a part of the tensor. Blocks of a GGUF file are returned as they are.

        The header of a GGUF file has the whole vocabulary and takes a second to read, so it is not read again.
        """
        if self.file.suffix == GGUF_SUFFIX:
            raw = np.memmap(self.file, mode="r", offset=self.offset, shape=(self.num_bytes,))
            return BlockSlice(raw, self.shape, self.dtype)[region]
        with open_file(self.file) as tensors:
            value: Tensor = tensors.get_tensor(self.name) if region == (...,) else tensors.get_slice(self.name)[region]
        return value


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor in the folder's files by its name."""
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        if file.suffix == GGUF_SUFFIX:
            tensors = read_gguf(file).tensors.items()
            found |= {name: StoredTensor(name, file, each.shape, each.kind, each.offset) for name, each in tensors}
            continue
        with open_file(file) as opened:
            offsets = _read_offsets(file)
            for name in opened.keys():  # noqa: SIM118 (an open file is not a dict)
                header = opened.get_slice(name)
                shape, dtype = tuple(header.get_shape()), str(header.get_dtype())
                if name in found:
                    problem = f"{file.name} and {found[name].file.name} both have {listed([name], 'tensor')}"
                    raise CheckpointError(f"{folder}: {problem}", hint="files of two downloads are mixed: download it again")
                found[name] = StoredTensor(name, file, shape, dtype, offsets[name])
    return found


def _read_offsets(path: Path) -> dict[str, int]:
    """Return where each tensor of a safetensors file begins. `open_file` has checked the header."""
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = msgspec.json.decode(file.read(header_len))
    begin = _LENGTH_BYTES + header_len
    return {name: begin + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights: those listed in the index, or the single file."""
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map: expected an object that maps tensor names to file names")
        names = sorted(set(weight_map.values()))
        odd = [name for name in names if not name.isprintable() or not 0 < len(name.encode()) <= _MAX_NAME_BYTES]
        if odd:
            problem = f"got {listed([ascii(name) for name in odd], 'file name')}"
            raise CheckpointError(
                f"{folder / INDEX_FILE}: weight_map: {problem}, expected printable names of 1 to {_MAX_NAME_BYTES} bytes"
            )
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map: got {listed(outside, 'file')} outside this folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            hint = "part of the model is missing: download it again"
            raise CheckpointError(f"{folder}: cannot find {listed(missing, 'file')} listed in {INDEX_FILE}", hint=hint)
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    blocks = sorted(folder.glob("*.gguf"))
    if len(blocks) == 1:
        return blocks
    hint = f"expected {SINGLE_FILE}, {INDEX_FILE} with the files that it lists, or one GGUF file"
    raise CheckpointError(f"{folder}: the folder has no weights", hint=hint)


@contextmanager
def open_file(file: Path) -> Iterator[Any]:
    """Open a memory-mapped safetensors file. Errors name the file."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as error:
        problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "the file is damaged or incomplete: download it again"
        raise CheckpointError(f"{file}: cannot be read: {problem}", hint=hint) from error


def shown(folder: Path) -> Path:
    """Return what a user passed for the folder in an error: a GGUF file, or the folder itself."""
    link = folder / GGUF_FILE
    return link.resolve() if link.is_symlink() else folder


def listed(names: list[str], noun: str) -> str:
    """Format names as `3 tensors (a, b, c)`. A long list shows only the first few names."""
    more = ", ..." if len(names) > _NUM_LISTED else ""
    shown = [name if len(name) <= _LISTED_CHARS else f"{name[:_LISTED_CHARS]}..." for name in names[:_NUM_LISTED]]
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} ({', '.join(shown)}{more})"
