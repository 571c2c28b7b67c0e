"""The media types that GET /v1/models names are those that the decoders read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

from culet.config import MediaConfig
from culet.limits import Limits
from culet.media.decoding import audio, containers, images
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits
from culet.media.spec import DETAILS, MediaSpec
from culet.serve.api.fields import Detail
from culet.serve.api.models import MEDIA_TYPES, _media_input

NAMES = {"mpeg": "MP3", "quicktime": "MOV", "webm": "WebM", "x-matroska": "Matroska"}


def names(kind: MediaKind, package: str) -> set[str]:
    subtypes = [name.removeprefix(f"{kind}/") for name in MEDIA_TYPES[kind][package]]
    return {NAMES.get(subtype, subtype.upper()) for subtype in subtypes}


def test_every_format_is_named() -> None:
    assert names(MediaKind.IMAGE, "PIL") == set(images.FORMATS)
    assert names(MediaKind.AUDIO, "soundfile") == set(audio.FORMATS)
    assert names(MediaKind.VIDEO, "av") == set(containers.FORMATS)
    assert names(MediaKind.AUDIO, "av") == set(containers.FORMATS) - {"MOV"}  # sound alone in a MOV file counts as MP4


def test_budgets_are_those_that_the_model_allows() -> None:
    """The built-in model allows fewer than the others, and a client would choose one that is refused."""
    spec = MediaSpec(frozenset({MediaKind.IMAGE, MediaKind.VIDEO}), max_budget=140)
    reader = SimpleNamespace(spec=spec, limits=MediaLimits())
    service: Any = SimpleNamespace(media=reader, limits=Limits(), config=SimpleNamespace(media=MediaConfig()))
    found = _media_input(service)
    assert found is not None
    assert found.image is not None
    assert found.video is not None
    assert found.image.budgets == found.video.budgets == [70, 140]


def test_details_of_the_apis_are_those_of_images() -> None:
    assert get_args(Detail) == DETAILS
