"""Resume points in a tree of their content, which finds the longest beginning that a prompt shares with any of them.

An edge holds the tokens between two places where points end or their contents part, so there are at most two nodes per point.
Every node knows which point below it can be resumed earliest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from culet.cache.content import UNIT, MediaKey, PrefixContent, common_len
from culet.types import PageTable

MIN_SHARED = 16  # tokens below which a point is resumed only at its end, because copying pages costs as much as computing them


@dataclass(eq=False, slots=True)
class ResumePoint:
    """Pages to resume a sequence from, at any length from `earliest` to `length` tokens."""

    length: int
    earliest: int
    tables: tuple[PageTable, ...]  # one per KV group
    stored_from: tuple[int, ...]  # per KV group, the first position from which on all tokens up to `length` are stored
    salt: str
    media: tuple[MediaKey, ...]  # those that begin before `length`
    point_id: int
    last_use: int  # a count of uses, larger for later ones

    @property
    def pages(self) -> list[int]:
        return [page for table in self.tables for page in table.pages]


@dataclass(eq=False, slots=True)
class Node:
    """A beginning that points share, or that a point ends with."""

    content: bytes  # the units after its parent's end
    end: int  # number of tokens from the start
    parent: Node | None
    point: ResumePoint | None = None
    children: dict[bytes, Node] = field(default_factory=dict)  # by the first unit of their content
    earliest: list[tuple[int, int]] = field(default_factory=list)  # (earliest, id) of its point and of each child's first


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a look-up, which says how much of a prompt is known."""

    point: ResumePoint | None  # the best point to resume from
    resume: int  # tokens that need not be computed
    known: int  # tokens that some resume point begins with. Beyond `resume`, they mark a junction.


class PointTree:
    """Resume points by content. The path of a prompt leads through all beginnings that it shares with points."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}  # by salt
        self._nodes: dict[int, Node] = {}  # by the id of their point

    @property
    def is_empty(self) -> bool:
        return not self._roots and not self._nodes

    def path(self, content: PrefixContent, units: bytearray, num_tokens: int) -> list[tuple[Node, int]]:
        """Return the nodes that the first `num_tokens` lead to, each with the number of tokens shared with all its points."""
        path: list[tuple[Node, int]] = []
        node = self._roots.get(content.salt)
        while node is not None and node.end < num_tokens:
            begin = UNIT * node.end
            child = node.children.get(bytes(units[begin : begin + UNIT]))
            if child is None:
                break
            if child.end <= num_tokens and units.startswith(child.content, begin):
                path.append((child, child.end))
                node = child
                continue
            path.append((child, node.end + common_len(child.content, units, begin, UNIT * num_tokens)))
            break
        return path

    def find(self, tokens: Sequence[int], content: PrefixContent, limit: int) -> Match:
        """Find the point that resumes `tokens` furthest, at `limit` tokens at most."""
        path = self.path(content, content.upto(tokens, len(tokens)), len(tokens))
        known = path[-1][1] if path else 0
        for node, num_shared in reversed(path):
            resume = content.resumable(min(num_shared, limit))
            point = node.point
            if point is None or point.earliest > resume:
                point = self._nodes[node.earliest[0][1]].point
                assert point is not None
            is_end = point.length == num_shared <= resume + 1  # otherwise the prompt parts from the point before its end
            if resume < max(1, point.earliest) or not (is_end or resume >= MIN_SHARED):
                continue
            if content.media_before(resume) == tuple([media for media in point.media if media[0] < resume]):
                return Match(point, resume, known)
        return Match(None, 0, known)

    def content_of(self, point_id: int) -> bytes:
        """Return the units of a point."""
        parts = []
        node: Node | None = self._nodes[point_id]
        while node is not None:
            parts.append(node.content)
            node = node.parent
        return b"".join(reversed(parts))

    def at(self, content: PrefixContent, units: bytearray, length: int) -> ResumePoint | None:
        """Return the point that ends exactly at `length`, if there is one."""
        path = self.path(content, units, length)
        return path[-1][0].point if path and path[-1][1] == path[-1][0].end == length else None

    def add(self, point: ResumePoint, units: bytearray) -> None:
        """Add a point with the content `units[: UNIT * point.length]`, where none ends yet."""
        node = self._roots.setdefault(point.salt, Node(b"", 0, None))
        while node.end < point.length:
            begin, end = UNIT * node.end, UNIT * point.length
            child = node.children.get(bytes(units[begin : begin + UNIT]))
            if child is None:
                child = Node(bytes(units[begin:end]), point.length, node)
                node.children[child.content[:UNIT]] = child
            elif (shared := common_len(child.content, units, begin, end)) < len(child.content) // UNIT:
                child = _split(child, shared)
            node = child
        assert node.point is None, "two points have the same content"
        node.point = point
        self._nodes[point.point_id] = node
        _change(node, None, (point.earliest, point.point_id))

    def remove(self, point: ResumePoint) -> None:
        """Remove a point, and the nodes that only it needed."""
        node = self._nodes.pop(point.point_id)
        node.point = None
        _change(node, (point.earliest, point.point_id), None)
        if not node.children and node.parent is not None:
            del node.parent.children[node.content[:UNIT]]
            node = node.parent
        if node.parent is not None and node.point is None and len(node.children) == 1:
            _merge(node)
        elif node.parent is None and not node.children:
            del self._roots[point.salt]


def _split(node: Node, num_tokens: int) -> Node:
    """Put a node after the first `num_tokens` of the node's content, and return it."""
    parent = node.parent
    assert parent is not None
    upper = Node(node.content[: UNIT * num_tokens], parent.end + num_tokens, parent, earliest=node.earliest[:1])
    parent.children[upper.content[:UNIT]] = upper
    node.content, node.parent = node.content[UNIT * num_tokens :], upper
    upper.children[node.content[:UNIT]] = node
    return upper


def _merge(node: Node) -> None:
    """Replace a node without a point by its only child."""
    (child,) = node.children.values()
    assert node.parent is not None
    child.content, child.parent = node.content + child.content, node.parent
    node.parent.children[child.content[:UNIT]] = child


def _change(node: Node | None, old: tuple[int, int] | None, new: tuple[int, int] | None) -> None:
    """Replace an entry of `node.earliest`, and do so in the nodes above it whose first entry it was."""
    while node is not None:
        before = node.earliest[0] if node.earliest else None
        if old is not None:
            del node.earliest[bisect_left(node.earliest, old)]
        if new is not None:
            insort(node.earliest, new)
        after = node.earliest[0] if node.earliest else None
        if before == after:
            return
        node, old, new = node.parent, before, after
