"""Write media into a prompt: each placeholder becomes marks and soft tokens, as transformers' processor does it. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from culet.errors import BadRequest
from culet.media.items import MediaItem, MediaKind, Medium
from culet.media.spec import MediaSpec
from culet.types import MediaSpan


@dataclass(frozen=True)
class ExpandedPrompt:
    """A prompt with a place for every soft token. `items[i]` fills `spans[i]`."""

    token_ids: Sequence[int]
    spans: tuple[MediaSpan, ...]
    items: tuple[MediaItem, ...]


def expand_prompt(
    token_ids: Sequence[int], media: Sequence[Medium], spec: MediaSpec, encode: Callable[[str], Sequence[int]]
) -> ExpandedPrompt:
    """Replace each placeholder by the medium that it stands for. The media of each kind are used in order.

    An image becomes begin + n placeholders + end, and so does audio. A video becomes `mm:ss begin n placeholders end` for each
    frame, with spaces between. `encode` is the tokenizer's, for these times.

    Without media nothing is replaced: a placeholder that somebody wrote as text stays a token without meaning. With media, a
    placeholder without a medium is an error, and so is a medium without a placeholder.
    """
    if not media:
        return ExpandedPrompt(tuple(token_ids), (), ())
    kinds = {spec.tokens.placeholder(kind): kind for kind in MediaKind}
    _check_counts(token_ids, media, kinds)
    waiting = {kind: iter([medium for medium in media if medium.kind == kind]) for kind in MediaKind}
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    items: list[MediaItem] = []
    for token_id in token_ids:
        kind = kinds.get(token_id)
        if kind is None:
            expanded.append(token_id)
            continue
        begin_id, end_id = spec.tokens.marks(kind)
        for before, item in _pieces(next(waiting[kind]), encode):
            expanded += [*before, begin_id]
            is_whole = spec.is_whole and kind != MediaKind.AUDIO
            spans.append(MediaSpan(len(expanded), item.num_tokens, item.key, is_whole))
            items.append(item)
            expanded += [token_id] * item.num_tokens
            expanded.append(end_id)
    return ExpandedPrompt(tuple(expanded), tuple(spans), tuple(items))


def timestamp(seconds: float) -> str:
    """Return a time as minutes and whole seconds. From 100 minutes on, the minutes have three digits."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def _pieces(medium: Medium, encode: Callable[[str], Sequence[int]]) -> Iterator[tuple[Sequence[int], MediaItem]]:
    """Yield (the tokens before it, an item) for each item of a medium."""
    if medium.kind != MediaKind.VIDEO:
        yield from (((), item) for item in medium.items)
        return
    for index, (item, seconds) in enumerate(zip(medium.items, medium.timestamps, strict=True)):
        space = " " if index else ""
        yield encode(f"{space}{timestamp(seconds)} "), item


def _check_counts(token_ids: Sequence[int], media: Sequence[Medium], kinds: dict[int, MediaKind]) -> None:
    found = Counter(kinds[token_id] for token_id in token_ids if token_id in kinds)
    given = Counter(medium.kind for medium in media)
    for kind in MediaKind:
        if found[kind] != given[kind]:
            hint = f"write one placeholder for each {kind} and none in plain text"
            raise BadRequest(f"prompt: got {found[kind]} placeholders for {given[kind]} media of kind {kind}", hint=hint)
