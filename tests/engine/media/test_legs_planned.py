"""Chunks with images that run in legs: which ones, what is planned beside them, and what happens in between."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from culet.cache.spec import CacheLayout
from culet.scheduler import sequence
from culet.scheduler.media.legs import MAX_LEGS
from culet.scheduler.sequence import Sequence
from culet.types import WHOLE, Leg, MediaSpan, Request, Row, StepPlan
from tests.engine.media.tower_runner import ask as ask_with_items
from tests.engine.media.tower_runner import check_end, drive_towers, item, ledger
from tests.engine.scheduler.drive import Drive, endless, make, make_layout, make_request, prompt

LAYOUT = make_layout((40, 4), (None, 8))
FIRST, SECOND = Leg(0, 1, 2), Leg(1, 2, 2)


def image(start: int, length: int, *, is_whole: bool = True) -> MediaSpan:
    return MediaSpan(start, length, b"cat", is_whole)


def seeing(name: str = "seen", length: int = 20, media: Seq[MediaSpan] = (image(4, 12),), **settings: object) -> Request:
    return make_request(name, prompt(length, 3), 3, stop=False, media=tuple(media), **settings)  # type: ignore[arg-type]


def beside_chats(num_chats: int = 2, *, leg_tokens: int = 10, layout: CacheLayout = LAYOUT, **settings: object) -> Drive:
    """Return a scheduler with chats that decode."""
    drive = make(layout, leg_tokens=leg_tokens, **settings)  # type: ignore[arg-type]
    for number in range(num_chats):
        drive.add(endless(f"chat {number}", 3 + number, 60))
        drive.step()
    return drive


def chunks(plans: Seq[StepPlan | None]) -> list[tuple[Leg, int, int]]:
    return [(row.leg, row.start, row.num_new) for plan in plans if plan for row in plan.rows if row.num_new > 1]


def steps_of(drive: Drive, *requests: Request, num_steps: int = 4) -> list[tuple[Leg, int, int]]:
    """Return the chunks of the next steps, then run to the end."""
    for request in requests:
        drive.add(request)
    found = chunks([drive.step() for _ in range(num_steps)])
    end(drive)
    return found


def end(drive: Drive) -> None:
    drive.run()
    if drive.waiting_result is not None:
        drive.step()
    drive.check_end()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_image_beside_chats(ahead: bool) -> None:
    drive = beside_chats(ahead=ahead)
    tokens = drive.scheduler.counters.step_tokens
    drive.add(seeing())
    plans = [drive.step() for _ in range(2)]
    assert chunks(plans) == [(FIRST, 0, 20), (SECOND, 0, 20)]
    for plan in plans:
        assert plan is not None
        assert len(plan.rows) == 3, "the chats go on"
    assert drive.scheduler.counters.chunks_in_legs == 1
    assert drive.scheduler.counters.step_tokens - tokens == 20 + 4, "its tokens count once"
    assert [step.is_timed for step in drive.scheduler._in_flight] == [False] * ahead
    end(drive)


@pytest.mark.parametrize(
    "request_",
    [
        seeing(media=()),
        seeing(media=[image(4, 12, is_whole=False)]),
        seeing(length=9, media=[image(2, 5)]),
        seeing(prompt_logprobs=0),
    ],
    ids=["no image", "may be split", "short", "scored"],
)
def test_other_chunks_are_whole(request_: Request) -> None:
    found = steps_of(beside_chats(seqs=4, budget=80), request_)
    assert found
    assert all(leg.is_whole for leg, _, _ in found)


def test_nothing_is_cut_without_chats_or_while_another_prompt_waits() -> None:
    assert steps_of(beside_chats(0), seeing()) == [(WHOLE, 0, 20)]
    both = steps_of(beside_chats(), seeing("a"), seeing("b", media=[MediaSpan(4, 12, b"dog")]))
    assert both == [(WHOLE, 0, 20), (FIRST, 0, 20), (SECOND, 0, 20)]
    assert steps_of(beside_chats(leg_tokens=0), seeing()) == [(WHOLE, 0, 20)]


def test_the_more_wait_the_fewer_legs() -> None:
    """A chunk in legs delays whoever waits. Only one starts in its step, and several together only if many wait."""
    counts = []
    for num_waiting in (0, 1, 2, 3, 9):
        drive = beside_chats(leg_tokens=5, budget=80)
        for number in range(1 + num_waiting):
            drive.add(seeing(f"seen {number}", media=[MediaSpan(4, 12, b"%d" % number)]))
        found = chunks([drive.step()])
        counts.append((len(found), found[0][0].of))
        end(drive)
        assert drive.scheduler.counters.finished == 1 + num_waiting + 2
    assert counts == [(1, 4), (1, 2), (1, 2), (1, 1), (2, 1)]


def test_nobody_starts_beside_a_running_prompts_leg() -> None:
    drive = beside_chats(leg_tokens=5, budget=45, seqs=4)
    drive.add(seeing(length=60, media=[image(44, 12)]))
    first = drive.step()
    drive.add(make_request("late", prompt(6, 9), 3))
    plans = [first, *[drive.step() for _ in range(3)]]
    found = [(WHOLE, 0, 42), (FIRST, 42, 18), (SECOND, 42, 18), (WHOLE, 0, 6)]
    assert [chunks([plan]) for plan in plans] == [[chunk] for chunk in found]
    end(drive)


def test_a_chunk_that_a_later_step_may_have_no_room_for() -> None:
    """With 8 sequences and 40 tokens, any step has room for 33."""
    assert steps_of(beside_chats(1, budget=40, leg_tokens=20), seeing(length=33))[0] == (FIRST, 0, 33)
    assert steps_of(beside_chats(1, budget=40, leg_tokens=20), seeing(length=34))[0] == (WHOLE, 0, 34)


def test_a_longer_chunk_has_more_legs() -> None:
    """So each step is about as long. Beyond some number, more legs would only delay the first token."""
    for length, count in ((10, 1), (11, 2), (21, 3), (30, 3), (33, 4)):
        drive = beside_chats(1, budget=40)
        found = steps_of(drive, seeing(length=length, media=[image(1, 8)]), num_steps=5)
        assert found == [(Leg(index, index + 1, count), 0, length) for index in range(count)]
        assert drive.scheduler.counters.chunks_in_legs == (count > 1)
    found = steps_of(beside_chats(1, budget=40, leg_tokens=2), seeing(length=33), num_steps=9)
    assert found == [(Leg(index, index + 1, MAX_LEGS), 0, 33) for index in range(MAX_LEGS)]


def test_without_chats_all_other_layers_run_at_once() -> None:
    drive = beside_chats(1, leg_tokens=4)
    drive.add(seeing())
    plans = [drive.step(), drive.step()]
    drive.scheduler.cancel("chat 0")
    plans.append(drive.step())
    assert chunks(plans) == [(Leg(*layers, 5), 0, 20) for layers in ((0, 1), (1, 2), (2, 5))]
    end(drive)


def test_a_chunk_in_the_middle_of_a_prompt() -> None:
    found = steps_of(beside_chats(budget=40, seqs=3, leg_tokens=20), seeing(length=90, media=[image(40, 12)]), num_steps=6)
    assert found == [(WHOLE, 0, 38), (FIRST, 38, 38), (SECOND, 38, 38), (WHOLE, 76, 14)]
    found = steps_of(beside_chats(budget=40, seqs=3, leg_tokens=20), seeing(length=90), num_steps=6)
    assert found == [(FIRST, 0, 38), (SECOND, 0, 38), (WHOLE, 38, 38), (WHOLE, 76, 14)], "the image was in the first chunk"


def test_no_prompt_starts_beside_a_later_leg() -> None:
    drive = beside_chats()
    drive.add(seeing())
    plans = [drive.step()]
    drive.add(make_request("late", prompt(6, 9), 3))
    plans += [drive.step(), drive.step()]
    assert [chunks([plan]) for plan in plans] == [[(FIRST, 0, 20)], [(SECOND, 0, 20)], [(WHOLE, 0, 6)]]
    end(drive)


def test_samples_fork_after_the_last_leg() -> None:
    drive = beside_chats()
    drive.add(seeing(n=3))
    first, second = drive.step(), drive.step()
    assert first is not None
    assert second is not None
    assert [len(row.draw_slots) for row in second.rows if not row.leg.is_whole] == [3]
    assert len(second.entries) == 2
    end(drive)
    assert drive.scheduler.counters.forks == 2


def test_resume_lengths_in_a_chunk_in_legs() -> None:
    drive = beside_chats()
    drive.add(seeing(resume_lengths=(17,)))
    plans = [drive.step()]
    prefix = drive.scheduler.page_allocator.prefix
    assert prefix is not None
    assert all(point.length < 17 for point in prefix.resume_points()), "some layers have not run"
    plans.append(drive.step())
    assert chunks(plans) == [(FIRST, 0, 20), (SECOND, 0, 20)]
    assert {point.length for point in prefix.resume_points()} >= {17, 20}
    before = drive.scheduler.counters.prefix_hit_tokens
    drive.add(make_request("next", [*prompt(20, 3)[:17], 50, 51], 2, media=(image(4, 12),)))
    drive.step()
    assert drive.scheduler.counters.prefix_hit_tokens - before == 17
    end(drive)


def the_leg(plan: StepPlan | None) -> Row:
    assert plan is not None
    (row,) = [row for row in plan.rows if not row.leg.is_whole]
    return row


# Where a chunk in legs is: the request, the steps before it, its first token and length. The window has 40 tokens, so a longer
# chunk stores only the last of its tokens there.
PLACES: dict[str, tuple[Request, int, int, int]] = {
    "at the start": (seeing(length=34), 0, 0, 34),
    "after others": (seeing(length=90, media=[image(70, 12)]), 1, 62, 28),
    "longer than the window": (seeing(length=150, media=[image(90, 12)]), 1, 62, 62),
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_run", [1, 3])
@pytest.mark.parametrize("what", ["preempt", "park", "cancel", "cancel chats", "fail"])
def test_between_the_legs(what: str, num_run: int, place: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens, all pages come back, and the answer is right. The fake runner checks every key."""
    monkeypatch.setattr(sequence, "MIN_PARKED", 0)
    request, num_before, start, length = PLACES[place]
    drive = beside_chats(ahead=ahead, leg_tokens=-(-length // 4), seqs=3, num_host_pages=60)
    scheduler = drive.scheduler
    drive.add(request)
    plans = [drive.step() for _ in range(num_before + num_run)]
    assert chunks(plans)[num_before:] == [(Leg(index, index + 1, 4), start, length) for index in range(num_run)]
    seq = next(iter(scheduler._alive["seen"].values()))
    assert seq.num_underway == seq.next_chunk == length
    if what == "park":
        assert seq.park(scheduler.page_allocator)
    if what in ("preempt", "park"):
        scheduler._preempt(seq)
    elif what == "cancel":
        scheduler.cancel("seen")
    elif what == "cancel chats":
        scheduler.cancel("chat 0")
        scheduler.cancel("chat 1")
    else:
        drive.waiting_result = None
        scheduler.fail_steps("no luck")
    if what == "cancel chats":
        plan = drive.step()
        assert plan is not None
        assert [(row.leg, row.start, row.num_new) for row in plan.rows] == [(Leg(num_run, 4, 4), start, length)]
    else:
        assert seq.num_underway == 0
    end(drive)
    assert scheduler.counters.restored == (what == "park" and start > 0)


@pytest.mark.parametrize("num_shared", range(56, 63))
def test_what_is_kept_of_a_chunk_that_ended_between_its_legs(num_shared: int) -> None:
    """Its sequence leaves a resume point before the chunk. The chunk before it had not stored its first tokens either."""
    drive = beside_chats(leg_tokens=16, seqs=3)
    drive.add(seeing(length=150, media=[image(90, 12)]))
    assert chunks([drive.step(), drive.step()]) == [(WHOLE, 0, 62), (Leg(0, 1, 4), 62, 62)]
    drive.scheduler.cancel("seen")
    before = drive.scheduler.counters.prefix_hit_tokens
    drive.add(make_request("next", [*prompt(150, 3)[:num_shared], 50, 51], 3))
    drive.step()
    assert drive.scheduler.counters.prefix_hit_tokens - before == (62 if num_shared == 62 else 0)
    end(drive)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("start", [20, 22])
def test_a_chunk_that_ends_between_its_legs_in_a_tiny_window(window: int, start: int) -> None:
    """With a window of one token, a sequence that resumes between two pages holds none before its chunk."""
    drive = beside_chats(leg_tokens=8, layout=make_layout((window, 4), (None, 8)))
    drive.add(make_request("before", prompt(start, 3), 1, stop=False))
    drive.step()
    drive.add(seeing(length=start + 32, media=[image(start + 4, 12)]))
    assert chunks([drive.step()]) == [(Leg(0, 1, 4), start, 32)]
    drive.scheduler.cancel("seen")
    drive.add(seeing("again", length=start + 32, media=[image(start + 4, 12)]))
    end(drive)


def test_a_preempted_chunk_is_computed_again() -> None:
    drive = beside_chats()
    drive.add(seeing())
    drive.step()
    seq = next(iter(drive.scheduler._alive["seen"].values()))
    drive.scheduler._preempt(seq)
    assert chunks([drive.step() for _ in range(3)]) == [(FIRST, 0, 20), (SECOND, 0, 20)]
    end(drive)


def pause(monkeypatch: pytest.MonkeyPatch, *names: str) -> set[str]:
    """Make requests wait as if their features were not ready, as long as they are in the set that is returned."""
    paused, is_ready = set(names), Sequence.is_ready.fget
    assert is_ready is not None
    ready = property(lambda seq: seq.request.request_id not in paused and is_ready(seq))
    monkeypatch.setattr(Sequence, "is_ready", ready)
    return paused


def test_a_chunk_waits_for_its_next_leg(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a step cannot have it, a later one does. Meanwhile, no other chunk is cut, and it keeps its pages."""
    drive = beside_chats()
    drive.add(seeing())
    plans = [drive.step()]
    paused = pause(monkeypatch, "seen")
    drive.add(seeing("other", media=[image(2, 12)]))
    plans += [drive.step(), drive.step()]
    paused.clear()
    plans.append(drive.step())
    assert chunks(plans) == [(FIRST, 0, 20), (WHOLE, 0, 20), (SECOND, 0, 20)]
    end(drive)


@pytest.mark.parametrize("has_older", [False, True])
def test_a_smaller_step_still_has_room(has_older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps become shorter between the legs, because they take long. An older prompt may then be able to go on."""
    drive = beside_chats(budget=40, leg_tokens=5 if has_older else 10)
    if has_older:
        drive.add(make_request("old", prompt(120, 5), 3))
        drive.step()
    paused = pause(monkeypatch, "old")
    drive.add(seeing())
    plans = [drive.step()]
    paused.clear()
    drive.scheduler.step_budget._num_tokens, drive.scheduler.step_budget.min_tokens = 4.0, 4
    plans.append(drive.step())
    assert chunks(plans) == [(FIRST, 0, 20), (SECOND, 0, 20)]
    end(drive)


def test_a_leg_goes_before_older_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older prompt that could not go on, and now can, takes only what is left of the step."""
    drive = beside_chats(1, budget=40, seqs=4, leg_tokens=10)
    drive.add(make_request("old", prompt(120, 5), 3))
    drive.step()
    paused = pause(monkeypatch, "old")
    drive.add(seeing(length=33, media=[image(10, 12)]))
    first = drive.step()
    paused.clear()
    assert chunks([first, drive.step()]) == [(FIRST, 0, 33), (WHOLE, 39, 6), (SECOND, 0, 33)]
    end(drive)


def test_features_may_go_between_the_legs() -> None:
    """The first leg has read them. Another request's image takes their place in the cache."""
    features = ledger(max_tokens=12, max_step_tokens=12)
    drive = drive_towers(features, layout=LAYOUT, leg_tokens=10)
    drive.add(endless("chat", 3, 60))
    drive.step()
    cat, dog = item(1, 12), item(2, 12)
    drive.add(ask_with_items("cat", [cat, prompt(5)], 2))
    plans = []
    while not any(not row.leg.is_whole for plan in plans if plan for row in plan.rows):
        plans.append(drive.step())
    drive.add(ask_with_items("dog", [prompt(4, 1), dog, prompt(5, 1)], 2))
    plan = drive.step()
    assert plan is not None
    assert the_leg(plan).leg == SECOND
    assert plan.drops == (cat.key,)
    assert plan.encodes == (dog,)
    drive.run()
    check_end(drive)
    assert drive.scheduler.counters.encoded_items == 2
    assert drive.scheduler.counters.chunks_in_legs == 2
