"""GET /health, /ready and /version, for load balancers and operators."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from culet import __version__
from culet.serve.api.endpoint import Endpoint, json_response
from culet.serve.http_errors import HttpError
from culet.serve.service import Service


async def health(service: Service, request: Request) -> Response:
    """Return 200 while the engine is alive, even while it loads. Return 503 if it is dead or stuck."""
    if not service.is_healthy:
        raise HttpError(503, "the engine is dead or stuck", code="engine_unavailable")
    return json_response({"status": "ok", "engine": service.engine.state})


async def ready(service: Service, request: Request) -> Response:
    """Return 200 once the model is loaded and warm, until the server is told to stop. Otherwise return 503."""
    if not service.is_ready:
        state = "draining" if service.is_draining else service.engine.state
        raise HttpError(503, f"not ready: {state}", code="not_ready")
    return json_response({"status": "ready"})


async def version(service: Service, request: Request) -> Response:
    """Return the version of Culet."""
    return json_response({"version": __version__})


ENDPOINTS = (
    Endpoint("GET", "/health", health),
    Endpoint("GET", "/ready", ready),
    Endpoint("GET", "/version", version),
)
