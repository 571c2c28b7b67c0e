"""The gate before every endpoint: keys, sizes, times, request ids, errors as answers, and the log.

It is the outermost ASGI application, so nothing behind it can be reached around it. Whatever path is not named as public
needs a key where keys are set.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from culet.errors import CuletError
from culet.log import logger
from culet.serve.errors import ErrorFacts, HttpRefusal, facts_of, openai_body
from culet.serve.service import Finished, Service
from culet.serve.streams import ABORT, SEND, ClientGone

PUBLIC_PATHS = frozenset({"/health", "/ready"})  # of GET; the page adds its static files
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/stats", "/live"})  # asked every few seconds: not worth a line each
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LINGER_BYTES = 64 << 20  # of a refused body that are read and dropped, so that the client reads the refusal
_LINGER_S = 5.0
_MEGABYTE = 1 << 20
DEFERRED = "culet.error"  # in the scope: what the application failed with, for the gate to answer


class Gate:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, service: Service, public_paths: Iterable[str] = ()) -> None:
        self._app, self._service = app, service
        self._public = PUBLIC_PATHS | frozenset(public_paths)
        self._keys = [_digest(key) for key in service.api_keys]
        self._is_local_only = not self._keys and _is_loopback(service.settings.host)
        self._finished: dict[str, list[Finished]] = {}  # of requests that are being answered, for their log line
        service.observers.append(self._note)

    def _note(self, finished: Finished) -> None:
        if finished.request_id in self._finished:
            self._finished[finished.request_id].append(finished)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Visit(self, scope, receive, send).run()
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse what may not come in."""
        method, path = scope["method"], scope["path"]
        if self._is_local_only:
            self._check_host(headers)
        if self._keys and not (path in self._public and method in ("GET", "HEAD")):
            self._check_key(headers)
        if method == "POST":
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            # A page of another origin may send a form or plain text without asking; JSON needs leave, which CORS denies.
            if kind != b"application/json":
                raise HttpRefusal(415, "content-type: expected application/json", hint="-H 'Content-Type: application/json'")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            raise self.too_large()

    @property
    def write_s(self) -> int:
        return self._service.limits.write_s

    @property
    def max_body(self) -> int:
        return self._service.limits.body_mb * _MEGABYTE

    def too_large(self) -> HttpRefusal:
        limit = self._service.limits.body_mb
        return HttpRefusal(413, f"the request is larger than {limit} MB", hint="--limits body_mb=N raises the bound")

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        sent = headers.get(b"x-api-key", b"").decode("latin-1").strip()
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer":
            sent = token.strip()
        digest = _digest(sent)
        # Every key is compared, and in constant time: how long it takes says nothing about them.
        if not sum(hmac.compare_digest(digest, key) for key in self._keys):
            problem = "the API key is wrong" if sent else "an API key is missing"
            raise HttpRefusal(401, problem, hint="send it as Authorization: Bearer KEY", code="invalid_api_key")

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Without keys, a server on this machine alone is not called by names of other machines.

        A web page could otherwise point its own name at 127.0.0.1 and talk to us as its own origin (DNS rebinding).
        """
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]")
        if not name or name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return
        raise HttpRefusal(403, "host: got a name that is not this machine's own", hint="set an API key to be called by it")

    def begin(self, request_id: str) -> None:
        self._finished[request_id] = []

    def end(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        """The request is over: log it."""
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
        words = ""
        if finished:
            first = next((one.first_token_s for one in finished if one.first_token_s is not None), None)
            fields |= {
                "prompt_tokens": sum(one.num_prompt_tokens for one in finished),
                "cached_tokens": sum(one.num_cached_tokens for one in finished),
                "generated_tokens": sum(one.num_generated_tokens for one in finished),
                "first_token_s": None if first is None else round(first, 4),
                "finish": ",".join(reason for one in finished for reason in one.finish_reasons or (one.error,)),
            }
            words = ", {prompt_tokens} -> {generated_tokens} tokens ({finish})".format(**fields)
        shown = path[:256].encode("unicode_escape").decode()  # no line breaks of a client's making in the log
        logger.info(
            "%s %s %d in %.3f s%s [%s]", scope["method"], shown, status, seconds, words, request_id, extra={"fields": fields}
        )

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def retry_after_s(self) -> int:
        return self._service.retry_after_s()

    def body_deadline(self) -> float:
        return time.monotonic() + self._service.limits.body_s


class _Visit:
    """One request on its way through the gate."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate, self._scope, self._receive, self._send = gate, scope, receive, send
        self._headers = dict(scope["headers"])
        given = self._headers.get(b"x-request-id", b"").decode("latin-1")
        self._id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        self._status = 0
        self._num_bytes = 0
        self._has_body = False  # all of it has come
        self._deadline = gate.body_deadline()

    async def run(self) -> None:
        began = time.monotonic()
        self._scope["request_id"] = self._id
        self._scope["root_path"] = ""  # a proxy's prefix has no say in which path is public
        self._gate.begin(self._id)
        try:
            self._gate.check(self._scope, self._headers)
            self._scope[SEND] = self._send_tagged
            await self._gate.pass_on(self._scope, self._receive_some, self._send_in_time)
            if (error := self._scope.pop(DEFERRED, None)) is not None:
                raise error
        except (ClientGone, asyncio.CancelledError) as error:
            self._status = self._status or 499
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling() > 1:
                raise
        except Exception as error:
            await self._refuse(error)
        finally:
            self._gate.end(self._scope, self._id, self._status, time.monotonic() - began)

    async def _receive_some(self) -> Message:
        """The next part of the body, within its limits of size and time."""
        if self._has_body:
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise HttpRefusal(408, "the request did not come in time", code="request_timeout") from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._has_body = not message.get("more_body", False)
            if self._num_bytes > self._gate.max_body:
                raise self._gate.too_large()
        return message

    async def _send_tagged(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id.encode())]
        await self._send(message)

    async def _send_in_time(self, message: Message) -> None:
        """Send to a client that takes it; streams have their own watch over that."""
        try:
            async with asyncio.timeout(self._gate.write_s):
                await self._send_tagged(message)
        except TimeoutError:
            self._scope.get(ABORT, lambda: None)()
            raise ClientGone from None

    async def _refuse(self, error: Exception) -> None:
        if not isinstance(error, CuletError):
            logger.exception("request %s failed", self._id)
        if self._status:  # the answer has begun: all that can be done is to break it off
            return
        facts = facts_of(error, retry_after_s=self._gate.retry_after_s())
        if facts.status == 500 and isinstance(error, CuletError):
            logger.error("request %s: %s", self._id, error.message)
        await self._answer(facts)

    async def _answer(self, facts: ErrorFacts) -> None:
        body = openai_body(facts)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if facts.retry_after_s is not None:
            headers.append((b"retry-after", str(facts.retry_after_s).encode()))
        if facts.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        is_unread = not self._has_body and self._scope["method"] not in ("GET", "HEAD")
        if is_unread:
            headers.append((b"connection", b"close"))
        await self._send_tagged({"type": "http.response.start", "status": facts.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": is_unread})
        if is_unread:
            await self._linger()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self) -> None:
        """Read what is left of a refused body and drop it: closing at once would cost the client the answer, too."""
        if b"expect" in self._headers:  # it waits for our word before it sends
            return
        try:
            async with asyncio.timeout(_LINGER_S):
                while self._num_bytes < _LINGER_BYTES:
                    message = await self._receive()
                    self._num_bytes += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="replace")).digest()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
