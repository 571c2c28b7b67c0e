"""Features in the scheduler: what is encoded beside which step, who waits for it, and what is kept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from culet.errors import BadRequest, ContextTooLong, QueueFull
from culet.media.items import MediaItem, MediaKind
from culet.scheduler import sequence
from culet.scheduler.media.features import FeatureLedger
from tests.engine.media.tower_runner import ask, check_end, drive_towers, item, ledger
from tests.engine.scheduler.drive import Drive, prompt, try_add

SEEDS = range(4)
CAT, DOG = item(0, 9), item(1, 9)


def test_an_item_is_encoded_once_for_all_who_wait() -> None:
    drive = drive_towers(ledger(), slowness=3)
    for name in "abc":
        drive.add(ask(name, [prompt(3, ord(name)), CAT, prompt(5, ord(name))]))
    drive.run()
    check_end(drive)
    assert drive.runner.encoded == {CAT.key: 1}  # type: ignore[attr-defined]
    assert drive.scheduler.counters.feature_hits == 2
    assert drive.scheduler.counters.encoded_tokens == 9


def test_decode_goes_on_while_a_tower_works() -> None:
    """A slow tower never holds up a running sequence: it has a row in every step."""
    drive = drive_towers(ledger(), slowness=0)
    drive.runner.slowness = 8  # type: ignore[attr-defined]
    drive.add(ask("text", [prompt(4)], 40, stop=False))
    drive.step()
    drive.add(ask("image", [prompt(2), CAT, prompt(2)]))
    plans = [drive.step() for _ in range(20)]
    assert all(plan is not None and any(row.num_logits for row in plan.rows) for plan in plans)
    drive.run()
    check_end(drive)


def test_the_budget_of_a_step() -> None:
    """Beside decoding, at most `max_step_tokens` are encoded, or a single item. Otherwise everything is."""
    drive = drive_towers(ledger(200, 12))
    images = [item(number, 6) for number in range(5)] + [item(9, 30)]
    drive.add(ask("a", [part for one in images for part in (one, prompt(2))]))
    plan = drive.step()
    assert plan is not None
    assert [one.key for one in plan.encodes] == [one.key for one in images]
    assert not plan.rows
    drive.run()
    images = [item(number, 5) for number in range(10, 13)] + [item(19, 30)]
    drive.add(ask("text", [prompt(4)], 40, stop=False))
    drive.step()
    drive.add(ask("b", [part for one in images for part in (one, prompt(2))]))
    plans = [drive.step() for _ in range(4)]
    assert [[one.num_tokens for one in plan.encodes] for plan in plans if plan] == [[5, 5], [5], [30], []]
    drive.run()
    check_end(drive)


def test_text_before_an_image_is_computed_if_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MIN_CUT_CHUNK", 10)
    for length, starts in ((9, []), (10, [(0, 10)])):
        drive = drive_towers(ledger())
        drive.add(ask("a", [prompt(length), CAT, prompt(4)]))
        plan = drive.step()
        assert plan is not None
        assert [(row.start, row.num_new) for row in plan.rows] == starts
        drive.run()
        check_end(drive)


def test_the_least_recently_used_features_go() -> None:
    drive = drive_towers(ledger(20))
    for name, one in (("a", CAT), ("b", DOG), ("c", CAT), ("d", item(2, 9)), ("e", CAT)):
        drive.add(ask(name, [prompt(3, ord(name)), one, prompt(3, ord(name))]))
        drive.run()
    assert drive.runner.encoded[CAT.key] == 1  # type: ignore[attr-defined]
    assert DOG.key not in drive.runner.held  # type: ignore[attr-defined]
    check_end(drive)


def test_a_cached_prefix_needs_no_features() -> None:
    """The second turn resumes after the image, although its features were dropped in the meantime."""
    drive = drive_towers(ledger(10))
    first = [prompt(3), CAT, prompt(30, 5)]
    drive.add(ask("a", first))
    drive.run()
    drive.add(ask("other", [prompt(4, 9), DOG, prompt(3)]))
    drive.run()
    drive.add(ask("b", [*first, prompt(4, 6)]))
    drive.run()
    assert drive.runner.encoded == {CAT.key: 1, DOG.key: 1}  # type: ignore[attr-defined]
    check_end(drive)


def test_refusals() -> None:
    drive = drive_towers(ledger(10, max_item_bytes=2000))
    request = ask("a", [prompt(3), CAT])
    with pytest.raises(BadRequest, match="got no content for tokens 3 to 12"):
        drive.add(replace(request, items=()))
    wrong = MediaItem(CAT.kind, CAT.key, 8, CAT.shape, CAT.data)
    with pytest.raises(BadRequest, match="a span of 9 tokens for content of 8"):
        drive.add(replace(request, items=(wrong,)))
    with pytest.raises(ContextTooLong, match="11 tokens x 10 bytes = 110 bytes of features, but their cache has only 100"):
        drive.add(ask("c", [prompt(3), item(3, 11)]))
    drive.scheduler.features.kinds = frozenset({MediaKind.AUDIO})  # type: ignore[union-attr]
    with pytest.raises(BadRequest, match="no tower for image"):
        drive.add(request)
    drive.scheduler.features.kinds = frozenset(MediaKind)  # type: ignore[union-attr]
    for name in "de":
        drive.add(ask(name, [prompt(3), CAT]))
    with pytest.raises(QueueFull, match="2700 bytes, above 2000"):
        drive.add(ask("f", [prompt(3), CAT]))
    drive.run()
    drive.add(ask("f", [prompt(3), CAT]))
    drive.run()
    check_end(drive)


def test_a_failed_tower_ends_only_those_who_need_it() -> None:
    drive = drive_towers(ledger(), slowness=50)
    drive.add(ask("text", [prompt(4)], 30, stop=False))
    drive.step()
    drive.add(ask("image", [CAT, prompt(3)]))
    plan = drive.scheduler.schedule()
    assert plan is not None
    assert plan.encodes
    drive.scheduler.fail_steps("the tower failed")
    drive.runner._last_step += 1  # the plan did not run
    for delta in drive.scheduler.deltas():
        drive.hear(delta)
    assert {name for (name, _), told in drive.told.items() if told.error} == {"text", "image"}
    drive.runner.held[CAT.key] = 0  # type: ignore[attr-defined]
    drive.scheduler.counters.encoded_items -= 1
    drive.add(ask("again", [CAT, prompt(3)]))
    drive.run()
    check_end(drive)


def test_a_parked_sequence_waits_for_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are saved in a step without rows, which waits for the features."""
    monkeypatch.setattr(sequence, "MIN_CUT_CHUNK", 1)
    monkeypatch.setattr(sequence, "MIN_PARKED", 1)
    drive = drive_towers(ledger(), slowness=50, num_host_pages=20)
    drive.add(ask("seen", [prompt(20), CAT, prompt(3)]))
    drive.step()
    (seq,) = drive.scheduler._running
    assert seq.num_computed == 20
    assert seq.park(drive.scheduler.page_allocator)
    drive.scheduler._preempt(seq)
    plan = drive.step()
    assert plan is not None
    assert plan.saves
    assert not plan.rows
    drive.run()
    check_end(drive)
    assert drive.scheduler.counters.restored == 1


