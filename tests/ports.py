"""Ports for the servers of tests.

A port that was free a moment ago may be taken when a server listens on it. Other processes of the suite start servers too,
connections also take ports, and a second run of the suite may go on beside this one. So tests claim their ports.
"""

from __future__ import annotations

import functools
import socket
from contextlib import suppress
from types import TracebackType
from typing import Self


class Claim:
    """Ports in a row, from `port` on, that no other program gets until `close`, whichever address it asks for.

    A socket is bound to each of them, but does not listen. The system then gives them to nobody else, and other claims fail.
    But a server that sets SO_REUSEADDR, as almost every server does, can listen there. Until then, connections are refused.
    """

    port: int

    def __init__(self, num_ports: int = 1) -> None:
        self._sockets: list[socket.socket] = []
        while len(self._sockets) < num_ports:
            self.close()
            self._sockets.append(_bind(0))
            self.port = self._sockets[0].getsockname()[1]
            with suppress(OSError, OverflowError):  # another port of the row is taken, or there is none
                for port in range(self.port + 1, self.port + num_ports):
                    self._sockets.append(_bind(port))
        if not _can_share():
            self.close()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _bind(port: int) -> socket.socket:
    """Bind a port at every address. Fail if any program has it at any address."""
    has_both = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if has_both else socket.AF_INET)
    try:
        if has_both:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
    except BaseException:
        sock.close()
        raise
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now, because two claims could share a port otherwise
    return sock


@functools.cache
def _can_share() -> bool:
    """Return whether servers can listen where a socket is bound. Linux allows it. Other systems get a port that was free."""
    with _bind(0) as sock, suppress(OSError), socket.create_server(("127.0.0.1", sock.getsockname()[1])):
        return True
    return False
