"""Media and tenants in the scheduler: what may be shared, and where chunks may end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count

import pytest

from culet.cache import content
from culet.cache.content import PrefixContent
from culet.errors import BadRequest, ContextTooLong
from culet.scheduler import sequence
from culet.types import MediaSpan, Request
from tests.engine.scheduler.drive import Drive, make, make_layout, make_request, prompt
from tests.engine.scheduler.test_scheduler_walk import WORLDS, walk

CAT, DOG = b"cat", b"dog"


def image(start: int, length: int, key: bytes = CAT, *, is_whole: bool = True) -> MediaSpan:
    return MediaSpan(start, length, key, is_whole)


def ask(name: str, length: int, media: Sequence[MediaSpan] = (), salt: str = "", **settings: object) -> Request:
    return make_request(name, prompt(length), 2, stop=False, media=tuple(media), cache_salt=salt, **settings)  # type: ignore[arg-type]


def num_computed(drive: Drive, request: Request) -> int:
    """Return the number of prompt tokens that a request must compute."""
    before = drive.scheduler.counters.prefix_hit_tokens
    drive.add(request)
    drive.run()
    return len(request.prompt_token_ids) - (drive.scheduler.counters.prefix_hit_tokens - before)


def test_equal_media_hit_and_others_do_not() -> None:
    drive = make()
    assert num_computed(drive, ask("a", 40, [image(6, 12)])) == 40
    assert num_computed(drive, ask("b", 40, [image(6, 12)])) == 1
    assert num_computed(drive, ask("c", 40, [image(6, 12, DOG)])) == 40
    assert num_computed(drive, ask("d", 40, [image(6, 12, DOG)])) == 1
    assert num_computed(drive, ask("e", 40)) == 40
    drive.check_end()


def test_tenants_share_nothing() -> None:
    drive = make()
    assert num_computed(drive, ask("a", 40, salt="x")) == 40
    assert num_computed(drive, ask("b", 40, salt="y")) == 40
    assert num_computed(drive, ask("c", 40)) == 40
    assert num_computed(drive, ask("d", 40, salt="x")) == 1
    drive.check_end()


def test_a_chunk_never_ends_inside_whole_media() -> None:
    """The fake runner fails if a chunk does. This test checks where chunks end instead."""
    drive = make(budget=16, seqs=2)
    drive.add(ask("a", 40, [image(10, 12)]))
    plans = [drive.step() for _ in range(4)]
    assert [(row.start, row.num_new) for plan in plans if plan for row in plan.rows] == [(0, 10), (10, 16), (26, 14), (40, 1)]
    drive.run()
    drive.check_end()


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
@pytest.mark.parametrize("groups", [((1, 1), (1, 1), (None, 4)), ((5, 2), (None, 3)), ((30, 4), (None, 8))])
def test_media_that_are_not_refused_end_in_the_smallest_cache(
    groups: tuple[tuple[int | None, int], ...], prompt_logprobs: int | None
) -> None:
    """With log-probabilities, every token of an image needs the keys in its window, so more pages are needed at once."""
    for num_pages in count(1):
        drive = make(make_layout(*groups), num_pages, budget=16, seqs=1)
        request = ask("a", 60, [image(1, 8), image(30, 9)], prompt_logprobs=prompt_logprobs)
        try:
            drive.add(request)
        except ContextTooLong:
            continue
        drive.run()
        drive.check_end()
        break


def test_a_chunk_may_end_inside_other_media() -> None:
    drive = make(budget=16, seqs=2)
    drive.add(ask("a", 40, [image(10, 12, is_whole=False)]))
    plan = drive.step()
    assert plan is not None
    assert plan.rows[0].num_new == 16


def test_media_wait_for_a_step_with_room() -> None:
    """Drafts and decode leave room for the oldest prompt's image, however large it is."""
    drive = make(budget=16, seqs=4, max_drafts=4)
    for name in "abc":
        drive.add(make_request(name, prompt(3, ord(name)), 60, stop=False))
    drive.step()
    drive.add(ask("image", 30, [image(4, 13)]))
    drive.run()
    drive.check_end()


def test_nothing_resumes_inside_whole_media() -> None:
    drive = make()
    drive.add(ask("a", 20, [image(12, 8)]))
    drive.run()
    # The same prompt would resume at its last token, inside the image, but an image can only be recomputed as a whole.
    assert num_computed(drive, ask("b", 20, [image(12, 8)])) == 20
    # A longer prompt resumes after it. Its token 60 is one that the runner never draws.
    assert num_computed(drive, make_request("c", [*prompt(20), *[60] * 10], 2, media=(image(12, 8),))) == 10
    drive.check_end()


def test_a_resume_length_inside_whole_media_is_ignored() -> None:
    drive = make(budget=64)
    drive.add(ask("a", 60, [image(20, 16)], resume_lengths=(28, 40)))
    drive.run()
    assert all(point.length not in range(21, 36) for point in drive.scheduler.page_allocator.prefix.resume_points())  # type: ignore[union-attr]
    assert num_computed(drive, make_request("b", [*prompt(40), 41, 42], 2, stop=False, media=(image(20, 16),))) == 2
    drive.check_end()


@pytest.mark.parametrize(
    "media", [[image(-1, 3)], [image(18, 3)], [image(5, 0)], [image(5, 5), image(8, 2)], [image(8, 2), image(2, 2)]]
)
def test_media_that_lie_wrongly_are_refused(media: list[MediaSpan]) -> None:
    with pytest.raises(BadRequest, match="media: "):
        make().add(ask("a", 20, media))


def test_media_larger_than_a_step_are_refused_with_the_arithmetic() -> None:
    drive = make(budget=16, seqs=4)
    drive.add(ask("a", 40, [image(2, 13)]))
    with pytest.raises(
        ContextTooLong, match="media: 14 tokens must be computed in one step, but a step has room for only 13"
    ) as caught:
        drive.add(ask("b", 40, [image(2, 14)]))
    assert caught.value.hint == "raise --max-num-batched-tokens"
    drive.run()
    drive.check_end()


@pytest.mark.parametrize("groups", [((8, 4), (None, 8)), ((1, 3), (None, 2)), ((6, 4),)])
def test_media_end_in_the_smallest_cache(groups: tuple[tuple[int | None, int], ...]) -> None:
    """Every admitted request fits, although an image takes more pages at once than its tokens one by one."""
    for num_pages in range(1, 60):
        drive = make(make_layout(*groups), num_pages, budget=64)
        try:
            drive.add(ask("a", 30, [image(3, 20)]))
        except ContextTooLong:
            continue
        drive.run()
        drive.check_end()
        return
    raise AssertionError("always refused")


def test_the_walk_sees_shared_media(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixContent, "media_before", lambda self, num_tokens: ())
    monkeypatch.setattr(content, "_media_units", lambda span: array("I", [7] * span.length))
    with pytest.raises(AssertionError, match="wrong key"):
        walk(WORLDS["media"], 0, 1000)


def test_the_walk_sees_chunks_that_end_inside_media(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence.Sequence, "_whole_span_at", lambda self, end: None)
    with pytest.raises(AssertionError, match="a chunk ends inside"):
        walk(WORLDS["media ahead"], 0, 1000)
