"""A runner without a model: it does what a StepPlan says to a model of the page memory, and checks every key it would read.

The KV of a token is stood for by (position, hash of all tokens up to it), since that is what it depends on in a deep model.
A page that was recycled, shared wrongly, copied too early or not stored thus shows up as a wrong key. Tokens are drawn by
a hash of (all tokens before, seed, sample), so the output of a request must not depend on how it was scheduled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from culet.cache.spec import CacheLayout, KVGroup, KVSpec
from culet.errors import CuletError
from culet.scheduler.scheduler import Scheduler
from culet.scheduler.sequence import HOLE, max_held_pages
from culet.types import Drawn, Entry, FinishReason, Request, Row, Sampling, StepPlan, StepResult, TokenDelta

VOCAB = 50
STOP = 0
Key = tuple[int, int, int]  # page, group, offset


def make_layout(*groups: tuple[int | None, int]) -> CacheLayout:
    """Groups of (window, page tokens)."""
    return CacheLayout(
        slab_bytes=1,
        groups=tuple(
            KVGroup(
                name=f"g{index}",
                index=index,
                specs=(KVSpec(index, num_kv_heads=1, head_dim=2, rotated_dims=2, window=window, latent=False, itemsize=4),),
                page_tokens=page_tokens,
            )
            for index, (window, page_tokens) in enumerate(groups)
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
) -> Request:
    sampling = Sampling(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        seed=seed,
        sample=0,
        logprobs=0,
        prompt_logprobs=prompt_logprobs,
    )
    stop_token_ids = frozenset({STOP}) if stop else frozenset()
    return Request(request_id, tuple(prompt), sampling, n, max_tokens, stop_token_ids, priority, deadline)


def chain(before: int, token: int) -> int:
    """Hash of a token sequence, from the hash of all but its last token."""
    return hash((before, token, 0x5EED))


def draw(before: int, sampling: Sampling) -> int:
    """The token that follows the sequence with hash `before`."""
    return hash((before, sampling.seed, sampling.sample)) % VOCAB


def expected_tokens(request: Request, sample: int) -> list[int]:
    """What `sample` must draw, however it is scheduled."""
    state = 0
    for token in request.prompt_token_ids:
        state = chain(state, token)
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        tokens.append(draw(state, request.sampling_of(sample)))
        if tokens[-1] in request.stop_token_ids:
            break
        state = chain(state, tokens[-1])
    return tokens


@dataclass
class Slot:
    """The runner's buffer of one slot."""

    entry: Entry
    tokens: list[int]
    hashes: list[int] = field(default_factory=list)  # of tokens[: i + 1]
    proposals: list[int] = field(default_factory=list)
    first_start: int | None = None  # where its first row began: tokens that were not computed
    num_computed: int = 0  # by its rows, until the first draw

    def hashes_of(self, tokens: list[int]) -> list[int]:
        """Of each prefix of `tokens`, which begin with the slot's own."""
        for token in self.tokens[len(self.hashes) :]:
            self.hashes.append(chain(self.hashes[-1] if self.hashes else 0, token))
        hashes = self.hashes[: len(tokens)]
        for token in tokens[len(hashes) :]:
            hashes.append(chain(hashes[-1] if hashes else 0, token))
        return hashes


