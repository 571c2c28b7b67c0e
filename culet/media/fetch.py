"""Fetch media from the hosts that the operator lists, and from no other. No torch.

A client chooses the URL, so the request must not reach what only the server can: the host must be listed, and the address that
is connected to must be public. That address is resolved here, checked, and used, so a name that resolves differently a moment
later changes nothing. Redirects are refused, since they would choose another URL.
"""

from __future__ import annotations

import functools
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from culet.errors import BadRequest, ConfigError, TimedOut
from culet.line_process import Stopper
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits
from culet.version import __version__

_PLAIN_URL = re.compile(r"[!-\[\]-~]{1,4096}")  # visible ASCII without the backslash, which programs read differently
_HOST_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")
_PORT_NUMBER = re.compile(r"[1-9][0-9]{0,4}")
_PORT = 443
_MAX_PATH_LEN = 255
_READ_BYTES = 1 << 16
Addresses = Sequence[tuple[socket.AddressFamily, str]]


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public internet: not this machine, its network, or a reserved range."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is not None:
            return is_public(str(inner))
        # Outside lie scopes, mappings and translations, most of which lead to any IPv4 address.
        if found not in _GLOBAL_UNICAST or found.scope_id is not None or found.teredo is not None:
            return False
    return found.is_global and not found.is_multicast and not any(found in network for network in _RESERVED)


_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all of IPv6 that the public internet uses
# Ranges that some versions of Python count as global.
_RESERVED = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))


@dataclass(frozen=True)
class FetchRules:
    """Which hosts may be asked. `hosts` has names, or NAME:PORT. The other fields are for tests."""

    hosts: frozenset[str] = frozenset()
    is_allowed: Callable[[str], bool] = is_public
    context: ssl.SSLContext | None = None


def read_hosts(text: str) -> frozenset[str]:
    """Read `--allowed-media-domains`. Raise for an entry that no URL could match, such as a URL or a pattern."""
    hosts = set()
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        host, colon, port = entry.lower().partition(":")
        host = host.rstrip(".")
        if _HOST_NAME.fullmatch(host) is None or (colon and _PORT_NUMBER.fullmatch(port) is None):
            problem = f"allowed-media-domains: got {entry[:100]!r}, expected the name of a host, or NAME:PORT"
            raise ConfigError(
                problem, hint="example: images.example.org,cdn.example.org:8443; write each host, without https://"
            )
        hosts.add(host if not colon or int(port) == _PORT else f"{host}:{port}")
    return frozenset(hosts)


@functools.cache
def _default_context() -> ssl.SSLContext:
    """Read the system's certificates when they are first needed, because it takes as long as a small model to load."""
    return ssl.create_default_context()


def fetch(
    url: str, kind: MediaKind, rules: FetchRules, limits: MediaLimits, name: str = "url", stopper: Stopper | None = None
) -> bytes:
    """Return what a URL holds. Blocks for at most `fetch_limit_s`.

    `name` says in errors which medium it is. `stopper` ends the work from another thread.
    """
    host, port, parts = check_url(url, rules, name)
    deadline = time.monotonic() + limits.fetch_limit_s
    late = TimedOut(f"{name}: {host} did not send everything within {limits.fetch_limit_s:g} s")
    addresses = _resolve(host, port, deadline)
    if addresses is None:
        raise late
    if not addresses:
        raise BadRequest(f"{name}: the host {host} was not found")
    if not all(rules.is_allowed(address) for _, address in addresses):
        raise BadRequest(f"{name}: {host} is an address inside a private network, so nothing was fetched")
    try:
        connection = _Connection(_connect(addresses[0], port, deadline))
        watch = threading.Timer(max(0.0, deadline - time.monotonic()), connection.kill)
        watch.start()  # the socket's own limit starts again with every byte
        try:
            with (stopper or Stopper()).watch(connection):
                if not rules.is_allowed(connection.socket.getpeername()[0]):
                    raise BadRequest(f"{name}: {host} is an address inside a private network, so nothing was fetched")
                body = _get(connection.secure(rules.context or _default_context(), host), parts, kind, limits, name)
                if connection.is_cut:  # which looks like the end of the answer
                    raise ConnectionError("cut off")
                return body
        finally:
            watch.cancel()
            connection.socket.close()
    except (OSError, http.client.HTTPException, ValueError):
        if time.monotonic() >= deadline:
            raise late from None
        problem = "could not be reached, is not the host that it claims to be, or sent only a part"
        raise BadRequest(f"{name}: {host} {problem}") from None


