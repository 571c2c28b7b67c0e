"""Estimate what it costs to decode JSON, from its bytes alone, so that a costly body is refused before it is decoded."""

from __future__ import annotations

_CONTAINER_COST = 8  # creating a list or an object takes about as long as eight numbers
_OTHER_BYTES = bytes(set(range(256)) - set(b'",[{'))


class JsonCost:
    """Counts the values of a JSON text that arrives in pieces. Texts in strings cost nothing, however long they are."""

    def __init__(self) -> None:
        self.cost = 0
        self._in_string = False
        self._is_escaped = False  # the last piece ended with a backslash that escapes the next byte

    def push(self, piece: bytes) -> None:
        """Count the values that begin in `piece`. Takes time in proportion to its length, and no Python code per value."""
        if self._is_escaped and piece:
            piece, self._is_escaped = piece[1:], False
        # Without escaped bytes, every quote opens or closes a string. Two quotes in a row change nothing, so few are left.
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._is_escaped = self._is_escaped or piece.endswith(b"\\")
        parts = piece.translate(None, _OTHER_BYTES).replace(b'""', b"").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        num_containers = outside.count(b"{") + outside.count(b"[")
        self.cost += outside.count(b",") + num_containers * _CONTAINER_COST
