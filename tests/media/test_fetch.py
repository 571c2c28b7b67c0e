"""Fetching: from listed hosts, over TLS, from public addresses, within limits, and never through a redirect."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from culet.errors import BadRequest, ConfigError, TimedOut
from culet.line_process import Stopper
from culet.media.fetch import FetchRules, check_url, fetch, is_public, read_hosts
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits

HOST = "media.example"
LIMITS = MediaLimits(max_image_bytes=10_000, fetch_limit_s=30.0)
BODY = bytes(range(256)) * 20


class Answers(BaseHTTPRequestHandler):
    """Answers by path, and notes what was asked."""

    asked: list[str] = []  # noqa: RUF012 (shared by all connections)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/redirect"):
            self._start(302, 0, [("Location", "https://media.example/image")])
        elif self.path == "/missing":
            self._start(404, 5)
            self.wfile.write(b"error")
        elif self.path == "/announced":
            self._start(200, 1 << 40)
        elif self.path == "/endless":
            self._start(200, None)
            with suppress(OSError):  # the client leaves
                for _ in range(100):
                    self.wfile.write(bytes(1000))
        elif self.path == "/short":
            self._start(200, 5000)
            self.wfile.write(bytes(100))
        elif self.path in ("/slow", "/slow-without-length"):
            self._start(200, 5000 if self.path == "/slow" else None)
            with suppress(OSError):  # the client leaves
                for _ in range(600):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.1)
        else:
            self._start(200, len(BODY))
            self.wfile.write(BODY)

    def _start(self, status: int, length: int | None, headers: list[tuple[str, str]] | None = None) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers or []:
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def write_certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, FetchRules]]:
    """A TLS server on this machine: (its port, rules that allow it)."""
    pem = write_certificate(tmp_path_factory.mktemp("tls"))
    web = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    web.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    web.socket = context.wrap_socket(web.socket, server_side=True)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    port = web.server_address[1]
    rules = FetchRules(
        frozenset({f"{HOST}:{port}", f"other.example:{port}"}),
        is_allowed=lambda address: address == "127.0.0.1",
        context=ssl.create_default_context(cafile=str(pem)),
    )
    yield port, rules
    web.shutdown()


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Resolve every name to this machine. Call it to choose other addresses."""
    Answers.asked.clear()
    addresses = [["127.0.0.1"]]

    def resolve(host: str, port: int, **_: object) -> list[tuple]:
        found = addresses[0] if len(addresses) == 1 else addresses.pop(0)
        kind = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(kind[":" in ip], socket.SOCK_STREAM, 6, "", (ip, port)) for ip in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    def choose(*rounds: list[str]) -> None:
        addresses[:] = rounds

    return choose


def get(server: tuple[int, FetchRules], path: str, limits: MediaLimits = LIMITS, host: str = HOST) -> bytes:
    port, rules = server
    return fetch(f"https://{host}:{port}{path}", MediaKind.IMAGE, rules, limits, "image")


def test_a_listed_host(server):
    assert get(server, "/image?size=1") == BODY
    assert Answers.asked == ["/image?size=1"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/redirect", "redirects are not followed"),
        ("/missing", "status 404, expected 200"),
        ("/announced", "expected an image of at most"),
        ("/endless", "expected an image of at most"),
        ("/short", "sent only a part"),
    ],
)
def test_answers_that_are_refused(server, path, problem):
    with pytest.raises(BadRequest, match=problem):
        get(server, path)
    assert Answers.asked == [path]  # and nothing else, such as a redirect's target


@pytest.mark.parametrize("path", ["/slow", "/slow-without-length"])
def test_an_answer_that_comes_a_byte_at_a_time(server, path):
    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"did not send everything within 1.5 s"):
        get(server, path, replace(LIMITS, fetch_limit_s=1.5))
    assert time.monotonic() - began < 20


def test_a_client_that_leaves_ends_the_fetch(server):
    port, rules = server
    stopper = Stopper()
    threading.Timer(0.5, stopper.stop).start()
    began = time.monotonic()
    with pytest.raises((BadRequest, ConnectionAbortedError)):
        fetch(f"https://{HOST}:{port}/slow", MediaKind.IMAGE, rules, replace(LIMITS, fetch_limit_s=60.0), "image", stopper)
    assert time.monotonic() - began < 30


