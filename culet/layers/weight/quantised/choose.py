"""Choose each weight's format from the checkpoint's tensors and config."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from culet.errors import CheckpointError
from culet.layers.weight.placement import FLOATS
from culet.layers.weight.plain import PerExpertFormat, PlainFormat
from culet.layers.weight.quantised.forms import Fp8, Int4, Int8, Nvfp4
from culet.layers.weight.quantised.gguf import RoundedQ6K, block_format
from culet.layers.weight.quantised.matrices import QuantisedFormat
from culet.layers.weight.quantised.mobile import MobileFormat
from culet.layers.weight.quantised.rounding import RoundedFormat, RoundedHead
from culet.layers.weight.quantised.scheme import MOBILE, MODELOPT, Description, HeadRounding, Scheme, is_group
from culet.layers.weight.quantised.sources import PackedInt4, PackedInt8, StoredFp8, StoredNvfp4
from culet.layers.weight.weights import WeightFormat

_PLAIN, _PER_EXPERT = PlainFormat(), PerExpertFormat()
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
_HINT = "use a file whose experts have one format, such as RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic"
_GGUF_KINDS = ("Q4_0", "Q8_0", "Q6_K")
# Endings of tensors that no form needs: activations stay in the model's precision, and the shape is in the config. The scales
# of the KV cache are not used either, because Culet derives its own.
SKIPPED = ("weight_shape", "input_scale", "input_global_scale", "k_scale", "v_scale", "k_cache_scale", "v_cache_scale")


class Header(Protocol):
    """What a file says about a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


def rounded(precision: str) -> Callable[[str], WeightFormat]:
    """Return a chooser for a plain checkpoint that is quantised while it is loaded."""
    chosen = RoundedFormat(precision)
    return lambda _: chosen


def with_rounded_head(
    choose: Callable[[str], WeightFormat], head: HeadRounding, stored_types: Collection[str]
) -> Callable[[str], WeightFormat] | None:
    """Return a chooser that differs from `choose` in the head, which is quantised while it is loaded.

    `stored_types` are those of the head's tensors. Return None if the head is stored quantised.
    """
    if FLOATS.issuperset(stored_types):
        chosen = RoundedHead(head.precision)
    elif set(stored_types) == {"Q6_K"}:
        chosen = RoundedHead(head.precision, RoundedQ6K())
    else:
        return None
    return lambda name: chosen if name == head.name else choose(name)