# A walk


def random_parts(chance: random.Random) -> list[list[int] | MediaItem]:
    parts: list[list[int] | MediaItem] = []
    for _ in range(chance.randint(1, 4)):
        parts.append(prompt(chance.randint(1, 30), chance.randint(0, 2)))
        kind = chance.choice((MediaKind.IMAGE, MediaKind.IMAGE, MediaKind.AUDIO))
        parts.append(item(chance.randint(0, 4), chance.choice((3, 7, 13)), kind))
    return [*parts, prompt(chance.randint(1, 9))]


def walk(seed: int, num_moves: int, **settings: object) -> Drive:
    """Make random requests, cancels and steps, then finish. Few pages mean many preemptions."""
    chance = random.Random(seed)
    features, slowness = ledger(chance.choice((13, 20, 60)), chance.choice((4, 14, 40))), chance.choice((0, 2, 6))
    sizes = {"num_pages": chance.choice((40, 70, 200)), "budget": chance.choice((17, 24, 64)), "seqs": 4}
    how = {"ahead": chance.random() < 0.5, "max_drafts": chance.choice((0, 3))}
    drive = drive_towers(features, slowness=slowness, seed=seed, **{**sizes, **how, **settings})
    for number in range(num_moves):
        if chance.random() < 0.25:
            parts = random_parts(chance) if chance.random() < 0.7 else [prompt(chance.randint(1, 40), chance.randint(0, 2))]
            n, scores = chance.choice((1, 1, 3)), chance.choice((None, None, 2))
            try_add(drive, ask(str(number), parts, chance.randint(1, 9), n=n, prompt_logprobs=scores))
        cancels = [(name, None) for name in list(drive.requests)[-6:] if chance.random() < 0.03]
        drive.step(between=cancels)
    drive.run()
    check_end(drive)
    return drive


def walk_all() -> None:
    for seed in SEEDS:
        walk(seed, 120)


@pytest.mark.parametrize("seed", SEEDS)
def test_walk(seed: int) -> None:
    """Trap 5 and more: the runner fails if a chunk ends inside an image, and if it reads features that are not ready."""
    walk(seed, 120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_long_walk(seed: int) -> None:
    walk(seed, 1500)


def test_walk_with_legs_and_parked_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features come and go between the legs of chunks, and sequences are preempted."""
    monkeypatch.setattr(sequence, "MIN_PARKED", 1)
    settings = {"num_pages": 22, "budget": 40, "max_drafts": 0, "leg_tokens": 3, "num_host_pages": 60}
    assert sum(walk(seed, 200, **settings).scheduler.counters.chunks_in_legs for seed in SEEDS)


def test_the_walk_sees_features_that_are_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeatureLedger, "is_ready", lambda self, key: key in self._held)
    with pytest.raises(AssertionError, match="not ready"):
        walk_all()


def test_the_walk_sees_chunks_that_end_inside_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence.Sequence, "_whole_span_at", lambda self, end: None)
    with pytest.raises(AssertionError, match="a chunk ends inside"):
        walk_all()
