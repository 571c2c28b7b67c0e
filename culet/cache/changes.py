"""Which resume points the prefix cache gains and loses, for those who follow it from outside: the web process and KV events."""

from __future__ import annotations

from msgspec import Struct

from culet.cache.content import UNIT, MediaKey, PrefixContent
from culet.cache.point_tree import PointTree, ResumePoint


class PointStored(Struct, frozen=True, array_like=True, tag=True):
    """A point. It begins like another one that is known already, so only the rest of its content is sent."""

    point_id: int
    length: int
    earliest: int
    salt: str
    media: tuple[MediaKey, ...]
    base_id: int  # another point, or 0 if `num_shared` is 0
    num_shared: int  # tokens that both begin with
    rest: bytes  # units of the tokens after these


class PointRemoved(Struct, frozen=True, array_like=True, tag=True):
    """The point is gone."""

    point_id: int


PrefixChange = PointStored | PointRemoved


def stored_change(tree: PointTree, point: ResumePoint, units: bytearray) -> PointStored:
    """Describe a point that is about to be added to `tree`, with the content `units[: UNIT * point.length]`."""
    path = tree.path(PrefixContent(point.salt), units, point.length)
    base_id, num_shared = (path[-1][0].earliest[0][1], path[-1][1]) if path else (0, 0)
    rest = bytes(units[UNIT * num_shared : UNIT * point.length])
    return PointStored(point.point_id, point.length, point.earliest, point.salt, point.media, base_id, num_shared, rest)
