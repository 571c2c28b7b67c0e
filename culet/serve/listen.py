"""The sockets that the server listens on: a port, a Unix socket, or sockets that systemd passes on. Also its certificate."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from culet.config import ServeConfig
from culet.errors import ConfigError

_FIRST_INHERITED = 3  # systemd passes its sockets from this descriptor on
_UDS_MODE = 0o660  # who may connect: the owner and the group
_MAX_UDS_BYTES = 107  # a limit of the system


@dataclass(frozen=True)
class Listeners:
    """Bound sockets. If `is_shared`, other processes may accept connections at the same address before and after this one."""

    sockets: list[socket.socket]
    is_shared: bool = False
    uds: Path | None = None  # the file of a Unix socket that this process has created
    uds_inode: int = 0

    @property
    def address(self) -> tuple[str, str | None]:
        """The host and the Unix socket's path of the first socket. One of them is empty or None."""
        sock = self.sockets[0]
        return ("", sock.getsockname()) if sock.family == socket.AF_UNIX else (sock.getsockname()[0], None)

    def describe(self) -> str:
        """Return the addresses as text."""
        return ", ".join(_describe(sock) for sock in self.sockets)

    def close(self) -> None:
        """Close the sockets. Remove the file of a Unix socket, unless another server has replaced it."""
        if self.uds is not None:
            with contextlib.suppress(OSError):
                if self.uds.stat().st_ino == self.uds_inode:
                    self.uds.unlink()
        for sock in self.sockets:
            sock.close()


def open_listeners(settings: ServeConfig) -> Listeners:
    """Bind the sockets. This happens before anything is loaded, so that a port in use is reported at once."""
    inherited = take_inherited(os.environ)
    if inherited:
        return Listeners(inherited, is_shared=True)
    if settings.uds is not None:
        return _bind_uds(Path(settings.uds))
    return Listeners([_bind(settings.host, settings.port, settings.reuse_port)], is_shared=settings.reuse_port)


def take_inherited(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """Return the sockets that systemd passes to this process (socket activation), and remove the variables that say so."""
    given = {name: environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if given["LISTEN_PID"] != str(os.getpid()) or not given["LISTEN_FDS"].isdecimal():
        return []
    sockets = []
    for descriptor in range(_FIRST_INHERITED, _FIRST_INHERITED + int(given["LISTEN_FDS"])):
        try:
            sock = socket.socket(fileno=descriptor)
            is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            is_listening = 0
        if not is_listening or sock.type != socket.SOCK_STREAM:
            raise ConfigError(
                f"LISTEN_FDS: descriptor {descriptor} is not a listening stream socket",
                hint="use ListenStream= with Accept=no in the socket unit",
            )
        sock.set_inheritable(False)
        sockets.append(sock)
    return sockets


def _bind(host: str, port: int, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {problem}", hint="choose another --host or --port") from error
    return sock


def _bind_uds(path: Path) -> Listeners:
    """Bind a Unix socket. Replace the file of a server that has ended, and nothing else."""
    path = path.absolute()
    if len(os.fsencode(path)) > _MAX_UDS_BYTES:
        raise ConfigError(f"uds: the path is longer than {_MAX_UDS_BYTES} bytes: {path}", hint="choose a shorter path")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        umask = os.umask(0o777 & ~_UDS_MODE)  # so that the file is never open to others, not even for a moment
        try:
            sock.bind(str(path))
        finally:
            os.umask(umask)
        inode = path.stat().st_ino
    except OSError as error:
        sock.close()
        raise ConfigError(f"uds: cannot listen on {path}: {error.strerror}", hint="choose another path") from error
    except ConfigError:
        sock.close()
        raise
    return Listeners([sock], uds=path, uds_inode=inode)


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on. Raise if something else has this name."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"uds: {path} exists and is not a socket", hint="choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"uds: cannot replace {path}: {error}", hint="remove it, or choose another path") from error
    raise ConfigError(f"uds: another server listens on {path}", hint="stop it, or choose another path")


def _describe(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_certificate(settings: ServeConfig) -> None:
    """Raise if the certificate or its key cannot be used."""
    if settings.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Without a password, OpenSSL would ask for one on the terminal.
    password = settings.ssl_keyfile_password or ""
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, lambda: password)
    except (OSError, ValueError) as error:  # includes SSLError
        problem = error.strerror if isinstance(error, FileNotFoundError) else str(error)
        raise ConfigError(
            f"ssl-certfile: cannot use {settings.ssl_certfile}: {problem}",
            hint="check --ssl-certfile, --ssl-keyfile and --ssl-keyfile-password",
        ) from error
