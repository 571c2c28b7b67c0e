"""GET /v1/models: the names under which the model is served, and which media it reads."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.media.items import MediaKind
from culet.media.spec import MAX_MEL_SAMPLES, SAMPLE_RATE
from culet.serve.api.endpoint import Endpoint, json_response
from culet.serve.service import Service

# The formats of each kind as media types, by the package that decodes them.
MEDIA_TYPES: dict[MediaKind, dict[str, tuple[str, ...]]] = {
    MediaKind.IMAGE: {"PIL": ("image/jpeg", "image/png", "image/webp", "image/gif")},
    MediaKind.AUDIO: {
        "soundfile": ("audio/wav", "audio/flac", "audio/ogg", "audio/mpeg"),
        "av": ("audio/mp4", "audio/webm", "audio/x-matroska"),
    },
    MediaKind.VIDEO: {"av": ("video/mp4", "video/quicktime", "video/webm", "video/x-matroska")},
}


class ImageInput(Struct):
    """The images that the server takes."""

    types: list[str]
    max_bytes: int
    max_count: int | None  # in one prompt
    max_pixels: int
    budgets: list[int]  # what `max_soft_tokens` may be
    budget: int  # the default


class VideoInput(Struct):
    """The videos that the server takes."""

    types: list[str]
    max_bytes: int
    max_count: int | None  # in one prompt
    num_frames: int  # that are shown to the model
    budgets: list[int]  # of each frame
    budget: int


class AudioInput(Struct):
    """The recordings that the server takes."""

    types: list[str]
    max_bytes: int
    max_count: int | None  # in one prompt
    max_s: float
    features: Literal["mel", "samples"]  # what the model reads. It decides how many soft tokens there are.


class MediaInput(Struct):
    """What the model reads besides text. A kind that it does not read, or that cannot be decoded here, is null."""

    max_body_bytes: int  # of a whole request, where media are base64
    image: ImageInput | None
    video: VideoInput | None
    audio: AudioInput | None


class ModelCard(Struct):
    """The model under one of its names."""

    id: str
    created: int
    max_model_len: int | None
    media: MediaInput | None  # null if the model reads only text
    object: str = "model"
    owned_by: str = "culet"


class ModelList(Struct):
    """All names of the model."""

    data: list[ModelCard]
    object: str = "list"


async def list_models(service: Service, request: Request) -> Response:
    """List the names under which the model is served."""
    return json_response(ModelList([_card(service, name) for name in service.names]))


async def show_model(service: Service, request: Request) -> Response:
    """Describe the model under one of its names."""
    return json_response(_card(service, service.check_model(request.path_params["name"])))


def _card(service: Service, name: str) -> ModelCard:
    facts = service.engines.facts
    return ModelCard(name, int(service.started_at), None if facts is None else facts.max_model_len, _media_input(service))


def _media_input(service: Service) -> MediaInput | None:
    spec, limits = service.media.spec, service.media.limits
    common = {kind: _common(service, kind) for kind in MediaKind}
    image, video, audio = (common[kind] for kind in (MediaKind.IMAGE, MediaKind.VIDEO, MediaKind.AUDIO))
    if not any(common.values()):
        return None
    budgets, frames = spec.budgets(MediaKind.IMAGE), spec.budgets(MediaKind.VIDEO)
    max_s = min(limits.max_audio_s, MAX_MEL_SAMPLES / SAMPLE_RATE) if spec.has_mel else limits.max_audio_s
    return MediaInput(
        max_body_bytes=service.limits.body_mb << 20,
        image=ImageInput(**image, max_pixels=limits.max_pixels, budgets=budgets, budget=spec.image_budget) if image else None,
        video=VideoInput(**video, num_frames=spec.num_frames, budgets=frames, budget=spec.video_budget) if video else None,
        audio=AudioInput(**audio, max_s=max_s, features="mel" if spec.has_mel else "samples") if audio else None,
    )


def _common(service: Service, kind: MediaKind) -> dict[str, Any] | None:
    """Return the fields that all kinds have, or None if the server takes no media of this kind."""
    if kind not in service.media.spec.kinds:
        return None
    types, max_count = _readable_types(kind), service.config.media.limits[kind]
    return {"types": types, "max_bytes": service.media.limits.max_bytes(kind), "max_count": max_count} if types else None


@cache
def _readable_types(kind: MediaKind) -> list[str]:
    return [name for package, names in MEDIA_TYPES[kind].items() if find_spec(package) is not None for name in names]


ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models, answer=ModelList),
    Endpoint("GET", "/v1/models/{name:path}", show_model, answer=ModelCard),
)
