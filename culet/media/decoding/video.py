"""Decode the frames of a video that are shown to the model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np

from culet.media.decoding.containers import FORMATS, is_container, open_container
from culet.media.decoding.refusal import Refusal
from culet.media.limits import MediaLimits
from culet.media.spec import sampled_indices

Array = np.ndarray[Any, Any]
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4"})
DEFAULT_RATE = 24.0  # frames per second, if the file does not say


def decode_video(
    data: bytes, num_frames: int, limits: MediaLimits, prepare: Callable[[Array], Array]
) -> tuple[list[Array], list[float]]:
    """Return (frames, their times in seconds), evenly spaced over the video.

    `prepare` makes each frame, uint8 [height, width, 3], smaller before the next one is decoded. A time is the frame's
    index in the file, divided by the file's average frame rate.
    """
    if not is_container(data):
        raise Refusal(f"this is not a video that can be read, expected {', '.join(FORMATS)}")
    with open_container(data, "video") as container:
        if not container.streams.video:
            raise Refusal("the file has no video")
        stream = container.streams.video[0]
        _check_stream(stream, limits.max_video_side)
        places = _read_places(container, stream, limits.max_video_frames)
        indices = sampled_indices(len(places), num_frames)
        rate = float(stream.average_rate or DEFAULT_RATE)
        reader = _FrameReader(container, stream, places, limits.max_video_side)
        return [prepare(reader.read(index)) for index in indices], [index / rate for index in indices]


class _FrameReader:
    """Reads frames in ascending order. It decodes only from the key frame before each."""

    def __init__(self, container: Any, stream: Any, places: list[tuple[int, bool]], max_side: int) -> None:
        self._container, self._stream = container, stream
        self._times = [time for time, _ in places]
        self._key_times = [time for time, is_key in places if is_key] or self._times[:1]
        self._max_side = max_side
        self._seek(self._times[0])

    def read(self, index: int) -> Array:
        """Return the frame with this index in the file."""
        target = self._times[index]
        key_time = self._key_times[max(0, bisect_right(self._key_times, target) - 1)]
        if self._position is None or key_time > self._position:
            self._seek(key_time)
        frame = self._next_at(target)
        if frame is None or frame.pts > target:  # the file's index led past it
            self._seek(self._times[0])
            frame = self._next_at(target)
        if frame is None:
            raise Refusal("the video is damaged or incomplete", "check that the whole file was sent")
        _check_side(frame.width, frame.height, self._max_side)
        pixels = frame.to_ndarray(format="rgb24")
        return np.rot90(pixels, round(frame.rotation / 90) % 4)

    def _seek(self, time: int) -> None:
        self._container.seek(time, stream=self._stream, backward=True)
        self._frames = self._container.decode(self._stream)
        self._position: int | None = None

    def _next_at(self, target: int) -> Any:
        """Return the next frame at or after this time, or None at the end."""
        for frame in self._frames:
            if frame.pts is None:
                continue
            self._position = frame.pts
            if frame.pts >= target:
                return frame
        return None


def _check_stream(stream: Any, max_side: int) -> None:
    context = stream.codec_context
    if context.name not in CODECS:
        known = ", ".join(sorted(CODECS - {"libdav1d"}))
        raise Refusal(f"the video's codec is not supported, expected one of {known}")
    _check_side(context.width, context.height, max_side)
    context.options = {"max_pixels": str(max_side * max_side)}  # a stream may change its size
    context.thread_count = 1


def _check_side(width: int, height: int, max_side: int) -> None:
    if not (0 < width <= max_side and 0 < height <= max_side):
        raise Refusal(f"the video is {width} x {height} pixels, expected sides from 1 to {max_side}")


def _read_places(container: Any, stream: Any, max_frames: int) -> list[tuple[int, bool]]:
    """Return (time, whether it is a key frame) of every frame, in order of time. Nothing is decoded."""
    places = []
    for packet in container.demux(stream):
        if packet.pts is None or packet.size == 0 or packet.is_discard:
            continue
        places.append((packet.pts, packet.is_keyframe))
        if len(places) > max_frames:
            raise Refusal(f"the video has more than {max_frames} frames")
    if not places:
        raise Refusal("the video has no frames")
    return sorted(places)
