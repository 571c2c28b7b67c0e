"""The bounds on media that clients send. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from culet.errors import BadRequest
from culet.media.items import MediaKind

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class MediaLimits:
    """Bounds on one medium, on the processes that decode it, and on what waits for them."""

    max_image_bytes: int = 20 * MEGABYTE  # as sent, before decoding
    max_audio_bytes: int = 25 * MEGABYTE
    max_video_bytes: int = 100 * MEGABYTE
    max_pixels: int = 64_000_000  # of an image, from its header
    max_audio_s: float = 600.0
    max_video_side: int = 4096
    max_video_frames: int = 200_000  # in the file. Only `num_frames` of them are decoded.
    time_limit_s: float = 8.0  # of processor time, for decoding one medium
    max_memory_bytes: int = 2 << 30  # of a decoding process, beyond what its libraries take
    num_processes: int = 2
    max_waiting: int = 64
    max_waiting_mb: int = 256
    fetch_limit_s: float = 5.0  # for one URL, from looking up its host to the last byte

    def max_bytes(self, kind: MediaKind) -> int:
        """The most encoded bytes of a medium of this kind."""
        return {
            MediaKind.IMAGE: self.max_image_bytes,
            MediaKind.AUDIO: self.max_audio_bytes,
            MediaKind.VIDEO: self.max_video_bytes,
        }[kind]

    def check_bytes(self, name: str, kind: MediaKind, num_bytes: int) -> None:
        """Raise if a medium is empty or has too many bytes. `name` says in the error which medium it is."""
        if num_bytes == 0:
            raise BadRequest(f"{name}: got no bytes, expected {kind.with_article}")
        if num_bytes > self.max_bytes(kind):
            got, most = num_bytes / MEGABYTE, self.max_bytes(kind) / MEGABYTE
            raise BadRequest(f"{name}: got {got:.1f} MB, expected {kind.with_article} of at most {most:g} MB")
