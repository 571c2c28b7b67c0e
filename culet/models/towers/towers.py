"""All towers of a checkpoint: load those that are wanted, and turn media into rows that the decoder reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from culet.errors import InternalError
from culet.kernels.beside_steps import beside_steps
from culet.layers.layer import Layer
from culet.layers.weight.weights import Weights
from culet.media.items import MediaItem, MediaKind
from culet.models.checkpoint import Checkpoint
from culet.models.random_weights import fill_randomly
from culet.models.towers.audio import AudioTower
from culet.models.towers.spec import (
    AudioSpec,
    TowerSpecs,
    UnifiedAudioSpec,
    UnifiedVisionSpec,
    VisionSpec,
    read_towers,
)
from culet.models.towers.unified import UnifiedAudio, UnifiedVision
from culet.models.towers.vision import VisionTower
from culet.models.weights import load_weights

_PREFIX = "model."
Tower = VisionTower | UnifiedVision | AudioTower | UnifiedAudio
ALL_KINDS = frozenset(MediaKind)


def _vision_tower(spec: VisionSpec | UnifiedVisionSpec, weights: Weights) -> VisionTower | UnifiedVision:
    return VisionTower(spec, weights) if isinstance(spec, VisionSpec) else UnifiedVision(spec, weights)


def _audio_tower(spec: AudioSpec | UnifiedAudioSpec, weights: Weights) -> AudioTower | UnifiedAudio:
    return AudioTower(spec, weights) if isinstance(spec, AudioSpec) else UnifiedAudio(spec, weights)


class Towers(Layer):
    """The towers that are wanted. A kind of media without a tower cannot be encoded."""

    def __init__(self, specs: TowerSpecs, weights: Weights) -> None:
        super().__init__()
        self.specs, weights = specs, weights.below(_PREFIX)
        self.vision = None if specs.vision is None else _vision_tower(specs.vision, weights)
        self.audio = None if specs.audio is None else _audio_tower(specs.audio, weights)

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """The kinds of media that can be encoded."""
        return self.specs.kinds

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the rows [num_tokens, D] of each item, in the decoder's precision.

        On a GPU, this only launches kernels. Items of one kind share passes, each of a bounded size.
        """
        rows: list[Tensor | None] = [None] * len(items)
        with beside_steps():
            for indices in self._passes(items):
                tower = self._tower_for(items[indices[0]])
                for index, found in zip(indices, tower.encode([items[index] for index in indices]), strict=True):
                    rows[index] = found
        return [found for found in rows if found is not None]

    def _passes(self, items: Sequence[MediaItem]) -> Iterator[list[int]]:
        """Yield the items of each pass. Images of one size are next to each other, because attention runs them as a batch."""
        images = [index for index, item in enumerate(items) if item.kind is not MediaKind.AUDIO]
        images.sort(key=lambda index: items[index].shape)
        clips = [index for index, item in enumerate(items) if item.kind is MediaKind.AUDIO]
        for indices in (images, clips):
            group: list[int] = []
            size = 0
            for index in indices:
                tower = self._tower_for(items[index])
                cost = tower.cost(items[index])
                if group and size + cost > tower.max_cost:
                    yield group
                    group, size = [], 0
                group.append(index)
                size += cost
            if group:
                yield group

    def _tower_for(self, item: MediaItem) -> Tower:
        tower: Tower | None = self.audio if item.kind is MediaKind.AUDIO else self.vision
        if tower is None:
            raise InternalError(f"{item.kind}: no tower is loaded for it")
        return tower

    def finish(self) -> None:
        """Compute the values that depend on several tensors. Call once, after loading."""
        for tower in (self.vision, self.audio):
            if tower is not None:
                tower.finish()


def load_towers(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kinds: frozenset[MediaKind] = ALL_KINDS,
    progress: bool = True,
) -> Towers | None:
    """Load the towers that `kinds` need and the checkpoint has. Return None if there are none. Others are not allocated."""
    specs = read_towers(checkpoint.config).only(kinds)
    if not specs.kinds:
        return None
    weights = Weights(dtype, torch.device(device))

    def build(weights: Weights) -> Towers:
        return Towers(specs, weights)

    if checkpoint.random is not None:
        towers = build(weights)
        fill_randomly(towers.placements(), checkpoint.random, weights.device)
        towers.finish()
        return towers
    return load_weights(checkpoint.folder, build, lambda names: _match_names(names, specs), weights, progress=progress)


def _match_names(stored: Iterable[str], specs: TowerSpecs) -> dict[str, str]:
    """Return a map of name -> name for the tensors of the towers."""
    parts = (("vision_tower.", "vision_embedder.", "embed_vision.") if specs.vision is not None else ()) + (
        ("audio_tower.", "embed_audio.") if specs.audio is not None else ()
    )
    prefixes = tuple(_PREFIX + part for part in parts)
    return {name: name for name in stored if name.startswith(prefixes)}