def test_the_host_must_prove_its_name(server):
    with pytest.raises(BadRequest, match="not the host that it claims to be"):
        get(server, "/image", host="other.example")
    assert Answers.asked == []


def test_private_addresses_are_not_connected_to(server, names, monkeypatch):
    """Every address of a name must be public, not only the first."""
    port, rules = server
    public_only = replace(rules, is_allowed=is_public)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it was connected to"))
    for addresses in (["127.0.0.1"], ["10.0.0.1"], ["8.8.8.8", "192.168.1.1"], ["::1"], ["fe80::1"], ["::ffff:127.0.0.1"]):
        names(addresses)
        with pytest.raises(BadRequest, match="inside a private network, so nothing was fetched"):
            fetch(f"https://{HOST}:{port}/image", MediaKind.IMAGE, public_only, LIMITS)


def test_a_name_that_changes_its_address(server, names):
    """DNS rebinding: the checked address is the one that is used, and the name is looked up once."""
    names(["127.0.0.1"], ["10.9.9.9"])
    assert get(server, "/image") == BODY
    with pytest.raises(BadRequest, match="inside a private network"):
        get(server, "/image")
    assert Answers.asked == ["/image"]


def test_a_name_that_is_not_found(server, names):
    names([])
    with pytest.raises(BadRequest, match="was not found"):
        get(server, "/image")


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.168.0.1", "224.0.0.1"),
        *("255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "192.0.2.1"),
        *(
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001:0:1::1",
            "not an address",
            "64:ff9b:1::7f00:1",
            "::127.0.0.1",
            "::10.0.0.1",
        ),
        *("::ffff:0:127.0.0.1", "fec0::1", "3fff::1", "5f00::1", "192.0.0.192", "192.88.99.1", "2606:4700::1%eth0"),
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "https://evil.example/",
        "https://media.example.evil.example/",
        "https://sub.media.example/",
        "https://media.example:444/",
        "https://media.example@evil.example/",
        "https://user@media.example/",
        "https://evil.example\\@media.example/",
        "https://media.example /",
        "https://media.example/\r\nHost: evil.example",
        "https://mediä.example/",
        "https://[::1/",
        "https://media.example:x/",
        "https:///image",
        "http://media.example/",
        "HTTP://media.example/",
        "//media.example/image",
        "https://media.example/" + "a" * 5000,
    ],
)
def test_urls_that_are_refused(url):
    with pytest.raises(BadRequest, match="url: "):
        check_url(url, FetchRules(frozenset({HOST})), "url")


@pytest.mark.parametrize(
    "url", ["https://media.example/a", "HTTPS://MEDIA.EXAMPLE/a", "https://media.example:443/", f"https://{HOST}./"]
)
def test_urls_that_are_accepted(url):
    host, port, _ = check_url(url, FetchRules(frozenset({HOST})), "url")
    assert (host, port) == (HOST, 443)


def test_nothing_is_listed_by_default():
    with pytest.raises(BadRequest, match=r"URLs of media\.example are not fetched"):
        fetch(f"https://{HOST}/", MediaKind.IMAGE, FetchRules(), LIMITS)


@pytest.mark.parametrize(("url", "got"), [("cat.jpg", "a path"), ("iVBORw0KGgo" * 100, "text that is no URL")])
def test_base64_alone_is_no_path(url, got):
    with pytest.raises(BadRequest, match=f"url: got {got}, expected a data: or https URL") as raised:
        check_url(url, FetchRules(), "url")
    assert "data:image/png;base64,DATA" in raised.value.hint


def test_hosts_are_listed_as_urls_name_them():
    listed = read_hosts(" Media.Example., cdn.example:443,other.example:8443 ,,")
    assert listed == {"media.example", "cdn.example", "other.example:8443"}
    for url in ("https://media.example/a", "https://cdn.example/a", "https://other.example:8443/a"):
        check_url(url, FetchRules(listed), "url")


@pytest.mark.parametrize(
    "entry",
    [
        *("https://media.example", "*.media.example", "*", "media.example/", "media.example/images", "media example"),
        *("media.example:0", "media.example:x", "media.example:", "mediä.example", "[::1]", "::1", "-"),
    ],
)
def test_hosts_that_no_url_could_match_are_refused(entry):
    with pytest.raises(ConfigError, match=r"allowed-media-domains: got .* expected the name of a host"):
        read_hosts(f"good.example,{entry}")
