"""What the ingress and the engine replicas send each other, as msgpack.

The content of media may be megabytes, and packing it would hold up everything else in the process. So it goes beside the
message, in buffers that Ray copies into its object store without Python's lock and that a replica reads where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pickle import PickleBuffer
from typing import cast

import msgspec
from msgspec import Struct

from culet.cache.changes import PrefixChange
from culet.types import Request, TokenDelta


@dataclass(frozen=True)
class Route:
    """The first argument of every call to an engine. The router reads it."""

    replica_id: str = ""  # only this replica can answer, or any if empty
    prompt_len: int = 0
    num_samples: int = 1
    max_num_seqs: int = 1  # of a replica
    overlaps: dict[str, tuple[int, int]] = field(default_factory=dict)  # replica id -> (resume, known), see `Overlap`
    loads: dict[str, int] = field(default_factory=dict)  # replica id -> samples that this ingress has there


class Order(Struct, frozen=True):
    """A request without the content of its media. Clocks differ between machines, so the time left replaces its deadline."""

    request: Request
    left_s: float


_order_decoder = msgspec.msgpack.Decoder(Order)


def pack_order(request: Request, left_s: float) -> tuple[bytes, list[PickleBuffer]]:
    """Return an order, and the contents of its media."""
    items = tuple([replace(item, data=b"") for item in request.items])
    order = msgspec.msgpack.encode(Order(replace(request, items=items), left_s))
    return order, [PickleBuffer(item.data) for item in request.items]


def unpack_order(order: bytes, contents: Sequence[PickleBuffer]) -> Order:
    """Return the order with the contents of its media, which are views of Ray's memory."""
    found = _order_decoder.decode(order)
    pairs = zip(found.request.items, contents, strict=True)
    # Nobody changes content, and everybody who reads it accepts a view.
    items = tuple([replace(item, data=cast("bytes", memoryview(content))) for item, content in pairs])
    return Order(replace(found.request, items=items), found.left_s)


class Part(Struct, frozen=True):
    """Some of the answer."""

    replica_id: str
    deltas: list[TokenDelta] = []
    refusal: tuple[str, str, str] | None = None  # kind, message and hint of an error
    starts_over: bool = False  # forget all parts so far, because the engine has died and another one answers


class Log(Struct, frozen=True):
    """How the prefix cache of a replica has changed."""

    replica_id: str
    next_number: int  # to ask for next
    changes: list[PrefixChange]
    is_whole: bool  # the changes begin with an empty cache
