"""Read the `quantization_config` of a checkpoint. No torch.

Three tools write such checkpoints: compressed-tensors, NVIDIA's ModelOpt, and Google's QAT for phones (`gemma`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from culet.errors import CheckpointError
from culet.layers.weight.quantised.block_types import GROUP
from culet.layers.weight.quantised.scheme import COMPRESSED_TENSORS, GGUF, MOBILE, MODELOPT, Scheme, is_group, kind_of
from culet.models.variants import variant_of

CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
_MODELOPT_BITS = {"NVFP4": 4, "W4A16_NVFP4": 4, "FP8": 8}  # of floats
_PACKED, _FLOAT, _NVFP4, _INT = "pack-quantized", "float-quantized", "nvfp4-pack-quantized", "int-quantized"
_FORMATS = (_PACKED, _FLOAT, _NVFP4, _INT)
WRITTEN = {"int": _PACKED, "float": _FLOAT}  # the formats that `write.py` writes, by type of number
_UNCOMPRESSED, _MIXED = (None, "dense"), "mixed-precision"
_BLOCK = [128, 128]
_LINEAR = "Linear"
_TABLES = ("embed_tokens", "embed_tokens_per_layer")
_TABLE_CLASSES = ("Embedding", "Gemma4TextScaledWordEmbedding")


@dataclass(frozen=True)
class Group:
    """The modules that share a scheme: full names, class names, or regular expressions after `re:`."""

    targets: tuple[str, ...]
    scheme: Scheme

    def match(self, module: str) -> int:
        """Return how exactly a target matches: by name (3), by expression (2), by class (1), or not at all (0)."""
        return max((_match(target, module) for target in self.targets), default=0)


@dataclass(frozen=True)
class Quantisation:
    """What `quantization_config` says."""

    method: str
    groups: tuple[Group, ...] = ()
    ignore: tuple[str, ...] = ()
    num_bits: int = 4  # the next fields are for Google's QAT for phones, and for tables of GGUF files
    bits_of: tuple[tuple[str, int], ...] = ()  # regular expressions and their bits
    has_tables: bool = False  # tables are quantised

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a linear module or table by its full name, or None if it is not quantised."""
        if any(_ignores(entry, module, self.method) for entry in self.ignore):
            return None
        if self.method in (MOBILE, GGUF) and _is_table(module):
            return self._table_scheme(module)
        if self.method == GGUF:
            return self._by_name.get(module)
        if self.method == MOBILE:
            return Scheme(kind_of("int", 8 if self.bits_for(module) == 8 else 4))
        # As in compressed-tensors, the most specific match counts, and the first of equal ones.
        best = max(self.groups, key=lambda group: group.match(module), default=None)
        return None if best is None or not best.match(module) else best.scheme

    @cached_property
    def _by_name(self) -> dict[str, Scheme]:
        """Schemes by target. A GGUF file names each of its hundreds of modules."""
        return {target: group.scheme for group in self.groups for target in group.targets}

    @property
    def scale_bytes(self) -> int | None:
        """The bytes of a scale in memory, or None if scales have the type of activations."""
        return {GGUF: 2, MOBILE: 4}.get(self.method)

    def _table_scheme(self, module: str) -> Scheme | None:
        bits = self.bits_for(module)
        if not self.has_tables or bits == 16:
            return None
        return Scheme(kind_of("int", 8 if bits == 8 else 4), GROUP if self.method == GGUF else 0)

    @property
    def only_scheme(self) -> Scheme | None:
        """The scheme, if all quantised modules share one."""
        return self.groups[0].scheme if len(self.groups) == 1 else None

    def bits_for(self, module: str) -> int:
        """Return the bits of a module of Google's QAT for phones."""
        return next((bits for pattern, bits in self.bits_of if re.search(pattern, module)), self.num_bits)


def _is_table(module: str) -> bool:
    return module.rpartition(".")[2] in _TABLES


def _match(target: str, module: str) -> int:
    if target.startswith("re:"):
        return 2 if re.match(target.removeprefix("re:"), module) else 0
    classes = _TABLE_CLASSES if _is_table(module) else (_LINEAR,)
    return 3 if target == module else 1 if target in classes else 0


def _read_names(values: object) -> tuple[str, ...]:
    """Read a list of names, classes and expressions. Raise if an expression is wrong."""
    names = (values,) if isinstance(values, str) else tuple(map(str, values or ()))  # type: ignore[call-overload]
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"{_word(name)} is not a regular expression: {error}") from error
    return names