class FakeRunner:
    """Executes plans and raises AssertionError where a real one would compute nonsense."""

    def __init__(self, layout: CacheLayout, num_pages: int, *, max_num_seqs: int, budget: int, max_drafts: int = 0) -> None:
        self.layout = layout
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.max_drafts = max_drafts
        self.slots: dict[int, Slot] = {}
        self.page_group: list[int | None] = [None] * num_pages
        self.memory: list[dict[int, tuple[int, int]]] = [{} for _ in range(num_pages)]  # page -> offset -> KV
        self.counts: Counter[str] = Counter()
        self.rows: list[Row] = []  # of the last plan
        self._last_step = -1

    def execute(self, plan: StepPlan) -> StepResult:
        self._check_plan(plan)
        for entry in plan.entries:
            self.slots[entry.slot] = Slot(entry, list(entry.token_ids))
        self._copy(plan.copies)
        self.rows = list(plan.rows)
        written: dict[Key, int] = {}
        for row in plan.rows:
            self._write(row, written)
        for row in plan.rows:
            self._read(row, written)
        drawn: list[Drawn] = []
        for row in plan.rows:
            drawn += self._draw(row)
        scores = {row.slot: self._score(row) for row in plan.rows if row.is_prompt_logprobs}
        return StepResult(plan.step_id, tuple(drawn), scores)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.step_id == self._last_step + 1
        self._last_step = plan.step_id
        assert plan.rows
        assert plan.num_tokens <= self.budget
        self.counts["tokens"] += plan.num_tokens
        self.counts["mixed"] += any(row.num_logits for row in plan.rows) and not all(row.num_logits for row in plan.rows)
        for slots in ([row.slot for row in plan.rows], [entry.slot for entry in plan.entries]):
            assert len(set(slots)) == len(slots)
            assert all(0 <= slot < self.max_num_seqs for slot in slots)

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not set(sources) & set(targets), "copies would depend on their order"
        self.counts["copies"] += len(copies)
        for source, target in copies:
            self.memory[target] = dict(self.memory[source])
            self.page_group[target] = self.page_group[source]

    def _tokens_of(self, row: Row) -> list[int]:
        """All tokens of the row's sequence up to its end, drafts included."""
        slot = self.slots[row.slot]
        end = row.start + row.num_new
        assert row.num_drafts <= len(slot.proposals)
        assert end - row.num_drafts <= len(slot.tokens)
        if row.num_drafts:
            assert row.start == len(slot.tokens) - 1
        return slot.tokens[: end - row.num_drafts] + slot.proposals[: row.num_drafts]

    def _at(self, row: Row, group: KVGroup, position: int) -> Key:
        table = row.tables[group.index]
        index = position // group.page_tokens - table.first
        assert 0 <= index < len(table.pages), f"position {position} is not in the table {table}"
        return table.pages[index], group.index, position % group.page_tokens

    def _write(self, row: Row, written: dict[Key, int]) -> None:
        slot, end = self.slots[row.slot], row.start + row.num_new
        if slot.first_start is None:
            slot.first_start = row.start
            self.counts["hits"] += row.start > 0
            self.counts["hit tokens"] += row.start
        hashes = slot.hashes_of(self._tokens_of(row))
        for group in self.layout.groups:
            store_from = row.store_from[group.index]
            rule = row.start
            if group.window is not None:
                rule = max(row.start, end - group.window - max(row.num_logits, 1) + 1)
            assert store_from == rule
            self.counts["holes"] += store_from > row.start
            for position in range(store_from, end):
                key = self._at(row, group, position)
                page, _, offset = key
                assert written.setdefault(key, row.slot) == row.slot, f"{key} written by two rows"
                if self.page_group[page] != group.index:  # the slab's bytes now mean something else
                    self.page_group[page], self.memory[page] = group.index, {}
                self.memory[page][offset] = (position, hashes[position])

    def _read(self, row: Row, written: dict[Key, int]) -> None:
        """Every key that must come from pages: the context of all queries, and for the tail the row's own keys too."""
        end = row.start + row.num_new
        hashes = self.slots[row.slot].hashes_of(self._tokens_of(row))
        for group in self.layout.groups:
            context = range(group.first_visible(row.start), row.start)
            tail = range(group.first_visible(end - row.num_logits), end) if row.num_logits else ()
            for position in sorted({*context, *tail}):
                key = self._at(row, group, position)
                page, _, offset = key
                assert self.page_group[page] == group.index, f"page {page} belongs to group {self.page_group[page]}"
                assert self.memory[page].get(offset) == (position, hashes[position]), (
                    f"slot {row.slot} reads a wrong key at {key}"
                )
                assert written.get(key, row.slot) == row.slot, f"{key} is read and written in the same step"

    def _draw(self, row: Row) -> list[Drawn]:
        slot, end = self.slots[row.slot], row.start + row.num_new
        is_last = end - row.num_drafts == len(slot.tokens)
        assert bool(row.draw_slots) == is_last
        if not row.is_prompt_logprobs:
            assert row.num_logits == (row.num_drafts + 1 if is_last else 0)
        assert slot.first_start is not None
        if len(slot.tokens) == len(slot.entry.token_ids):
            slot.num_computed += row.num_new
            if is_last:  # a hit saves exactly the tokens before it, nothing is computed twice
                assert slot.num_computed == len(slot.entry.token_ids) - slot.first_start
        if not is_last:
            return []
        assert row.draw_slots[0] == row.slot
        hashes = slot.hashes_of(self._tokens_of(row))
        drafts = slot.proposals[: row.num_drafts]
        drawn = []
        for slot_id in row.draw_slots:
            each = self.slots[slot_id]
            assert each.tokens == slot.tokens
            assert slot_id == row.slot or not drafts
            if each.first_start is None:
                each.first_start = len(each.tokens)  # forked
                self.counts["forks"] += 1
            tokens: list[int] = []
            for index in range(end - row.num_drafts - 1, end):
                tokens.append(draw(hashes[index], each.entry.sampling))
                if len(tokens) > len(drafts) or drafts[len(tokens) - 1] != tokens[-1]:
                    break
            drawn.append((slot_id, tokens))
        self.counts["verifies"] += bool(drafts)
        return [self._append(slot_id, tokens) for slot_id, tokens in drawn]

    def _append(self, slot_id: int, tokens: list[int]) -> Drawn:
        slot = self.slots[slot_id]
        slot.tokens += tokens
        state = slot.hashes_of(slot.tokens)[-1]
        slot.proposals = []
        for number in range(hash((state, 1)) % (self.max_drafts + 1)):
            token = draw(state, slot.entry.sampling)
            if hash((state, number, 2)) % 3 == 0:
                token = (token + 1) % VOCAB  # a wrong one
            slot.proposals.append(token)
            state = chain(state, token)
        logprobs = tuple({token: -1.0} for token in tokens)
        return Drawn(slot_id, tuple(tokens), logprobs, len(slot.proposals))

    def _score(self, row: Row) -> tuple[dict[int, float], ...]:
        """The log-probability of token i is minus i."""
        assert row.num_logits == row.num_new <= 256
        slot, end = self.slots[row.slot], row.start + row.num_new
        assert end <= slot.entry.prompt_len
        return tuple({slot.tokens[i]: float(-i)} for i in range(row.start + 1, min(end + 1, slot.entry.prompt_len)))


