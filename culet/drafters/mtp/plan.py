"""An MTP drafter as `culet plan` and the engine see it before its weights are loaded. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from culet.cache.spec import CacheLayout, KVSpec
from culet.config import DraftChoice
from culet.drafters.mtp.spec import MTPSpec, make_config, read_mtp
from culet.errors import CheckpointError, ConfigError
from culet.layers.weight.byte_sizes import bytes_per_value
from culet.layers.weight.quantised.scheme import Scheme
from culet.models.folder import find_folder, read_config
from culet.models.quantised.config import main_scheme
from culet.models.random_checkpoint import PREFIX, RandomDraw
from culet.models.sizes import attention_weights
from culet.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from culet.attention.base import AttentionBackend
    from culet.drafters.mtp.drafter import MTPDrafter
    from culet.drafters.mtp.model import MTPModel
    from culet.layers.weight.weights import Weights
    from culet.models.gemma4 import Gemma4

DEFAULT_DRAFTS = 3


@dataclass(frozen=True)
class MTPPlan:
    """An MTP drafter, and how it drafts."""

    method: ClassVar[str] = "mtp"
    taps: ClassVar[tuple[int, ...]] = ()  # every draft round has the hidden state after the final norm
    reads_target_pages: ClassVar[bool] = True
    needs_intervals: ClassVar[bool] = False

    choice: DraftChoice
    spec: MTPSpec
    random: RandomDraw | None = None  # if set, weights are random and there is no folder
    scheme: Scheme | None = None  # of stored matrices, if the checkpoint is quantised

    @property
    def model(self) -> str:
        return self.choice.model

    @property
    def max_drafts(self) -> int:
        return self.choice.num_speculative_tokens or DEFAULT_DRAFTS

    @property
    def num_heads(self) -> int:
        return self.spec.decoder.layers[0].num_heads

    @property
    def lookback(self) -> int:
        """Number of keys before the target's window that its sliding layers also see."""
        return int(self.choice.position == "hf")

    @classmethod
    def open(cls, choice: DraftChoice, target: ModelSpec) -> MTPPlan:
        """Read the drafter's config.json. Raise if the drafter was not made for `target`."""
        draw, config = None, None
        if choice.model.startswith(PREFIX):
            draw, config = _read_random(choice.model), make_config(target)
        try:
            config = config or read_config(choice.model, choice.revision)
            spec, scheme = read_mtp(config, target), main_scheme(config)
        except CheckpointError as error:
            raise CheckpointError(f"drafter {choice.model}: {error.message}", hint=error.hint) from error
        if choice.head_dtype != "auto" and spec.centroids is not None:
            problem = f"drafter {choice.model} scores clusters of tokens first and reads little of its head"
            raise ConfigError(f"speculative-config: head_dtype: got {choice.head_dtype}, but {problem}", hint="omit head_dtype")
        return cls(choice, spec, draw, scheme)

    def kv_specs(self, itemsize: int) -> list[KVSpec]:
        """Return [], since it reads the target's pages."""
        return []

    def readers(self, layout: CacheLayout) -> Mapping[str, tuple[int, ...]]:
        """Return its layers by the group of the target that they read."""
        found: dict[str, tuple[int, ...]] = {}
        for layer in self.spec.decoder.layers:
            name = layout.group_of(layer.kv_source).name
            found[name] = (*found.get(name, ()), layer.index)
        return found

    def num_parameters(self) -> Mapping[str, int]:
        """Return the number of weights by part."""
        return self.spec.tensor_sizes()

    def weight_bytes(self, itemsize: int, layout: CacheLayout | None = None) -> int:
        """Return the bytes of its weights, or of the part that a rank holds. The head may have its own precision."""
        counts = dict(self.num_parameters() if layout is None else self._parameters_of_rank(layout))
        head = counts.pop("head") * bytes_per_value(itemsize, self.choice.head_dtype)
        chosen = bytes_per_value(itemsize, self.choice.quantization)
        return round(head + sum(counts.values()) * (chosen if self.scheme is None else self.scheme.bytes_per_value(itemsize)))

    def _parameters_of_rank(self, layout: CacheLayout) -> Mapping[str, int]:
        """Return the number of a rank's weights by part. Heads are divided like those of the pages that they read."""
        decoder, counts = self.spec.decoder, dict(self.num_parameters())
        sources = [layout.group_of(layer.kv_source).spec for layer in decoder.layers]
        num_ranks = sources[0].head_shares * sources[0].token_shares
        counts["attention"] = sum(
            attention_weights(layer, decoder.hidden_size) // source.head_shares
            for layer, source in zip(decoder.layers, sources, strict=True)
        )
        for part in ("mlp", *(("head",) if self.spec.centroids is None else ())):
            counts[part] //= num_ranks
        return counts

    def check(self, weights: Weights, *, latent: bool) -> None:
        """Raise if its files do not match its config, or if its head cannot have the requested precision. Nothing is loaded."""
        from culet.drafters.mtp.drafter import check_mtp

        if self.random is None:
            folder = find_folder(self.choice.model, self.choice.revision)
            model = check_mtp(folder, self.spec, weights, latent=latent, quantization=self.choice.quantization)
            self._narrow_head(model, weights.device)

    def build(self, target: Gemma4, backends: Mapping[int, AttentionBackend], *, progress: bool = True) -> MTPDrafter:
        """Load the weights to the target's device in its precision. `backends` are the drafter's, by index of the KV group."""
        from culet.drafters.mtp.drafter import MTPDrafter, draw_mtp, load_mtp

        if self.random is not None:
            model = draw_mtp(self.spec, target, self.random, quantization=self.choice.quantization)
        else:
            folder = find_folder(self.choice.model, self.choice.revision)
            model = load_mtp(folder, self.spec, target, quantization=self.choice.quantization, progress=progress)
        self._narrow_head(model, target.device)
        return MTPDrafter(model, target, backends, max_drafts=self.max_drafts, position=self.choice.position)

    def _narrow_head(self, model: MTPModel, device: torch.device) -> None:
        """Give the head the requested precision. `device` is where it will run, since `model` may be on the meta device."""
        from culet.layers.weight.e4m3 import check_device

        if self.choice.head_dtype == "auto":
            return
        try:
            check_device(device)
            model.narrow_head(self.choice.head_dtype)
        except ConfigError as error:
            problem = f"speculative-config: head_dtype: {error.message}"
            raise ConfigError(problem, hint=error.hint or "omit head_dtype") from error


def _read_random(model: str) -> RandomDraw:
    """Parse `random:` or `random:seed=1`."""
    given = dict(part.partition("=")[::2] for part in model.removeprefix(PREFIX).split(",") if part)
    for key, value in given.items():
        if key != "seed" or not value.isdecimal():
            raise ConfigError(f"speculative-config: model: got {model!r}, but {key}={value} is not an option, expected seed=N")
    return RandomDraw(int(given.get("seed", 0)))