def _ignores(entry: str, module: str, method: str) -> bool:
    if method == COMPRESSED_TENSORS:
        return _match(entry, module) > 0
    if method == MODELOPT:
        parts = (re.escape(part) for part in entry.split("*"))
        return re.fullmatch(".*".join(parts), module) is not None or module.startswith(f"{entry}.")
    return re.search(rf"(^|\.){re.escape(entry)}($|\.)", module) is not None or module.startswith(entry)


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Return what a config.json says about quantisation, or None for plain weights.

    Google's QAT weights in bfloat16 carry a quantization_config without a method. Their weights are plain.
    """
    _check_towers(config)
    found = {key: read for key, values in _sections(config) if (read := _read(config, key, values)) is not None}
    first = next(iter(found), "")
    for key, read in found.items():
        if read != found[first]:
            raise _error(config, key, f"differs from {first}, and only one of them can be right")
    return found.get(first)


def main_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of most matrices of a quantised checkpoint, or None for plain weights.

    That is the first scheme, because a list of targets does not say how many matrices it matches.
    """
    quantisation = read_quantisation(config)
    return quantisation.groups[0].scheme if quantisation is not None and quantisation.groups else None


def _check_towers(config: Mapping[str, Any]) -> None:
    """Raise if a tower for images or audio says that its weights are quantised."""
    for tower in ("vision_config", "audio_config"):
        section = config.get(tower)
        given = section if isinstance(section, Mapping) else {}
        for key in CONFIG_KEYS:
            if given.get(key) is not None and _read(config, f"{tower}.{key}", given[key]) is not None:
                raise _error(config, f"{tower}.{key}", "Culet reads only towers with plain weights")


