"""Where the server listens: Unix sockets, TLS, a shared port, sockets from systemd, and the hand-over to a new server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from culet.config import build_serve_config
from culet.errors import ConfigError
from culet.serve.listen import check_certificate, open_listeners
from tests.serve.running import Running, wait_for

HELLO: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="culet-", dir="/tmp") as folder:
        yield Path(folder)


# Unix sockets


class OverUds(Running):
    """A server on a Unix socket."""

    def __init__(self, folder: Path, path: Path, **options: Any) -> None:
        super().__init__(folder, settings={"uds": str(path)}, wait=False, **options)
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://culet", timeout=300)
        self.wait_ready()


def test_a_unix_socket(folder: Path, encode: Callable[[str], list[int]], short_path: Path) -> None:
    """It works with httpx, only the owner and the group may connect, and the file is removed at the end."""
    path = short_path / "culet.sock"
    with OverUds(folder, path, script={"answers": [encode("Hi.<turn|>")]}) as server:
        assert server.chat().json()["choices"][0]["message"]["content"] == "Hi."
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert str(path) in server.log()
        assert "WARNING no API key" not in server.log()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        with pytest.raises(ConfigError, match="another server listens"):
            open_listeners(build_serve_config({"uds": str(path)}))
        assert server.chat().status_code == 200, "the second server has not touched the first one's socket"
    assert not path.exists()


def test_a_stale_unix_socket_is_replaced(short_path: Path) -> None:
    path = short_path / "culet.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listeners = open_listeners(build_serve_config({"uds": str(path)}))
    listeners.close()
    assert not path.exists()


def test_anything_else_is_not_replaced(short_path: Path) -> None:
    path = short_path / "file"
    path.write_text("keep me")
    with pytest.raises(ConfigError, match="not a socket"):
        open_listeners(build_serve_config({"uds": str(path)}))
    assert path.read_text() == "keep me"
    link = short_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="not a socket"):
        open_listeners(build_serve_config({"uds": str(link)}))
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        open_listeners(build_serve_config({"uds": str(short_path / ("x" * 200))}))
    with pytest.raises(ConfigError, match="No such file"):
        open_listeners(build_serve_config({"uds": str(short_path / "missing" / "culet.sock")}))


def test_the_socket_of_a_newer_server_is_not_removed(short_path: Path) -> None:
    path = short_path / "culet.sock"
    old = open_listeners(build_serve_config({"uds": str(path)}))
    path.rename(short_path / "moved")
    new = open_listeners(build_serve_config({"uds": str(path)}))
    old.close()
    assert path.exists()
    new.close()
    assert not path.exists()


def test_a_unix_socket_cannot_share_a_port() -> None:
    with pytest.raises(ConfigError, match="reuse-port"):
        build_serve_config({"uds": "/tmp/x", "reuse_port": True})


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for localhost (cert.pem), its key (key.pem), and the key with a password (locked.pem)."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem")
    openssl("req", "-x509", *key, "-out", "cert.pem", *subject)
    openssl("ec", "-in", "key.pem", "-aes256", "-passout", "pass:secret", "-out", "locked.pem")
    return folder


class OverTls(Running):
    """A server with a certificate."""

    def __init__(self, folder: Path, certificate: Path, settings: dict[str, Any], **options: Any) -> None:
        super().__init__(folder, settings={"ssl_certfile": str(certificate / "cert.pem"), **settings}, wait=False, **options)
        self.url = self.url.replace("http:", "https:")
        trusted = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
        self.http = httpx.Client(base_url=self.url, timeout=300, verify=trusted)
        self.wait_ready()


def test_tls(folder: Path, encode: Callable[[str], list[int]], certificate: Path) -> None:
    settings = {"ssl_keyfile": str(certificate / "locked.pem"), "ssl_keyfile_password": "secret", "limits": "header_s=1"}
    with OverTls(folder, certificate, settings, script={"answers": [encode("Hi.<turn|>")]}) as server:
        assert server.chat().json()["choices"][0]["message"]["content"] == "Hi."
        with server.http.stream("POST", CHAT, json={**HELLO, "stream": True}) as response:
            assert "[DONE]" in response.read().decode()
        assert f"https://127.0.0.1:{server.port}" in server.log()
        assert "secret" not in server.log()
        with pytest.raises(httpx.TransportError):  # plain HTTP
            httpx.get(f"http://127.0.0.1:{server.port}/health")
        with socket.create_connection(("127.0.0.1", server.port)) as silent:
            silent.settimeout(60)
            assert silent.recv(100) == b"", "a handshake that does not begin is given up"
        server.check_well()


def test_bad_certificates(certificate: Path) -> None:
    cert, key, locked = (str(certificate / name) for name in ("cert.pem", "key.pem", "locked.pem"))
    check_certificate(build_serve_config({}))
    check_certificate(build_serve_config({"ssl_certfile": cert, "ssl_keyfile": key}))
    bad: list[dict[str, str]] = [
        {"ssl_certfile": cert},  # the key is in another file
        {"ssl_certfile": cert, "ssl_keyfile": locked},  # no password
        {"ssl_certfile": cert, "ssl_keyfile": locked, "ssl_keyfile_password": "wrong"},
        {"ssl_certfile": str(certificate / "nowhere.pem")},
        {"ssl_certfile": key},
    ]
    for given in bad:
        with pytest.raises(ConfigError, match="ssl-certfile: cannot use") as error:
            check_certificate(build_serve_config(given))
        assert "--ssl-keyfile" in error.value.hint
    with pytest.raises(ConfigError, match="without a certificate"):
        build_serve_config({"ssl_keyfile": key})


# Hand-over


class Clients:
    """Threads that ask again and again, each time over a new connection or over one that is kept. Counts how it went."""

    def __init__(self, url: str) -> None:
        self.ends: Counter[str] = Counter()
        self._url, self._is_over = url, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(is_kept,)) for is_kept in (True, False)]
        for thread in self._threads:
            thread.start()

    def _run(self, is_kept: bool) -> None:
        kept = httpx.Client(timeout=300, verify=False)
        while not self._is_over.is_set():
            client = kept if is_kept else httpx.Client(timeout=300, verify=False)
            try:
                self.ends[str(client.post(self._url + CHAT, json=HELLO).status_code)] += 1
            except httpx.RemoteProtocolError:
                # A kept connection was closed while it was idle. HTTP clients must expect this, and send the request again.
                self.ends["closed" if is_kept else "refused"] += 1
            except (httpx.ReadError, httpx.WriteError):  # the same, if the request was on its way
                self.ends["closed" if is_kept else "reset"] += 1
            except httpx.TransportError as error:
                self.ends[type(error).__name__] += 1
            if not is_kept:
                client.close()
        kept.close()

    def stop(self) -> Counter[str]:
        self._is_over.set()
        for thread in self._threads:
            thread.join(300)
        return self.ends


def test_a_new_server_takes_over_a_port(folder: Path, encode: Callable[[str], list[int]], port: int) -> None:
    """The new one listens only when it is ready. The old one then leaves, and no client sees a refused connection.

    A connection may be reset, if it is made between the last accept and the close of the old one.
    """
    script = {"answers": [encode("Hi.<turn|>")], "step_s": 0.02}

    def start() -> Running:
        server = Running(folder, script=script, settings={"port": port, "reuse_port": True}, wait=False)
        server.url = f"http://127.0.0.1:{port}"
        wait_for(lambda: "ready at" in server.log(), 40, "the server")
        return server

    first = second = start()
    clients = Clients(first.url)
    try:
        wait_for(lambda: clients.ends["200"] > 5, what="some answers")
        second = start()
        before = clients.ends["200"]
        wait_for(lambda: clients.ends["200"] > before + 5, what="answers of both")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        before = clients.ends["200"]
        wait_for(lambda: clients.ends["200"] > before + 5, what="answers of the second")
        ends = clients.stop()
        assert set(ends) <= {"200", "closed", "reset"}, ends
        assert ends["closed"] <= 1
        assert ends["reset"] <= 1
    finally:
        clients.stop()
        first.stop()
        second.stop()


def test_a_port_that_is_not_shared_is_reported(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            open_listeners(build_serve_config({"port": other.getsockname()[1], "reuse_port": True}))


# systemd passes listening sockets from descriptor 3 on, and names the process in LISTEN_PID.
ACTIVATE = """
import os, sys
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Activated(Running):
    """A server that inherits a listening socket."""

    def __init__(self, folder: Path, listener: socket.socket, **options: Any) -> None:
        self._listener = listener
        super().__init__(folder, wait=False, **options)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=300)

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        number = self._listener.fileno()

        def pass_on() -> None:
            os.dup2(number, 3)
            os.set_inheritable(3, True)

        return subprocess.Popen(
            [sys.executable, "-c", ACTIVATE, *command[1:]],
            stderr=self._log,
            env=environment,
            pass_fds=[3, number],
            preexec_fn=pass_on,
        )


