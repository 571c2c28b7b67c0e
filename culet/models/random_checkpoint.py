"""Models without files. `random:31B` is a Gemma 4 with the 31B's dimensions and weights drawn on the device. No torch.

    random:31B                         a variant by name, or the folder or config.json of a checkpoint
    random:31B,layers=6,seed=1         the same with fewer layers and other weights
    random:31B,layers=12,draw=calm     the same with another distribution

`random_weights.py` draws the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from culet.cache.spec import plan_cache
from culet.errors import ConfigError
from culet.models.folder import read_config
from culet.models.spec import LayerSpec, ModelSpec, read_spec
from culet.models.variants import VARIANTS

PREFIX = "random:"
KINDS = ("normal", "narrow", "uniform", "calm")  # the distributions in random_weights.py
_HINT = f"example: random:31B,layers=6,seed=1; the name is one of {', '.join(VARIANTS)}, or a checkpoint folder"


@dataclass(frozen=True)
class RandomDraw:
    """How random weights are drawn."""

    seed: int = 0
    kind: str = "normal"  # one of KINDS


def random_name(model: str, *, num_layers: int | None = None, draw: str = "normal") -> str:
    """Return the name of a random model with the dimensions of `model`.

    `model` is a variant, or the path of a checkpoint or its config.json.
    """
    return (
        f"{PREFIX}{model}"
        + (f",layers={num_layers}" if num_layers is not None else "")
        + (f",draw={draw}" if draw != "normal" else "")
    )


def read_random(name: str) -> tuple[dict[str, Any], ModelSpec, RandomDraw]:
    """Return the config, the spec and the draw that `random:...` names."""
    model, *options = name.removeprefix(PREFIX).split(",")
    given = dict(option.partition("=")[::2] for option in options)
    for key, value in given.items():
        if value not in KINDS if key == "draw" else key not in ("layers", "seed") or not value.isdecimal():
            known = f"layers=N, seed=N, draw={'|'.join(KINDS)}"
            raise ConfigError(f"model: got {name!r}, but {key}={value} is not an option, expected one of: {known}", hint=_HINT)
    if not model:
        raise ConfigError(f"model: got {name!r}, expected the name of a variant", hint=_HINT)
    config = _find_config(model)
    spec = read_spec(config)
    if "layers" in given:
        spec = reduce_depth(spec, int(given["layers"]))
    return config, spec, RandomDraw(int(given.get("seed", 0)), given.get("draw", KINDS[0]))


def _find_config(model: str) -> dict[str, Any]:
    by_name = {variant.lower(): variant for variant in VARIANTS} | {"26b": "26B-A4B"}
    if not Path(model).exists() and model.lower() in by_name:
        return VARIANTS[by_name[model.lower()]]
    if "/" not in model and not Path(model).exists():
        raise ConfigError(f"model: got {PREFIX}{model}, but there is no such variant", hint=_HINT)
    return read_config(model)


def variant_of(spec: ModelSpec) -> str | None:
    """Return the published variant with these dimensions, or None for any other model."""
    for name, config in VARIANTS.items():
        published = read_spec(config)
        if (published.layers, published.hidden_size, published.moe) == (spec.layers, spec.hidden_size, spec.moe):
            return name
    return None


def twin_depth(spec: ModelSpec, itemsize: int, *, latent: bool = True) -> int:
    """Return the depth of the smallest model with both kinds of layer, shared layers if `spec` has them, and equal pages."""
    pattern = _pattern(spec)
    wanted = _page_tokens(spec, itemsize, latent)
    for num_layers in range(2 * pattern if spec.num_kv_shared else pattern, len(spec.layers), pattern):
        if _page_tokens(reduce_depth(spec, num_layers), itemsize, latent) == wanted:
            return num_layers
    return len(spec.layers)


def _page_tokens(spec: ModelSpec, itemsize: int, latent: bool) -> list[int]:
    return [group.page_tokens for group in plan_cache(spec.kv_specs(itemsize, latent=latent)).groups]


def _pattern(spec: ModelSpec) -> int:
    """Return the number of layers up to and including the first global one."""
    return next(layer.index for layer in spec.layers if layer.is_global) + 1


def reduce_depth(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """Return `spec` with fewer layers.

    The last layer is global, as in every Gemma 4, and the same share of layers reads another layer's KV.
    """
    full_depth = len(spec.layers)
    if not 2 <= num_layers <= full_depth:
        raise ConfigError(f"layers: got {num_layers}, expected a number from 2 to {full_depth}", hint=_HINT)
    # As in published models, layers that own KV come first in whole patterns, so each shared layer has a source of its kind.
    num_owners = num_layers - round(spec.num_kv_shared * num_layers / full_depth)
    if spec.num_kv_shared:
        pattern = _pattern(spec)
        num_owners = min(num_layers, max(pattern, num_owners // pattern * pattern))
    layers: list[LayerSpec] = []
    for index in range(num_layers):
        is_global = spec.layers[index].is_global or index + 1 == num_layers
        like = next(layer for layer in spec.layers if (layer.is_global, layer.owns_kv) == (is_global, index < num_owners))
        source = index
        if not like.owns_kv:
            source = next(layer.index for layer in reversed(layers) if layer.owns_kv and layer.is_global == is_global)
        layers.append(replace(like, index=index, kv_source=source))
    return replace(spec, layers=tuple(layers))
