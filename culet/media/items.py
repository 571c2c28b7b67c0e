"""Define MediaItem: an image, a video frame or a clip of audio, decoded and ready for a tower. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MediaKind(StrEnum):
    IMAGE = "image"
    VIDEO = "video"  # one frame
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One span of soft tokens before the tower: decoded, resized, and named by its content.

    A video is one item per frame, because its frames stand apart in the prompt, with a timestamp before each.

    `data` holds an image or a frame as uint8 [height, width, 3], already resized, and audio as float32: mel features
    [frames, 128] for E2B and E4B, samples [tokens, 640] for 12B.
    """

    kind: MediaKind
    key: bytes  # a digest of the decoded content, the size it was resized to, its kind and the processor's settings
    num_tokens: int
    shape: tuple[int, ...]
    data: bytes
