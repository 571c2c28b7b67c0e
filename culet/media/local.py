"""Read media of the caller's own program: paths, bytes, Pillow images and numpy arrays. No torch.

Only `LLM`, `AsyncLLM` and the command line do this. A server's clients send bytes and URLs.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from culet.errors import BadRequest
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits
from culet.media.parts import MediaOptions
from culet.media.sources import MediaSource, check_pixels, pixel_source, sample_source

_LIMITS = MediaLimits()
_METADATA_READ = ("fps", "frames_indices", "do_sample_frames")  # of a video
_METADATA_IGNORED = ("total_num_frames", "duration", "video_backend", "width", "height")  # they say nothing about its frames
_MAX_INDEX = 1 << 32


def open_local(source: MediaSource, value: Any) -> MediaSource:
    """Return `source` with the content that `value` stands for."""
    if isinstance(value, str) and (value[:5].lower() == "data:" or "://" in value[:16]):
        return replace(source, url=value)
    if isinstance(value, str | os.PathLike):
        return replace(source, data=_read_file(Path(value).expanduser(), source))
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if isinstance(value, bytes | bytearray | memoryview):
        return replace(source, data=bytes(value))
    settings: dict[str, Any] = {}
    if _has_rate(value, source.kind):
        value, about = value
        is_metadata = source.kind == MediaKind.VIDEO and isinstance(about, Mapping)
        settings = _read_metadata(about, source.name) if is_metadata else {"rate": _read_rate(about, source.name)}
    settings |= {"max_soft_tokens": source.max_soft_tokens, "detail": source.detail}
    if source.kind == MediaKind.AUDIO:
        return sample_source(value, settings.pop("rate", 0.0), name=source.name, **settings)
    if source.kind == MediaKind.IMAGE and _is_picture(value):
        value = _read_picture(value, source.name)
    elif source.kind == MediaKind.VIDEO and isinstance(value, list | tuple):
        value = _stack_frames(value, source.name)
    found = pixel_source(value, name=source.name, **settings)
    if found.kind != source.kind:
        problem = f"{source.name}: got {found.kind.with_article} {list(found.shape)}, expected {source.kind.with_article}"
        hint = "pass pixels[0]" if found.shape[0] == 1 else "give each image on its own"
        raise BadRequest(problem, hint=hint if source.kind == MediaKind.IMAGE else "a video is a list of its frames: [pixels]")
    if found.indices and len(found.indices) != found.shape[0]:
        problem = f"{source.name}: got {len(found.indices)} frames_indices for {found.shape[0]} frames"
        raise BadRequest(problem, hint="give one index for each frame: its place in the original video")
    return found


def read_media_data(data: Any, options: MediaOptions, name: str) -> list[MediaSource]:
    """Read `multi_modal_data`: one value or several for each kind.

    Several values are a list or a tuple. A list or a tuple of frames is one video.
    """
    if not isinstance(data, Mapping):
        raise BadRequest(f"{name}: got {type(data).__name__}, expected a mapping with image, video or audio")
    sources = []
    for kind_name, values in data.items():
        if kind_name not in list(MediaKind):
            raise BadRequest(f"{name}: got {str(kind_name)[:100]!r}, expected one of {', '.join(MediaKind)}")
        if values is None:
            continue
        kind = MediaKind(kind_name)
        for index, value in enumerate(values if _is_several(values, kind) else [values]):
            sources.append(open_local(_empty(kind, f"{name}.{kind}[{index}]", options), value))
    return sources


def _is_several(values: Any, kind: MediaKind) -> bool:
    """Return whether these are several media, and not one."""
    if not isinstance(values, list | tuple) or _has_rate(values, kind):
        return False
    return kind != MediaKind.VIDEO or not values or not all(map(_is_frame, values))


def _has_rate(value: Any, kind: MediaKind) -> bool:
    """Return whether a value is samples or frames with their rate."""
    if kind == MediaKind.IMAGE or not isinstance(value, tuple) or len(value) != 2:
        return False
    first, second = value
    is_content = hasattr(first, "shape") or isinstance(first, list | tuple)
    is_another = _is_picture(second) or isinstance(second, list | tuple) or len(getattr(second, "shape", ())) > 0
    return is_content and not is_another


def _is_picture(value: Any) -> bool:
    """Return whether a value is a picture of Pillow."""
    return hasattr(value, "getexif")


def _is_frame(value: Any) -> bool:
    return _is_picture(value) or len(getattr(value, "shape", ())) in (2, 3)


def _empty(kind: MediaKind, name: str, options: MediaOptions) -> MediaSource:
    return MediaSource(kind, name, max_soft_tokens=options.max_soft_tokens)


def _read_file(path: Path, source: MediaSource) -> bytes:
    try:
        _LIMITS.check_bytes(source.name, source.kind, path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        problem = f"{source.name}: cannot read {path}: {error.strerror}"
        raise BadRequest(problem, hint="check the name of the file") from error


def _read_picture(picture: Any, name: str) -> Any:
    """Return a Pillow image as an array of RGB pixels, upright."""
    import numpy as np

    from culet.media.decoding.colours import clear_colour, to_rgb

    width, height = picture.size
    if width <= 0 or height <= 0:
        raise BadRequest(f"{name}: the image is {width} x {height} pixels, expected at least 1 x 1")
    try:
        _check_levels(picture, name)
        clear = clear_colour(picture)
        upright = _turn_upright(picture)
        if "transparency" in upright.info:  # some are gone once their image is loaded
            upright.info["transparency"] = clear
        return np.asarray(to_rgb(upright))
    except (BadRequest, MemoryError):
        raise
    except Exception as error:  # Pillow and its plugins raise almost anything
        problem = f"{name}: cannot read this picture of Pillow (mode {picture.mode}, {width} x {height} pixels)"
        raise BadRequest(problem, hint="check that its file is complete and that it was not closed") from error


def _check_levels(picture: Any, name: str) -> None:
    """Raise for levels of 32 bits that are no grey levels of 8 bits. Pillow would make all of them white, or black."""
    if picture.mode not in ("I", "F"):
        return
    low, high = picture.getextrema()
    is_share = picture.mode == "F" and 0 < high <= 1  # white may be 1.0
    if not (low >= 0 and high <= 255) or is_share:  # also for NaN
        problem = f"{name}: got a picture of mode {picture.mode} with levels from {low:g} to {high:g}, expected 0 to 255"
        raise BadRequest(problem, hint="scale its levels so that 255 is white, and convert it to mode L")


def _turn_upright(picture: Any) -> Any:
    """Return a copy of a Pillow image, turned by its EXIF data. Damaged EXIF data counts as none."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(picture)
    except MemoryError:
        raise
    except Exception:
        return picture.copy()  # raises too if something else is wrong


