"""Claimed ports belong to their test: its server can listen there, and nobody else gets them."""

from __future__ import annotations

import errno
import socket

import pytest

from tests.ports import Claim, _bind, _can_share

pytestmark = pytest.mark.skipif(not _can_share(), reason="this system cannot hold ports for servers")


def test_only_a_server_can_have_a_claimed_port() -> None:
    with Claim() as claim:
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", claim.port))
            with socket.create_server((host, claim.port)):
                socket.create_connection(("127.0.0.1", claim.port)).close()
                with pytest.raises(OSError, match="in use"):
                    socket.create_server((host, claim.port))
            with pytest.raises(OSError, match="in use"):
                _bind(claim.port)
    assert not claim._sockets


def test_ports_in_a_row() -> None:
    claims = [Claim(3) for _ in range(20)]
    ports = [port for claim in claims for port in range(claim.port, claim.port + 3)]
    assert len(set(ports)) == 60
    for port in ports:
        with pytest.raises(OSError, match="in use"):
            _bind(port)
    for claim in claims:
        claim.close()


def test_a_row_begins_elsewhere_if_one_of_its_ports_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first, taken = [], []

    def bind(port: int) -> socket.socket:
        if port and not taken:
            taken.append(port)
            raise OSError(errno.EADDRINUSE, "Address already in use")
        sock = _bind(port)
        if not port:
            first.append(sock.getsockname()[1])
        return sock

    monkeypatch.setattr("tests.ports._bind", bind)
    with Claim(3) as claim:
        assert taken == [first[0] + 1]
        assert claim.port == first[1]
        assert [sock.getsockname()[1] for sock in claim._sockets] == [claim.port, claim.port + 1, claim.port + 2]
