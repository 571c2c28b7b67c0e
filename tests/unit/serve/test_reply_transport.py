"""The head of a stream waits for its first event, so that a client gets both at once."""

from __future__ import annotations

from types import SimpleNamespace

from culet.serve.http.connection import _ReplyTransport


def test_a_held_head_is_written_with_the_bytes_after_it() -> None:
    written: list[bytes] = []
    transport = _ReplyTransport(SimpleNamespace(transport=SimpleNamespace(write=written.append)))  # type: ignore[arg-type]
    for _ in range(2):  # two responses on one connection
        transport.write(b"100 Continue, ")
        transport.hold_head()
        transport.write(b"head, ")
        assert written == [b"100 Continue, "], "the head waits"
        transport.write(b"first event, ")
        transport.write(b"second event")
        assert written == [b"100 Continue, ", b"head, first event, ", b"second event"]
        written.clear()