def _stack_frames(values: Sequence[Any], name: str) -> Any:
    """Return the frames of a video as one array. They are pictures or arrays."""
    import numpy as np

    from culet.media.decoding.colours import array_to_rgb

    frames: list[Any] = []
    for index, value in enumerate(values):
        at = f"{name}[{index}]"
        pixels = _read_picture(value, at) if _is_picture(value) else array_to_rgb(check_pixels(value, at))
        if pixels.ndim != 3:
            raise BadRequest(f"{at}: got an array {list(pixels.shape)}, expected a frame [height, width, 3]")
        if frames and pixels.shape != frames[0].shape:
            got, first = (f"{shape[1]} x {shape[0]}" for shape in (pixels.shape, frames[0].shape))
            raise BadRequest(f"{at}: got a frame of {got} pixels, expected {first}, like the first frame")
        frames.append(pixels)
    if not frames:
        raise BadRequest(f"{name}: got no frames, expected a video")
    return np.stack(frames)


def _read_rate(rate: Any, name: str) -> float:
    """Return the number of samples or frames per second."""
    if isinstance(rate, bool) or not isinstance(rate, Real):
        problem = f"{name}: got a rate of type {type(rate).__name__}, expected a number per second"
        raise BadRequest(problem, hint="such as (samples, 16000) or (frames, 24)")
    if not (math.isfinite(found := float(rate)) and found > 0):
        raise BadRequest(f"{name}: got a rate of {rate}, expected a number above 0")
    return found


def _read_metadata(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a video's source that its metadata says, in the form of vLLM and transformers."""
    found = {key: value for key, value in given.items() if value is not None}  # transformers' may have None for all of them
    for key in found:
        if key not in (*_METADATA_READ, *_METADATA_IGNORED):
            problem = f"{name}: got the key {str(key)[:100]!r} in a video's metadata, expected {', '.join(_METADATA_READ)}"
            raise BadRequest(problem, hint="omit it, because it is not read")
    if "fps" not in found:
        hint = "add fps, the number of frames per second, such as {'fps': 24}"
        raise BadRequest(f"{name}: got a video's metadata without fps", hint=hint)
    is_sampled = found.get("do_sample_frames", True)
    is_sampled = is_sampled.item() if hasattr(is_sampled, "item") else is_sampled
    if not isinstance(is_sampled, bool):
        raise BadRequest(f"{name}: do_sample_frames: got {type(is_sampled).__name__}, expected True or False")
    indices = _read_indices(found["frames_indices"], name) if "frames_indices" in found else ()
    return {"rate": _read_rate(found["fps"], name), "indices": indices, "takes_all": not is_sampled}


def _read_indices(values: Any, name: str) -> tuple[int, ...]:
    """Return the place of each frame in the original video. Raise unless they ascend."""
    problem, expected = f"{name}: frames_indices: got", "expected ascending whole numbers from 0 on, one for each frame"
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise BadRequest(f"{problem} {type(values).__name__}, {expected}")
    if not values:
        raise BadRequest(f"{problem} none, {expected}")
    indices: list[int] = []
    for at, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise BadRequest(f"{problem} {type(value).__name__} at {at}, {expected}")
        if not (indices[-1] if indices else -1) < int(value) < _MAX_INDEX:
            raise BadRequest(f"{problem} {value} at {at}{f' after {indices[-1]}' if indices else ''}, {expected}")
        indices.append(int(value))
    return tuple(indices)
