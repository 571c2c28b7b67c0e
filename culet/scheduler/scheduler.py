"""The scheduler: which sequences compute which tokens in the next step, and on which pages.

`schedule` gives a plan, `apply` takes its result; in between, one more plan may be made (look-ahead by one). Everything
is ordered by (priority, arrival): the oldest never waits for a younger one, so every admitted request ends.
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator

from culet.cache.prefix import Match, PageKeys
from culet.cache.spec import CacheLayout
from culet.config import ScheduleConfig
from culet.errors import BadRequest, QueueFull
from culet.scheduler.admission import check_fits, reserved_pages
from culet.scheduler.budget import Grant, share_budget
from culet.scheduler.draft_length import Lengths
from culet.scheduler.page_allocator import PageAllocator
from culet.scheduler.rows import PlannedRow, commit_row, decode_shape, drafts_to_go_on, go_on, largest_row
from culet.scheduler.sequence import Sequence
from culet.scheduler.stats import Counters, SchedulerStats
from culet.types import Drawn, Entry, FinishReason, Logprobs, Request, Row, StepPlan, StepResult, TokenDelta


class Scheduler:
    """Continuous batching over the paged cache."""

    def __init__(
        self,
        layout: CacheLayout,
        num_slabs: int,
        config: ScheduleConfig,
        *,
        max_model_len: int,
        prefix_caching: bool = True,
        max_drafts: int = 0,
        policy: Lengths | None = None,
        plans_open: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_drafts`: most tokens a drafter proposes at a time. `policy` decides how many it should; None: always all.

        `plans_open`: the runner finds out by itself where a row begins whose last one has drafts in flight. Else a sequence is
        not planned again before it is known what was accepted.
        """
        self.layout = layout
        self.max_model_len = max_model_len
        self.max_drafts = max_drafts
        self.policy = policy
        self.plans_open = plans_open
        self.budget = config.max_num_batched_tokens
        # Pages that a token and its drafts may need, those in flight as well.
        self._most_fresh = sum(1 + group.pages_for(1 + 2 * max_drafts + group.ahead) for group in layout.groups)
        self.page_allocator = PageAllocator(layout, num_slabs, prefix_caching=prefix_caching)
        self.counters = Counters()
        self._clock = clock
        self._max_queue_len = config.max_queue_len
        # Every running sequence can have a token in every step, so none starves another.
        self._max_running = min(config.max_num_seqs, self.budget)
        self._free_slots = list(range(config.max_num_seqs))
        self._running: list[Sequence] = []  # by order
        self._waiting: list[Sequence] = []  # by order
        self._held: dict[str, Sequence] = {}  # by request id: not in the queue before `release`
        self._alive: dict[str, dict[int, Sequence]] = {}  # request id -> sample -> sequence
        self._deadlines: list[tuple[float, int, str]] = []  # a heap
        self._num_arrivals = 0
        self._next_step_id = 0
        self._in_flight: deque[tuple[int, list[PlannedRow], tuple[int, int] | None]] = deque()  # with `decode_shape`
        self._deltas: list[TokenDelta] = []
        self._timed: tuple[tuple[int, int] | None, float] = (None, 0.0)  # sequences and drafts of the last step, and its end

    # Requests come and go

    def add(self, request: Request, *, held: bool = False) -> None:
        """Queue a request; refuses what can never fit, and what the queue has no room for. `held`: it waits for `release`."""
        check_fits(request, self.layout, self.page_allocator.arena.num_pages, self.max_model_len)
        if request.request_id in self._alive:
            raise BadRequest(f"request_id: got {request.request_id!r}, which is still running")
        if len(self._waiting) + len(self._held) >= self._max_queue_len:
            raise QueueFull(
                f"{len(self._waiting) + len(self._held)} sequences wait already, the queue's bound", hint="try again later"
            )
        arrival = self._num_arrivals
        self._num_arrivals += 1
        first, *others = [Sequence(request, sample, arrival, self.layout, self._keys()) for sample in range(request.n)]
        first.siblings = others
        first.arrived_at = self._clock()
        self._alive[request.request_id] = {one.sample: one for one in (first, *others)}
        if held:
            self._held[request.request_id] = first
        else:
            insort(self._waiting, first, key=lambda one: one.order)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, arrival, request.request_id))

    def release(self, request_id: str) -> None:
        """Let a held request into the queue, in the order of its arrival. One that has ended meanwhile stays so."""
        one = self._held.pop(request_id, None)
        if one is not None:
            insort(self._waiting, one, key=lambda each: each.order)

    def cancel(
        self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL, *, error: str = ""
    ) -> None:
        """End a request, or one sample of it, at any time. What has ended already stays as it ended."""
        alive = self._alive.get(request_id, {})
        for one in list(alive.values()) if sample is None else [alive[sample]] if sample in alive else []:
            self._finish(one, reason)
            self._deltas.append(one.tell(error=error))

    def fail(self, error: str) -> None:
        """End everything: a step did not run, so what pages hold is unknown. Plans without a result are forgotten."""
        self._in_flight.clear()
        for request_id in list(self._alive):
            self.cancel(request_id, reason=FinishReason.ERROR, error=error)
        self.drop_resume_points()

    def drop_resume_points(self) -> None:
        """Empty the prefix cache."""
        if self.page_allocator.prefix is not None:
            self.page_allocator.prefix.clear()

    def deltas(self) -> list[TokenDelta]:
        """Everything that happened since the last call, cancels included."""
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether a sequence has yet to end, or a result to come. (`deltas` may hold more even when not.)"""
        return bool(self._alive or self._in_flight)

    def stats(self) -> SchedulerStats:
        arena, prefix = self.page_allocator.arena, self.page_allocator.prefix
        held = {
            group.name: len({page for one in self._running for page in one.groups[group.index].held})
            for group in self.layout.groups
        }
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=arena.num_pages,
            num_free_pages=arena.num_free,
            num_resume_point_pages=arena.num_reclaimable,
            num_held_pages=held,
            num_resume_points=prefix.num_resume_points if prefix else 0,
            counters=self.counters.copy(),
        )

    # A step is planned

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing to do, or nothing before the result in flight is applied."""
        assert len(self._in_flight) <= 1, "two plans wait for their results already"
        self._expire()
        is_open = bool(self._in_flight) and any(one.awaits_drafts and one.draws_in_flight for one in self._running)
        counts = self._drafts_to_go_on(is_open=is_open)
        # A batch of which a part runs ahead would run in two halves from then on: all do, or none.
        if is_open and counts is None:
            return None
        if self.policy is not None:
            self.policy.see([one.pace for one in self._running])
        entries: list[Entry] = []
        if counts is not None:
            planned = [self._plan_to_go_on(one, count) for one, count in zip(self._running, counts, strict=True)]
            copies, shape = self.page_allocator.drain_copies(), decode_shape(planned)
        else:
            planned = self._plan_rows(share_budget([one for one in self._running if one.is_ready], self.budget), entries)
            # Forks and checkpoints come after this plan's copies are closed: their pages get content in its forward.
            copies = self.page_allocator.drain_copies() if planned else ()
            for plan in planned:
                entries += self._fork(plan)
            for plan in planned:
                self._checkpoint_row(plan)
            shape = decode_shape(planned)
        if not planned:
            return None
        rows = tuple([plan.row for plan in planned])
        return StepPlan(self._count_step(planned, shape), tuple(entries), copies, rows)

    def _count_step(self, planned: list[PlannedRow], shape: tuple[int, int] | None) -> int:
        """A step is on its way; its number."""
        step_id = self._next_step_id
        self._next_step_id += 1
        self.counters.steps += 1
        self._in_flight.append((step_id, planned, shape))
        return step_id

    def _drafts_to_go_on(self, *, is_open: bool) -> list[int] | None:
        """Drafts of each sequence, where all go on and there are pages for all who need any; most steps are such.

        `is_open`: drafts are in flight. Who could start meanwhile must not wait for all to go on.
        """
        if not (self._is_full and self._running) or (is_open and not self.plans_open):
            return None
        counts = drafts_to_go_on(self._running, self.budget, is_open=is_open)
        if counts is None:
            return None
        num_restless = sum([not one.is_calm(1 + count) for one, count in zip(self._running, counts, strict=True)])
        return counts if not num_restless or num_restless * self._most_fresh <= self.page_allocator.available else None

    def _plan_to_go_on(self, one: Sequence, num_drafts: int) -> PlannedRow:
        """The row of a sequence that goes on with so many drafts."""
        if one.is_calm(1 + num_drafts):
            return go_on(one, num_drafts, self._num_wanted(one))
        (plan,) = self._plan_row(Grant(one, 1 + num_drafts, num_drafts), may_preempt=False)
        return plan

    @property
    def _is_full(self) -> bool:
        """Whether nobody could start now."""
        return not self._waiting or len(self._running) == self._max_running

    def _plan_rows(self, grants: list[Grant], entries: list[Entry]) -> list[PlannedRow]:
        """Rows for `grants`, and where pages are left for those who start with this step, whose entries are added."""
        planned: list[PlannedRow] = []
        num_preempted = self.counters.preemptions
        for grant in grants:
            if grant.sequence.is_running:  # else an older one has taken its pages just now
                planned += self._plan_row(grant, may_preempt=True)
        if len(planned) == len(grants) and self.counters.preemptions == num_preempted:  # nobody lacks pages
            for one, rows in self._admissions(self.budget - sum(plan.row.num_new for plan in planned)):
                entries.append(one.entry())
                planned += rows
        return planned

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, arrival, request_id = heapq.heappop(self._deadlines)
            alive = self._alive.get(request_id)
            if alive and next(iter(alive.values())).arrival == arrival:
                self.cancel(request_id, reason=FinishReason.TIMEOUT)

    def _plan_row(self, grant: Grant, *, may_preempt: bool) -> list[PlannedRow]:
        """The row for `grant`, smaller if pages are short; none where not even one token finds room.

        Younger ones lose their pages only where nothing else lets this one go on.
        """
        one = grant.sequence
        one.release_behind(self.page_allocator)
        num_spared = len(self._running) * len(self.layout.groups)  # a page in each group for everybody
        while (shape := largest_row(grant, self.page_allocator.available, num_spared)) is None:
            if not may_preempt or self._running[-1] is one:
                return []
            self._preempt(self._running[-1])
        return [commit_row(one, shape, self.page_allocator, self._num_wanted(one) if shape.draws else 0)]

    def _num_wanted(self, one: Sequence) -> int:
        """Proposals to make behind the token that `one` is about to draw."""
        count = self.max_drafts
        if count and self.policy is not None:
            # A sequence that is about to start does not run yet.
            count = self.policy.wanted(one.pace, max(1, len(self._running)))
        # The token drawn now and the one after the last draft need none.
        return max(0, min(count, one.num_left - 2)) if count else 0

    def _preempt(self, one: Sequence) -> None:
        """Take its slot and pages; it is computed again later, what it has drawn included."""
        self._leave(one)
        insort(self._waiting, one, key=lambda each: each.order)
        self.counters.preemptions += 1

    def _leave(self, one: Sequence) -> None:
        """Out of the running ones, or of those that wait if its admission failed: slot and pages are free."""
        assert one.slot is not None
        (self._running if one in self._running else self._waiting).remove(one)
        heapq.heappush(self._free_slots, one.slot)
        one.slot = None
        one.release_all(self.page_allocator)

    # A sequence starts

    def _admissions(self, budget: int) -> Iterator[tuple[Sequence, list[PlannedRow]]]:
        """Start waiting sequences, strictly in order, while tokens, slots and pages last."""
        if not (self._waiting and budget and len(self._running) < self._max_running):
            return
        # Prompts that are not all computed have been promised pages that they do not hold yet.
        reserved = sum(reserved_pages(one, self.budget) for one in self._running if one.num_uncomputed > 1)
        while self._waiting and budget and len(self._running) < self._max_running:
            one = self._waiting[0]
            assert not one.rows_in_flight, "a preempted sequence starts again before its last result is known"
            rows = self._admit(one, budget, reserved)
            if not rows:
                return
            budget -= rows[0].row.num_new
            reserved += reserved_pages(one, self.budget) if one.num_uncomputed > 1 else 0
            yield one, rows

    def _admit(self, one: Sequence, budget: int, reserved: int) -> list[PlannedRow]:
        """Give `one` a slot and its first row, resumed from a checkpoint where there is one; [] if it must wait."""
        match = self._find_prefix(one)
        if match.checkpoint is not None:
            rows = self._start(one, match, budget, reserved)
            # Alone it must start in any case: the checkpoint it does not fit beside gives way.
            if rows or self._running:
                return rows
        return self._start(one, Match(None, 0, match.known), budget, reserved)

    def _start(self, one: Sequence, match: Match, budget: int, reserved: int) -> list[PlannedRow]:
        if match.checkpoint is not None and not one.resume_from(match.checkpoint, match.resume, self.page_allocator):
            return []
        one.prefill_end = len(one.tokens)
        one.resume_points = one.points_beyond(match) if self.page_allocator.prefix is not None else ()
        rows: list[PlannedRow] = []
        if not self._running or reserved + reserved_pages(one, self.budget) <= self.page_allocator.available:
            one.slot = heapq.heappop(self._free_slots)
            rows = self._plan_row(Grant(one, min(one.next_chunk, budget)), may_preempt=False)
            if not rows:
                heapq.heappush(self._free_slots, one.slot)
                one.slot = None
        if not rows:
            one.release_all(self.page_allocator)
            return []
        self._waiting.remove(one)
        insort(self._running, one, key=lambda each: each.order)
        if one.arrived_at and not one.is_announced:
            one.queue_s = self._clock() - one.arrived_at
        self._count_prefix(one, match)
        return rows

    def _find_prefix(self, one: Sequence) -> Match:
        """Where `one` can resume. Prompt tokens whose log-probabilities are wanted must be computed."""
        prefix = self.page_allocator.prefix
        if prefix is None:
            return Match(None, 0, 0)
        assert one.keys is not None
        limit = min(len(one.tokens) - 1, one.num_scored) if one.needs_scoring else len(one.tokens) - 1
        match = prefix.find(one.tokens, one.keys, limit)
        if match.checkpoint is not None:
            # Even if it must wait: better not evict it meanwhile, nor where the next prompt may part from this one.
            prefix.touch(match.checkpoint)
            for length in one.request.resume_points:
                prefix.touch_at(one.tokens, length, one.keys)
        return match

    def _count_prefix(self, one: Sequence, match: Match) -> None:
        if self.page_allocator.prefix is None:
            return
        self.counters.prefix_queries += 1
        self.counters.prefix_query_tokens += len(one.tokens)
        self.counters.prefix_hits += match.checkpoint is not None
        self.counters.prefix_hit_tokens += match.resume
        if not one.is_announced:
            one.num_cached = min(match.resume, one.prompt_len)

    def _fork(self, plan: PlannedRow) -> list[Entry]:
        """At the end of a prompt, let the other samples draw from the same logits; who finds no room waits in the queue."""
        one = plan.owner
        if not (plan.drawers and one.siblings):
            return []
        siblings, one.siblings = one.siblings, []
        forked: list[Sequence] = []
        for sibling in siblings:
            # A page per group: the copy of the partial one, or the next.
            if len(self._running) < self._max_running and self.page_allocator.available >= len(self.layout.groups):
                sibling.slot = heapq.heappop(self._free_slots)
                sibling.fork_from(one, self.page_allocator)
                insort(self._running, sibling, key=lambda each: each.order)
                forked.append(sibling)
            else:
                insort(self._waiting, sibling, key=lambda each: each.order)
        plan.drawers += forked
        plan.row = plan.row._replace(draw_slots=tuple(each.slot for each in plan.drawers if each.slot is not None))
        self.counters.forks += len(forked)
        return [sibling.entry() for sibling in forked]

    def _checkpoint_row(self, plan: PlannedRow) -> None:
        """Keep a checkpoint where a prompt ends, and where later ones may part from it: these last, to be evicted later."""
        one = plan.owner
        if plan.row.start < one.prefill_end == one.num_computed:
            self._checkpoint(one, one.num_computed)
        for length in plan.resume_points:
            self._checkpoint(one, length)

    def _checkpoint(self, one: Sequence, length: int) -> None:
        prefix, tables = self.page_allocator.prefix, one.raw_tables()
        # A forked sequence whose pages are still to be copied has nothing yet that its parent has not kept.
        if prefix is None or not length or any(self.page_allocator.is_awaiting_copy(table.pages) for table in tables):
            return
        assert one.keys is not None
        prefix.insert(one.tokens, length, one.keys, tables)

    # A result comes back

    def apply(self, result: StepResult) -> None:
        """Take the result of the oldest plan in flight."""
        step_id, planned, shape = self._in_flight.popleft()
        assert step_id == result.step_id, f"got the result of step {result.step_id}, expected that of {step_id}"
        if self.policy is not None:
            self._time(shape)
        drawn = iter(result.drawn)
        for plan in planned:
            row, members = plan.row, plan.members
            for one in members:
                one.rows_in_flight -= 1
            scores = result.prompt_logprobs[row.slot] if row.is_prompt_logprobs else ()
            if scores and not plan.drawers and plan.owner.finish_reason is None:
                self._deltas.append(plan.owner.tell(scores=scores))
            for one, slot in zip(plan.drawers, row.draw_slots, strict=True):
                draw = next(drawn)
                assert draw.slot == slot, f"got a draw of slot {draw.slot}, expected one of {slot}"
                self._accept(one, row, draw, scores if one is plan.owner else ())
            for one in members:
                if not one.rows_in_flight and one.is_running:
                    one.release_behind(self.page_allocator)
        assert next(drawn, None) is None, "more draws than the plan asked for"

    def _time(self, shape: tuple[int, int] | None) -> None:
        """Tell the policy how long a step took that decodes as the one before it did."""
        now = self._clock()
        if shape is not None and self.policy is not None and shape == self._timed[0]:
            self.policy.took(*shape, now - self._timed[1])
        self._timed = shape, now

    def _accept(self, one: Sequence, row: Row, drawn: Drawn, scores: tuple[Logprobs, ...]) -> None:
        """Append what was drawn, up to a stop; the KV of drafts that were not accepted is forgotten."""
        num_drafts, token_ids = row.num_drafts, drawn.token_ids
        num_drawn = len(token_ids)
        assert 1 <= num_drawn <= num_drafts + 1, f"{num_drawn} tokens drawn from {num_drafts} drafts"
        assert drawn.num_proposed <= self.max_drafts, f"{drawn.num_proposed} drafts proposed, declared were {self.max_drafts}"
        one.draws_in_flight -= 1
        one.num_open -= num_drafts
        if one.finish_reason is not None:
            self.counters.dropped_tokens += num_drawn
            return
        if drawn.fault:
            self._finish(one, FinishReason.ERROR)
            self._deltas.append(one.tell(error=drawn.fault))
            return
        if num_drafts:
            self.counters.count_verify(num_drafts, num_drawn - 1)
            if self.policy is not None:
                self.policy.note(one.pace, num_drafts, num_drawn - 1)
        if one.is_running:  # else preempted since: the tokens count, the pages are gone
            one.num_computed += num_drawn - 1
            if not one.rows_in_flight:  # else it has been planned with these proposals, and with pages for all it may accept
                one.num_proposed = drawn.num_proposed
                # An open row before this one may have left some, too.
                if num_drafts or self.plans_open:
                    one.release_beyond(self.page_allocator)
        count, reason = one.append(token_ids)
        if reason is not None:
            self.counters.dropped_tokens += num_drawn - count
            self._finish(one, reason)
        num_kept = min(num_drawn - 1, count)
        drafts = num_kept, num_drafts - num_kept
        self._deltas.append(one.tell(token_ids[:count], drawn.logprobs[:count], scores, drafts=drafts))

    def _finish(self, one: Sequence, reason: FinishReason) -> None:
        """End `one`, wherever it is. What it has computed stays as a checkpoint for the next turn."""
        assert one.finish_reason is None
        one.finish_reason = reason
        self.counters.finished += 1
        self.counters.cancelled += reason is FinishReason.CANCEL
        self.counters.timed_out += reason is FinishReason.TIMEOUT
        is_held = False
        alive = self._alive[one.request.request_id]
        del alive[one.sample]
        if not alive:
            del self._alive[one.request.request_id]
        if one.is_running:
            if reason is not FinishReason.ERROR:
                self._checkpoint(one, min(one.num_computed, len(one.tokens)))
            self._leave(one)
        elif one in self._waiting:
            self._waiting.remove(one)
        elif is_held := self._held.get(one.request.request_id) is one:
            del self._held[one.request.request_id]
        else:
            leader = next(other for other in alive.values() if one in other.siblings)
            leader.siblings.remove(one)
        if one.siblings:  # they waited for its prompt: the next one computes it
            heir, *heir.siblings = one.siblings
            one.siblings = []
            if is_held:
                self._held[heir.request.request_id] = heir
            else:
                insort(self._waiting, heir, key=lambda each: each.order)

    def _keys(self) -> PageKeys | None:
        return None if self.page_allocator.prefix is None else PageKeys(self.page_allocator.prefix.page_tokens)
