"""Blank images and silent clips to rehearse the towers with at startup."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt, prod

from culet.media.items import MediaItem, MediaKind
from culet.media.spec import BUDGETS, MEL_STRIDE
from culet.models.towers.spec import MEL_BINS, AudioSpec, TowerSpecs, UnifiedAudioSpec, UnifiedVisionSpec, VisionSpec

_LONG_CLIP = 100  # soft tokens: too many for the norms' kernels for few tokens


def heaviest_images(spec: VisionSpec | UnifiedVisionSpec | None) -> list[MediaItem]:
    """Return images that fill one pass of the vision tower, or none if there is no tower. Audio needs less memory."""
    return [] if spec is None else [_image(spec, isqrt(max(BUDGETS)))] * 2


def sample_media(specs: TowerSpecs) -> Iterator[list[MediaItem]]:
    """Yield media that together use every kernel of the towers: many soft tokens at once, and a single one."""
    if specs.vision is not None:
        yield heaviest_images(specs.vision)
        yield [_image(specs.vision, 1)]
    if specs.audio is not None:
        yield [_clip(specs.audio, _LONG_CLIP)]
        yield [_clip(specs.audio, 1)]


def _image(spec: VisionSpec | UnifiedVisionSpec, side: int) -> MediaItem:
    """Return a square image with `side` soft tokens on a side, or as many as the tower has positions for."""
    side = min(side, spec.max_tokens_on_a_side)
    pixels = side * spec.token_pixels
    return MediaItem(MediaKind.IMAGE, b"", side**2, (pixels, pixels, 3), bytes(pixels * pixels * 3))


def _clip(spec: AudioSpec | UnifiedAudioSpec, num_tokens: int) -> MediaItem:
    """Return a silent clip of `num_tokens` soft tokens: mel frames, or samples if there is no encoder."""
    if isinstance(spec, AudioSpec):
        shape = num_tokens * MEL_STRIDE, MEL_BINS
    else:
        shape = num_tokens, spec.num_samples
    return MediaItem(MediaKind.AUDIO, b"", num_tokens, shape, bytes(4 * prod(shape)))
