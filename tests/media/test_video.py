"""Video: which frames are taken, when they are, and that they are the right ones."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from culet.errors import BadRequest
from culet.media.decoding.refusal import Refusal
from culet.media.decoding.video import decode_video
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits
from culet.media.reader import MediaReader
from culet.media.sources import MediaSource, pixel_source
from culet.media.spec import sampled_indices
from tests.media.make_golden import VIDEO, VIDEO_RATE
from tests.media.noise import noise

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))["video"]


def clip(num_frames: int, rate: int = 10, size: tuple[int, int] = (64, 96), form: str = "mp4", codec: str = "mpeg4") -> bytes:
    """Return a video in which frame i has the grey level 5 i, with a key frame every 12 frames."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.gop_size = 12
        for index in range(num_frames):
            pixels = np.full((*size, 3), 5 * (index % 50), dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def in_order(data: bytes) -> list[np.ndarray]:
    """Return all frames of a video, decoded one after another."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def decoded(data: bytes, num_frames: int) -> tuple[list[np.ndarray], list[float]]:
    return decode_video(data, num_frames, MediaLimits(), np.array)


def test_which_frames_are_taken():
    """Trap 20: a video with fewer frames than wanted gives all of them."""
    assert sampled_indices(5, 32) == [0, 1, 2, 3, 4]
    assert sampled_indices(32, 32) == list(range(32))
    for total in (33, 41, 100, 1799, 108_000):
        step = torch.arange(0, total, total / 32).int().tolist()  # as transformers does it
        assert sampled_indices(total, 32) == step


CODECS = [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("mp4", "libx264"), ("webm", "libvpx-vp9")]


@pytest.mark.parametrize(("form", "codec"), CODECS)
def test_the_right_frames_with_their_times(form, codec):
    """Frames are found through key frames, and equal those of a decoder that reads everything."""
    if codec not in av.codecs_available:
        pytest.skip(f"this build of PyAV has no {codec} encoder")
    data = clip(45, form=form, codec=codec)
    every = in_order(data)
    assert len(every) == 45
    assert not np.array_equal(every[22], every[28])
    for num_frames in (2, 8, 64):
        indices = sampled_indices(45, num_frames)
        frames, times = decoded(data, num_frames)
        assert times == pytest.approx([index / 10 for index in indices])
        for index, frame in zip(indices, frames, strict=True):
            assert np.array_equal(frame, every[index]), index


def test_limits_of_videos():
    for limits, problem in (
        (MediaLimits(max_video_frames=20), "more than 20 frames"),
        (MediaLimits(max_video_side=95), "96 x 64 pixels, expected sides from 1 to 95"),
    ):
        with pytest.raises(Refusal, match=problem):
            decode_video(clip(25), 8, limits, np.array)


def test_a_frame_that_is_larger_than_the_file_says_is_not_decoded():
    """A stream may change its size between two frames. The decoder refuses it, before it takes memory for the pixels."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = None
        for index, side in enumerate((64, 128)):
            with av.open(io.BytesIO(clip(1, size=(side, side), form="matroska", codec="libvpx"))) as source:
                stream = stream or container.add_stream_from_template(source.streams.video[0])
                packet = av.Packet(bytes(next(source.demux(video=0))))
            packet.stream, packet.pts, packet.dts, packet.is_keyframe = stream, 100 * index, 100 * index, True
            container.mux(packet)
    frames, _ = decode_video(buffer.getvalue(), 32, replace(MediaLimits(), max_video_side=128), np.array)
    assert [frame.shape[0] for frame in frames] == [64, 128]
    with pytest.raises(Refusal, match="damaged"):
        decode_video(buffer.getvalue(), 32, replace(MediaLimits(), max_video_side=100), np.array)


def test_what_to_install(reader: MediaReader, monkeypatch: pytest.MonkeyPatch):
    data = clip(2)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(BadRequest, match="because PyAV is not installed") as raised:
        reader.read_now([MediaSource(MediaKind.VIDEO, "video", data=data)])
    assert "pip install av" in raised.value.hint


def test_frames_of_a_file(reader: MediaReader):
    medium = reader.read_now([MediaSource(MediaKind.VIDEO, "video", data=clip(40))])[0]
    assert len(medium.items) == len(medium.timestamps) == 32
    assert {item.shape for item in medium.items} == {(288, 480, 3)}  # 64 x 96 in 70 tokens
    assert {item.num_tokens for item in medium.items} == {60}
    assert {item.kind for item in medium.items} == {MediaKind.VIDEO}
    assert medium.num_tokens == 32 * 60
    shorter = reader.read_now([MediaSource(MediaKind.VIDEO, "video", data=clip(3))])[0]
    assert shorter.timestamps == pytest.approx((0.0, 0.1, 0.2))


def test_frames_are_those_of_transformers(reader: MediaReader):
    medium = reader.read_now([pixel_source(noise(*VIDEO, 3), name="video", rate=VIDEO_RATE)])[0]
    assert list(medium.timestamps) == [index / VIDEO_RATE for index in GOLDEN["indices"]]
    for item, digest in zip(medium.items, GOLDEN["frames"], strict=True):
        pixels = torch.frombuffer(bytearray(item.data), dtype=torch.uint8).reshape(item.shape)
        height, width = item.shape[0] // 16, item.shape[1] // 16
        patches = (pixels / 255.0).reshape(height, 16, width, 16, 3).permute(0, 2, 1, 3, 4).contiguous()
        if platform.machine() == "x86_64":
            assert hashlib.sha256(patches.numpy().tobytes()).hexdigest()[:32] == digest