def test_a_socket_from_systemd(folder: Path, encode: Callable[[str], list[int]]) -> None:
    """Connections wait in the socket while no server runs, and while the next one loads. None is refused."""
    script = {"answers": [encode("Hi.<turn|>")], "step_s": 0.02}
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        first = second = Activated(folder, listener, script=script)
        clients = Clients(first.url)  # they connect before the first server is ready
        try:
            wait_for(lambda: clients.ends["200"] > 5, 40, "some answers")
            first.signal(signal.SIGTERM)
            assert first.wait() == 0
            second = Activated(folder, listener, script=script)
            before = clients.ends["200"]
            wait_for(lambda: clients.ends["200"] > before + 5, 40, "answers of the second")
            ends = clients.stop()
            assert set(ends) <= {"200", "closed"}, ends
            assert ends["closed"] <= 1
            assert f"127.0.0.1:{first.port}" in second.log()
        finally:
            clients.stop()
            first.stop()
            second.stop()


def test_descriptors_for_another_process_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", "1")
    listeners = open_listeners(build_serve_config({"port": 0}))
    assert not listeners.is_shared
    assert "LISTEN_FDS" not in os.environ, "children must not see it"
    listeners.close()


# The event loop


def test_loop_lag_is_measured(fake: Running) -> None:
    """A pause of the process shows as one late timer."""

    def slow_ticks() -> float:
        lines = fake.http.get("/metrics").text.splitlines()
        found = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("culet:loop_lag_seconds")
        }
        total = found['culet:loop_lag_seconds_count{model_name="gemma"}']
        return total - found['culet:loop_lag_seconds_bucket{le="1.0",model_name="gemma"}']

    before = slow_ticks()
    fake.signal(signal.SIGSTOP)
    time.sleep(1.5)
    fake.signal(signal.SIGCONT)
    wait_for(lambda: slow_ticks() > before, what="the late timer")
