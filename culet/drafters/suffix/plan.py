"""Suffix drafting as `culet plan` and the engine see it: alone, or beside a drafter with weights. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from culet.cache.spec import CacheLayout, KVSpec
from culet.config import DraftChoice
from culet.drafters.base import DRAFTERS, Drafter, DrafterPlan
from culet.errors import ConfigError
from culet.models.random_checkpoint import PREFIX
from culet.models.spec import ModelSpec
from culet.registry import load, lookup

if TYPE_CHECKING:
    from culet.attention.base import AttentionBackend
    from culet.drafters.suffix.drafter import SuffixDrafter
    from culet.layers.weight.weights import Weights
    from culet.models.gemma4 import Gemma4

DEFAULT_DRAFTS = 8


@dataclass(frozen=True)
class SuffixPlan:
    """Suffix drafting without another drafter. It has no weights and no layers."""

    method: ClassVar[str] = "suffix"
    taps: ClassVar[tuple[int, ...]] = ()
    reads_target_pages: ClassVar[bool] = True  # it has no pages of its own
    num_heads: ClassVar[int] = 1
    lookback: ClassVar[int] = 0
    needs_intervals: ClassVar[bool] = False

    choice: DraftChoice

    @property
    def model(self) -> str:
        return "no weights"

    @property
    def max_drafts(self) -> int:
        return self.choice.num_speculative_tokens or DEFAULT_DRAFTS

    @classmethod
    def open(cls, choice: DraftChoice, target: ModelSpec) -> SuffixPlan:
        """Check the choice. It fits every target."""
        if choice.model and not choice.model.startswith(PREFIX):
            problem = f"got {choice.model!r}, but suffix drafting has no weights"
            raise ConfigError(f"speculative-config: model: {problem}", hint="omit model")
        return cls(choice)

    def kv_specs(self, itemsize: int) -> list[KVSpec]:
        """Return [], since it has no KV."""
        return []

    def readers(self, layout: CacheLayout) -> Mapping[str, tuple[int, ...]]:
        """Return {}, since it has no layers."""
        return {}

    def num_parameters(self) -> Mapping[str, int]:
        return {}

    def weight_bytes(self, itemsize: int, layout: CacheLayout | None = None) -> int:
        return 0

    def check(self, weights: Weights, *, latent: bool) -> None:
        """Do nothing, since it has no files."""

    def build(self, target: Gemma4, backends: Mapping[int, AttentionBackend], *, progress: bool = True) -> SuffixDrafter:
        from culet.drafters.suffix.drafter import SuffixDrafter

        return SuffixDrafter(self.choice.match_lens, max_drafts=self.max_drafts)


@dataclass(frozen=True)
class BesidePlan:
    """A drafter with weights that copies instead where the last tokens have occurred before."""

    inner: DrafterPlan
    choice: DraftChoice

    @property
    def method(self) -> str:
        return self.inner.method

    @property
    def model(self) -> str:
        return self.inner.model

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    @property
    def max_drafts(self) -> int:
        """A copy may be longer than what the other drafter proposes."""
        return max(self.inner.max_drafts, DEFAULT_DRAFTS)

    @property
    def reads_target_pages(self) -> bool:
        return self.inner.reads_target_pages

    @property
    def num_heads(self) -> int:
        return self.inner.num_heads

    @property
    def lookback(self) -> int:
        return self.inner.lookback

    @property
    def needs_intervals(self) -> bool:
        return self.inner.needs_intervals

    @classmethod
    def open(cls, choice: DraftChoice, target: ModelSpec) -> BesidePlan:
        """Open the drafter that `choice` names."""
        return cls(load(lookup("speculative method", choice.method, DRAFTERS)).open(choice, target), choice)

    def kv_specs(self, itemsize: int) -> list[KVSpec]:
        return self.inner.kv_specs(itemsize)

    def readers(self, layout: CacheLayout) -> Mapping[str, tuple[int, ...]]:
        return self.inner.readers(layout)

    def num_parameters(self) -> Mapping[str, int]:
        return self.inner.num_parameters()

    def weight_bytes(self, itemsize: int, layout: CacheLayout | None = None) -> int:
        return self.inner.weight_bytes(itemsize, layout)

    def check(self, weights: Weights, *, latent: bool) -> None:
        self.inner.check(weights, latent=latent)

    def build(self, target: Gemma4, backends: Mapping[int, AttentionBackend], *, progress: bool = True) -> Drafter:
        from culet.drafters.suffix.drafter import BesideDrafter

        inner = self.inner.build(target, backends, progress=progress)
        return BesideDrafter(inner, self.choice.match_lens, max_drafts=self.max_drafts)
