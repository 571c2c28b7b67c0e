"""Errors as HTTP answers in OpenAI's form, so that clients raise their own exception types.

What the caller can fix is said in full. Of a fault of ours the caller learns only that it happened: the log has the rest.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from culet.errors import ContextTooLong, CuletError, InternalError, QueueFull, TimedOut, UserError, WorkerDied, http_status

_PARAM = re.compile(r"(\w+(?:\[\d+\]|\.\w+)*): ")  # `messages[0].role: got ...`
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES: dict[type[CuletError], str] = {
    ContextTooLong: "context_length_exceeded",
    QueueFull: "queue_full",
    TimedOut: "timed_out",
    WorkerDied: "engine_unavailable",
}


class HttpRefusal(UserError):
    """A request that is refused for how it came, by its own HTTP status: no key, no such path, too large, too slow."""

    def __init__(self, status: int, message: str, *, hint: str = "", code: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


class ErrorFacts(Struct, frozen=True):
    """What a client is told of an error; each API writes it in its own form."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


def facts_of(error: BaseException, *, retry_after_s: int = 1) -> ErrorFacts:
    """What a client may know of `error`."""
    if not isinstance(error, CuletError):
        error = InternalError("internal error")
    status = error.status if isinstance(error, HttpRefusal) else http_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if isinstance(error, InternalError) and not isinstance(error, WorkerDied):
        return ErrorFacts(status, kind, "internal error: the server's log has more, under the request's id")
    code = error.code if isinstance(error, HttpRefusal) else _CODES.get(type(error))
    message = f"{error.message} (hint: {error.hint})" if error.hint else error.message
    found = _PARAM.match(error.message) if kind == "invalid_request_error" else None
    wait = retry_after_s if status in (429, 503) else None
    return ErrorFacts(status, kind, message, found.group(1) if found else None, code, wait)


class _Body(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


def openai_body(facts: ErrorFacts) -> bytes:
    """`{"error": {...}}` as OpenAI's clients read it."""
    return msgspec.json.encode({"error": _Body(facts.message, facts.type, facts.param, facts.code)})
