"""Read media of the caller's own program: paths, bytes, pictures of Pillow and arrays of numpy. No torch.

Only `LLM`, `AsyncLLM` and the command line do this. A server's clients send bytes and URLs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from culet.errors import BadRequest
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits
from culet.media.messages import Form
from culet.media.parts import MediaOptions, read_options
from culet.media.sources import MediaSource, pixel_source, sample_source

_PNG_MODES = ("1", "L", "LA", "P", "RGBA", "I;16")  # those whose pixels a PNG keeps
_LIMITS = MediaLimits()


def open_local(source: MediaSource, value: Any) -> MediaSource:
    """Return `source` with the content that `value` stands for."""
    if isinstance(value, str) and (value[:5].lower() == "data:" or "://" in value[:16]):
        return replace(source, url=value)
    if isinstance(value, str | os.PathLike):
        return replace(source, data=_read_file(Path(value).expanduser(), source))
    if isinstance(value, bytes | bytearray | memoryview):
        return replace(source, data=bytes(value))
    if hasattr(value, "getexif") and source.kind == MediaKind.IMAGE:
        return _open_picture(source, value)
    rate = 0.0
    if isinstance(value, tuple) and len(value) == 2 and hasattr(value[0], "shape"):  # samples or frames, with their rate
        value, rate = value[0], _rate_of(value[1], source.name)
    settings = {"max_soft_tokens": source.max_soft_tokens, "detail": source.detail, "is_split": source.is_split}
    if source.kind == MediaKind.AUDIO:
        return sample_source(value, rate, name=source.name, **settings)
    found = pixel_source(value, name=source.name, rate=rate, **settings)
    if found.kind != source.kind:
        raise BadRequest(f"{source.name}: got {found.kind.with_article}, expected {source.kind.with_article}")
    return found


def read_media_data(data: Any, options: Mapping[str, Any] | None, name: str) -> list[MediaSource]:
    """Read `multi_modal_data`: one value or a list of values for each kind. `options` are the `mm_processor_kwargs`."""
    if not isinstance(data, Mapping):
        raise BadRequest(f"{name}: got {type(data).__name__}, expected a mapping with image, video or audio")
    found = read_options(options)
    sources = []
    for kind_name, values in data.items():
        if kind_name not in list(MediaKind):
            raise BadRequest(f"{name}: got {str(kind_name)[:100]!r}, expected one of {', '.join(MediaKind)}")
        if values is None:
            continue
        for index, value in enumerate(values if isinstance(values, list) else [values]):
            sources.append(open_local(_empty(MediaKind(kind_name), f"{name}.{kind_name}[{index}]", found), value))
    return sources


def _empty(kind: MediaKind, name: str, options: MediaOptions) -> MediaSource:
    return MediaSource(kind, name, max_soft_tokens=options.max_soft_tokens, is_split=options.is_split)


def _read_file(path: Path, source: MediaSource) -> bytes:
    try:
        _LIMITS.check_bytes(source.name, source.kind, path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        problem = f"{source.name}: cannot read {path}: {error.strerror}"
        raise BadRequest(problem, hint="check the name of the file") from error


def _open_picture(source: MediaSource, picture: Any) -> MediaSource:
    """Return a picture of Pillow: as pixels, or as a PNG where its transparency or depth must be kept."""
    from PIL import ImageOps

    picture = ImageOps.exif_transpose(picture)
    if picture.mode not in _PNG_MODES and "transparency" not in picture.info:
        rgb = picture.convert("RGB")
        return replace(source, data=rgb.tobytes(), form=Form.RAW, shape=(rgb.height, rgb.width, 3))
    buffer = io.BytesIO()
    (picture if picture.mode in _PNG_MODES else picture.convert("RGBA")).save(buffer, "PNG", compress_level=1)
    return replace(source, data=buffer.getvalue())


def _rate_of(value: Any, name: str) -> float:
    """Return the number of samples or frames per second. vLLM gives it in a mapping for videos."""
    rate = value.get("fps") if isinstance(value, Mapping) else value
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise BadRequest(f"{name}: got a rate of type {type(rate).__name__}, expected a number per second")
    return float(rate)
