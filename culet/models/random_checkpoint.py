"""Models without files: `random:31B` is a Gemma 4 at the 31B's dimensions whose weights are drawn on the device. No torch.

    random:31B                         a variant by name, or the folder or config.json of a checkpoint
    random:31B,layers=6,seed=1         the same with fewer layers, and other weights
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from culet.errors import ConfigError
from culet.models.checkpoint import Checkpoint, read_config
from culet.models.spec import LayerSpec, ModelSpec, read_spec
from culet.models.variants import VARIANTS
from culet.types import MAX_SEED, ModelDefaults

PREFIX = "random:"
_HINT = f"as in random:31B or random:31B,layers=6,seed=1; known: {', '.join(VARIANTS)}, or a checkpoint's folder"


def random_name(model: str, *, num_layers: int | None = None, seed: int = 0) -> str:
    """The name under which a model of `model`'s dimensions, with random weights, is opened."""
    layers = "" if num_layers is None else f",layers={num_layers}"
    return f"{PREFIX}{model}{layers}" + (f",seed={seed}" if seed else "")


def open_random(name: str) -> Checkpoint:
    """The checkpoint that `random:...` names: a config and a seed, and no folder."""
    model, *options = name.removeprefix(PREFIX).split(",")
    numbers: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("layers", "seed") or not value.isdecimal() or int(value) > MAX_SEED:
            raise ConfigError(f"model: got {name!r}, in which {option!r} is no layers=N and no seed=N", hint=_HINT)
        numbers[key] = int(value)
    if not model:
        raise ConfigError(f"model: got {name!r}, expected a variant's name", hint=_HINT)
    config = _find_config(model)
    spec = read_spec(config)
    if "layers" in numbers:
        spec = reduce_depth(spec, numbers["layers"])
    defaults = ModelDefaults(eos_token_ids=spec.eos_token_ids)
    return Checkpoint(folder=Path(name), config=config, spec=spec, defaults=defaults, random_seed=numbers.get("seed", 0))


def _find_config(model: str) -> dict[str, Any]:
    by_name = {variant.lower(): variant for variant in VARIANTS} | {"26b": "26B-A4B"}
    if not Path(model).exists() and model.lower() in by_name:
        return VARIANTS[by_name[model.lower()]]
    if "/" not in model and not Path(model).exists():
        raise ConfigError(f"model: got {PREFIX}{model}, but there is no such variant", hint=_HINT)
    return read_config(model)


def variant_of(spec: ModelSpec) -> str | None:
    """The published variant of these dimensions; None for any other model."""
    for name, config in VARIANTS.items():
        published = read_spec(config)
        if (published.layers, published.hidden_size, published.moe) == (spec.layers, spec.hidden_size, spec.moe):
            return name
    return None


def twin_depth(spec: ModelSpec) -> int:
    """Layers of the smallest model that still has all that this one has: both kinds, and both among shared layers."""
    pattern = _pattern(spec)
    return min(len(spec.layers), 2 * pattern if spec.num_kv_shared else pattern)


def _pattern(spec: ModelSpec) -> int:
    """Layers up to and with the first global one."""
    return next(layer.index for layer in spec.layers if layer.is_global) + 1


def reduce_depth(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """`spec` with fewer layers. The last is global, as in every Gemma 4, and as large a share of them reads others' KV."""
    full_depth = len(spec.layers)
    if not 2 <= num_layers <= full_depth:
        raise ConfigError(f"layers: got {num_layers}, expected 2 to {full_depth}", hint=_HINT)
    # Layers that own KV come first and must be of both kinds, so that every shared one has a source.
    num_owners = max(num_layers - round(spec.num_kv_shared * num_layers / full_depth), min(num_layers, _pattern(spec)))
    layers: list[LayerSpec] = []
    for index in range(num_layers):
        is_global = spec.layers[index].is_global or index + 1 == num_layers
        like = next(
            layer for layer in spec.layers if (layer.is_global, layer.owns_kv) == (is_global, index < num_owners)
        )
        source = index
        if not like.owns_kv:
            source = next(layer.index for layer in reversed(layers) if layer.owns_kv and layer.is_global == is_global)
        layers.append(replace(like, index=index, kv_source=source))
    return replace(spec, layers=tuple(layers))
