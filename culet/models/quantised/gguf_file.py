"""Read GGUF files of Gemma 4: their metadata, and where each tensor lies under its name in other checkpoints. No torch."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from culet.errors import CheckpointError
from culet.layers.weight.quantised.block_types import FLOAT32, OTHER_TYPES, READ_NAMES, READ_TYPES
from culet.models.variants import variant_of

ARCHITECTURE = "gemma4"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ITEMS = 1 << 24  # entries of a list, tensors and keys; a vocabulary has 2^18
_HINT = "the file is damaged or incomplete: download it again"
# Types of metadata: their struct codes, then the numbers of strings and arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Names in GGUF and in other checkpoints.
_GLOBAL_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
}
_ROPE = "rope_freqs.weight"
_SKIPPED = ("output.weight", _ROPE)  # the head equals the embedding table; rope is part of the config
_PREFIX = "model."
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file."""

    shape: tuple[int, ...]
    kind: str  # a name in READ_TYPES
    offset: int
    values_per_block: int
    bytes_per_block: int

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count // self.values_per_block * self.bytes_per_block


@dataclass(frozen=True)
class GgufFile:
    """The contents of a GGUF file except for the weights themselves."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]  # by their names in other checkpoints
    rope_factors: tuple[int, int] | None  # offset and number of the float32 factors of global layers

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's metadata."""
        return self.metadata.get(f"{ARCHITECTURE}.{key}", default)


class _Cursor:
    """Reads values one after another. Every read is within the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def bad(self, problem: str, hint: str = _HINT) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}", hint=hint)

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise self.bad(f"the file ends at byte {len(self.data)}, inside its header")
        chunk = self.data[self.at : end]
        self.at = end
        return chunk

    def number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return value

    def count(self, what: str) -> int:
        value: int = self.number("Q")
        if value > _MAX_ITEMS:
            raise self.bad(f"it has {value} {what}, expected at most {_MAX_ITEMS}")
        return value

    def text(self) -> str:
        return self.take(self.count("characters in a name")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.count("entries in a list")
            if depth or (inner not in _SCALARS and inner != _STRING):
                raise self.bad(f"a list has entries of type {inner}")
            if inner == _STRING:
                return [self.text() for _ in range(count)]
            size = struct.calcsize(f"<{_SCALARS[inner]}")
            return list(struct.unpack(f"<{count}{_SCALARS[inner]}", self.take(size * count)))
        if kind not in _SCALARS:
            raise self.bad(f"metadata has a value of type {kind}, which is unknown")
        return self.number(_SCALARS[kind])


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file. Raise if it is not one of Gemma 4, or if a tensor has a type that Culet does not read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data, path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint=_HINT) from error


def _read(cursor: _Cursor) -> GgufFile:
    if cursor.take(4) != _MAGIC:
        raise cursor.bad("this is not a GGUF file")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise cursor.bad(f"GGUF version {version}, expected 2 or 3", "convert the model again with a current llama.cpp")
    num_tensors, num_keys = cursor.count("tensors"), cursor.count("keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise cursor.bad(f"the metadata has {key[:80]!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        hint = "Culet serves only Gemma 4"
        if architecture == "clip":
            hint = "this file has the vision and audio parts; pass the file with the language model"
        raise cursor.bad(f"the architecture is {str(architecture)[:80]!r}, expected {ARCHITECTURE!r}", hint)
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        hint = "join the parts with `llama-gguf-split --merge FIRST_PART OUT`, and pass the result"
        raise cursor.bad(f"this is one of {count} parts of a model", hint)
    described = [_read_tensor(cursor, metadata) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise cursor.bad(f"the alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    rope: tuple[int, int] | None = None
    _check_offsets(cursor, described, alignment)
    for name, tensor in described:
        placed = GgufTensor(tensor.shape, tensor.kind, start + tensor.offset, tensor.values_per_block, tensor.bytes_per_block)
        if placed.offset + placed.num_bytes > len(cursor.data):
            raise cursor.bad(
                f"{name} ends at byte {placed.offset + placed.num_bytes}, but the file has only {len(cursor.data)}"
            )
        if name == _ROPE and placed.kind == FLOAT32:
            rope = placed.offset, placed.shape[0]
        if name in _SKIPPED:
            continue
        if _other_name(name) in tensors:
            raise cursor.bad(f"it has two tensors that are {_other_name(name)}")
        tensors[_other_name(name)] = placed
    return GgufFile(cursor.path, metadata, tensors, rope)


def _check_offsets(cursor: _Cursor, described: Sequence[tuple[str, GgufTensor]], alignment: int) -> None:
    """Raise if a tensor is not aligned, or begins before the one before it ends."""
    end, before = 0, ""
    for name, tensor in sorted(described, key=lambda item: item[1].offset):
        if tensor.offset % alignment:
            raise cursor.bad(f"{name} begins at byte {tensor.offset} of the data, expected a multiple of {alignment}")
        if tensor.offset < end:
            raise cursor.bad(f"{name} begins inside {before}")
        end, before = tensor.offset + tensor.num_bytes, name


def _read_tensor(cursor: _Cursor, metadata: Mapping[str, Any]) -> tuple[str, GgufTensor]:
    name, num_dims = cursor.text()[:200], cursor.number("I")
    if not 1 <= num_dims <= 4:
        raise cursor.bad(f"{name} has {num_dims} dimensions")
    sizes = [cursor.number("Q") for _ in range(num_dims)]
    if any(not 0 < size < 1 << 40 for size in sizes):
        raise cursor.bad(f"{name} has the shape {sizes}")
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in READ_TYPES:
        kind = OTHER_TYPES.get(number, f"type {number}")
        width, depth = (metadata.get(f"{ARCHITECTURE}.{key}") for key in ("embedding_length", "block_count"))
        model = variant_of(width, depth)
        file = f"google/gemma-4-{model}-it-qat-q4_0-gguf" if model else "a file made by `llama-quantize --pure`"
        hint = f"use {file}: every tensor must be {READ_NAMES}"
        raise cursor.bad(f"{name} is stored as {kind}, which Culet does not read", hint)
    kind, values, size = READ_TYPES[number]
    if sizes[0] % values:
        raise cursor.bad(f"{name} has rows of {sizes[0]} values, which blocks of {values} do not divide")
    return name, GgufTensor(tuple(reversed(sizes)), kind, offset, values, size)


def _other_name(name: str) -> str:
    """Return the name of a tensor in other checkpoints. An unknown name stays, and is reported as unexpected."""
    if name in _GLOBAL_NAMES:
        return _PREFIX + _GLOBAL_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] in _LAYER_NAMES:
        return f"{_PREFIX}layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}"
    return name
