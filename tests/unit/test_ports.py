"""Claimed ports belong to their test: its server can listen there, and nobody else gets them."""

from __future__ import annotations

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
    _bind(claim.port).close()


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
    with Claim(2) as other:
        other._sockets.pop(0).close()  # so that the port before a taken one is free
        wanted = [other.port]

        def bind(port: int) -> socket.socket:
            return _bind(port or (wanted.pop() if wanted else 0))

        monkeypatch.setattr("tests.ports._bind", bind)
        with Claim(2) as claim:
            assert not wanted
            assert claim.port != other.port
            assert [sock.getsockname()[1] for sock in claim._sockets] == [claim.port, claim.port + 1]
