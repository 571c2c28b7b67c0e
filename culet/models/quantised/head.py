"""The table that `--head-quantization` rounds, and the checks that it can be rounded. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from culet.errors import ConfigError
from culet.layers.weight.quantised.scheme import HeadRounding
from culet.models.quantised.config import read_quantisation
from culet.models.spec import ModelSpec

HEAD, TABLE = "lm_head", "embed_tokens"  # the only module whose name has no prefix, and the table that usually is the head
AUTO = "auto"  # keep the precision of the checkpoint


def head_rounding(spec: ModelSpec, precision: str) -> HeadRounding | None:
    """Return what `--head-quantization` rounds, or None if it rounds nothing."""
    if precision == AUTO:
        return None
    rounding = HeadRounding(HEAD if spec.has_head else TABLE, precision)
    group = rounding.scheme.group
    if group and spec.hidden_size % group:
        problem = f"got {precision}, but groups of {group} do not divide the table's {spec.hidden_size} columns"
        raise ConfigError(f"head-quantization: {problem}", hint="omit --head-quantization")
    return rounding


def already_quantised(precision: str, name: object) -> ConfigError:
    """Return the error for a checkpoint whose head is stored quantised."""
    problem = f"head-quantization: got {precision}, but the head of {name} is already quantised"
    return ConfigError(problem, hint="omit --head-quantization, or pass a checkpoint whose embedding table is bfloat16")


def check_head(spec: ModelSpec, config: Mapping[str, Any], precision: str, name: str) -> None:
    """Raise if the head cannot be rounded, as far as the config says. The loader checks the stored tensors."""
    rounding, quantisation = head_rounding(spec, precision), read_quantisation(config)
    if rounding is not None and quantisation is not None and quantisation.scheme_of(stored_name(config, rounding.name)):
        raise already_quantised(precision, name)


def stored_name(config: Mapping[str, Any], module: str) -> str:
    """Return the full name of one of the decoder's modules in a checkpoint."""
    if module == HEAD:
        return module
    return ("model.language_model." if "text_config" in config else "model.") + module
