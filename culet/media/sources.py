"""Where media come from: bytes, `data:` URLs, https URLs, and pixels or samples of the caller's own program. No torch."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from culet.errors import BadRequest
from culet.media.items import MediaKind
from culet.media.limits import MEGABYTE, MediaLimits
from culet.media.messages import MediaForm
from culet.media.spec import MAX_CHANNELS

_DATA = "data:"
_STEP_CHARS = 1 << 20  # a multiple of four, which stand for three bytes
_LINE_BREAKS = ("\n", "\r")
_MIN_RATE, _MAX_RATE = 1_000, 1_000_000  # of raw samples
_READ_FILE = "pass its bytes: file.read()"


@dataclass(frozen=True)
class MediaSource:
    """One medium as a caller gives it: a URL, the bytes of a file, or raw pixels or samples."""

    kind: MediaKind
    name: str  # says in errors which medium it is, such as `messages[0].content[1]`
    url: str = ""  # a `data:` or https URL
    data: bytes = b""
    base64: str = ""  # the bytes of a file as base64
    form: MediaForm = MediaForm.FILE
    shape: tuple[int, ...] = ()  # of raw pixels: [height, width, 3], or [frames, height, width, 3] for a video
    rate: float = 0.0  # of raw samples or frames, per second
    indices: tuple[int, ...] = ()  # of raw frames in the video that they were taken from, if they are not all of it
    takes_all: bool = False  # the raw frames are all shown, or refused if they are too many
    max_soft_tokens: int | None = None  # of an image or a frame: 70, 140, 280, and for images also 560 or 1120
    detail: str | None = None  # low (the least), high (the most) or auto (the model's default), unless max_soft_tokens is set
    is_split: bool = False  # audio of more than 30 s becomes several parts for E2B and E4B: transcriptions only

    @property
    def num_bytes(self) -> int:
        """The size of what the caller sent. It decides who waits for whom."""
        return len(self.url) + len(self.data) + len(self.base64)

    @property
    def is_remote(self) -> bool:
        return bool(self.url) and self.url[: len(_DATA)].lower() != _DATA

    def inline_bytes(self, limits: MediaLimits) -> bytes:
        """Return the bytes of a source that needs no fetching. Their number is checked before they are decoded."""
        if self.base64:
            return decode_base64(self.name, self.kind, self.base64, limits)
        if not self.url:
            if self.form == MediaForm.FILE:
                limits.check_bytes(self.name, self.kind, len(self.data))
            return self.data
        header, comma, _ = self.url[:256].partition(",")
        begin = len(header) + 1
        if not comma or not header.lower().endswith(";base64"):
            raise BadRequest(f"{self.name}: got a data: URL without base64, expected data:TYPE;base64,DATA")
        _check_base64_len(self.name, self.kind, self.url, limits, begin)  # before it is copied
        return decode_base64(self.name, self.kind, self.url[begin:], limits)


def _check_base64_len(name: str, kind: MediaKind, text: str, limits: MediaLimits, begin: int = 0) -> None:
    """Raise if the base64 text from `begin` on holds more bytes than a medium may have."""
    text_len = len(text) - begin - sum(text.count(mark, begin) for mark in _LINE_BREAKS)
    if text_len > 4 * -(-limits.max_bytes(kind) // 3):
        most = limits.max_bytes(kind) / MEGABYTE
        raise BadRequest(
            f"{name}: got about {text_len * 0.75 / MEGABYTE:.1f} MB, expected {kind.with_article} of at most {most:g} MB"
        )


def decode_base64(name: str, kind: MediaKind, text: str, limits: MediaLimits) -> bytes:
    """Return the bytes of base64 text. Its length is checked first. Other threads run between the steps of decoding.

    Line breaks do not count. Programs such as `base64` write them.
    """
    _check_base64_len(name, kind, text, limits)
    for mark in _LINE_BREAKS:
        text = text.replace(mark, "")
    pieces = [text[begin : begin + _STEP_CHARS] for begin in range(0, len(text), _STEP_CHARS)]
    try:
        if any(piece.endswith("=") for piece in pieces[:-1]):
            raise ValueError("only the end may be padded")
        data = b"".join([base64.b64decode(piece, validate=True) for piece in pieces])
    except ValueError:
        raise BadRequest(f"{name}: the data is not valid base64") from None
    limits.check_bytes(name, kind, len(data))
    return data


def pixel_source(pixels: Any, *, name: str, rate: float = 0.0, **settings: Any) -> MediaSource:
    """Return the source of an array of uint8 pixels: [height, width, 3] for an image, [frames, height, width, 3] for a video.

    Pixels may also be grey or RGBA. `rate` is the video's number of frames per second. `settings` are other fields of
    MediaSource.
    """
    pixels = check_pixels(pixels, name)
    if pixels.shape[-1] != 3:
        from culet.media.decoding.colours import array_to_rgb

        pixels = array_to_rgb(pixels)
    shape = tuple(map(int, pixels.shape))
    kind = MediaKind.IMAGE if len(shape) == 3 else MediaKind.VIDEO
    return MediaSource(kind, name, data=pixels.tobytes(), form=MediaForm.RAW, shape=shape, rate=rate, **settings)


def check_pixels(pixels: Any, name: str) -> Any:
    """Return uint8 pixels as an array [height, width, channels], or with frames before. Raise for any other form."""
    shape, dtype = tuple(getattr(pixels, "shape", ())), _dtype_of(pixels)
    channels = 1 if len(shape) == 2 else shape[-1] if shape else 0
    if len(shape) in (2, 3, 4) and channels in (1, 3, 4) and 0 not in shape and dtype == "uint8":
        return pixels[:, :, None] if len(shape) == 2 else pixels
    expected = "uint8 [height, width, 3], [height, width, 4] or [height, width], or [frames, height, width, 3] for a video"
    hint = _dtype_hint(dtype) or _shape_hint(shape) if dtype else _value_hint(pixels)
    raise BadRequest(f"{name}: got {dtype or type(pixels).__name__} {list(shape)}, expected {expected}", hint=hint)


def _dtype_of(array: Any) -> str:
    """Return the name of an array's dtype, without its byte order, or an empty string if `array` is not an array."""
    dtype = getattr(array, "dtype", "")
    return str(getattr(dtype, "name", dtype))


