"""The media types that GET /v1/models names are those that the decoders read."""

from __future__ import annotations

from culet.media.decoding import audio, containers, images
from culet.media.items import MediaKind
from culet.serve.api.models import MEDIA_TYPES

NAMES = {"mpeg": "MP3", "quicktime": "MOV", "webm": "WebM", "x-matroska": "Matroska"}


def names(kind: MediaKind, package: str) -> set[str]:
    subtypes = [name.removeprefix(f"{kind}/") for name in MEDIA_TYPES[kind][package]]
    return {NAMES.get(subtype, subtype.upper()) for subtype in subtypes}


def test_every_format_is_named() -> None:
    assert names(MediaKind.IMAGE, "PIL") == set(images.FORMATS)
    assert names(MediaKind.AUDIO, "soundfile") == set(audio.FORMATS)
    assert names(MediaKind.VIDEO, "av") == set(containers.FORMATS)
    assert names(MediaKind.AUDIO, "av") == set(containers.FORMATS) - {"MOV"}  # sound alone in a MOV file counts as MP4
