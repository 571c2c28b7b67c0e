"""The scheduler's account of the features that the runner holds, by content key.

An item (an image, a video frame, a clip of audio) is encoded once, however many requests wait for it. The scheduler decides
what is encoded beside which step, and what is dropped when the cache is full. The runner obeys and reports which features have
become ready. A chunk reaches an item only then, so on a GPU no step waits for a tower.

Nothing is pinned. In every step the sequences say in order which features they still need, and these are kept as far as they
fit. The first sequence's next item always fits, so it never waits for a later one. Other features are dropped by last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from culet.errors import BadRequest, ContextTooLong, QueueFull
from culet.media.items import MediaItem, MediaKind
from culet.types import MediaSpan, Request


@dataclass(slots=True)
class _Held:
    """Features that the runner holds or is about to hold."""

    num_bytes: int
    is_ready: bool = False
    is_used: bool = False  # whether a chunk has read them


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """What the towers do beside one step."""

    drops: tuple[bytes, ...] = ()
    encodes: tuple[MediaItem, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.encodes])


NOTHING = EncoderPlan()


@dataclass
class FeatureLedger:
    """Knows which features exist, and decides which items to encode and which features to drop."""

    kinds: frozenset[MediaKind]  # which the towers can encode
    token_bytes: int  # bytes of one row of features
    max_bytes: int  # size of the cache
    max_step_tokens: int  # most tokens to encode beside a step that decodes. A single item may have more.
    max_item_bytes: int  # most bytes of the media of all requests
    num_bytes: int = 0  # of features
    num_item_bytes: int = 0  # of the media of requests that have not ended
    num_requests: int = 0  # requests with media that have not ended
    _held: OrderedDict[bytes, _Held] = field(default_factory=OrderedDict)  # the least recently used first
    _lost: list[bytes] = field(default_factory=list)  # to drop with the next plan

    @property
    def has_work(self) -> bool:
        """Whether there are requests with media, or features to drop."""
        return bool(self.num_requests or self._lost)

    def admit(self, request: Request) -> None:
        """Count a request with media. Raise if it cannot be served, or if all requests together have too many bytes."""
        self._check(request)
        total = self.num_item_bytes + request.num_item_bytes
        if total > self.max_item_bytes:
            problem = f"media: those of all requests would take {total} bytes, above {self.max_item_bytes}"
            raise QueueFull(problem, hint="try again later, or raise --max-media-bytes")
        self.num_item_bytes = total
        self.num_requests += 1

    def release(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.num_item_bytes -= request.num_item_bytes
        self.num_requests -= 1

    def _check(self, request: Request) -> None:
        """Raise if a span lacks its item, if no tower encodes it, or if its features do not fit into the cache."""
        for item in request.items:
            if item.kind not in self.kinds:
                raise BadRequest(f"media: no tower for {item.kind} is loaded")
        tokens = {item.key: item.num_tokens for item in request.items}
        for span in request.media:
            if span.key not in tokens:
                raise BadRequest(f"media: got no content for tokens {span.start} to {span.end}")
            if tokens[span.key] != span.length:
                raise BadRequest(f"media: got a span of {span.length} tokens for content of {tokens[span.key]} tokens")
            if span.length * self.token_bytes > self.max_bytes:
                raise ContextTooLong(
                    f"media: {span.length} tokens x {self.token_bytes} bytes = {span.length * self.token_bytes} bytes "
                    f"of features, but their cache has only {self.max_bytes}",
                    hint="raise --media-cache-memory-bytes",
                )

    def is_held(self, key: bytes) -> bool:
        """Return whether features exist or are being computed."""
        return key in self._held

    def is_ready(self, key: bytes) -> bool:
        held = self._held.get(key)
        return held is not None and held.is_ready

    @property
    def is_encoding(self) -> bool:
        """Whether features are being computed."""
        return any(not held.is_ready for held in self._held.values())

    @property
    def num_held(self) -> int:
        return len(self._held)

    def plan(self, needs: Iterable[tuple[Request, int]], max_tokens: int) -> EncoderPlan:
        """Decide what to encode beside the next step, in the order of `needs`: requests, and how far each is computed."""
        encodes: list[MediaItem] = []
        kept: set[bytes] = set()
        num_kept = 0
        pairs = ((request, span) for request, start in needs for span in request.media if span.end > start)
        for request, span in pairs:
            if span.key in kept:
                continue
            size, is_held = span.length * self.token_bytes, span.key in self._held
            is_over = bool(encodes) and span.length > max_tokens
            if num_kept + size > self.max_bytes or (is_over and not is_held):
                break
            if is_held:
                self._held.move_to_end(span.key)
            else:
                encodes.append(next(item for item in request.items if item.key == span.key))
                max_tokens -= span.length
            kept.add(span.key)
            num_kept += size
        drops = self._make_room(sum([item.num_tokens for item in encodes]) * self.token_bytes, kept)
        for item in encodes:
            self._held[item.key] = _Held(item.num_tokens * self.token_bytes)
            self.num_bytes += self._held[item.key].num_bytes
        return EncoderPlan(tuple(drops), tuple(encodes)) if drops or encodes else NOTHING

    def _make_room(self, num_bytes: int, kept: set[bytes]) -> list[bytes]:
        """Forget features until `num_bytes` are free. Return their keys, after those that were lost."""
        dropped, self._lost = self._lost, []
        unused = iter([key for key in self._held if key not in kept]) if self.num_bytes + num_bytes > self.max_bytes else None
        while unused is not None and self.num_bytes + num_bytes > self.max_bytes:
            key = next(unused)
            self.num_bytes -= self._held.pop(key).num_bytes
            dropped.append(key)
        return dropped

    def use(self, span: MediaSpan) -> bool:
        """Note that a chunk reads the features of `span`. Return whether one did so before."""
        held = self._held[span.key]
        was_used, held.is_used = held.is_used, True
        self._held.move_to_end(span.key)
        return was_used

    def note_ready(self, keys: Iterable[bytes]) -> None:
        """Take the runner's report."""
        for key in keys:
            if key in self._held:  # otherwise it was dropped in the meantime
                self._held[key].is_ready = True

    def forget_all(self) -> set[bytes]:
        """Forget everything after a step failed. Return the keys that were being encoded."""
        running = {key for key, held in self._held.items() if not held.is_ready}
        self._lost += self._held
        self._held.clear()
        self.num_bytes = 0
        return running
