"""The messages between the web process and a decoding process. No torch.

A message is a msgpack struct, prefixed by its length, and then the bytes that it announces, as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import BinaryIO

import msgspec

from culet.frames import LENGTH_BYTES, frame, frame_length
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits


class MediaForm(StrEnum):
    FILE = "file"  # encoded, as clients send it
    RAW = "raw"  # pixels or samples, from the caller's own program


class Question(msgspec.Struct, frozen=True):
    """One medium to decode."""

    kind: MediaKind
    num_bytes: int = 0
    form: MediaForm = MediaForm.FILE
    budget: int = 280  # soft tokens of an image or a frame
    num_frames: int = 32  # to take from a video
    has_mel: bool = True
    is_split: bool = False  # audio that is too long for the model becomes several items
    shape: tuple[int, ...] = ()  # of raw pixels
    rate: float = 0.0  # of raw samples or frames, per second
    indices: tuple[int, ...] = ()  # of raw frames in the video that they were taken from, if they are not all of it


class ItemFacts(msgspec.Struct, frozen=True):
    """A MediaItem without its data."""

    key: bytes
    num_tokens: int
    shape: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """The items of a medium, or why there are none."""

    items: tuple[ItemFacts, ...] = ()
    timestamps: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()  # of the items' data
    problem: str = ""
    hint: str = ""


_questions = msgspec.msgpack.Decoder(Question)
_limits = msgspec.msgpack.Decoder(MediaLimits)
answers = msgspec.msgpack.Decoder(Answer)


def pack(answer: Answer, parts: Sequence[bytes]) -> list[bytes | bytearray]:
    """Return an answer as pieces to write one after another."""
    return [frame(msgspec.structs.replace(answer, lengths=tuple(map(len, parts)))), *parts]


def read_limits(source: BinaryIO) -> MediaLimits:
    return _limits.decode(source.read(frame_length(source.read(LENGTH_BYTES))))


def read_question(source: BinaryIO) -> tuple[Question, bytes] | None:
    """Return the next question and its medium, or None at the end."""
    prefix = source.read(LENGTH_BYTES)
    if len(prefix) < LENGTH_BYTES:
        return None
    question = _questions.decode(source.read(frame_length(prefix)))
    return question, source.read(question.num_bytes)
