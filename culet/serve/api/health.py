"""GET /health, /ping, /ready, /live and /version, for load balancers and operators."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from culet import __version__
from culet.serve.api.endpoint import Endpoint, json_response
from culet.serve.http_errors import HttpError
from culet.serve.service import Service

_PROBLEMS = {
    "loading": "the model is loading",
    "restarting": "the engine died and is being restarted",
    "stuck": "the engine is stuck in a step",
    "given up": "the engine died too often and will not be restarted",
}


async def health(service: Service, request: Request) -> Response:
    """Return 200 while the engine can answer requests. Return 503 while the model loads, and if the engine is dead or stuck."""
    state = service.health
    if state != "ok":
        raise HttpError(503, f"{state}: {_PROBLEMS[state]}", code="engine_unavailable")
    return json_response({"status": "ok", "engine": service.engines.state})


async def ready(service: Service, request: Request) -> Response:
    """Return 200 once the model is loaded and warm, until the server is told to stop. Otherwise return 503."""
    if not service.is_ready:
        state = "draining" if service.is_draining else service.health
        raise HttpError(503, f"not ready: {state}", code="not_ready")
    return json_response({"status": "ready"})


async def live(service: Service, request: Request) -> Response:
    """Return 200 as long as the server process runs, whatever the engine does. A supervisor need not restart it."""
    return json_response({"status": "live"})


async def version(service: Service, request: Request) -> Response:
    """Return the version of Culet."""
    return json_response({"version": __version__})


ENDPOINTS = (
    Endpoint("GET", "/health", health),
    Endpoint("GET", "/ping", health),  # the name that SageMaker uses
    Endpoint("GET", "/ready", ready),
    Endpoint("GET", "/live", live),
    Endpoint("GET", "/version", version),
)
