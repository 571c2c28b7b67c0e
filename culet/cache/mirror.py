"""A copy of an engine's resume points that follows its reports. It has their content, but no pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from culet.cache.changes import PointStored, PrefixChange, stored_change
from culet.cache.content import UNIT, PrefixContent
from culet.cache.point_tree import PointTree, ResumePoint


@dataclass(frozen=True, slots=True)
class Overlap:
    """What an engine has of a prompt."""

    resume: int = 0  # tokens that it need not compute
    known: int = 0  # tokens that some of its resume points begin with


class PrefixMirror:
    """The resume points of one engine. They take 4 bytes per token of content, and the engine bounds their number."""

    def __init__(self) -> None:
        self._tree = PointTree()
        self._points: dict[int, ResumePoint] = {}

    @property
    def num_points(self) -> int:
        return len(self._points)

    def clear(self) -> None:
        """Forget everything, because the engine is gone."""
        self._tree, self._points = PointTree(), {}

    def apply(self, changes: Iterable[PrefixChange]) -> None:
        """Follow what the engine reports."""
        for change in changes:
            if isinstance(change, PointStored):
                base = self._tree.content_of(change.base_id)[: UNIT * change.num_shared] if change.num_shared else b""
                facts = change.length, change.earliest, (), (), change.salt, change.media
                self.add(ResumePoint(*facts, point_id=change.point_id, last_use=0), bytearray(base + change.rest))
            else:
                self.discard(change.point_id)

    def add(self, point: ResumePoint, units: bytearray) -> None:
        """Add a point with all of its content, where none ends yet."""
        self._tree.add(point, units)
        self._points[point.point_id] = point

    def discard(self, point_id: int) -> None:
        """Remove a point."""
        self._tree.remove(self._points.pop(point_id))

    def has_point_at(self, content: PrefixContent, units: bytearray, length: int) -> bool:
        """Return whether a point ends exactly at `length`."""
        return self._tree.at(content, units, length) is not None

    def content_of(self, point_id: int) -> bytes:
        """Return the units of a point."""
        return self._tree.content_of(point_id)

    def find(self, tokens: Sequence[int], content: PrefixContent) -> Overlap:
        """Return what the engine has of a prompt. At least one token must be computed."""
        match = self._tree.find(tokens, content, len(tokens) - 1)
        return Overlap(match.resume, match.known)

    def snapshot(self) -> list[PointStored]:
        """Return the changes that make an empty mirror like this one."""
        tree, changes = PointTree(), []
        for point in self._points.values():
            units = bytearray(self._tree.content_of(point.point_id))
            changes.append(stored_change(tree, point, units))
            tree.add(point, units)
        return changes