def check_url(url: str, rules: FetchRules, name: str) -> tuple[str, int, SplitResult]:
    """Return (host, port, parts) of a URL. Raise unless it is https and its host is listed."""
    scheme = url[:32].partition(":")[0].lower() if ":" in url[:32] else ""
    if scheme != "https":
        # Base64 is longer than any path, and some clients send it alone.
        got = f"a {scheme}: URL" if scheme.isalnum() else "a path" if len(url) <= _MAX_PATH_LEN else "text that is no URL"
        hint = "send the file itself as a data: URL, such as data:image/png;base64,DATA"
        raise BadRequest(f"{name}: got {got}, expected a data: or https URL", hint=hint)
    if _PLAIN_URL.fullmatch(url) is None:
        raise BadRequest(f"{name}: got a URL with unusual characters, or with more than 4096 of them")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or _PORT
    except ValueError:
        raise BadRequest(f"{name}: got a URL that cannot be read") from None
    if parts.username is not None or parts.password is not None:
        raise BadRequest(f"{name}: got a URL with a user name or password")
    listed = host if port == _PORT else f"{host}:{port}"
    if not host or listed not in rules.hosts:
        hint = "send the file itself as a data: URL, or let the operator list the host (--allowed-media-domains)"
        raise BadRequest(f"{name}: URLs of {listed or 'this host'} are not fetched", hint=hint)
    return host, port, parts


def _resolve(host: str, port: int, deadline: float) -> Addresses | None:
    """Return the addresses of a host, none if it has none, or None if that is not known in time."""
    found: list[Addresses] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            entries = []
        found.append([(family, str(address[0])) for family, _, _, _, address in entries])

    thread = threading.Thread(target=look_up, daemon=True)  # it cannot be interrupted
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    return found[0] if found else None


def _connect(address: tuple[socket.AddressFamily, str], port: int, deadline: float) -> socket.socket:
    family, ip = address
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.connect((ip, port))
    except OSError:
        connection.close()
        raise
    return connection


@dataclass
class _Connection:
    """A socket that another thread can cut off."""

    socket: socket.socket
    is_cut: bool = False

    def secure(self, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
        """Return the same connection with TLS. The host must prove that it is `host`."""
        secure = context.wrap_socket(self.socket, server_hostname=host, do_handshake_on_connect=False)
        self.socket = secure  # the plain socket is closed now
        secure.do_handshake()
        return secure

    def kill(self) -> None:
        self.is_cut = True
        with suppress(OSError):  # it is closed already
            self.socket.shutdown(socket.SHUT_RDWR)


def _get(secure: ssl.SSLSocket, parts: SplitResult, kind: MediaKind, limits: MediaLimits, name: str) -> bytes:
    """Send the request and return the body. Only status 200 counts."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = (
        f"GET {target} HTTP/1.1",
        f"Host: {parts.netloc}",
        f"User-Agent: culet/{__version__}",
        "Accept: */*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    secure.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
    response = http.client.HTTPResponse(secure, method="GET")
    response.begin()
    if 300 <= response.status < 400:
        raise BadRequest(f"{name}: the URL redirects to another one, and redirects are not followed")
    if response.status != 200:
        raise BadRequest(f"{name}: the URL answered with status {response.status}, expected 200")
    if response.length is not None:
        limits.check_bytes(name, kind, response.length)
    body, most = bytearray(), limits.max_bytes(kind)
    while chunk := response.read(min(_READ_BYTES, most + 1 - len(body))):
        body += chunk
        if len(body) > most:
            limits.check_bytes(name, kind, len(body))
    if response.length not in (None, 0):
        raise ConnectionError("the answer is shorter than announced")
    limits.check_bytes(name, kind, len(body))
    return bytes(body)
