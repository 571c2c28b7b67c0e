"""Handle API keys, size and time limits, request ids, error replies and the request log for every request.

This is the outermost ASGI application, apart from CORS, so no request bypasses it. If API keys are set, every path that is not
listed as public needs one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from culet.errors import CuletError
from culet.log import logger
from culet.serve.http.forms import FORM
from culet.serve.http.intake import BODY, IncomingBody, release_body
from culet.serve.http_errors import OLLAMA_PATHS, ErrorReply, HttpError, error_body, reply_to
from culet.serve.keys import CALLER, Caller
from culet.serve.service import FinishedRequest, Service
from culet.serve.streams import ABORT, SEND, ClientGone

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready", "/live"})  # for GET and HEAD. The web page adds its static files.
QUIET_PATHS = PUBLIC_PATHS | {"/metrics", "/stats", "/samples", "/markdown"}  # polled often, so not logged
UNCOUNTED_PATHS = frozenset({"/markdown"})  # the web page calls these while an answer is written
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MEGABYTE = 1 << 20
DEFERRED = "culet.error"  # scope key of an application error that is answered here


class Middleware:
    """Wraps the application."""

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        public_paths: Iterable[str] = (),
        form_paths: Iterable[str] = (),
        origins: Iterable[str] = (),
    ) -> None:
        """Wrap `app`. `form_paths` take forms instead of JSON, also from pages of these `origins`."""
        self._app, self._service = app, service
        self._public = PUBLIC_PATHS | frozenset(public_paths)
        self._forms, self._origins = frozenset(form_paths), frozenset(origins)
        self._keys = service.keys
        self._is_loopback = _is_loopback(service.settings.host)
        self._finished: dict[str, list[FinishedRequest]] = {}  # by request id, for the log line
        service.observers.append(self._on_finished)

    def _on_finished(self, finished: FinishedRequest) -> None:
        if finished.request_id in self._finished:
            self._finished[finished.request_id].append(finished)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise if the request is not allowed."""
        method, path = scope["method"], scope["path"]
        if self._is_loopback and not self._keys:
            self._check_host(headers)
        is_public = path in self._public and method in ("GET", "HEAD")
        scope[CALLER] = caller = self._keys.anybody if is_public else self._keys.caller(headers)
        if method == "POST":
            if path not in UNCOUNTED_PATHS:
                caller.count_request()
            # Pages from other origins can post forms and plain text freely. JSON needs a CORS preflight, which fails.
            expected = FORM if path in self._forms else "application/json"
            is_expected = headers.get(b"content-type", b"").split(b";")[0].strip().lower() == expected.encode()
            # Ollama takes JSON with any content type, and its documentation uses `curl -d`.
            if not is_expected and not (path.startswith(OLLAMA_PATHS) and _is_from_no_page(headers)):
                raise HttpError(415, f"content-type: expected {expected}", hint="set the Content-Type header")
            if path in self._forms:
                self._check_origin(headers)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            raise self.too_large()

    @property
    def write_s(self) -> int:
        return self._service.limits.write_s

    @property
    def max_body(self) -> int:
        return self._service.limits.body_mb * _MEGABYTE

    def too_large(self) -> HttpError:
        limit = self._service.limits.body_mb
        return HttpError(413, f"the request is larger than {limit} MB", hint="raise the limit with --limits body_mb=N")

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Raise if the Host header names another machine. Used if no keys are set and the server only listens locally.

        Otherwise a web page could point its own name at 127.0.0.1 and talk to the server as its own origin (DNS rebinding).
        """
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]")
        if not name or name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return
        raise HttpError(403, "host: the name does not refer to this machine", hint="set an API key to allow other names")

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Raise if a page of another origin sent a form. Browsers name the origin, and other clients do not."""
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        is_own = origin.partition("://")[2] == headers.get(b"host", b"").decode("latin-1").strip().lower()
        if origin and not is_own and not self._origins & {origin, "*"}:
            raise HttpError(403, "origin: got a form from a page of another origin", hint="allow it with --allowed-origins")

    def begin(self, request_id: str) -> None:
        self._finished[request_id] = []

    def end(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        """Log a request that has ended."""
        finished = self._finished.pop(request_id, [])
        path = scope["path"]
        if not self._service.settings.log_requests or path in QUIET_PATHS:
            return
        fields: dict[str, object] = {
            "request_id": request_id,
            "method": scope["method"],
            "path": path[:256],
            "status": status,
            "seconds": round(seconds, 4),
        }
        caller: Caller | None = scope.get(CALLER)
        summary = ""
        if finished:
            first = next((entry.first_token_s for entry in finished if entry.first_token_s is not None), None)
            fields |= {
                "prompt_tokens": sum(entry.num_prompt_tokens for entry in finished),
                "cached_tokens": sum(entry.num_cached_tokens for entry in finished),
                "generated_tokens": sum(entry.num_generated_tokens for entry in finished),
                "first_token_s": None if first is None else round(first, 4),
                "finish": ",".join(reason for entry in finished for reason in entry.finish_reasons or (entry.error,)),
            }
            summary = ", {prompt_tokens} -> {generated_tokens} tokens ({finish})".format(**fields)
        if caller is not None and caller.name:
            fields["key"] = caller.name
            summary += f", key {caller.name}"
        shown = path[:256].encode("unicode_escape").decode()  # a client cannot inject line breaks into the log
        logger.info(
            "%s %s %d in %.3f s%s [%s]", scope["method"], shown, status, seconds, summary, request_id, extra={"fields": fields}
        )

    async def call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def retry_after_s(self) -> int:
        return self._service.retry_after_s()

    def body_deadline(self) -> float:
        return time.monotonic() + self._service.limits.body_s


class _Exchange:
    """One request and its response."""

    def __init__(self, middleware: Middleware, scope: Scope, receive: Receive, send: Send) -> None:
        self._middleware, self._scope, self._receive, self._send = middleware, scope, receive, send
        self._headers = dict(scope["headers"])
        given = self._headers.get(b"x-request-id", b"").decode("latin-1")
        self._id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        self._status = 0
        self._num_bytes = 0
        self._has_body = False  # the complete body has arrived
        self._deadline = middleware.body_deadline()

    async def run(self) -> None:
        began = time.monotonic()
        self._scope["request_id"] = self._id
        self._scope["root_path"] = ""  # a proxy's prefix must not change which paths are public
        self._middleware.begin(self._id)
        try:
            self._middleware.check(self._scope, self._headers)
            self._scope[SEND] = self._send_tagged
            await self._middleware.call_app(self._scope, self._receive_some, self._send_in_time)
            if (error := self._scope.pop(DEFERRED, None)) is not None:
                raise error
        except (ClientGone, asyncio.CancelledError) as error:
            self._status = self._status or 499
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling() > 1:
                raise
        except Exception as error:
            await self._reply_error(error)
        finally:
            release_body(self._scope)
            self._middleware.end(self._scope, self._id, self._status, time.monotonic() - began)

    async def _receive_some(self) -> Message:
        """Receive the next part of the body, within the limits on size and time."""
        if self._has_body:
            return await self._receive()
        body: IncomingBody | None = self._scope.get(BODY)
        if body is not None and body.is_complete:
            message = await self._receive()
        else:
            message = await self._receive_in_time()
        if body is not None and body.error is not None:
            raise body.error
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._num_bytes += len(message.get("body", b""))
        self._has_body = not message.get("more_body", False)
        if self._num_bytes > self._middleware.max_body:
            raise self._middleware.too_large()
        return message

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                return await self._receive()
        except TimeoutError:
            raise HttpError(408, "the request body did not arrive in time", code="request_timeout") from None

    async def _send_tagged(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id.encode())]
        await self._send(message)

    async def _send_in_time(self, message: Message) -> None:
        """Send a message and abort the connection if the client does not read. Streams do this themselves."""
        try:
            async with asyncio.timeout(self._middleware.write_s):
                await self._send_tagged(message)
        except TimeoutError:
            self._scope.get(ABORT, lambda: None)()
            raise ClientGone from None

    async def _reply_error(self, error: Exception) -> None:
        if not isinstance(error, CuletError):
            logger.exception("request %s failed", self._id)
        error.__traceback__ = None  # its frames hold the body, and the connection of a refused body holds the error
        if self._status:  # The response has started, so it can only be cut off.
            return
        reply = reply_to(error, retry_after_s=self._middleware.retry_after_s())
        if reply.status == 500 and isinstance(error, CuletError):
            logger.error("request %s: %s", self._id, error.message)
        await self._send_reply(reply)

    async def _send_reply(self, reply: ErrorReply) -> None:
        body = error_body(reply, self._scope["path"])
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if reply.retry_after_s is not None:
            headers.append((b"retry-after", str(reply.retry_after_s).encode()))
        if reply.allow:
            headers.append((b"allow", reply.allow.encode()))
        if reply.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if not self._has_body and self._scope["method"] not in ("GET", "HEAD"):
            headers.append((b"connection", b"close"))  # the rest of the body is dropped (see culet.serve.http.connection)
        await self._send_tagged({"type": "http.response.start", "status": reply.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _is_from_no_page(headers: dict[bytes, bytes]) -> bool:
    """Return whether no web page sent this POST. Browsers name the origin of every POST, even if only as `null`."""
    return b"origin" not in headers and b"sec-fetch-site" not in headers


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
