"""Prefix reuse: checkpoints from which a prompt that begins alike is resumed, in all KV groups at once.

A layer with a window cannot be rebuilt from its last window alone, since every layer looks one window further back. So a
hit resumes only where somebody kept everything that the next query needs: a **checkpoint** at p tokens holds, in groups
without a window, all pages of [0, p), and in groups with one, the pages of the window before p.

One token more of window is kept wherever it is at hand (always at the end of a prompt), so that the checkpoint also
resumes at p - 1: a resumed request must compute at least one token to have logits, and so the very same prompt hits at
its last token while a longer one hits at p.

Checkpoints are kept at the end of a prompt and of an answer, where prompts were seen to part, and at the points that a
request names: a chat's next prompt begins like this one only up to the model's turn.

Found by content: each full page of tokens has a key chained from the key before it, and the tokens behind the last full
page are the checkpoint's tail. A look-up walks the keys of the prompt as far as they are known and then tries tails from
the deepest page back: no checkpoint is compared that does not lie on the way. The chain starts from a salt, which will
keep apart what must not be shared (adapters, tenants). Keys are cryptographic digests: a collision would answer one
user's prompt with another's cache.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from culet.cache.arena import Arena
from culet.cache.spec import CacheLayout
from culet.types import PageTable

DIGEST_BYTES = 16


class PageKeys:
    """Chained content keys of one token list: `upto(tokens, n)[i]` names its first i full pages."""

    def __init__(self, page_tokens: int, salt: bytes = b"") -> None:
        self.page_tokens = page_tokens
        self._keys = [blake2b(salt, digest_size=DIGEST_BYTES).digest()]

    def upto(self, tokens: Sequence[int], num_tokens: int) -> list[bytes]:
        """Keys of the pages that `num_tokens` tokens fill, computed once: earlier tokens never change."""
        num_pages = num_tokens // self.page_tokens
        for page in range(len(self._keys) - 1, num_pages):
            content = array("I", tokens[page * self.page_tokens : (page + 1) * self.page_tokens]).tobytes()
            self._keys.append(blake2b(self._keys[-1] + content, digest_size=DIGEST_BYTES).digest())
        return self._keys[: num_pages + 1]


@dataclass(eq=False, slots=True)
class Checkpoint:
    """Pages to resume a token sequence from, at `length` tokens or down to `earliest` (one less)."""

    length: int
    earliest: int
    tables: tuple[PageTable, ...]  # one per KV group
    key: bytes  # of the full pages
    tail: tuple[int, ...]  # tokens behind them

    @property
    def pages(self) -> list[int]:
        return [page for table in self.tables for page in table.pages]


@dataclass(frozen=True, slots=True)
class Match:
    """How far a prompt is known."""

    checkpoint: Checkpoint | None  # the best to resume from
    resume: int  # tokens that need not be computed
    known: int  # tokens of full pages that some checkpoint begins with; beyond `resume` they mark a junction


@dataclass(slots=True)
class _Node:
    """A known run of full pages, and the checkpoints that end within the page behind it."""

    parent: bytes | None
    num_children: int = 0
    tails: dict[tuple[int, ...], Checkpoint] = field(default_factory=dict)
    num_of_length: dict[int, int] = field(default_factory=dict)  # tail length -> how many


class PrefixCache:
    """Checkpoints by content, least recently used first out. They keep pages of the arena, but never against a sequence."""

    def __init__(self, arena: Arena, layout: CacheLayout) -> None:
        self._arena = arena
        self._groups = layout.groups
        # The key's page is that of a group without a window, where its content is all of the page's history; not that of a
        # drafter, so that prompts part ways where they would without one.
        whole = [group.page_tokens for group in layout.groups if group.window is None and not group.spec.owner]
        self.page_tokens = max(whole or [group.page_tokens for group in layout.groups])
        self._nodes: dict[bytes, _Node] = {}
        self._by_use: OrderedDict[Checkpoint, None] = OrderedDict()

    @property
    def num_resume_points(self) -> int:
        return len(self._by_use)

    def checkpoints(self) -> list[Checkpoint]:
        """All, the least recently used first."""
        return list(self._by_use)

    def find(self, tokens: Sequence[int], keys: PageKeys, limit: int) -> Match:
        """The checkpoint that resumes `tokens` furthest, at `limit` tokens at most."""
        path = []
        for key in keys.upto(tokens, len(tokens)):
            if key not in self._nodes:
                break
            path.append(self._nodes[key])
        known = max(0, len(path) - 1) * self.page_tokens
        for depth in range(len(path) - 1, -1, -1):
            node, begin = path[depth], depth * self.page_tokens
            for length in sorted(node.num_of_length, reverse=True):
                if begin + length > len(tokens):
                    continue
                checkpoint = node.tails.get(tuple(tokens[begin : begin + length]))
                if checkpoint is not None and max(1, checkpoint.earliest) <= limit:
                    return Match(checkpoint, min(checkpoint.length, limit), known)
        return Match(None, 0, known)

    def touch(self, checkpoint: Checkpoint) -> None:
        """It was used: evict it later."""
        self._by_use.move_to_end(checkpoint)

    def touch_at(self, tokens: Sequence[int], length: int, keys: PageKeys) -> None:
        """The same for the checkpoint at `length` tokens, if there is one."""
        node = self._nodes.get(keys.upto(tokens, length)[-1])
        checkpoint = node.tails.get(tuple(tokens[length - length % self.page_tokens : length])) if node else None
        if checkpoint is not None:
            self.touch(checkpoint)

    def insert(self, tokens: Sequence[int], length: int, keys: PageKeys, tables: Sequence[PageTable]) -> None:
        """Keep what resumes `tokens` at `length`, out of the tables of the sequence that computed it."""
        key = keys.upto(tokens, length)[-1]
        tail = tuple(tokens[length - length % self.page_tokens : length])
        earliest, kept = self._cut(length, tables)
        known = self._nodes[key].tails.get(tail) if key in self._nodes else None
        if known is not None:
            if known.earliest <= earliest:
                self.touch(known)
                return
            self._remove(known)
        checkpoint = Checkpoint(length, earliest, kept, key, tail)
        self._arena.keep(checkpoint.pages)
        self._link(checkpoint, keys.upto(tokens, length))
        self._by_use[checkpoint] = None

    def make_room(self, num_pages: int) -> None:
        """Evict until `num_pages` are free, as far as that is possible: first what frees something at once."""
        while self._arena.num_free < num_pages and self._arena.num_reclaimable:
            first = next(iter(self._by_use))
            self._remove(next((one for one in self._by_use if self._frees_any(one)), first))

    def clear(self) -> None:
        """Forget everything."""
        for checkpoint in list(self._by_use):
            self._remove(checkpoint)

    def _cut(self, length: int, tables: Sequence[PageTable]) -> tuple[int, tuple[PageTable, ...]]:
        """From where on `tables` resume, and the part of them that this takes."""
        earliest = length - 1
        for group, table in zip(self._groups, tables, strict=True):
            if table.first > group.first_visible(length - 1) // group.page_tokens:
                earliest = length
        kept = []
        for group, table in zip(self._groups, tables, strict=True):
            first = group.first_visible(earliest) // group.page_tokens
            pages = table.pages[first - table.first : group.pages_for(length) - table.first]
            assert len(pages) == max(0, group.pages_for(length) - first), "a checkpoint lacks pages"
            assert min(pages, default=0) >= 0, "a checkpoint reaches into tokens that were not stored"
            kept.append(PageTable(first, pages))
        return earliest, tuple(kept)

    def _frees_any(self, checkpoint: Checkpoint) -> bool:
        """Whether dropping it alone frees a page."""
        for group, table in zip(self._groups, checkpoint.tables, strict=True):
            # Without a window who shares a page shares all before it, so the last is the least shared.
            pages = table.pages[-1:] if group.window is None else table.pages
            if any(self._arena.frees(page) for page in pages):
                return True
        return False

    def _link(self, checkpoint: Checkpoint, keys: list[bytes]) -> None:
        parent = None
        for key in keys:
            if key not in self._nodes:
                self._nodes[key] = _Node(parent)
                if parent is not None:
                    self._nodes[parent].num_children += 1
            parent = key
        node = self._nodes[checkpoint.key]
        node.tails[checkpoint.tail] = checkpoint
        node.num_of_length[len(checkpoint.tail)] = node.num_of_length.get(len(checkpoint.tail), 0) + 1

    def _remove(self, checkpoint: Checkpoint) -> None:
        del self._by_use[checkpoint]
        self._arena.drop(checkpoint.pages)
        node = self._nodes[checkpoint.key]
        del node.tails[checkpoint.tail]
        length = len(checkpoint.tail)
        node.num_of_length[length] -= 1
        if not node.num_of_length[length]:
            del node.num_of_length[length]
        key: bytes | None = checkpoint.key
        while key is not None and not self._nodes[key].tails and not self._nodes[key].num_children:
            key = self._nodes.pop(key).parent
            if key is not None:
                self._nodes[key].num_children -= 1