def _read(config: Mapping[str, Any], key: str, values: object) -> Quantisation | None:
    """Read what the config has under one of CONFIG_KEYS."""
    if not isinstance(values, Mapping):
        raise _error(config, key, f"got {type(values).__name__}, expected an object")
    method = values.get("quant_method")
    if method is None:
        return _read_method_free(config, key, values)
    try:
        if method == COMPRESSED_TENSORS:
            return _read_compressed(config, key, values)
        if method == MODELOPT:
            return _read_modelopt(config, key, values)
        if method == MOBILE:
            return _read_mobile(values)
        if method == GGUF:
            return _read_blocks(values)
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise _error(config, key, f"cannot be read: {error}") from error
    raise _error(config, key, f"the format is {_word(method)}, which Culet does not read")


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each section about quantised weights of the text model, with its key."""
    text = config.get("text_config")
    for prefix, section in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        for key in CONFIG_KEYS:
            if section.get(key) is not None:
                yield f"{prefix}{key}", section[key]


def _read_method_free(config: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> Quantisation | None:
    if "config_groups" in values or "format" in values:  # older compressed-tensors
        return _read_compressed(config, key, values)
    if "bits" in values or key.endswith("quantization"):
        raise _error(config, key, "the format is MLX, which Culet does not read")
    if key.endswith("compression_config"):
        raise _error(config, key, "it names no format")
    return None


def _read_compressed(config: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> Quantisation | None:
    groups = []
    top = values.get("format")
    if top not in (*_FORMATS, *_UNCOMPRESSED, _MIXED):
        raise _error(config, key, f"the format is compressed-tensors {_word(top)}, which Culet does not read")
    for name, group in values.get("config_groups", {}).items():
        where = f"{key}.config_groups.{name}"
        if not isinstance(group, Mapping):
            raise _error(config, where, f"got {type(group).__name__}, expected an object with targets and weights")
        weights = group.get("weights")
        if weights is None:
            continue
        targets = _read_names(group.get("targets"))
        written = group.get("format") or top
        if written in _UNCOMPRESSED:
            continue
        if written not in _FORMATS:
            raise _error(config, where, f"the format is compressed-tensors {_word(written)}, which Culet does not read")
        groups.append(Group(targets, _read_scheme(config, where, written, weights)))
    if values.get("sparsity_config") not in (None, {}) and values["sparsity_config"].get("format") not in _UNCOMPRESSED:
        raise _error(config, key, "the format is compressed-tensors with sparsity, which Culet does not read")
    if not groups:
        return None
    return Quantisation(COMPRESSED_TENSORS, tuple(groups), _read_names(values.get("ignore")))


def _read_scheme(config: Mapping[str, Any], where: str, written: str, weights: Mapping[str, Any]) -> Scheme:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    if weights.get("actorder") not in (None, False, "static", "weight"):
        raise _error(config, where, f"actorder is {weights['actorder']!r}, and Culet reads only columns in their own order")
    if written == _NVFP4:
        return Scheme(kind_of("float", 4), has_divisor=True)
    if written == _FLOAT:
        scales = {"channel": "channel", "tensor": "tensor", "block": "block"}.get(str(strategy))
        if (bits, kind) != (8, "float") or scales is None:
            raise _error(
                config, where, f"got {bits}-bit {kind} weights by {strategy}, expected 8-bit float by channel or block"
            )
        if scales == "block" and list(weights.get("block_structure") or _BLOCK) != _BLOCK:
            raise _error(config, where, f"block_structure: got {weights['block_structure']}, expected {_BLOCK}")
        return Scheme(kind_of("float", 8), scales=scales)
    group = weights.get("group_size") if strategy == "group" else 0
    if strategy not in ("group", "channel") or (strategy == "group" and not is_group(group)):
        expected = "expected channel, or group with a power of two from 8 up"
        raise _error(config, where, f"got strategy {_word(strategy)} with group_size {_word(group)}, {expected}")
    assert isinstance(group, int)
    symmetric = weights.get("symmetric", True)
    if kind != "int" or bits not in (4, 8) or (bits == 8 and not symmetric) or (written == _INT and bits != 8):
        what = f"{bits}-bit {kind} weights{'' if symmetric else ' with zero points'}"
        raise _error(config, where, f"got {what}, expected 4 bits, or 8 bits without zero points")
    return Scheme(kind_of(kind, bits), group, has_zero=not symmetric, is_packed=written == _PACKED)


def _read_modelopt(config: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> Quantisation:
    algorithm = values.get("quant_algo")
    if algorithm not in _MODELOPT_BITS:
        raise _error(config, key, f"the format is ModelOpt {_word(algorithm)}, which Culet does not read")
    kind = kind_of("float", _MODELOPT_BITS[algorithm])
    ignore = values.get("ignore") or values.get("exclude_modules") or ()
    return Quantisation(MODELOPT, (Group((_LINEAR,), Scheme(kind, scales="tensor")),), tuple(map(str, ignore)))


def _read_mobile(values: Mapping[str, Any]) -> Quantisation:
    overrides = values.get("module_quant_configs") or {}
    bits = [(str(pattern), override.get("num_bits", values.get("num_bits", 4))) for pattern, override in overrides.items()]
    for pattern, count in [*bits, ("num_bits", values.get("num_bits", 4))]:
        if not isinstance(count, int) or count not in (2, 4, 8):
            raise ValueError(f"{pattern}: got {count!r} bits, expected 2, 4 or 8")
        if pattern != "num_bits":
            re.compile(pattern)
    return Quantisation(
        MOBILE,
        ignore=tuple(map(str, values.get("modules_to_not_convert") or ())),
        num_bits=values.get("num_bits", 4),
        bits_of=tuple(bits),
        has_tables=bool(values.get("quantize_embeddings", False)),
    )


def _read_blocks(values: Mapping[str, Any]) -> Quantisation | None:
    """Read what `gguf_folder.py` wrote about a GGUF file: the bits of each module.

    A file whose matrices and tables are plain counts as a plain checkpoint.
    """
    modules: dict[int, list[str]] = {}
    for module, bits in values.get("module_bits", {}).items():
        if bits not in (4, 8):
            raise ValueError(f"{_word(module)}: got {bits!r} bits, expected 4 or 8")
        modules.setdefault(bits, []).append(str(module))
    groups = tuple(Group(tuple(names), Scheme(kind_of("int", bits), GROUP)) for bits, names in modules.items())
    tables = (
        ("embed_tokens_per_layer", values.get("per_layer_table_bits", 16)),
        ("embed_tokens", values.get("table_bits", 16)),
    )
    if values.get("module_bits") == {} and all(count == 16 for _, count in tables):
        return None
    return Quantisation(GGUF, groups, bits_of=tables, has_tables=True)


def _word(value: object) -> str:
    """Return a value for an error message, without the control characters or the length of a hostile one."""
    return f"{value!r}"[:80]


def _error(config: Mapping[str, Any], key: str, problem: str) -> CheckpointError:
    return CheckpointError(f"config.json: {key}: {problem}", hint=f"use {readable_file(config)}")


def readable_file(config: Mapping[str, Any]) -> str:
    """Return the name of a published checkpoint of the same model that Culet reads."""
    found = trained_file(config)
    return found or "the bfloat16 checkpoint, with --quantization fp8 or int4"


def trained_file(config: Mapping[str, Any]) -> str | None:
    """Return the best published quantised checkpoint of the same model, or None for a model that is not published."""
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert isinstance(text, Mapping)
    name = variant_of(text.get("hidden_size"), text.get("num_hidden_layers"))
    if name is None:
        return None
    # There is no such checkpoint of the 26B from Google.
    return "RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic" if name == "26B-A4B" else f"google/gemma-4-{name}-it-qat-w4a16-ct"
