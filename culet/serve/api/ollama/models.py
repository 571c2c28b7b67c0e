"""GET /api/tags, /api/ps and /api/version, POST /api/show: what Ollama's clients ask about models.

Ollama also downloads, creates and deletes models and computes embeddings. These requests are refused with an explanation.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from culet import __version__
from culet.errors import BadRequest, UnsupportedError
from culet.media.items import MediaKind
from culet.models.checkpoint import Checkpoint
from culet.models.sizes import text_weights
from culet.serve.api.endpoint import Endpoint, json_response, read_body
from culet.serve.api.ollama.protocol import ModelName, find_model
from culet.serve.service import Service

API_VERSION = "0.12.0"  # the release of Ollama whose API this is, which clients compare with what they need
FAMILY = "gemma4"
_NEVER = "9999-12-31T23:59:59Z"  # the model is never unloaded
_HINTS = {
    "/api/pull": "start a server with culet serve MODEL, which downloads it",
    "/api/push": "upload the model to the Hugging Face Hub",
    "/api/create": "start a server with culet serve MODEL",
    "/api/copy": "name the model with culet serve --served-model-name NAME,NAME",
    "/api/delete": "stop the server",
    "/api/embed": "Gemma 4 generates text, so use a model for embeddings",
    "/api/embeddings": "Gemma 4 generates text, so use a model for embeddings",
}


class OllamaDetails(Struct):
    """What kind of model it is."""

    parameter_size: str
    quantization_level: str
    parent_model: str = ""
    format: str = "safetensors"
    family: str = FAMILY
    families: tuple[str, ...] = (FAMILY,)


class OllamaModel(Struct, kw_only=True):
    """The model under one of its names."""

    name: str
    model: str
    modified_at: str
    size: int  # bytes on disk
    digest: str  # of config.json
    details: OllamaDetails


class OllamaModels(Struct):
    """All names of the model."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel, kw_only=True):
    """The same for /api/ps."""

    expires_at: str
    size_vram: int
    context_length: int | None


class OllamaRunningModels(Struct):
    models: list[OllamaRunningModel]


class ShowRequest(Struct):
    """The body of POST /api/show."""

    model: ModelName | None = None
    name: ModelName | None = None  # the same in older clients


class ShowAnswer(Struct, kw_only=True):
    """The answer to POST /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Struct):
    version: str
    culet: str


class OtherRequest(Struct):
    """The body of a request that is refused."""

    model: ModelName = ""


async def tags(service: Service, request: Request) -> Response:
    """List the names under which the model is served."""
    return json_response(OllamaModels([OllamaModel(**_model_fields(service, name)) for name in service.names]))


async def running(service: Service, request: Request) -> Response:
    """List the models that are loaded. There is one, and it stays."""
    facts = service.engines.facts
    length, size = (None, 0) if facts is None else (facts.max_model_len, _num_bytes(service.checkpoint))
    on_gpu = size if facts is not None and facts.device.startswith("cuda") else 0
    more: dict[str, Any] = {"expires_at": _NEVER, "size_vram": on_gpu, "context_length": length}
    models = [OllamaRunningModel(**_model_fields(service, name), **more) for name in service.names] if facts is not None else []
    return json_response(OllamaRunningModels(models))


async def show(service: Service, request: Request) -> Response:
    """Describe the model."""
    body = await read_body(service, request, ShowRequest)
    if body.model is None and body.name is None:
        raise BadRequest("model: expected the name of a model")
    name = find_model(service, body.model or body.name or "")
    spec, facts = service.checkpoint.spec, service.engines.facts
    defaults = service.checkpoint.defaults
    sampling = {"temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p}
    info: dict[str, Any] = {
        "general.architecture": FAMILY,
        "general.basename": name,
        "general.parameter_count": _num_weights(service.checkpoint),
        f"{FAMILY}.context_length": spec.max_position if facts is None else facts.max_model_len,
        f"{FAMILY}.embedding_length": spec.hidden_size,
        f"{FAMILY}.block_count": len(spec.layers),
        f"{FAMILY}.vocab_size": spec.vocab_size,
    }
    answer = ShowAnswer(
        modelfile=f"FROM {name}\n",
        parameters="\n".join(f"{key} {value}" for key, value in sampling.items()),
        template=service.template.source,
        details=_details(service),
        model_info=info,
        capabilities=["completion", "tools", "thinking", *(["vision"] if MediaKind.IMAGE in service.media.spec.kinds else [])],
        modified_at=_started_at(service),
    )
    return json_response(answer)


async def api_version(service: Service, request: Request) -> Response:
    """Return the release of Ollama whose API this is, and the version of Culet."""
    return json_response(OllamaVersion(API_VERSION, __version__))


async def refuse(service: Service, request: Request) -> Response:
    """Refuse a request that this server cannot answer."""
    path = request.scope["path"]
    raise UnsupportedError(f"{path}: not supported", hint=_HINTS[path])


def _model_fields(service: Service, name: str) -> dict[str, Any]:
    checkpoint = service.checkpoint
    return {
        "name": name,
        "model": name,
        "modified_at": _started_at(service),
        "size": _num_bytes(checkpoint),
        "digest": hashlib.sha256(msgspec.json.encode(checkpoint.config)).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> OllamaDetails:
    facts = service.engines.facts
    level = "" if facts is None else facts.dtype.replace("float", "f").upper()  # such as BF16
    return OllamaDetails(_short_count(_num_weights(service.checkpoint)), level)


def _num_weights(checkpoint: Checkpoint) -> int:
    return sum(text_weights(checkpoint.spec).values())


def _short_count(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _num_bytes(checkpoint: Checkpoint) -> int:
    return _size_of(str(checkpoint.folder))


@lru_cache(maxsize=4)
def _size_of(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def _started_at(service: Service) -> str:
    return datetime.fromtimestamp(service.started_at, UTC).isoformat().replace("+00:00", "Z")


ENDPOINTS = (
    Endpoint("GET", "/api/tags", tags, answer=OllamaModels),
    Endpoint("GET", "/api/ps", running, answer=OllamaRunningModels),
    Endpoint("GET", "/api/version", api_version, answer=OllamaVersion),
    Endpoint("POST", "/api/show", show, body=ShowRequest, answer=ShowAnswer),
    *(
        Endpoint("DELETE" if path == "/api/delete" else "POST", path, refuse, body=OtherRequest, only_refuses=True)
        for path in _HINTS
    ),
)
