"""GET and DELETE /v1/responses/{response_id}: responses that the server keeps with `--store-responses`."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.serve.api.endpoint import Endpoint, json_response
from culet.serve.api.openai.responses import ENDPOINT, ResponsesAnswer
from culet.serve.keys import CALLER
from culet.serve.service import Service


class DeletedResponse(Struct):
    """The answer to DELETE /v1/responses/{response_id}."""

    id: str
    object: str = "response"
    deleted: bool = True


async def get_response(service: Service, request: Request) -> Response:
    """Return a stored response."""
    stored = service.stored.find(request.scope[CALLER].name, request.path_params["response_id"])
    return Response(stored.answer, media_type="application/json")


async def delete_response(service: Service, request: Request) -> Response:
    """Forget a stored response. Responses that continue it cannot be continued any more."""
    response_id = request.path_params["response_id"]
    service.stored.delete(request.scope[CALLER].name, response_id)
    return json_response(DeletedResponse(response_id))


ENDPOINTS = (
    Endpoint("GET", f"{ENDPOINT}/{{response_id}}", get_response, answer=ResponsesAnswer),
    Endpoint("DELETE", f"{ENDPOINT}/{{response_id}}", delete_response, answer=DeletedResponse),
)
