"""What a sequence says at each of its positions, in a form that can be compared from any position to any other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import shake_128

from culet.types import MediaSpan

UNIT = 4  # bytes of a position
MediaKey = tuple[int, int, bytes]  # start, length and key of a media span
_MEDIA_BIT = 1 << 31  # set in positions of media, so that they never look like a token


class PrefixContent:
    """The content of one sequence: its tokens, the media among them, and the salt, which keeps tenants apart.

    Each position is one unit of bytes. It is the token's id, or a part of a digest of the media that it stands for.
    """

    def __init__(self, salt: str = "", media: Sequence[MediaSpan] = ()) -> None:
        self.salt = salt
        self.media = tuple(media)
        self._units = bytearray()

    def upto(self, tokens: Sequence[int], num_tokens: int) -> bytearray:
        """Return the units of at least `num_tokens` positions. Each is computed once, since tokens never change."""
        begin = len(self._units) // UNIT
        if begin < num_tokens:
            units = array("I", tokens[begin:num_tokens])
            for span in self.media:
                if span.start < num_tokens and span.end > begin:
                    first, last = max(begin, span.start), min(num_tokens, span.end)
                    units[first - begin : last - begin] = _media_units(span)[first - span.start : last - span.start]
            self._units += units.tobytes()
        return self._units

    def media_before(self, num_tokens: int) -> tuple[MediaKey, ...]:
        """Return the media that begin before position `num_tokens`. Units are too short to tell media apart for certain."""
        return tuple([(span.start, span.length, span.key) for span in self.media if span.start < num_tokens])

    def resumable(self, length: int) -> int:
        """Return the longest length of at most `length` that a sequence may resume at.

        It may not resume inside media that are computed as a whole.
        """
        return next((span.start for span in self.media if span.is_whole and span.start < length < span.end), length)


def _media_units(span: MediaSpan) -> array[int]:
    digest = shake_128(array("q", (span.length, len(span.key))).tobytes() + span.key).digest(UNIT * span.length)
    return array("I", [unit | _MEDIA_BIT for unit in array("I", digest)])


def common_len(content: bytes, units: bytearray, begin: int, end: int) -> int:
    """Return how many positions `content` shares with `units[begin:end]` from its start on. Both ends are in bytes."""
    same, most = 0, min(len(content), end - begin)
    while same < most:  # each comparison is half as long as the one before it
        middle = (same + most + 1) // 2
        if content[same:middle] == units[begin + same : begin + middle]:
            same = middle
        else:
            most = middle - 1
    return same // UNIT
