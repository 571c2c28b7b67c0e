"""An MTP assistant as `culet plan` and the engine see it before its weights are loaded. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from culet import hardware
from culet.cache.spec import CacheLayout, KVSpec
from culet.config import DraftChoice
from culet.drafters.mtp.spec import AssistantSpec, make_config, read_assistant
from culet.errors import CheckpointError, ConfigError
from culet.models.checkpoint import RandomDraw, find_folder, read_config
from culet.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from culet.attention.base import AttentionBackend
    from culet.drafters.mtp.drafter import MTPDrafter
    from culet.models.gemma4 import Gemma4

RANDOM = "random:"
DEFAULT_DRAFTS = 3


@dataclass(frozen=True)
class MTPSpec:
    """Which assistant, for which target, and how it drafts."""

    method: ClassVar[str] = "mtp"
    taps: ClassVar[tuple[int, ...]] = ()  # the hidden state after the final norm comes with every round
    reads_target_pages: ClassVar[bool] = True
    needs_intervals: ClassVar[bool] = False

    choice: DraftChoice
    assistant: AssistantSpec
    random: RandomDraw | None = None  # its weights are drawn, and no folder holds it

    @property
    def model(self) -> str:
        return self.choice.model

    @property
    def max_drafts(self) -> int:
        return self.choice.num_speculative_tokens or DEFAULT_DRAFTS

    @property
    def num_heads(self) -> int:
        return self.assistant.decoder.layers[0].num_heads

    @property
    def lookback(self) -> int:
        """Keys behind the target's window that its sliding layers see too."""
        return int(self.choice.position == "hf")

    @classmethod
    def open(cls, choice: DraftChoice, target: ModelSpec) -> MTPSpec:
        """Read the assistant's config.json, and refuse one that was not made for `target`."""
        draw, config = None, None
        if choice.model.startswith(RANDOM):
            draw, config = _read_random(choice.model), make_config(target)
        try:
            assistant = read_assistant(config or read_config(choice.model, choice.revision), target)
        except CheckpointError as error:
            raise CheckpointError(f"drafter {choice.model}: {error.message}", hint=error.hint) from error
        if choice.head_dtype == "fp8" and assistant.centroids is not None:
            problem = f"drafter {choice.model} scores clusters of tokens first and reads little of its head"
            raise ConfigError(f"speculative-config: head_dtype: got fp8, but {problem}", hint="leave head_dtype away")
        return cls(choice, assistant, draw)

    def kv_specs(self, itemsize: int) -> list[KVSpec]:
        """None: it reads the target's pages."""
        return []

    def readers(self, layout: CacheLayout) -> Mapping[str, tuple[int, ...]]:
        """Its layers by the target's group that they read."""
        found: dict[str, tuple[int, ...]] = {}
        for layer in self.assistant.decoder.layers:
            name = layout.group_of(layer.kv_source).name
            found[name] = (*found.get(name, ()), layer.index)
        return found

    def num_parameters(self) -> Mapping[str, int]:
        """Weights by part."""
        return self.assistant.tensor_sizes()

    def build(self, target: Gemma4, backends: Mapping[int, AttentionBackend], *, progress: bool = True) -> MTPDrafter:
        """Load the weights to the target's device in its precision; `backends` are its own, by index of the KV group."""
        from culet.drafters.mtp.drafter import MTPDrafter, draw_assistant, load_assistant

        if self.random is not None:
            assistant = draw_assistant(self.assistant, target, self.random)
        else:
            folder = find_folder(self.choice.model, self.choice.revision)
            assistant = load_assistant(folder, self.assistant, target, progress=progress)
        if self.choice.head_dtype == "fp8":
            _check_fp8(target.device)
            assistant.head_to_fp8()
        return MTPDrafter(assistant, target, backends, max_drafts=self.max_drafts, position=self.choice.position)


def _check_fp8(device: torch.device) -> None:
    """Refuse a GPU that knows no e4m3."""
    if device.type == "cuda" and not hardware.has_e4m3(found := hardware.capability_of(device)):
        problem = f"this GPU is sm_{found}, e4m3 needs sm_{hardware.ADA} or later"
        raise ConfigError(f"speculative-config: head_dtype: got fp8, but {problem}", hint="leave head_dtype away")


def _read_random(model: str) -> RandomDraw:
    """`random:` or `random:seed=1`."""
    given = dict(part.partition("=")[::2] for part in model.removeprefix(RANDOM).split(",") if part)
    for key, value in given.items():
        if key != "seed" or not value.isdecimal():
            raise ConfigError(f"speculative-config: model: got {model!r}, in which {key}={value} is not seed=N")
    return RandomDraw(int(given.get("seed", 0)))
