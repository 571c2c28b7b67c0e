"""A DFlash drafter as `culet plan` and the engine see it before its weights are loaded. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from culet.cache.spec import CacheLayout, KVSpec
from culet.config import MAX_DRAFTS, DraftChoice
from culet.drafters.dflash.spec import DFlashSpec, make_config, read_dflash
from culet.errors import CheckpointError, ConfigError, UnsupportedError
from culet.layers.weight.byte_sizes import bytes_per_value
from culet.layers.weight.quantised.scheme import Scheme
from culet.models.folder import find_folder, read_config
from culet.models.quantised.config import main_scheme
from culet.models.random_checkpoint import PREFIX, RandomDraw
from culet.models.spec import ModelSpec

if TYPE_CHECKING:
    from culet.attention.base import AttentionBackend
    from culet.drafters.dflash.drafter import DFlashDrafter
    from culet.layers.weight.weights import Weights
    from culet.models.gemma4 import Gemma4

_RANDOM_OPTIONS = ("layers", "block", "seed")


@dataclass(frozen=True)
class DFlashPlan:
    """A DFlash drafter, and how many of its drafts are used."""

    method: ClassVar[str] = "dflash"
    reads_target_pages: ClassVar[bool] = False
    lookback: ClassVar[int] = 0  # it does not read the target's keys

    model: str
    revision: str | None
    spec: DFlashSpec
    first_layer: int  # number of its first layer in the pool, where the target's layers come first
    max_drafts: int
    random: RandomDraw | None = None  # if set, weights are random and there is no folder
    quantization: str = "auto"
    scheme: Scheme | None = None  # of stored matrices, if the checkpoint is quantised

    @property
    def taps(self) -> tuple[int, ...]:
        return self.spec.taps

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads

    @property
    def needs_intervals(self) -> bool:
        """Whether a layer sees the whole block, including later tokens."""
        return not all(layer.is_causal for layer in self.spec.layers)

    @classmethod
    def open(cls, choice: DraftChoice, target: ModelSpec) -> DFlashPlan:
        """Read the drafter's config.json. Raise if the drafter was not made for `target`."""
        draw, config = None, None
        if choice.model.startswith(PREFIX):
            draw, config = _read_random(choice.model, target)
        try:
            config = config or read_config(choice.model, choice.revision)
            spec, scheme = read_dflash(config, target), main_scheme(config)
        except CheckpointError as error:
            raise CheckpointError(f"drafter {choice.model}: {error.message}", hint=error.hint) from error
        if spec.block_size > MAX_DRAFTS + 1:
            problem = f"its blocks have {spec.block_size} tokens, but attention supports at most {MAX_DRAFTS + 1}"
            raise UnsupportedError(f"drafter {choice.model}: {problem}")
        most = spec.block_size - 1
        if choice.num_speculative_tokens is not None and choice.num_speculative_tokens > most:
            problem = f"got {choice.num_speculative_tokens}, but blocks of {spec.block_size} tokens hold at most {most} drafts"
            raise ConfigError(f"speculative-config: num_speculative_tokens: {problem}")
        drafts = choice.num_speculative_tokens or most
        return cls(choice.model, choice.revision, spec, len(target.layers), drafts, draw, choice.quantization, scheme)

    def kv_specs(self, itemsize: int) -> list[KVSpec]:
        """Return the layers as one group. Windows are only masks. A block is written after the newest token for one pass."""
        spec = self.spec
        return [
            KVSpec(
                layer=self.first_layer + index,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                rotated_dims=spec.head_dim,
                window=None,
                latent=False,
                itemsize=itemsize,
                owner=self.method,
                ahead=spec.block_size,
            )
            for index in range(len(spec.layers))
        ]

    def readers(self, layout: CacheLayout) -> Mapping[str, tuple[int, ...]]:
        """Return its own group, the only one that it reads."""
        return {self.method: tuple(range(self.first_layer, self.first_layer + len(self.spec.layers)))}

    def num_parameters(self) -> Mapping[str, int]:
        """Return the number of weights by part."""
        counts = {"context": 0, "attention": 0, "MLP": 0, "norms": 0}
        for name, size in self.spec.tensor_shapes():
            part = (
                "norms" if len(size) == 1 else "context" if name == "fc.weight" else "MLP" if ".mlp." in name else "attention"
            )
            counts[part] += prod(size)
        return counts

    def weight_bytes(self, itemsize: int, layout: CacheLayout | None = None) -> int:
        """Return the bytes of its weights. Every rank holds all of them."""
        counts = dict(self.num_parameters())
        norms = counts.pop("norms") * bytes_per_value(itemsize)
        chosen = bytes_per_value(itemsize, self.quantization)
        each = chosen if self.scheme is None else self.scheme.bytes_per_value(itemsize)
        return round(norms + sum(counts.values()) * each)

    def check(self, weights: Weights, *, latent: bool) -> None:
        """Raise if its files do not match its config. Nothing is loaded."""
        from culet.drafters.dflash.model import check_dflash

        if self.random is None:
            folder = find_folder(self.model, self.revision)
            check_dflash(folder, self.spec, self.first_layer, weights, quantization=self.quantization)

    def build(self, target: Gemma4, backends: Mapping[int, AttentionBackend], *, progress: bool = True) -> DFlashDrafter:
        """Load the weights to the target's device, in its precision. `backends` holds only the backend of its group."""
        from culet.drafters.dflash.drafter import DFlashDrafter
        from culet.drafters.dflash.model import draw_dflash, load_dflash

        if self.random is not None:
            model = draw_dflash(self.spec, target, self.random, quantization=self.quantization)
        else:
            folder = find_folder(self.model, self.revision)
            model = load_dflash(folder, self.spec, target, quantization=self.quantization, progress=progress)
        (backend,) = backends.values()
        return DFlashDrafter(model, backend, max_drafts=self.max_drafts)


def _read_random(model: str, target: ModelSpec) -> tuple[RandomDraw, dict[str, object]]:
    """Parse `random:` or `random:layers=2,block=8,seed=1`, a drafter for `target` with the published proportions."""
    given = dict(part.partition("=")[::2] for part in model.removeprefix(PREFIX).split(",") if part)
    for key, value in given.items():
        if key not in _RANDOM_OPTIONS or not value.isdecimal():
            known = ", ".join(f"{name}=N" for name in _RANDOM_OPTIONS)
            problem = f"got {model!r}, but {key}={value} is not an option, expected one of: {known}"
            raise ConfigError(f"speculative-config: model: {problem}")
    overrides = {"num_hidden_layers": given.get("layers"), "block_size": given.get("block")}
    numbers = {key: int(value) for key, value in overrides.items() if value is not None}
    return RandomDraw(int(given.get("seed", 0))), make_config(target, **numbers)
