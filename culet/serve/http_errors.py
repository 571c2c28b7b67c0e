"""Turn errors into HTTP replies in the format of each API, so that clients raise their own exception types.

Errors that the caller can fix are explained in full. Internal errors are only reported as such, and the log has the details.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from culet.errors import ContextTooLong, CuletError, InternalError, QueueFull, TimedOut, UserError, WorkerDied, http_status

_PARAM = re.compile(r"(\w+(?:\[\d+\]|\.\w+)*): ")  # `messages[0].role: got ...`
_MAX_MESSAGE_CHARS = 2000  # a message may quote what the client sent
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_PATHS, OLLAMA_PATHS = "/v1/messages", "/api/"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_CODES: dict[type[CuletError], str] = {
    ContextTooLong: "context_length_exceeded",
    QueueFull: "queue_full",
    TimedOut: "timed_out",
    WorkerDied: "engine_unavailable",
}


class HttpError(UserError):
    """A request refused at the HTTP level, with its own status. Examples are a missing key, a bad path or a large body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        hint: str = "",
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s  # None for the server's own estimate
        self.allow = allow  # the methods that the path supports, for a 405


class ErrorReply(Struct, frozen=True):
    """The reply to a client about an error. `error_body` writes it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    allow: str = ""


def reply_to(error: BaseException, *, retry_after_s: int = 1) -> ErrorReply:
    """Return the reply for `error`, without the details of internal errors."""
    if not isinstance(error, CuletError):
        error = InternalError("internal error")
    status = error.status if isinstance(error, HttpError) else http_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if isinstance(error, InternalError) and not isinstance(error, WorkerDied):
        return ErrorReply(status, kind, "internal error: see the server's log for this request id")
    code = error.code if isinstance(error, HttpError) else _CODES.get(type(error))
    problem = error.message[:_MAX_MESSAGE_CHARS]
    message = f"{problem} (hint: {error.hint})" if error.hint else problem
    param = _PARAM.match(problem) if kind == "invalid_request_error" else None
    wait = (getattr(error, "retry_after_s", None) or retry_after_s) if status in (429, 503) else None
    allow = error.allow if isinstance(error, HttpError) else ""
    return ErrorReply(status, kind, message, param.group(1) if param else None, code, wait, allow)


class _Body(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


def error_body(reply: ErrorReply, path: str = "") -> bytes:
    """Encode a reply in the format of the API that has this path: Anthropic's, Ollama's or, for all others, OpenAI's."""
    body: dict[str, object] = {"error": _Body(reply.message, reply.type, reply.param, reply.code)}
    if path.startswith(ANTHROPIC_PATHS):
        kind = _ANTHROPIC_TYPES.get(reply.status, "invalid_request_error" if reply.status < 500 else "api_error")
        body = {"type": "error", "error": {"type": kind, "message": reply.message}}
    elif path.startswith(OLLAMA_PATHS):
        body = {"error": reply.message}
    return msgspec.json.encode(body)