def _value_hint(value: Any) -> str:
    """Return how to turn something that is not an array into pixels."""
    if hasattr(value, "getexif"):  # a picture of Pillow
        return "a video is a list of its frames: [picture]"
    if hasattr(value, "read"):
        return _READ_FILE
    if not isinstance(value, list | tuple):
        return ""
    is_numbers = bool(value) and isinstance(value[0], list | tuple | int | float)
    return "make it an array: numpy.asarray(pixels, dtype='uint8')" if is_numbers else "give each image on its own"


def _dtype_hint(dtype: str) -> str:
    """Return how to convert pixels of this dtype to uint8."""
    if dtype.startswith("torch."):
        return "make it an array with .numpy(), with the channels last"
    if "float" in dtype:
        # Both 0..1 and 0..255 are in use, and a dark picture looks the same in them.
        return "convert it: (255 * pixels).round().astype('uint8') if 1.0 is white, pixels.round().astype('uint8') if 255.0 is"
    if dtype == "bool":
        return "convert it: 255 * pixels.astype('uint8') if True is white"
    if dtype == "uint16":
        return "convert it: (pixels >> 8).astype('uint8') if 65535 is white, pixels.astype('uint8') if 255 is"
    return "convert it: pixels.astype('uint8') if 255 is white" if "int" in dtype and dtype != "uint8" else ""


def _shape_hint(shape: tuple[int, ...]) -> str:
    """Return how to fix the shape of uint8 pixels."""
    if len(shape) in (3, 4) and shape[-1] == 2:
        return "leave out the transparency, with pixels[..., 0], or give a picture of Pillow of mode LA"
    if len(shape) in (3, 4) and shape[-3] in (1, 3, 4):
        return "put the channels last, with numpy.moveaxis(pixels, -3, -1)"
    return "pass pixels[0]" if len(shape) == 5 and shape[0] == 1 else ""


def sample_source(samples: Any, rate: float, *, name: str, **settings: Any) -> MediaSource:
    """Return the source of an array [samples] or [samples, channels]. `settings` are other fields of MediaSource.

    Floats lie in [-1, 1]. int16 and int32 are scaled and channels are averaged as those of a file are.
    """
    mono = _to_mono(samples, name)
    if not rate:
        problem = f"{name}: got samples without a rate"
        raise BadRequest(problem, hint="pass them with their rate in Hz, such as (samples, 16000)")
    if not _MIN_RATE <= rate <= _MAX_RATE or rate != int(rate):
        problem = f"{name}: got a rate of {rate:.10g} Hz, expected a whole number from {_MIN_RATE} to {_MAX_RATE}"
        raise BadRequest(problem, hint="give the number of samples per second; resample if it is not whole")
    return MediaSource(MediaKind.AUDIO, name, data=mono.tobytes(), form=MediaForm.RAW, rate=rate, **settings)


def _to_mono(samples: Any, name: str) -> Any:
    """Return samples as a float32 array [samples]."""
    import numpy as np

    shape, dtype = tuple(getattr(samples, "shape", ())), getattr(samples, "dtype", None)
    kind, size = getattr(dtype, "kind", ""), getattr(dtype, "itemsize", 0)
    is_sound = kind == "f" or (kind == "i" and size in (2, 4))
    if not is_sound or not (len(shape) == 1 or (len(shape) == 2 and 1 <= shape[1] <= MAX_CHANNELS)):
        got = f"{dtype or type(samples).__name__} {list(shape)}"
        expected = f"float, int16 or int32 of the form [samples], or [samples, channels] with at most {MAX_CHANNELS} channels"
        raise BadRequest(f"{name}: got {got}, expected {expected}", hint=_sample_hint(samples, shape, is_sound=is_sound))
    with np.errstate(over="ignore"):  # what is too large is refused later
        floats = np.asarray(samples).astype(np.float32)
    if kind == "i":
        floats /= 1 << (8 * size - 1)
    return floats if floats.ndim == 1 else floats.mean(axis=1)


def _sample_hint(samples: Any, shape: tuple[int, ...], *, is_sound: bool) -> str:
    """Return how to convert these samples."""
    dtype = _dtype_of(samples)
    if not dtype:
        if isinstance(samples, list):
            return "make it an array: numpy.asarray(samples, dtype='float32')"
        return _READ_FILE if hasattr(samples, "read") else "pass (samples, rate) with an array of samples, or a file's bytes"
    if dtype.startswith("torch."):
        return "make it an array with .numpy(), with the channels last"
    if not is_sound:
        return {
            "int64": "convert it: samples.astype('int16') if its levels are -32768 to 32767",
            "uint8": "convert it: (samples.astype('float32') - 128) / 128",
        }.get(dtype, "convert it to float32, from -1 to 1")
    if len(shape) == 2 and 1 <= shape[0] <= MAX_CHANNELS:
        return "put the channels last: samples.T"
    return "pass samples[0]" if len(shape) == 3 and shape[0] == 1 else ""
