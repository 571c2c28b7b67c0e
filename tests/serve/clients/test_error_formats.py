"""Errors have the format of the API whose path was asked, whatever went wrong and wherever it was noticed."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from culet.limits import Limits
from culet.serve.keys import KeyRing
from culet.serve.middleware import Middleware
from tests.serve.running import Running

JSON = {"content-type": "application/json"}


def check_format(path: str, body: dict[str, Any], status: int) -> str:
    """Check the format of an error, and return its message."""
    if path.startswith("/api/"):
        assert list(body) == ["error"]
        return str(body["error"])
    if path.startswith("/v1/messages"):
        assert list(body) == ["type", "error"]
        assert body["type"] == "error"
        assert list(body["error"]) == ["type", "message"]
        kinds = {404: "not_found_error", 500: "api_error"}
        assert body["error"]["type"] == kinds.get(status, "invalid_request_error")
    else:
        assert list(body["error"]) == ["message", "type", "param", "code"]
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", ["/api/chat", "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("method", "suffix", "headers", "body", "status"),
    [
        ("POST", "/nothing", JSON, "{}", 404),
        ("DELETE", "", JSON, "{}", 405),
        ("POST", "", {"content-type": "text/plain", "origin": "http://other.example"}, "{}", 415),
        ("POST", "", JSON, "{", 400),
        ("POST", "", JSON, '{"messages": 5}', 400),
        ("POST", "", JSON, '{"model": "other", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}', 404),
    ],
    ids=["path", "method", "content type", "not JSON", "field", "model"],
)
def test_errors_have_the_format_of_their_api(
    fake: Running, path: str, method: str, suffix: str, headers: dict[str, str], body: str, status: int
) -> None:
    response = fake.http.request(method, path + suffix, headers=headers, content=body)
    assert response.status_code == status
    assert check_format(path, response.json(), status)


@pytest.mark.parametrize("path", ["/api/chat", "/v1/messages", "/v1/chat/completions"])
def test_internal_errors_have_the_format_of_their_api(path: str) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a secret")

    settings = SimpleNamespace(host="127.0.0.1", log_requests=False)
    service: Any = SimpleNamespace(settings=settings, limits=Limits(), keys=KeyRing(), observers=[], retry_after_s=lambda: 1)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-type", b"application/json")]}
    asyncio.run(Middleware(fail, service)(scope, receive, send))
    assert sent[0]["status"] == 500
    message = check_format(path, json.loads(sent[1]["body"]), 500)
    assert message.startswith("internal error")
    assert "secret" not in message
