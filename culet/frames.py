"""Messages between processes, in msgpack. Each message is prefixed by its length."""

from __future__ import annotations

from typing import Any

import msgspec

from culet.errors import InternalError

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 28  # far above the longest prompt
_EMPTY_BYTES, _BYTES_32 = b"\xc4\x00", b"\xc6"  # msgpack's empty byte string, and what comes before a length of 32 bits
_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytearray:
    """Return `message` as bytes, prefixed by its length."""
    buffer = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, buffer, LENGTH_BYTES)
    buffer[:LENGTH_BYTES] = (len(buffer) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return buffer


def frame_head(message: Any, num_bytes: int) -> bytearray:
    """Return the beginning of a frame, whose last `num_bytes` are content that need not be copied.

    The content is a byte string, the last value of `message`, and must be empty there.
    """
    buffer = frame(message)
    if not buffer.endswith(_EMPTY_BYTES):
        raise InternalError(f"the last value of {type(message).__name__} is not an empty byte string")
    buffer[-len(_EMPTY_BYTES) :] = _BYTES_32 + num_bytes.to_bytes(4, "big")
    buffer[:LENGTH_BYTES] = (len(buffer) - LENGTH_BYTES + num_bytes).to_bytes(LENGTH_BYTES, "big")
    return buffer


def frame_length(prefix: bytes | bytearray | memoryview) -> int:
    """Return the length that a frame's prefix states. Raise if no message is that long."""
    length = int.from_bytes(prefix, "big")
    if length > MAX_FRAME_BYTES:
        raise InternalError(f"got a message of {length} bytes, expected at most {MAX_FRAME_BYTES}")
    return length


class FrameReader:
    """Splits a stream of bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decode = decoder.decode
        self._buffer = bytearray()

    def push(self, data: bytes) -> list[Any]:
        """Return the messages that `data` completes."""
        self._buffer += data
        messages, begin, size = [], 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while size - begin >= LENGTH_BYTES:
                end = begin + LENGTH_BYTES + frame_length(view[begin : begin + LENGTH_BYTES])
                if end > size:
                    break
                messages.append(self._decode(view[begin + LENGTH_BYTES : end]))
                begin = end
        del self._buffer[:begin]
        return messages
