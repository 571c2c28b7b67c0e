"""GET /v1/models: the names under which the model is served."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.serve.api.endpoint import Endpoint, json_response
from culet.serve.service import Service


class ModelCard(Struct):
    """The model under one of its names."""

    id: str
    created: int
    max_model_len: int | None
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
    return ModelCard(name, int(service.started_at), None if facts is None else facts.max_model_len)


ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models, answer=ModelList),
    Endpoint("GET", "/v1/models/{name:path}", show_model, answer=ModelCard),
)
