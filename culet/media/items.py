"""Define MediaItem: an image, a video frame or a clip of audio, decoded and ready for a tower. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MediaKind(StrEnum):
    IMAGE = "image"
    VIDEO = "video"  # one frame
    AUDIO = "audio"

    @property
    def with_article(self) -> str:
        return {"image": "an image", "video": "a video", "audio": "audio"}[self.value]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MediaItem:
    """One span of soft tokens before the tower: decoded, resized, and named by its content.

    A video is one item per frame, because its frames stand apart in the prompt, with a timestamp before each.

    `data` holds an image or a frame as uint8 [height, width, 3], already resized, and audio as float32: mel features
    [frames, 128] for E2B and E4B, without invalid frames, and samples [tokens, 640] for 12B.
    """

    kind: MediaKind
    key: bytes  # a digest of the decoded content, the size it was resized to, its kind and the processor's settings
    num_tokens: int
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Medium:
    """What one placeholder of a prompt stands for: an image, a whole video, or a recording.

    An image is one item and a video one per frame. A recording is one item, or several if it was split.
    """

    kind: MediaKind
    items: tuple[MediaItem, ...]
    timestamps: tuple[float, ...] = ()  # in seconds, one per frame of a video

    @property
    def num_tokens(self) -> int:
        """The number of soft tokens, without the marks around them and without timestamps."""
        return sum(item.num_tokens for item in self.items)
