"""Random walks of the scheduler: no page is ever lost, shared wrongly or freed twice, and all requests end correctly.

The fake runner checks every key of every query. `audit` checks every reference count after every move.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from culet.config import ScheduleConfig
from culet.errors import ContextTooLong, QueueFull
from culet.runner.deferred_kv import Ledger
from culet.scheduler import sequence
from culet.scheduler.scheduler import Scheduler
from culet.scheduler.sequence import Acceptance
from culet.types import MediaSpan, Request
from tests.engine.scheduler.drive import Drive, make_layout, make_request, try_add
from tests.engine.scheduler.fake_runner import VOCAB, FakeRunner
from tests.engine.scheduler.fixed_lengths import FixedLengths


@dataclass(frozen=True)
class World:
    """The settings of a walk."""

    groups: tuple[tuple[int | None, int] | tuple[int | None, int, int], ...] = ((8, 4), (None, 8))
    num_pages: int = 40
    max_num_seqs: int = 8
    budget: int = 32
    max_drafts: int = 0
    ahead: bool = False
    prefix_caching: bool = True
    max_prompt: int = 60
    max_tokens: int = 40
    plans_open: bool = False  # rows are planned while drafts are in flight
    on_cpu: bool = False  # short prompts have steps of their own
    pauses: bool = False  # drafts are wanted in some steps and not in others
    has_media: bool = False  # some prompts have media, and tenants have salts
    leg_tokens: int = 0  # chunks with images and more tokens run in several steps
    has_many_legs: bool = False  # as many as if no prompt waited
    tenants: tuple[str, ...] = ("",)  # each request belongs to one of them
    num_host_pages: int = 0


class Moody(FixedLengths):
    """All sequences want drafts for a while, then none do, except for a few that always differ."""

    def __init__(self, chance: random.Random, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.random, self.is_drafting = chance, True

    def length(self, state: Acceptance, num_seqs: int) -> int:
        if self.random.random() < 0.1:
            self.is_drafting = not self.is_drafting
        return self.random.randint(0, self.num_drafts) if self.is_drafting == (self.random.random() < 0.98) else 0


Prompt = tuple[list[int], tuple[MediaSpan, ...]]
PLACEHOLDER = 7


class Walk:
    """Adds, cancels and steps at random, and counts what actually happened."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.now = 0.0
        layout = make_layout(*world.groups)
        scheduler = Scheduler(
            layout,
            world.num_pages,
            ScheduleConfig(world.max_num_seqs, world.budget, max_queue_len=12),
            max_model_len=world.max_prompt + world.max_tokens,
            prefix_caching=world.prefix_caching,
            max_drafts=world.max_drafts,
            policy=Moody(self.random, world.max_drafts) if world.pauses else None,
            plans_open=world.plans_open,
            on_cpu=world.on_cpu,
            leg_tokens=world.leg_tokens,
            clock=lambda: self.now,
        )
        scheduler.page_allocator.host.grow(world.num_host_pages)
        if world.has_many_legs:
            scheduler._legs._running = scheduler._legs._waiting = ()
        runner = FakeRunner(
            layout,
            world.num_pages,
            max_num_seqs=world.max_num_seqs,
            budget=world.budget,
            max_drafts=world.max_drafts,
            num_host_pages=world.num_host_pages,
        )
        self.drive = Drive(scheduler, runner, ahead=world.ahead)
        self.stems = [self._with_media(self._tokens(self.random.randint(1, world.max_prompt // 2))) for _ in range(4)]
        self.counts: Counter[str] = Counter()

    def _tokens(self, length: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(length)]

    def _with_media(self, tokens: list[int]) -> Prompt:
        """Return `tokens` with placeholders for a few images, each with one of two contents."""
        spans: list[MediaSpan] = []
        while self.world.has_media and self.random.random() < 0.6:
            start = (spans[-1].end if spans else 0) + self.random.randint(0, 6)
            span = MediaSpan(start, self.random.randint(1, 9), self.random.choice((b"cat", b"dog")), self.random.random() < 0.8)
            if span.end > len(tokens):
                break
            tokens[span.start : span.end] = [PLACEHOLDER] * span.length
            spans.append(span)
        return tokens, tuple(spans)

    def _prompt(self) -> Prompt:
        """Return a fresh prompt, one with a shared prefix, or a later turn of an earlier prompt."""
        kind, limit = self.random.random(), self.world.max_prompt
        if kind < 0.2 or not self.drive.requests:
            return self._with_media(self._tokens(self.random.randint(1, limit)))
        if kind < 0.6:
            tokens, media = self.random.choice(self.stems)
            return (tokens + self._tokens(self.random.randint(0, 20)))[:limit], media
        earlier = self.random.choice(list(self.drive.requests.values())[-20:])
        tokens = list(earlier.prompt_token_ids) + self.drive.told[earlier.request_id, 0].tokens
        if earlier.resume_lengths and self.random.random() < 0.6:
            tokens = tokens[: self.random.choice(earlier.resume_lengths)]
        tokens = (tokens + self._tokens(self.random.randint(0, 3)))[:limit]
        media = tuple(span for span in earlier.media if span.end <= len(tokens))
        if media and self.random.random() < 0.3:  # another image in the same place
            media = (replace(media[0], key=b"bird"), *media[1:])
        return tokens, media

    def _request(self) -> Request:
        chance, (prompt, media) = self.random.random, self._prompt()
        num_lengths = self.random.choice((0, 0, 1, 2))
        # Most are near the prompt's end, where a generation prompt begins. Some are anywhere.
        begin = len(prompt) - 8 if chance() < 0.7 else 1
        return make_request(
            f"r{len(self.drive.requests)}",
            prompt,
            self.random.randint(1, self.world.max_tokens),
            n=self.random.choice((1, 1, 1, 2, 4)),
            seed=self.random.randrange(3),
            stop=chance() < 0.8,
            prompt_logprobs=0 if chance() < 0.1 else None,
            priority=self.random.choice((0, 0, 0, 1)),
            deadline=self.now + self.random.randint(0, 60) if chance() < 0.05 else None,
            resume_lengths=tuple(sorted({self.random.randint(max(1, begin), len(prompt)) for _ in range(num_lengths)})),
            media=media,
            cache_salt=self.random.choice(("", "", "tenant")) if self.world.has_media else "",
            tenant=self.random.choice(self.world.tenants) if len(self.world.tenants) > 1 else self.world.tenants[0],
        )

    def _someone(self) -> list[tuple[str, int | None]]:
        """Return a recent request, or one of its samples, to cancel."""
        alive = [key for key, told in self.drive.told.items() if told.finish_reason is None]
        if not alive:
            return []
        request_id, sample = self.random.choice(alive[-16:])
        return [(request_id, sample if self.random.random() < 0.5 else None)]

    def step(self) -> None:
        self.now += 1
        while self.random.random() < 0.35:
            refused = try_add(self.drive, self._request())
            assert refused is None or isinstance(refused, QueueFull | ContextTooLong)
            self.counts["refused"] += refused is not None
        if self.random.random() < 0.05:
            for request_id, sample in self._someone():
                self.drive.scheduler.cancel(request_id, sample)
        self.drive.step(between=self._someone() if self.random.random() < 0.05 else None)

    def finish(self) -> Counter[str]:
        """Run until no work is left, check the end, and return the counts."""
        self.drive.run()
        if self.drive.waiting_result is not None:
            self.drive.step()
        self.drive.check_end()
        counters = self.drive.scheduler.counters
        self.counts.update({name: value for name, value in vars(counters).items() if isinstance(value, int)})
        self.counts.update(self.drive.runner.counts)
        return self.counts


def walk(world: World, seed: int, num_steps: int) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "MIN_PARKED", 1)
        steps = Walk(world, seed)
        for _ in range(num_steps):
            steps.step()
        return steps.finish()


WORLDS = {
    "sync": World(),
    "ahead": World(ahead=True),
    "roomy": World(num_pages=200, max_drafts=2, ahead=True),  # where resume points live long
    "drafts": World(max_drafts=4, max_tokens=80),
    "drafts ahead": World(max_drafts=3, ahead=True, num_pages=36, max_tokens=80),
    "growth": World(groups=((3, 1), (None, 1)), num_pages=80, max_num_seqs=16, max_drafts=2, max_prompt=8, max_tokens=60),
    "growth ahead": World(groups=((4, 2), (None, 1)), num_pages=70, max_num_seqs=16, ahead=True, max_prompt=8, max_tokens=60),
    "three groups": World(groups=((5, 2), (None, 4), (16, 8)), num_pages=60, max_drafts=2),
    "drafter": World(groups=((8, 4), (None, 8), (None, 6, 5)), num_pages=60, max_drafts=4, max_tokens=60),
    "drafter ahead": World(groups=((8, 4), (None, 8), (None, 1, 7)), num_pages=160, max_drafts=3, ahead=True),
    # Short answers so that the next turn fits, and enough room that it finds them.
    "pauses": World(groups=((8, 4), (None, 8), (None, 6, 5)), num_pages=160, max_drafts=4, max_tokens=16, pauses=True),
    "pauses ahead": World(
        groups=((8, 4), (None, 8), (None, 3, 7)), num_pages=200, max_drafts=3, max_tokens=16, ahead=True, pauses=True
    ),
    "open": World(max_drafts=3, ahead=True, plans_open=True, num_pages=60, max_num_seqs=3, max_tokens=80),
    "open, short of pages": World(groups=((3, 1), (None, 2)), max_drafts=4, ahead=True, plans_open=True, num_pages=50),
    "open drafter": World(
        groups=((8, 4), (None, 8), (None, 3, 7)), num_pages=150, max_drafts=4, ahead=True, plans_open=True, pauses=True
    ),
    "short first": World(on_cpu=True, num_pages=120, max_num_seqs=32, max_tokens=60),
    "short first, short of pages": World(
        groups=((3, 1), (None, 1)), on_cpu=True, num_pages=90, max_num_seqs=32, max_drafts=2, max_prompt=8
    ),
    "tenants": World(tenants=("a", "a", "a", "b", "c"), max_num_seqs=4),
    "tenants ahead": World(tenants=("a", "a", "a", "b"), ahead=True, max_drafts=3, max_num_seqs=5, max_tokens=80),
    "tenants, open drafter": World(
        groups=((8, 4), (None, 8), (None, 3, 7)),
        num_pages=90,
        max_drafts=4,
        ahead=True,
        plans_open=True,
        pauses=True,
        max_num_seqs=5,
        tenants=("a", "a", "b"),
    ),
    "tenants with media": World(has_media=True, num_pages=60, tenants=("a", "a", "b"), max_num_seqs=4),
    "media": World(has_media=True, num_pages=100, max_num_seqs=4),
    "media ahead": World(has_media=True, max_drafts=3, ahead=True, budget=24, num_pages=50, max_num_seqs=6),
    "media, short of pages": World(
        has_media=True, groups=((3, 1), (None, 1)), num_pages=70, max_num_seqs=3, budget=16, max_prompt=30, max_tokens=30
    ),
    "legs": World(has_media=True, leg_tokens=2, groups=((40, 4), (None, 8)), num_pages=120, max_num_seqs=4),
    "legs ahead": World(
        has_media=True, leg_tokens=1, has_many_legs=True, groups=((40, 2), (None, 3)), num_pages=150, ahead=True, budget=40
    ),
    "legs, tenants": World(
        has_media=True,
        leg_tokens=1,
        has_many_legs=True,
        num_pages=70,
        ahead=True,
        tenants=("a", "a", "b"),
        max_num_seqs=5,
        groups=((30, 4), (None, 8)),
    ),
    "legs, short first": World(
        has_media=True, leg_tokens=1, has_many_legs=True, on_cpu=True, num_pages=70, groups=((30, 4), (None, 8)), max_num_seqs=6
    ),
    "legs, long chunks": World(
        has_media=True,
        leg_tokens=1,
        has_many_legs=True,
        groups=((6, 4), (None, 16)),
        budget=128,
        num_pages=80,
        max_prompt=120,
        ahead=True,
    ),
    "no cache": World(prefix_caching=False, num_pages=34, max_drafts=3),
    "long chunks": World(groups=((6, 4), (None, 16)), budget=128, num_pages=36, max_prompt=120, max_drafts=1),
    "tiny budget": World(budget=3, max_drafts=2, num_pages=20, max_prompt=30),
    "parked": World(num_host_pages=60),
    "parked ahead": World(num_host_pages=60, ahead=True, num_pages=34, max_drafts=3, max_tokens=80),
    "parked without a cache": World(num_host_pages=200, prefix_caching=False, num_pages=34, max_drafts=3),
    "few host pages": World(
        groups=((3, 1), (None, 1)), num_pages=90, num_host_pages=40, max_num_seqs=16, ahead=True, max_prompt=8
    ),
    "parked, long chunks": World(
        groups=((6, 4), (None, 16)), budget=128, num_pages=30, num_host_pages=50, max_prompt=120, max_drafts=1, ahead=True
    ),
    "parked, three groups": World(groups=((5, 2), (None, 4), (16, 8)), num_pages=56, num_host_pages=90, max_drafts=2),
    "parked, open drafter": World(
        groups=((8, 4), (None, 8), (None, 3, 7)),
        num_pages=90,
        num_host_pages=120,
        max_drafts=4,
        ahead=True,
        plans_open=True,
        pauses=True,
    ),
    "parked tenants": World(tenants=("a", "a", "b"), num_host_pages=60, max_num_seqs=4, ahead=True, max_tokens=80),
    "parked media": World(has_media=True, num_host_pages=60, num_pages=50, max_drafts=3, ahead=True, budget=24),
    "parked, short first": World(
        groups=((3, 1), (None, 1)), on_cpu=True, num_pages=90, num_host_pages=90, max_num_seqs=32, max_drafts=2, max_prompt=8
    ),
}


def run_worlds(num_steps: int, seed: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for world in WORLDS.values():
        total += walk(world, seed, num_steps)
    return total


@pytest.mark.parametrize("num_steps", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_walk(num_steps: int) -> None:
    """Walk this many steps in each world. Everything that can happen does."""
    total = run_worlds(num_steps, seed=1)
    print(dict(total))
    assert total["steps"] >= 10 * num_steps
    assert total["preemptions"] >= num_steps // 2
    assert total["cancelled"] >= num_steps // 2
    assert total["rollbacks"] >= num_steps // 2
    assert total["prefix_hits"] >= num_steps // 10
    deferred = ("deferred tokens, left", "deferred tokens, due", "drafted keys")
    for name in (
        "forks",
        "timed_out",
        "holes",
        "copies",
        "mixed",
        "refused",
        "dropped_tokens",
        "scribbled",
        "open",
        "moved on",
        "media computed",
        "in legs",
        "middle legs",
        "parked",
        "restored",
        *deferred,
    ):
        assert total[name] >= num_steps // 20, f"{name} happened {total[name]} times only"


@pytest.mark.parametrize("world", ["pauses", "pauses ahead"])
def test_the_walk_sees_what_is_not_written(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk fails if a ledger forgets sequences that left, or writes what is due a step too late."""
    before, after = Ledger.due_before, Ledger.due_after
    monkeypatch.setattr(Ledger, "due_before", lambda self, plan: before(self, plan) and [])
    with pytest.raises(AssertionError, match="drafts from a wrong key"):
        walk(WORLDS[world], {"pauses": 0, "pauses ahead": 10}[world], 2000)
    monkeypatch.setattr(Ledger, "due_before", before)
    monkeypatch.setattr(Ledger, "due_after", lambda self, rows: after(self, rows) and [])
    with pytest.raises(AssertionError, match="drafts from a wrong key"):
        walk(WORLDS[world], 0, 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_walk_long(seed: int) -> None:
    assert run_worlds(2000, seed)["preemptions"] >= 500


any_world = given(
    windows=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=0, max_size=2),
    whole_page=st.integers(1, 9),
    drafter=st.lists(st.tuples(st.none(), st.integers(1, 9), st.integers(1, 8)), min_size=0, max_size=1),
    spare_pages=st.integers(0, 20),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    max_drafts=st.integers(0, 4),
    ahead=st.booleans(),
    plans_open=st.booleans(),
    pauses=st.booleans(),
    has_media=st.booleans(),
    num_host_pages=st.integers(0, 40),
    seed=st.integers(0, 2**32),
)
SETTINGS = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}


def walk_in(
    windows: list[tuple[int, int]],
    whole_page: int,
    drafter: list[tuple[None, int, int]],
    spare_pages: int,
    max_num_seqs: int,
    budget: int,
    max_drafts: int,
    ahead: bool,
    plans_open: bool,
    pauses: bool,
    has_media: bool,
    num_host_pages: int,
    seed: int,
) -> None:
    """Pages have any size, windows go down to one token, and memory goes down to what one request needs."""
    world = World(
        groups=(*windows, (None, whole_page), *drafter),
        # Room for about one request of medium length. Many are rejected, and most others must wait or be preempted.
        num_pages=60 // whole_page
        + sum(window // page + 3 for window, page in windows)
        + sum((60 + ahead) // page + 1 for _, page, ahead in drafter)
        + spare_pages,
        max_num_seqs=max_num_seqs,
        budget=budget,
        max_drafts=max_drafts,
        ahead=ahead,
        plans_open=plans_open,
        pauses=pauses,
        has_media=has_media,
        leg_tokens=1,
        has_many_legs=ahead,
        num_host_pages=num_host_pages,
    )
    walk(world, seed, 60)


@settings(max_examples=10, **SETTINGS)
@any_world
def test_walk_in_any_world(**facts: Any) -> None:
    walk_in(**facts)


@pytest.mark.slow
@settings(max_examples=200, **SETTINGS)
@any_world
def test_walk_in_many_worlds(**facts: Any) -> None:
    walk_in(**facts)
