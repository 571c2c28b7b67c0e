"""Where a step reads features instead of embeddings, and which keys the tokens of images see.

Media are spans of placeholder tokens. Their rows come from the feature store, with token id 0 for per-layer embeddings.

The tokens of a whole image see each other. `ImageMask` names the rules, each an interval of keys for the token at position i
of an image at positions s to e, in a model with the window W:

    rule     sliding layers            global layers
    causal   i - W + 1 to i            0 to i            E2B and E4B
    clipped  i - W + 1 to e            0 to i            26B-A4B, 31B and 12B
    whole    min(s, i - W + 1) to e    0 to e            12B as transformers computes it

All other tokens follow the causal rule. Shapes: T new tokens of a step · M soft tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from culet.cache.spec import KVGroup
from culet.runner.media.features import FeatureStore
from culet.types import Entry, MediaSpan, Row

Ints = NDArray[np.int64]


class ImageMask(StrEnum):
    CAUSAL = "causal"
    CLIPPED = "clipped"
    WHOLE = "whole"


def image_mask(image_attention: str, setting: str) -> ImageMask:
    """Return the rule of a model (`ModelSpec.image_attention`) with the setting `--image-mask`."""
    if image_attention == "causal":
        return ImageMask.CAUSAL
    return ImageMask.WHOLE if image_attention == "all" and setting == "transformers" else ImageMask.CLIPPED


@dataclass(frozen=True, slots=True)
class StepMedia:
    """The media in a step's tokens."""

    index_M: Ints  # soft tokens, among all tokens of the step
    rows: tuple[Tensor, ...]  # their rows, in the same order, in parts
    first_T: Ints | None  # first position of the image that a token belongs to, or its own; None without whole images
    last_T: Ints | None  # last position
    has_image: tuple[bool, ...]  # by row, whether it has tokens of whole images
    mask: ImageMask

    def visible(self, group: KVGroup, position_T: Ints) -> NDArray[np.int32] | None:
        """Return the first and last key that each token sees in a KV group, [2, T], or None for the text rule."""
        if self.first_T is None or self.last_T is None or group.spec.owner:
            return None
        if group.window is None:
            if self.mask is not ImageMask.WHOLE:
                return None
            lo_T = np.zeros_like(position_T)
        else:
            lo_T = np.maximum(position_T - group.window + 1, 0)
            if self.mask is ImageMask.WHOLE:
                lo_T = np.minimum(lo_T, self.first_T)
        return np.stack((lo_T, self.last_T)).astype(np.int32)


@dataclass
class SlotMedia:
    """The media of all slots."""

    mask: ImageMask
    store: FeatureStore | None  # None without towers
    _slots: dict[int, tuple[MediaSpan, ...]] = field(default_factory=dict)  # of sequences with media that are not all computed

    def enter(self, entries: Iterable[Entry]) -> None:
        """Note the media of sequences that take their slots."""
        for entry in entries:
            self._slots.pop(entry.slot, None)
            if entry.media:
                self._slots[entry.slot] = entry.media

    def find(self, rows: Sequence[Row]) -> StepMedia | None:
        """Return the media in a step's tokens, or None if there are none, as in most steps."""
        if not self._slots:
            return None
        index: list[Ints] = []
        parts: list[Tensor] = []
        blocks: list[tuple[int, int, MediaSpan]] = []  # first and end token of whole images
        has_image = [False] * len(rows)
        begin = 0
        for number, row in enumerate(rows):
            spans, shift, row_end = self._slots.get(row.slot), begin - row.start, row.start + row.num_new
            begin += row.num_new
            if spans is None:
                continue
            if row.start >= spans[-1].end:
                del self._slots[row.slot]
                continue
            for span in spans:
                first, end = max(span.start, row.start), min(span.end, row_end)
                if first >= end:
                    continue
                assert self.store is not None, "media need towers"
                if row.leg.is_first:  # it has read them, and then they may be gone
                    index.append(np.arange(first + shift, end + shift))
                    parts.append(self.store.rows(span.key)[first - span.start : end - span.start])
                if span.is_whole and self.mask is not ImageMask.CAUSAL:
                    blocks.append((first + shift, end + shift, span))
                    has_image[number] = True
        if not index and not blocks:
            return None
        first_T, last_T = _blocks(rows, blocks)
        return StepMedia(
            np.concatenate([np.zeros(0, dtype=np.int64), *index]), tuple(parts), first_T, last_T, tuple(has_image), self.mask
        )


def _blocks(rows: Sequence[Row], blocks: Sequence[tuple[int, int, MediaSpan]]) -> tuple[Ints | None, Ints | None]:
    """Return the first and last position of each token's image, or of the token itself. Return None without images."""
    if not blocks:
        return None, None
    first_T = np.concatenate([np.arange(row.start, row.start + row.num_new) for row in rows])
    last_T = first_T.copy()
    for begin, end, span in blocks:
        first_T[begin:end], last_T[begin:end] = span.start, span.end - 1
    return first_T, last_T
