"""A scheduler on the fake runner, audited after every move, with helpers for its tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count

from culet.cache.prefix import POINT_SLACK
from culet.cache.spec import CacheLayout, KVGroup, KVSpec
from culet.config import ScheduleConfig
from culet.errors import CuletError
from culet.scheduler.group_pages import HOLE, max_held_pages, span
from culet.scheduler.rows import PlannedRow
from culet.scheduler.scheduler import Scheduler
from culet.scheduler.sequence import MAX_TRAIL
from culet.types import FinishReason, MediaSpan, Request, Row, StepPlan, StepResult, TokenDelta
from tests.engine.scheduler.fake_runner import STOP, FakeRunner, expected_tokens
from tests.samplings import PLAIN


def make_layout(*groups: tuple[int | None, int] | tuple[int | None, int, int]) -> CacheLayout:
    """Make groups from (window, page tokens) or (None, page tokens, tokens that a drafter writes ahead)."""
    return CacheLayout(
        slab_bytes=1,
        groups=tuple(
            KVGroup(
                name=f"g{index}",
                index=index,
                specs=(KVSpec(index, 1, 2, 2, window, latent=False, itemsize=4, ahead=ahead[0] if ahead else 0),),
                page_tokens=page_tokens,
            )
            for index, (window, page_tokens, *ahead) in enumerate(groups)
        ),
    )


def make_request(
    request_id: str,
    prompt: list[int] | tuple[int, ...],
    max_tokens: int = 8,
    *,
    n: int = 1,
    seed: int = 0,
    stop: bool = True,
    prompt_logprobs: int | None = None,
    priority: int = 0,
    deadline: float | None = None,
    resume_lengths: tuple[int, ...] = (),
    media: tuple[MediaSpan, ...] = (),
    cache_salt: str = "",
    tenant: str = "",
) -> Request:
    sampling = replace(PLAIN, seed=seed, prompt_logprobs=prompt_logprobs)
    stop_token_ids = frozenset({STOP}) if stop else frozenset()
    return Request(
        request_id,
        tuple(prompt),
        sampling,
        n,
        max_tokens,
        stop_token_ids,
        priority,
        deadline,
        resume_lengths=resume_lengths,
        media=media,
        cache_salt=cache_salt,
        tenant=tenant,
    )


@dataclass
class Told:
    """The output of one sample."""

    tokens: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    scores: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    num_deltas: int = 0
    error: str = ""
    expected: list[int] = field(default_factory=list)  # what it must draw in all, once it is known


class Drive:
    """A scheduler with a fake runner, stepped synchronously or one plan ahead, and audited after every move."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, *, ahead: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.ahead = ahead
        self.requests: dict[str, Request] = {}
        self.told: dict[tuple[str, int], Told] = {}
        self.waiting_result: StepResult | None = None

    def add(self, request: Request) -> None:
        """Add a request, or raise the scheduler's error."""
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        for sample in range(request.n):
            self.told[request.request_id, sample] = Told()

    def step(self, *, between: list[tuple[str, int | None]] | None = None) -> StepPlan | None:
        """Schedule, execute, cancel `between`, and apply. In ahead mode, apply the previous plan's result."""
        plan = self.scheduler.schedule()
        audit(self.scheduler)
        result = None if plan is None else self.runner.execute(plan)
        for request_id, sample in between or []:
            self.scheduler.cancel(request_id, sample)
            audit(self.scheduler)
        if self.ahead:
            if self.waiting_result is None and plan is None:
                assert not self.scheduler.has_work, "work is left, but nothing is planned"
            result, self.waiting_result = self.waiting_result, result
        elif plan is None:
            assert not self.scheduler.has_work, "work is left, but nothing is planned"
        if result is not None:
            self.scheduler.apply(result)
        audit(self.scheduler)
        for delta in self.scheduler.deltas():
            self.hear(delta)
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Step until no work is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        for delta in self.scheduler.deltas():
            self.hear(delta)

    def hear(self, delta: TokenDelta) -> None:
        told = self.told[delta.request_id, delta.sample]
        request = self.requests[delta.request_id]
        assert told.finish_reason is None, "told something after the end"
        assert told.num_deltas == 0 or delta.num_cached_tokens == 0
        told.num_deltas += 1
        told.num_cached += delta.num_cached_tokens
        told.tokens += delta.token_ids
        told.num_logprobs += len(delta.logprobs)
        told.scores += [dict(score) for score in delta.prompt_logprobs]
        told.finish_reason = delta.finish_reason
        told.error = delta.error
        expected = told.expected = told.expected or expected_tokens(request, delta.sample)
        assert told.tokens == expected[: len(told.tokens)], f"{delta.request_id}/{delta.sample} drew other tokens"
        assert told.num_logprobs == len(told.tokens)
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert told.tokens == expected
            assert (delta.finish_reason is FinishReason.STOP) == (expected[-1] in request.stop_token_ids)
            assert delta.stop_token_id == (expected[-1] if delta.finish_reason is FinishReason.STOP else None)
            if request.sampling.prompt_logprobs is not None and delta.sample == 0:
                prompt = request.prompt_token_ids
                assert told.scores == [{prompt[i]: float(-i)} for i in range(1, len(prompt))]
        elif delta.finish_reason is None:
            assert delta.token_ids or delta.prompt_logprobs
            assert delta.stop_token_id is None
            assert len(told.tokens) < len(expected)

    def check_end(self) -> None:
        """Check that everything has ended, and that every page is free once resume points are dropped."""
        assert all(told.finish_reason is not None for told in self.told.values())
        counters, arena = self.scheduler.counters, self.scheduler.page_allocator.arena
        assert counters.finished == len(self.told)
        assert counters.prefix_hits + counters.restart_hits + counters.restored == self.runner.counts["hits"]
        hit_tokens = counters.prefix_hit_tokens + counters.restart_hit_tokens + counters.restored_tokens
        assert hit_tokens == self.runner.counts["hit tokens"]
        assert counters.forks == self.runner.counts["forks"]
        assert arena.num_free + arena.num_reclaimable == arena.num_pages
        host = self.scheduler.page_allocator.host
        host.drain()  # what was parked last has ended
        assert host.num_free == host.num_pages
        self.scheduler.drop_resume_points()
        assert arena.num_free == arena.num_pages
        assert arena.num_reclaimable == 0


