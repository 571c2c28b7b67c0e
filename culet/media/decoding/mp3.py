"""Find MP3 files whose length is unknown, so that all of their samples are read.

libsndfile takes the length of an MP3 from a header in its first frame. Without one, it divides the size of the file by the
bitrate of that frame, and reads no further. Where bitrates differ, most of a recording may be missing then.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_MPEG_1 = 3
_RATES = {_MPEG_1: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_BITRATES_1 = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_BITRATES_2 = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_TAG_BYTES = 10  # of the header of an ID3 tag
_VBRI_AT = 36
_MOST_FRAMES = 0xFFFFFF


class _Frame(NamedTuple):
    num_bytes: int
    bitrate: int
    info_at: int  # where a header about the whole file lies in the first frame


def with_unknown_length(data: bytes) -> bytes:
    """Return the file with a header of great length, if it has none and its bitrate changes. Any other file stays as it is."""
    begin = _first_frame(data)
    first = _read_frame(data, begin)
    if first is None or _has_info(data, begin, first) or not _changes_bitrate(data, begin, first):
        return data
    sync, version, form, mode = data[begin : begin + 4]
    header = bytes((sync, version | 1, form & ~2, mode))  # without a checksum and without padding
    info = header.ljust(first.info_at, b"\0") + b"Xing" + struct.pack(">II", 1, _MOST_FRAMES)
    padding = form >> 1 & 1
    return data[:begin] + info.ljust(first.num_bytes - padding, b"\0") + data[begin:]


def _first_frame(data: bytes) -> int:
    if data[:3] != b"ID3" or len(data) < _TAG_BYTES:
        return 0
    size = 0
    for byte in data[6:_TAG_BYTES]:
        size = size << 7 | byte & 0x7F
    return _TAG_BYTES + size


def _read_frame(data: bytes, at: int) -> _Frame | None:
    """Return the MP3 frame at this place. Return None if there is none, or if its header does not state its size."""
    if len(data) < at + 4 or data[at] != 0xFF or data[at + 1] & 0xE6 != 0xE2:
        return None
    version, bitrate, rate = data[at + 1] >> 3 & 3, data[at + 2] >> 4, data[at + 2] >> 2 & 3
    if version not in _RATES or rate == 3 or not 0 < bitrate < 15:
        return None
    is_first, is_mono = version == _MPEG_1, data[at + 3] >> 6 == 3
    bits = (_BITRATES_1 if is_first else _BITRATES_2)[bitrate - 1] * 1000
    num_bytes = (144 if is_first else 72) * bits // _RATES[version][rate] + (data[at + 2] >> 1 & 1)
    side_bytes = (17 if is_mono else 32) if is_first else (9 if is_mono else 17)
    return _Frame(num_bytes, bitrate, 4 + side_bytes)


def _has_info(data: bytes, begin: int, first: _Frame) -> bool:
    at = begin + first.info_at
    return data[at : at + 4] in (b"Xing", b"Info") or data[begin + _VBRI_AT : begin + _VBRI_AT + 4] == b"VBRI"


def _changes_bitrate(data: bytes, begin: int, first: _Frame) -> bool:
    at, frame = begin, _read_frame(data, begin)
    while frame is not None and frame.bitrate == first.bitrate:
        at += frame.num_bytes
        frame = _read_frame(data, at)
    return frame is not None