@dataclass(frozen=True)
class StoredFormats:
    """Chooses formats for the weights of a checkpoint. `stored` maps the model's names to headers, `names` to stored names."""

    quantisation: Description | None
    stored: Mapping[str, Header]
    names: Mapping[str, str]

    def __call__(self, name: str) -> WeightFormat:
        if f"{name}.gate_up_proj" in self.stored:
            formats = [
                self._of_tensor(name, f"{name}.{part}") for part in ("gate_up_proj", "down_proj") if self._has(name, part)
            ]
            return self._of_experts(name, formats)
        if self._type_of(f"{name}.0.gate_proj"):
            self._check_alike(name)
            found = self._of_experts(name, [self._of_module(f"{name}.0.{part}") for part in _EXPERT_PARTS])
            return _PER_EXPERT if found == _PLAIN else found
        return self._of_module(name)

    def _has(self, name: str, part: str) -> bool:
        return f"{name}.{part}" in self.stored

    def _type_of(self, module: str) -> str:
        """Return how the values of a module are stored, or "" if they are not."""
        found = (f"{module}.{ending}" for ending in ("weight_packed", "weight") if self._has(module, ending))
        return next((f"{name.rpartition('.')[2]} {self.stored[name].dtype}" for name in found), "")

    def _check_alike(self, name: str) -> None:
        """Raise if the experts of a layer are not all stored like the first one."""
        expert = 1
        while types := [self._type_of(f"{name}.{expert}.{part}") for part in _EXPERT_PARTS]:
            if not any(types):
                return
            for part, found in zip(_EXPERT_PARTS, types, strict=True):
                if found and found != self._type_of(f"{name}.0.{part}"):
                    raise CheckpointError(
                        f"{name}: {part} of expert {expert} has another format than that of expert 0", hint=_HINT
                    )
            expert += 1

    def _of_experts(self, name: str, formats: list[WeightFormat]) -> WeightFormat:
        """Return the format of a layer's experts, given those of its matrices. The down matrices come last."""
        first, last = formats[0], formats[-1]
        if all(each == first for each in formats):
            return first
        if any(each != first for each in formats[:-1]):
            raise CheckpointError(f"{name}: gate and up have different formats, which Culet does not read", hint=_HINT)
        if not isinstance(first, QuantisedFormat) or not isinstance(last, QuantisedFormat):
            raise CheckpointError(f"{name}: only some matrices are quantised, which Culet does not read", hint=_HINT)
        return replace(first, down=last)

    def _of_module(self, name: str) -> WeightFormat:
        if f"{name}.embedding_quantized" in self.stored:
            return self._mobile_table(name)
        for ending in ("weight_packed", "weight"):
            if f"{name}.{ending}" in self.stored:
                return self._of_tensor(name, f"{name}.{ending}")
        return _PLAIN  # the check of names and shapes reports what is missing

    def _of_tensor(self, module: str, tensor: str) -> WeightFormat:
        header = self.stored[tensor]
        if header.dtype in FLOATS:
            return _PLAIN
        if header.dtype in _GGUF_KINDS:
            return block_format(header.dtype)
        if self.quantisation is None or len(header.shape) != 2:
            return _PLAIN  # the check of types reports it
        stored_module = self.names[tensor].rpartition(".")[0]
        if self.quantisation.method == MOBILE:
            bits = self.quantisation.bits_for(stored_module)
            return MobileFormat(8 if header.dtype == "I8" else bits if bits != 8 else 4)
        is_modelopt = self.quantisation.method == MODELOPT
        if header.dtype == "U8":
            return QuantisedFormat(Nvfp4(has_divisor=not is_modelopt), StoredNvfp4(is_modelopt))
        scheme = self._scheme(stored_module)
        self._check_kind(stored_module, header, scheme)
        return _format_of(scheme, self._scale_dtype(module, scheme))

    def _scale_dtype(self, module: str, scheme: Scheme) -> torch.dtype | None:
        """Return the dtype of int4 and int8 scales if the stored one should be kept, or None for that of the activations.

        float32 scales of groups would need as much memory as a quarter of the weights, so only those of rows are kept.
        """
        header = self.stored.get(f"{module}.weight_scale")
        kept = {"F16": torch.float16} | ({} if scheme.group else {"F32": torch.float32})
        return None if header is None else kept.get(header.dtype)

    def _scheme(self, module: str) -> Scheme:
        assert self.quantisation is not None
        scheme = self.quantisation.scheme_of(module)
        scheme = scheme or self.quantisation.only_scheme  # the tensors are right if the ignore list says otherwise
        if scheme is None:
            problem = f"{module} is stored quantised, but no group of quantization_config has it as a target"
            raise CheckpointError(problem, hint="config.json and the weights belong to different models")
        return scheme

    def _check_kind(self, module: str, header: Header, scheme: Scheme) -> None:
        """Raise if the tensor cannot have this scheme."""
        expected = {"int4": "I32", "int8": "I32" if scheme.is_packed else "I8", "fp8": "F8_E4M3", "nvfp4": "U8"}[scheme.kind]
        if header.dtype != expected:
            problem = f"{module} is stored as {header.dtype}, but quantization_config says {scheme.kind}, stored as {expected}"
            raise CheckpointError(problem, hint="config.json and the weights belong to different models")
        num_columns = header.shape[1] * {"int4": 8, "int8": 4 if scheme.is_packed else 1}.get(scheme.kind, 1)
        if scheme.group and num_columns % scheme.group:
            problem = f"{module} has {num_columns} columns, which groups of {scheme.group} do not divide"
            raise CheckpointError(problem, hint="group_size in config.json is wrong, or the tensor is cut off")
        if scheme.has_zero and f"{module}.weight_zero_point" not in self.names.values():
            hint = "the file is incomplete, or `symmetric` in config.json is wrong"
            raise CheckpointError(f"{module} has no weight_zero_point, although its weights are not symmetric", hint=hint)

    def _mobile_table(self, name: str) -> WeightFormat:
        values, scale = self.stored[f"{name}.embedding_quantized"], self.stored.get(f"{name}.embedding_scale")
        blocks = scale.shape[-1] if scale is not None and len(scale.shape) == 2 else 1
        module = self.names[f"{name}.embedding_quantized"].rpartition(".")[0]
        bits = 4 if self.quantisation is None else self.quantisation.bits_for(module)
        bits = 8 if values.dtype == "I8" else bits if bits != 8 else 4
        num_columns = values.shape[-1] * (1 if bits == 8 else 8 // bits)
        if blocks != 1 and (blocks < 1 or num_columns % blocks or not is_group(num_columns // blocks)):
            problem = f"{module}.embedding_scale has {blocks} scales per row of {num_columns} columns"
            hint = "expected one scale, or one for each 8, 16, 32, ... columns: the file is damaged, download it again"
            raise CheckpointError(problem, hint=hint)
        return MobileFormat(bits, blocks)


def _format_of(scheme: Scheme, scale_dtype: torch.dtype | None) -> WeightFormat:
    if scheme.kind == "int4":
        return QuantisedFormat(Int4(scheme.group, scale_dtype, scheme.has_zero), PackedInt4(scheme.group, scheme.has_zero))
    if scheme.kind == "int8":
        return QuantisedFormat(Int8(scheme.group, scale_dtype), PackedInt8(scheme.group, scheme.is_packed))
    return QuantisedFormat(Fp8(scheme.scales == "block"), StoredFp8(scheme.scales))