@dataclass
class Told:
    """What came out for one sample."""

    tokens: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    scores: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    num_deltas: int = 0
    error: str = ""


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
        """Add, or raise what the scheduler raises."""
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        for sample in range(request.n):
            self.told[request.request_id, sample] = Told()

    def step(self, *, between: list[tuple[str, int | None]] | None = None) -> StepPlan | None:
        """Schedule, execute, cancel `between`, apply; in ahead mode the result applied is that of the plan before."""
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
        """Step until nothing is left."""
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
        expected = expected_tokens(request, delta.sample)
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
        """Everything has ended, and every page is free once checkpoints are dropped."""
        assert all(told.finish_reason is not None for told in self.told.values())
        counters, arena = self.scheduler.counters, self.scheduler.supply.arena
        assert counters.finished == len(self.told)
        assert counters.prefix_hits == self.runner.counts["hits"]
        assert counters.prefix_hit_tokens == self.runner.counts["hit tokens"]
        assert counters.forks == self.runner.counts["forks"]
        assert arena.num_free + arena.num_reclaimable == arena.num_pages
        self.scheduler.drop_checkpoints()
        assert arena.num_free == arena.num_pages
        assert arena.num_reclaimable == 0


def audit(scheduler: Scheduler) -> None:
    """Every page's references are exactly those of the sequences, checkpoints and copies that are there."""
    arena, prefix = scheduler.supply.arena, scheduler.supply.prefix
    held: Counter[int] = Counter(scheduler.supply.pending_sources)
    last_row = {id(plan.owner): plan.row for _, planned in scheduler._in_flight for plan in planned}
    for one in scheduler._running:
        assert one.slot is not None
        row = last_row.get(id(one))
        num_new, num_logits = (row.num_new, row.num_logits) if row and one.rows_in_flight else (0, 0)
        for pages in one.groups:
            held.update(pages.held)
            bound = max_held_pages(pages.group, num_new, num_logits)
            assert bound is None or len(pages.held) <= bound, f"{len(pages.held)} pages held, the bound is {bound}"
            assert pages.group.window is not None or HOLE not in pages.pages
    for one in scheduler._waiting:
        assert one.slot is None
        assert one.num_held == 0
    kept: Counter[int] = Counter()
    for checkpoint in prefix.checkpoints() if prefix else []:
        kept.update(checkpoint.pages)
    num_free = num_reclaimable = 0
    for page in range(arena.num_pages):
        assert arena.num_references(page) == (held[page], kept[page]), f"page {page} is counted wrongly"
        num_free += not held[page] and not kept[page]
        num_reclaimable += bool(not held[page] and kept[page])
    assert (arena.num_free, arena.num_reclaimable) == (num_free, num_reclaimable)
    slots = [one.slot for one in scheduler._running] + scheduler._free_slots
    assert sorted(slots) == list(range(len(slots)))
    assert [one.order for one in scheduler._running] == sorted(one.order for one in scheduler._running)
    assert [one.order for one in scheduler._waiting] == sorted(one.order for one in scheduler._waiting)


def try_add(drive: Drive, request: Request) -> CuletError | None:
    """Add; returns the refusal instead of raising it."""
    try:
        drive.add(request)
    except CuletError as error:
        return error
    return None
