"""Resume points: found by content, longest first, evicted least recently used first, and never wrong."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from culet.cache import content
from culet.cache.arena import Arena
from culet.cache.content import PrefixContent
from culet.cache.point_tree import ResumePoint
from culet.cache.prefix import PrefixCache
from culet.cache.spec import CacheLayout, KVGroup, KVSpec
from culet.types import MediaSpan, PageTable

WINDOW, SMALL, LARGE = 6, 2, 4  # window and page tokens of the group with a window; page tokens of the group without


def group(index: int, window: int | None, page_tokens: int) -> KVGroup:
    spec = KVSpec(index, num_kv_heads=1, head_dim=2, rotated_dims=2, window=window, latent=False, itemsize=4)
    return KVGroup(f"g{index}", index, (spec,), page_tokens)


LAYOUT = CacheLayout(1, (group(0, WINDOW, SMALL), group(1, None, LARGE)))


class Cache:
    """A PrefixCache without running sequences, so that only resume points hold pages."""

    def __init__(self, num_pages: int = 100) -> None:
        self.arena = Arena(num_pages)
        self.prefix = PrefixCache(self.arena, LAYOUT)

    def insert(self, tokens: list[int], *, salt: str = "", media: Sequence[MediaSpan] = (), first: int = 0) -> None:
        """Insert a resume point at the end of `tokens`. The windowed table begins with logical page `first`."""
        tables, pages_held = [], []
        for group in LAYOUT.groups:
            begin = first if group.window else 0
            pages = self.arena.take(group.pages_for(len(tokens)) - begin)
            pages_held += pages
            tables.append(PageTable(begin, tuple(pages)))
        self.prefix.insert(tokens, len(tokens), PrefixContent(salt, media), tables, (0, 0))
        self.arena.give_back(pages_held)

    def find(
        self, tokens: list[int], *, salt: str = "", media: Sequence[MediaSpan] = (), limit: int | None = None
    ) -> tuple[int, int]:
        """Look up `tokens` and return (resume, known)."""
        limit = len(tokens) - 1 if limit is None else limit
        match = self.prefix.find(tokens, PrefixContent(salt, media), limit)
        assert (match.point is None) == (match.resume == 0)
        return match.resume, match.known


def test_a_longer_prompt_resumes_at_the_end_of_a_shorter_one() -> None:
    cache = Cache()
    cache.insert([1, 2, 3, 4, 5, 6, 7])
    assert cache.find([1, 2, 3, 4, 5, 6, 7, 8]) == (7, 7)
    assert cache.find([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]) == (7, 7)


def test_the_same_prompt_resumes_at_its_last_token() -> None:
    cache = Cache()
    for length in (7, 8):  # the last page is full, or partly filled
        tokens = list(range(length))
        cache.insert(tokens)
        assert cache.find(tokens) == (length - 1, length)


def test_without_the_token_before_the_window_only_a_longer_prompt_hits() -> None:
    cache = Cache()
    tokens = list(range(11))
    # At 11 the window begins with token 6, the fourth page. At 10 it begins with token 5, one page earlier.
    cache.insert(tokens, first=3)
    assert cache.find(tokens) == (0, 11)
    assert cache.find([*tokens, 99]) == (11, 11)
    # The same tokens with one more page replace it.
    cache.insert(tokens, first=2)
    assert cache.prefix.num_resume_points == 1
    assert cache.find(tokens) == (10, 11)


def test_a_table_that_lacks_pages_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="lacks pages"):
        Cache().insert(list(range(11)), first=4)


def test_skipped_pages_cannot_be_kept() -> None:
    cache = Cache()
    pages = tuple(cache.arena.take(3))
    with pytest.raises(AssertionError, match="not stored"):
        cache.prefix.insert(
            list(range(8)), 8, PrefixContent(), (PageTable(0, (-1, -1, *pages[:2])), PageTable(0, pages[1:])), (0, 0)
        )


def test_the_longest_of_several_wins() -> None:
    cache = Cache()
    tokens = list(range(20))
    for length in (3, 5, 8, 10, 13):
        cache.insert(tokens[:length])
    for length in range(2, 20):
        best = max(
            end
            for end in (0, 3, 5, 8, 10, 13, length - 1)
            if end < length and (end in (0, 3, 5, 8, 10, 13) or end + 1 in (3, 5, 8, 10, 13))
        )
        assert cache.find(tokens[:length])[0] == best, length


def test_a_limit_holds() -> None:
    cache = Cache()
    tokens = list(range(20))
    cache.insert(tokens[:5])
    cache.insert(tokens[:12])
    assert cache.find(tokens, limit=11)[0] == 11
    assert cache.find(tokens, limit=10)[0] == 5
    assert cache.find(tokens, limit=3)[0] == 0
    assert cache.find(tokens, limit=0)[0] == 0


def test_equal_pages_at_other_places_do_not_match() -> None:
    cache = Cache()
    cache.insert([9, 9, 9, 9, 1, 2, 3, 4, 5])
    assert cache.find([1, 2, 3, 4, 5, 6]) == (0, 0)
    assert cache.find([8, 8, 8, 8, 1, 2, 3, 4, 5, 6]) == (0, 0)


def test_known_tokens_reach_beyond_the_best_resume_point() -> None:
    cache = Cache()
    cache.insert([1, 2])
    cache.insert(list(range(1, 15)), first=3)
    assert cache.find([*range(1, 11), 99]) == (2, 10)


def test_salts_keep_prompts_apart() -> None:
    cache = Cache()
    tokens = list(range(9))
    cache.insert(tokens, salt="one")
    assert cache.find(tokens, salt="two") == (0, 0)
    assert cache.find(tokens, salt="one") == (8, 9)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_media_are_compared_by_content(start: int, length: int) -> None:
    """Media may lie in a full page, across pages, or in the tail after them. Pages before them are shared."""
    cache, tokens = Cache(), [5] * 11
    cat, dog, longer = (MediaSpan(start, size, key) for size, key in ((length, b"cat"), (length, b"dog"), (length + 1, b"cat")))
    cache.insert(tokens, media=[cat])
    assert cache.find([*tokens, 1], media=[cat])[0] == 11
    for other in ([dog], [longer], [MediaSpan(start + 1, length, b"cat")], []):
        assert cache.find([*tokens, 1], media=other) == (0, start)


def test_text_keys_do_not_depend_on_the_media_after_them() -> None:
    cache, tokens = Cache(), list(range(20))
    cache.insert(tokens[:9])
    assert cache.find(tokens, media=[MediaSpan(9, 5, b"cat")])[0] == 9


def test_nothing_resumes_inside_whole_media() -> None:
    cache, tokens = Cache(), list(range(12))
    for is_whole in (True, False):
        media = [MediaSpan(8, 4, b"cat" if is_whole else b"sound", is_whole)]
        cache.insert(tokens, media=media)
        assert cache.find(tokens, media=media)[0] == (0 if is_whole else 11)
        assert cache.find([*tokens, 1], media=media)[0] == 12


def test_points_with_different_media_and_equal_units_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """The units of media are short digests, which someone may find a collision of."""
    monkeypatch.setattr(content, "_media_units", lambda span: array("I", [7] * span.length))
    cache, tokens = Cache(), list(range(40))
    cat, dog = MediaSpan(4, 8, b"cat"), MediaSpan(4, 8, b"dog")
    cache.insert(tokens, media=[cat])
    assert cache.find([*tokens, 1], media=[dog]) == (0, 40)
    cache.insert(tokens, media=[dog])
    assert cache.prefix.num_resume_points == 1
    assert cache.find([*tokens, 1], media=[dog])[0] == 40
    assert cache.find([*tokens, 1], media=[cat])[0] == 0


def test_media_never_look_like_tokens() -> None:
    """A token id has at most 31 bits. The 32nd marks media."""
    for number in range(50):
        span = MediaSpan(0, 100, b"%d" % number)
        assert min(content._media_units(span)) >= 1 << 31


def test_points_are_bounded() -> None:
    cache = Cache(2000)
    cache.prefix._max_points = 20
    for number in range(100):
        cache.insert([number] * 5)
        cache.find([0] * 6)
    assert cache.prefix.num_resume_points == 20
    assert [cache.find([number] * 6)[0] for number in (79, 80, 99)] == [0, 5, 5]


@pytest.mark.parametrize("seed", range(8))
def test_a_look_up_finds_what_a_scan_of_all_points_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points come and go at random. Their contents, salts, media and stored tokens are all compared one by one."""
    monkeypatch.setattr("culet.cache.point_tree.MIN_SHARED", 3)
    chance = random.Random(seed)
    cache = Cache(4000)
    model: dict[int, Described] = {}
    num_inside = 0
    for _ in range(400):
        prompt = Described.draw(chance)
        move = chance.random()
        if move < 0.5:
            length = len(prompt.tokens)
            first = chance.randint(0, max(0, (length - WINDOW + 1) // SMALL))
            cache.prefix.make_room(60)
            cache.insert(prompt.tokens, salt=prompt.salt, media=prompt.media, first=first)
        elif move < 0.6 and cache.prefix.num_resume_points:
            cache.prefix._remove(chance.choice(cache.prefix.resume_points()))
        points = {point.point_id: point for point in cache.prefix.resume_points()}
        if move < 0.5:
            newest = max(points.values(), key=lambda point: point.last_use)
            model[newest.point_id] = prompt
        model = {point_id: described for point_id, described in model.items() if point_id in points}
        assert model.keys() == points.keys()
        limit = chance.choice((len(prompt.tokens) - 1, chance.randint(0, len(prompt.tokens) - 1)))
        match = cache.prefix.find(prompt.tokens, PrefixContent(prompt.salt, prompt.media), limit)
        shared = {point_id: prompt.num_shared(described) for point_id, described in model.items()}
        assert match.known == max(shared.values(), default=0)
        best = max((prompt.best_resume(points[key], count, limit) for key, count in shared.items()), default=0)
        assert match.resume == best
        num_inside += match.point is not None and match.resume < match.point.length - 1
    assert num_inside > 5
    cache.prefix.clear()
    assert cache.arena.num_free == cache.arena.num_pages
    assert cache.prefix._tree.is_empty


@dataclass
class Described:
    """A prompt of the model, which compares positions one by one."""

    tokens: list[int]
    salt: str
    media: list[MediaSpan]

    @classmethod
    def draw(cls, chance: random.Random) -> Described:
        tokens = [chance.choice((1, 1, 1, 1, 2)) for _ in range(chance.randint(1, 24))]
        media = []
        if chance.random() < 0.3 and len(tokens) > 6:
            start = chance.randint(0, 2)
            media.append(MediaSpan(start, chance.randint(1, 4), chance.choice((b"cat", b"dog")), chance.random() < 0.5))
        return cls(tokens, chance.choice(("", "", "other")), media)

    def at(self, position: int) -> object:
        inside = [(span.key, span.length, position - span.start) for span in self.media if span.start <= position < span.end]
        return inside[0] if inside else self.tokens[position]

    def num_shared(self, other: Described) -> int:
        if self.salt != other.salt:
            return 0
        length = min(len(self.tokens), len(other.tokens))
        return next((place for place in range(length) if self.at(place) != other.at(place)), length)

    def best_resume(self, point: ResumePoint, num_shared: int, limit: int) -> int:
        """Return the longest length that `point` can be resumed at, or 0."""
        for length in range(min(num_shared, limit), 0, -1):
            is_end = num_shared == point.length and length >= point.length - 1
            is_inside_media = any(span.is_whole and span.start < length < span.end for span in self.media)
            if length >= point.earliest and not is_inside_media and (is_end or length >= 3):
                return length
        return 0


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache()
    prompts = [[number] * 5 for number in range(4)]
    for prompt in prompts:
        cache.insert(prompt)
    match = cache.prefix.find([*prompts[0], 7], PrefixContent(), 5)
    assert match.point is not None
    cache.prefix.touch(match.point)
    cache.insert(prompts[1])  # already known, so this counts as a use
    cache.prefix.make_room(cache.arena.num_free + 1)
    assert [cache.find([*prompt, 7])[0] for prompt in prompts] == [5, 5, 0, 5]
    cache.prefix.make_room(cache.arena.num_free + 1)
    assert [cache.find([*prompt, 7])[0] for prompt in prompts] == [5, 5, 0, 0]


def test_eviction_spares_what_frees_nothing() -> None:
    cache = Cache()
    cache.insert([1] * 5)
    owned = cache.prefix.resume_points()[0].pages
    cache.arena.share(owned)  # a running sequence uses it
    cache.insert([2] * 5)
    cache.prefix.make_room(cache.arena.num_pages)
    assert cache.find([1] * 6)[0] == 5
    assert cache.find([2] * 6)[0] == 0
    cache.arena.give_back(owned)
    cache.prefix.make_room(cache.arena.num_pages)
    assert cache.prefix.num_resume_points == 0
    assert cache.arena.num_free == cache.arena.num_pages


def test_resume_points_that_share_all_their_pages_can_be_evicted() -> None:
    cache = Cache()
    pages = cache.arena.take(3)
    tables = (PageTable(0, tuple(pages[:2])), PageTable(0, tuple(pages[2:])))
    for length in (3, 4):  # the same pages, twice
        cache.prefix.insert([1, 2, 3, 4], length, PrefixContent(), tables, (0, 0))
    cache.arena.give_back(pages)
    assert cache.arena.num_reclaimable == 3
    cache.prefix.make_room(cache.arena.num_pages)
    assert cache.arena.num_free == cache.arena.num_pages


def test_nothing_is_left_behind() -> None:
    cache = Cache(400)
    chance = random.Random(3)
    for _ in range(200):
        tokens = [chance.randrange(2) for _ in range(chance.randint(1, 20))]
        cache.prefix.make_room(20)
        cache.insert(tokens)
        assert cache.find([*tokens, 1])[0] == len(tokens)
    cache.prefix.clear()
    assert cache.arena.num_free == cache.arena.num_pages
    assert cache.prefix._tree.is_empty


def test_a_look_up_does_not_visit_unrelated_resume_points() -> None:
    """The cost of a lookup grows with the prompt, not with the number of resume points."""
    cache = Cache(90_000)
    tokens = list(range(1000, 1040))
    cache.insert(tokens)
    for number in range(2000):
        cache.insert([10_000 + number, *tokens])

    path = cache.prefix._tree.path(PrefixContent(), PrefixContent().upto(tokens, 40), 40)
    assert [(node.end, num_shared) for node, num_shared in path] == [(40, 40)]
    assert cache.find([*tokens, 1]) == (40, 40)