def num_kept_queries(plan: PlannedRow) -> set[int]:
    """Return how many queries at the end of a row may need all their keys.

    These are the queries with logits and, if pages suffice, those from a little before the first resume point on.
    """
    row, end = plan.row, plan.row.start + plan.row.num_new
    assert all(row.start < point <= end <= point + MAX_TRAIL for point in plan.resume_lengths)
    own = max(1, row.num_logits)
    counts = set() if any(point < end for point in plan.resume_lengths) else {own}
    return counts | {max(own, end - point + slack) for point in plan.resume_lengths[:1] for slack in (POINT_SLACK, 1)}


def audit_stored(scheduler: Scheduler, plan: PlannedRow) -> None:
    """Check that a row stores exactly what later queries will see."""
    row, end = plan.row, plan.row.start + plan.row.num_new
    rules = [
        tuple(
            max(row.start, 0 if group.window is None else end - group.window - count + 1) for group in scheduler.layout.groups
        )
        for count in num_kept_queries(plan)
    ]
    assert row.store_from in rules


def assert_counted(counts: list[int], expected: Counter[int]) -> None:
    """Check the references to every page. Lists are compared as a whole, because this runs after every step."""
    wanted = [0] * len(counts)
    for page, num_references in expected.items():
        wanted[page] = num_references
    wrong = [page for page in range(len(counts)) if counts[page] != wanted[page]] if counts != wanted else []
    assert not wrong, f"pages {wrong} are counted wrongly"


def audit_host(scheduler: Scheduler) -> None:
    """Check that every host page is free, held by one waiting sequence, or left by the next plan's loads."""
    host = scheduler.page_allocator.host
    held = [page for seq in scheduler._waiting for parked in seq.parked for page in parked.host_pages]
    loading = [page for page in host._loads.values() if page not in host._held]
    assert sorted([*host._free, *held, *loading]) == list(range(host.num_pages))
    assert host._held == set(held)
    assert host._saves.keys() <= {*held, *loading}
    for seq in scheduler._running:
        assert not seq.parked
        assert not seq.parked_len


