"""Build the web application from the endpoints of all APIs, the OpenAPI document and the middleware."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from culet import __version__
from culet.errors import CuletError
from culet.registry import load
from culet.serve import metrics, tracing
from culet.serve.api.endpoint import Endpoint
from culet.serve.http.forms import FORM
from culet.serve.http_errors import HttpError
from culet.serve.middleware import DEFERRED, Middleware
from culet.serve.service import Service
from culet.serve.streams import ClientGone, unless_gone
from culet.text.text_queue import SHORT_BYTES, request_bytes

# Modules with endpoints. Each defines ENDPOINTS and may define PUBLIC_PATHS, which need no key. Add a new API here.
MODULES = (
    "culet.serve.api.openai.chat",
    "culet.serve.api.openai.completions",
    "culet.serve.api.openai.audio",
    "culet.serve.api.openai.responses",
    "culet.serve.api.openai.stored_responses",
    "culet.serve.api.anthropic",
    "culet.serve.api.ollama.generate",
    "culet.serve.api.ollama.models",
    "culet.serve.api.models",
    "culet.serve.api.tokens",
    "culet.serve.api.health",
    "culet.serve.api.stats",
    "culet.serve.api.routers",
    "culet.serve.metrics",
    "culet.serve.web_page",
)
_PATTERN = re.compile(r":\w+}")  # of a name in a path, such as {name:path}
_Handle = Callable[[Request], Coroutine[Any, Any, Response]]
_REFERENCE = "#/components/schemas/{name}"
_ERROR = {
    "description": "An error in the format of the API. Most have OpenAI's: "
    '`{"error": {"message": ..., "type": ..., "code": ...}}`.'
}


def create_app(service: Service) -> ASGIApp:
    """Create the ASGI application for `service`."""
    # FastAPI's own /docs is disabled because that page loads scripts from another host. `web_page` has ours.
    app = FastAPI(title="Culet", version=__version__, docs_url=None, redoc_url=None)
    endpoints: list[Endpoint] = []
    public: list[str] = []
    for name in MODULES:
        endpoints += load(f"{name}:ENDPOINTS")
        public += _optional(name, "PUBLIC_PATHS")
    metrics.attach(service)
    tracing.attach(service)
    fixed: dict[tuple[str, str], _Handle] = {}
    for endpoint in endpoints:
        _add(app, fixed, service, endpoint)
    _document(app, endpoints)
    working = {_PATTERN.sub("}", endpoint.path) for endpoint in endpoints if not endpoint.only_refuses}
    paths = ", ".join(sorted({*working, app.openapi_url or "/"}))
    for kind in (CuletError, HTTPException, ClientGone, Exception):
        app.add_exception_handler(kind, partial(_defer_error, paths))
    origins = [origin.strip() for origin in service.settings.allowed_origins.split(",") if origin.strip()]
    forms = [endpoint.path for endpoint in endpoints if endpoint.body_type == FORM]
    wrapped: ASGIApp = Middleware(_FixedPaths(app, fixed), service, public, form_paths=forms, origins=origins)
    if origins:
        wrapped = CORSMiddleware(wrapped, allow_origins=origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"])
    return wrapped


def _optional(module: str, name: str) -> tuple[str, ...]:
    try:
        paths: tuple[str, ...] = load(f"{module}:{name}")
    except AttributeError:
        return ()
    return paths


class _FixedPaths:
    """Calls the endpoint of a path without names at once, because FastAPI's layers would cost every request time.

    The middleware answers the errors of endpoints. All other requests go through FastAPI, also those for unknown paths.
    """

    def __init__(self, app: FastAPI, endpoints: Mapping[tuple[str, str], _Handle]) -> None:
        """`endpoints` are given by method and path."""
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._endpoints.get((scope.get("method", ""), scope.get("path", "")))
        if handle is None:
            await self._app(scope, receive, send)
        else:
            response = await handle(Request(scope, receive, send))
            await response(scope, receive, send)


class _PlainRoute(APIRoute):
    """A route whose function takes a request and returns a response. FastAPI's parameters would cost every request time."""

    def get_route_handler(self) -> _Handle:
        handle: _Handle = self.endpoint
        return handle


def _add(app: FastAPI, fixed: dict[tuple[str, str], _Handle], service: Service, endpoint: Endpoint) -> None:
    """Add an endpoint to the application, and to the `fixed` paths if its path has no names."""

    async def handle(request: Request) -> Response:
        if endpoint.body is None:
            return await endpoint.handle(service, request)
        num_bytes = len(await request.body())
        request_bytes.set(num_bytes)
        return await unless_gone(request, lambda: endpoint.handle(service, request), is_large=num_bytes > SHORT_BYTES)

    # A GET also answers HEAD, which the HTTP server sends without the body. The document does not repeat it.
    for method in ("GET", "HEAD") if endpoint.method == "GET" else (endpoint.method,):
        if "{" not in endpoint.path:
            fixed[method, endpoint.path] = handle
        app.router.add_api_route(
            endpoint.path,
            handle,
            route_class_override=_PlainRoute,
            methods=[method],
            name=endpoint.handle.__name__,
            description=endpoint.handle.__doc__,
            response_model=None,
            openapi_extra=_entry(endpoint),
            include_in_schema=method != "HEAD",
        )


def _entry(endpoint: Endpoint) -> dict[str, Any]:
    """Return the OpenAPI entry of an endpoint, without its path."""
    answer: dict[str, Any] = {"description": "The answer."}
    if endpoint.answer is not None:
        answer["content"] = {"application/json": {"schema": _reference(endpoint.answer)}}
    entry: dict[str, Any] = {"responses": {"200": answer, "4XX": _ERROR, "5XX": _ERROR}}
    names = re.findall(r"{(\w+)", endpoint.path)
    if names:
        kind = {"type": "string", "maxLength": 256}
        entry["parameters"] = [{"name": name, "in": "path", "required": True, "schema": kind} for name in names]
    if endpoint.body is not None:
        content = {endpoint.body_type: {"schema": _reference(endpoint.body)}}
        entry["requestBody"] = {"required": True, "content": content}
    return entry


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _document(app: FastAPI, endpoints: list[Endpoint]) -> None:
    """Add the structs to the OpenAPI document."""
    make: Callable[[], dict[str, Any]] = app.openapi
    kinds = [kind for endpoint in endpoints for kind in (endpoint.body, endpoint.answer) if kind is not None]

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            _, components = msgspec.json.schema_components(dict.fromkeys(kinds), ref_template=_REFERENCE)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


class _Deferred(Response):
    """A placeholder response. The middleware sends the actual reply, as for all errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DEFERRED] = self._error


async def _defer_error(paths: str, request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        allow = _methods_of(request) if error.status_code == 405 else ""
        messages = {404: "path not found", 405: f"the path does not support {request.method}"}
        hint = {404: f"the paths are {paths}", 405: f"use {allow}"}.get(error.status_code, "")
        message = messages.get(error.status_code, "the request was refused")
        error = HttpError(error.status_code, message, hint=hint, allow=allow)
    return _Deferred(error)


def _methods_of(request: Request) -> str:
    """Return the methods that the path of a request supports."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in getattr(route, "methods", ())}))
