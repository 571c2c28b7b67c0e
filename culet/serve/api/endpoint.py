"""What an endpoint is: a path, a coroutine, and the structs that its OpenAPI entry is made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from culet.serve.service import Service

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class Endpoint:
    """One path and method. `handle` raises CuletError for what it refuses; the gate makes an answer of it."""

    method: str
    path: str
    handle: Callable[[Service, Request], Awaitable[Response]]
    body: type[Struct] | None = None
    answer: type[Struct] | None = None


def json_response(answer: object, status: int = 200) -> Response:
    """`answer`, a struct or plain data, as JSON."""
    return Response(_encoder.encode(answer), status_code=status, media_type="application/json")


def request_id_of(request: Request) -> str:
    """The id under which this request is logged, which the client also gets as `x-request-id`."""
    request_id: str = request.scope["request_id"]
    return request_id