def audit(scheduler: Scheduler) -> None:
    """Check that every page's references are exactly those of the existing sequences, resume points and copies."""
    arena, prefix = scheduler.page_allocator.arena, scheduler.page_allocator.prefix
    held: Counter[int] = Counter(scheduler.page_allocator.pending_sources)
    last_plan = {id(plan.owner): plan for step in scheduler._in_flight for plan in step.planned}
    for plan in last_plan.values():
        audit_stored(scheduler, plan)
    for seq in scheduler._running:
        assert seq.slot is not None
        last = last_plan.get(id(seq))
        num_new, num_queries = (seq.num_underway, seq.num_underway)
        if last and seq.rows_in_flight:
            num_new, num_queries = last.row.num_new, max(num_kept_queries(last))
        for pages in seq.groups:
            held.update(pages.held)
            bound = max_held_pages(pages.group, num_new, num_queries)
            if bound is not None and pages.reach is not None and scheduler.plans_open and seq.rows_in_flight:
                # This allows for all drafts of two rows being accepted.
                bound = max(bound, span(max(pages.reach - 1, 1) + 2 * scheduler.max_drafts + 1, pages.page_tokens))
            assert bound is None or len(pages.held) <= bound, f"{len(pages.held)} pages held, the bound is {bound}"
            assert pages.group.window is not None or HOLE not in pages.pages
    for seq in scheduler._waiting:
        assert seq.slot is None
        assert seq.num_held == 0
        assert seq.num_computed == seq.parked_len
    audit_host(scheduler)
    kept: Counter[int] = Counter()
    for point in prefix.resume_points() if prefix else []:
        kept.update(point.pages)
    assert_counted(arena._held, held)
    assert_counted(arena._kept, kept)
    num_reclaimable = len(kept.keys() - held.keys())
    assert (arena.num_free, arena.num_reclaimable) == (arena.num_pages - len(held) - num_reclaimable, num_reclaimable)
    slots = [seq.slot for seq in scheduler._running] + scheduler._free_slots
    assert sorted(slots) == list(range(len(slots)))
    if not scheduler._waiting.is_shared:
        assert [seq.order for seq in scheduler._running] == sorted(seq.order for seq in scheduler._running)
    for tenant in {seq.tenant for seq in (*scheduler._waiting, *scheduler._running)}:
        waiting = [seq.order for seq in scheduler._waiting if seq.tenant == tenant]
        assert waiting == sorted(waiting)
        assert scheduler._waiting.num_running(tenant) == sum(seq.tenant == tenant for seq in scheduler._running)
    assert len(scheduler._waiting) == len(list(scheduler._waiting))


def try_add(drive: Drive, request: Request) -> CuletError | None:
    """Add a request and return its error instead of raising it."""
    try:
        drive.add(request)
    except CuletError as error:
        return error
    return None


LAYOUT = make_layout((8, 4), (None, 8))


def make(
    layout: CacheLayout = LAYOUT,
    num_pages: int = 200,
    *,
    seqs: int = 8,
    budget: int = 64,
    queue: int = 100,
    ahead: bool = False,
    max_drafts: int = 0,
    prefix_caching: bool = True,
    on_cpu: bool = False,
    max_model_len: int = 1000,
    leg_tokens: int = 0,
    num_host_pages: int = 0,
) -> Drive:
    """Make a scheduler and a fake runner, with a clock that stands still unless `drive.now` is set."""
    drive: Drive
    scheduler = Scheduler(
        layout,
        num_pages,
        ScheduleConfig(seqs, budget, queue),
        max_model_len=max_model_len,
        prefix_caching=prefix_caching,
        max_drafts=max_drafts,
        on_cpu=on_cpu,
        leg_tokens=leg_tokens,
        clock=lambda: getattr(drive, "now", 0.0),
    )
    scheduler.page_allocator.host.grow(num_host_pages)
    sizes = {"max_num_seqs": seqs, "budget": budget, "max_drafts": max_drafts, "num_host_pages": num_host_pages}
    runner = FakeRunner(layout, num_pages, **sizes)
    drive = Drive(scheduler, runner, ahead=ahead)
    return drive


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i + salt) % 40 + 1 for i in range(length)]


def endless(name: str, length: int, max_tokens: int = 20, **kwargs: object) -> Request:
    """Make a request that stops only at max_tokens."""
    return make_request(name, prompt(length), max_tokens, stop=False, **kwargs)  # type: ignore[arg-type]


def row_of(plan: StepPlan | None, slot: int) -> Row:
    assert plan is not None
    return next(row for row in plan.rows if row.slot == slot)


def first_seed(length: int, wanted: str, sample: int = 0) -> int:
    """Return a seed with which the sample draws a stop token at once, late, or never."""
    for seed in count():
        tokens = expected_tokens(make_request("x", prompt(length), 30, seed=seed), sample)
        if {"at once": tokens == [STOP], "late": 5 < len(tokens) < 30, "never": STOP not in tokens}[wanted]:
            return seed
    raise AssertionError
