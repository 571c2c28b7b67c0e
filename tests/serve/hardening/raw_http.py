"""Requests as bytes on a socket, for what no HTTP client would send."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

from tests.serve.running import Running

MEGABYTE = 1 << 20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def connect(server: Running) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(120)
    return sock


def chat_bytes(**fields: Any) -> bytes:
    """Return a complete chat request."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], **fields}).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def exchange(server: Running, *pieces: bytes) -> bytes:
    """Send the pieces, as far as the server takes them, and return everything it sends until it closes the connection."""
    with connect(server) as sock:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                sock.sendall(piece)
        return read_all(sock)


def status_of(answer: bytes) -> int:
    return int(answer.split(None, 2)[1])


def error_of(answer: bytes) -> Any:
    """Return the error that the last response of `answer` carries."""
    return json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]


def web_memory_bytes(server: Running) -> int:
    """Return the most memory that the web process has had so far."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def metric(server: Running, name: str) -> float:
    """Return the sum of a metric over its labels."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
