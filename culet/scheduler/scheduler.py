"""The scheduler decides which sequences compute which tokens in the next step, and on which pages.

`schedule` returns a plan and `apply` takes its result. In between, one more plan may be made (look-ahead by one). A tenant's
sequences are ordered by (priority, arrival), and tenants take turns (`fairness.py`). The first in this order never waits for a
later one, except for short prompts on a CPU in every other step (`budget.py`) and for a preempted sequence's time slice. So
every admitted request ends.
"""

from __future__ import annotations

import heapq
import itertools
import time
from bisect import insort
from collections import deque
from collections.abc import Callable

from culet.cache.point_tree import Match
from culet.cache.spec import CacheLayout
from culet.config import ScheduleConfig
from culet.scheduler.admission import (
    Shortage,
    check_fits,
    check_queue,
    growth_pages,
    pages_to_start,
    promised_pages,
    reserved_pages,
)
from culet.scheduler.budget import Grant, ShortFirst, make_step_budget, share_step, short_prompts
from culet.scheduler.deadlines import Deadlines
from culet.scheduler.draft_length import DraftLengths
from culet.scheduler.fairness import BY_OLDER, BY_ORDER, FairQueue, StepPrompts, TimeSlices
from culet.scheduler.media.encoding import count_media, plan_encoding
from culet.scheduler.media.features import NOTHING, FeatureLedger
from culet.scheduler.media.legs import Legs
from culet.scheduler.page_allocator import PageAllocator
from culet.scheduler.reuse import complete_start, find_prefix, keep_point, keep_row_points, take_known_pages
from culet.scheduler.rows import (
    PlannedRow,
    PlannedStep,
    StepTimer,
    commit_row,
    continue_in_pages,
    drafts_to_continue,
    largest_row,
    num_wanted,
)
from culet.scheduler.sequence import Sequence, held_pages, samples_of
from culet.scheduler.stats import Counters, SchedulerStats, take_snapshot
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
        policy: DraftLengths | None = None,
        plans_open: bool = False,
        on_cpu: bool = False,
        features: FeatureLedger | None = None,
        leg_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up an empty scheduler.

        `max_drafts` is the most tokens that a drafter proposes at a time. `policy` decides how many it should propose. Without
        a policy, it always proposes all. If `plans_open`, the runner itself finds out where a row begins when drafts of the
        previous row are in flight. Otherwise a sequence is planned again only after its accepted drafts are known. If `on_cpu`,
        every token makes a step longer. Without `features`, their account, the runner has no towers. Chunks with images and
        more than `leg_tokens` tokens run in several steps (0: none), unless there is a drafter.
        """
        self.layout, self.max_model_len = layout, max_model_len
        self.max_drafts, self.policy = max_drafts, policy
        self.plans_open, self.features = plans_open, features
        self.budget, self.step_budget = config.max_num_batched_tokens, make_step_budget(config, on_cpu=on_cpu)
        self._short_first, self._slices = ShortFirst(is_on=on_cpu), TimeSlices(self.step_budget.min_tokens)
        # The most pages that a token and its drafts may need, including drafts in flight.
        self._max_fresh = sum(1 + group.pages_for(1 + 2 * max_drafts + group.ahead) for group in layout.groups)
        self.page_allocator, self.counters = PageAllocator(layout, num_slabs, prefix_caching=prefix_caching), Counters()
        # Every running sequence can have a token in every step, so none can starve.
        self._max_running = min(config.max_num_seqs, self.budget)
        self._max_chunk = self.budget - self._max_running + 1  # tokens that every step has room for
        self._clock, self._max_queued = clock, self._max_running + config.max_queue_len
        self._free_slots = list(range(config.max_num_seqs))
        self._running: list[Sequence] = []  # by order
        self._waiting = FairQueue()
        self._legs = Legs(0 if max_drafts else leg_tokens, self._max_chunk, self._running, self._waiting, self.counters)
        self._held: dict[str, Sequence] = {}  # by request id, not queued before `release`
        self._alive: dict[str, dict[int, Sequence]] = {}  # request id -> sample -> sequence
        self._deadlines = Deadlines(self.is_alive)
        self._arrivals, self._step_ids = itertools.count(), itertools.count()
        self._in_flight: deque[PlannedStep] = deque()
        self._deltas: list[TokenDelta] = []
        self._step_timer = StepTimer(clock)

    # Requests come and go

    def add(self, request: Request, *, held: bool = False) -> None:
        """Queue a request. If `held`, it waits for `release`. Raise if it can never fit or the queue is full."""
        check_fits(request, self.layout, self.page_allocator.arena.num_pages, self.max_model_len, self._max_chunk)
        check_queue(request, self._alive, len(self._running) + len(self._waiting) + len(self._held), self._max_queued)
        if self.features is not None and request.media:
            self.features.admit(request)
        arrival = next(self._arrivals)
        is_cached = self.page_allocator.prefix is not None
        first = samples_of(request, arrival, self._clock(), self.layout, self.features, is_cached=is_cached)
        self._alive[request.request_id] = {seq.sample: seq for seq in (first, *first.siblings)}
        self._slices.wait(first, *first.siblings)
        if held:
            self._held[request.request_id] = first
        else:
            self._waiting.push(first)
        if request.deadline is not None:
            self._deadlines.add(request.deadline, arrival, request.request_id, len(self._alive))

    def is_alive(self, request_id: str, arrival: int | None = None) -> bool:
        """Return whether a request has not ended. A later one may have the same id, but not the same `arrival`."""
        alive = self._alive.get(request_id)
        return alive is not None and arrival in (None, next(iter(alive.values())).arrival)

    def release(self, request_id: str, *, has_new_grammar: bool = False) -> None:
        """Queue a held request, in order of its arrival. Do nothing if it has already ended."""
        seq = self._held.pop(request_id, None)
        if seq is not None:
            for sample in (seq, *seq.siblings):
                sample.has_new_grammar = has_new_grammar
            self._waiting.push(seq)

    def cancel(
        self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.CANCEL, *, error: str = ""
    ) -> None:
        """End a request, or one sample of it. Do nothing if it has already ended."""
        alive = self._alive.get(request_id, {})
        for seq in list(alive.values()) if sample is None else [alive[sample]] if sample in alive else []:
            self._finish(seq, reason)
            self._deltas.append(seq.delta(error=error))

    def fail(self, error: str) -> None:
        """End all requests after a step could not be planned."""
        self._in_flight.clear()
        if self.features is not None:
            self.features.forget_all()
        for request_id in list(self._alive):
            self.cancel(request_id, reason=FinishReason.ERROR, error=error)
        self.drop_resume_points()

    def fail_steps(self, error: str) -> None:
        """End the requests of the steps in flight, which did not run, and forget the plans.

        The content of all pages is unknown now. All other sequences give up theirs and are computed again.
        """
        rows = [plan for step in self._in_flight for plan in step.planned]
        self._in_flight.clear()
        for seq in [seq for plan in rows for seq in plan.members]:
            if seq.finish_reason is None:
                self.cancel(seq.request.request_id, reason=FinishReason.ERROR, error=error)
        # A tower may have failed, so whoever needs what was being encoded ends too.
        for key in self.features.forget_all() if self.features is not None else ():
            for seqs in list(self._alive.values()):
                if (seq := next(iter(seqs.values()))).needs_features(key):
                    self.cancel(seq.request.request_id, reason=FinishReason.ERROR, error=error)
        for seq in list(self._running):
            self._preempt(seq)
        for seq in self._waiting:  # pages may not have been saved either
            seq.unpark(self.page_allocator)
        self.drop_resume_points()

    def drop_resume_points(self) -> None:
        """Empty the prefix cache."""
        if self.page_allocator.prefix is not None:
            self.page_allocator.prefix.clear()

    def deltas(self) -> list[TokenDelta]:
        """Return everything that happened since the last call, including cancellations."""
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether a sequence or a result is outstanding. Even if not, `deltas` may return more."""
        return bool(self._alive or self._in_flight)

    def stats(self) -> SchedulerStats:
        waiting, pages = [*self._waiting, *self._held.values()], held_pages(self._running, self.layout)
        return take_snapshot(self._running, waiting, self.page_allocator, pages, self.features, self.counters)

    # A step is planned

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do, at least until the result in flight is applied."""
        assert len(self._in_flight) <= 1, "two plans are already waiting for their results"
        now = self._clock()
        for request_id in self._deadlines.expired(now):
            self.cancel(request_id, reason=FinishReason.TIMEOUT)
        if self._waiting:
            self._make_way()
        is_open = bool(self._in_flight) and any(seq.awaits_drafts and seq.draws_in_flight for seq in self._running)
        counts = self._drafts_to_continue(is_open=is_open)
        # If part of the batch ran ahead, the batch would run in two halves from then on. So all run ahead, or none does.
        if is_open and counts is None:
            return None
        if self.policy is not None:
            self.policy.plan([seq.acceptance for seq in self._running if seq.num_uncomputed == 1])
        encoding = plan_encoding(self.features, self._running, self._waiting, self.page_allocator, self.budget)
        entries: list[Entry] = []
        if counts is not None:
            planned = [self._continue(seq, count) for seq, count in zip(self._running, counts, strict=True)]
            copies = self.page_allocator.drain_copies()
        else:
            planned = self._plan_rows(entries)
            # Forks and resume points come after this plan's copies are drained, because its forward pass fills their pages.
            copies = self.page_allocator.drain_copies() if planned else ()
            for plan in planned:
                entries += self._fork(plan)
            for plan in planned:
                keep_row_points(plan, self.page_allocator)
        # If features are being encoded and there is nothing else to do, an empty plan waits for them.
        if not planned and encoding is NOTHING and (self._in_flight or self.features is None or not self.features.is_encoding):
            return None
        count_media(self.features, encoding, planned, self.counters)
        saves, loads = self.page_allocator.host.drain()
        step = PlannedStep(next(self._step_ids), planned, now, is_slowed=bool(encoding.encodes or saves or loads))
        self._in_flight.append(step)
        self.counters.count_step(step.num_tokens)
        self._slices.count_step(step.num_tokens, len(self._running))
        rows = tuple([plan.row for plan in planned])
        return StepPlan(step.step_id, tuple(entries), copies, rows, encoding.drops, encoding.encodes, saves, loads)

    def _drafts_to_continue(self, *, is_open: bool) -> list[int] | None:
        """Return the drafts of each sequence if all continue and pages suffice, as in most steps. Otherwise return None.

        `is_open` means that drafts are in flight. A sequence that could start must not wait until all can continue.
        """
        is_full = not self._waiting or len(self._running) == self._max_running
        if not (is_full and self._running) or (is_open and not self.plans_open):
            return None
        return drafts_to_continue(self._running, self.budget, self.page_allocator.available // self._max_fresh, is_open=is_open)

    def _continue(self, seq: Sequence, num_drafts: int) -> PlannedRow:
        """Plan the row of a sequence that continues with this many drafts."""
        if seq.pages_unchanged(1 + num_drafts):
            return continue_in_pages(seq, num_drafts, self._num_wanted(seq))
        return self._plan_row(Grant(seq, 1 + num_drafts, num_drafts), may_preempt=False)[0]

    def _plan_rows(self, entries: list[Entry]) -> list[PlannedRow]:
        """Plan rows for running sequences. If pages are left, also start waiting ones and append their entries to `entries`."""
        prompts, is_shared = StepPrompts(), self._waiting.is_shared
        waiting = self._waiting.head() if self._waiting and len(self._running) < self._max_running else None
        is_brisk = self._short_first.is_brisk(self.counters.steps)
        budget = self.step_budget.of_step(self._running, waiting, is_brisk=is_brisk, is_shared=is_shared)
        grants = share_step(self._running, self._waiting, waiting, budget, prompts)
        planned: list[PlannedRow] = []
        may_go_first = waiting is not None and not is_shared  # tenants have their own rules for new prompts
        num_first = self._short_first.num_tokens(grants, self.counters.steps) if may_go_first else 0
        if num_first:
            self._start_new(planned, entries, num_first, prompts, first=True)
        if planned:
            self._short_first.used(self.counters.steps)
            return planned
        num_preempted = self.counters.preemptions
        for grant in grants:
            if grant.sequence.is_running:  # an older sequence may just have taken its pages
                planned += self._plan_row(grant, may_preempt=True)
        if len(planned) == len(grants) and self.counters.preemptions == num_preempted:  # nobody lacks pages
            self._start_new(planned, entries, budget - sum(plan.row.num_new for plan in planned), prompts)
        return self._legs.mark(planned)

    def _plan_row(self, grant: Grant, *, may_preempt: bool) -> list[PlannedRow]:
        """Plan the row for `grant`, with a shorter chunk if pages are scarce. Return [] if none fits.

        Younger sequences lose their pages only if this one cannot continue otherwise.
        """
        seq = grant.sequence
        seq.release_behind(self.page_allocator)
        num_spared = len(self._running) * len(self.layout.groups)  # a page in each group for every sequence
        while (shape := self._legs.shape_of(seq) or largest_row(grant, self.page_allocator.available, num_spared)) is None:
            if not may_preempt or (last := max(self._running, key=BY_OLDER if self._waiting.is_shared else BY_ORDER)) is seq:
                return []
            last.park(self.page_allocator)
            self._preempt(last)
        return [commit_row(seq, shape, self.page_allocator, self._num_wanted(seq) if shape.draws else 0)]

    def _num_wanted(self, seq: Sequence) -> int:
        """Return how many proposals to make after the token that `seq` is about to draw."""
        if not self.max_drafts:
            return 0
        return num_wanted(seq, self.max_drafts, self.policy, min(self._max_running, len(self._running) + len(self._waiting)))

    def _preempt(self, seq: Sequence) -> None:
        """Take the slot and pages of `seq`. Tokens that are not parked, including drawn ones, are computed again later."""
        self._leave(seq)
        self._slices.stop(seq)
        self._waiting.push(seq)
        self.counters.count_preemption(is_parked=bool(seq.parked))

    def _make_way(self) -> None:
        """Make room if sequences must give up their pages for others. Keep what they have computed."""
        shortage = Shortage(self._running, self.page_allocator, self.budget, self._max_running)
        for seq in self._slices.making_way(self._waiting, self._running, shortage.num_missing, shortage.num_lacking):
            if not seq.park(self.page_allocator):
                keep_point(seq, min(seq.num_computed, len(seq.tokens)), self.page_allocator)
            self._preempt(seq)

    def _leave(self, seq: Sequence) -> None:
        """Free the slot and pages of `seq`. If its admission failed half-way, it is still in the queue."""
        assert seq.slot is not None
        if seq in self._waiting:
            self._waiting.remove(seq)
        else:
            self._running.remove(seq)
            self._waiting.end(seq)
        heapq.heappush(self._free_slots, seq.slot)
        seq.slot = None
        seq.release_all(self.page_allocator)

    # A sequence starts

    def _start_new(
        self, planned: list[PlannedRow], entries: list[Entry], budget: int, prompts: StepPrompts, *, first: bool = False
    ) -> None:
        """Start waiting sequences in order, as long as tokens, slots and pages last. Append their rows and entries.

        Those that go `first` must end their prompts with this step. They leave enough pages to all that run, and enough pages
        and a slot to the next in order, which they may overtake.
        """
        reserved = promised_pages(self._running, self.budget)
        if first and (head := self._waiting.head()) is not None:
            reserved += len(self._running) * self._max_fresh + pages_to_start(head, self.budget)
        for seq in short_prompts(self._waiting) if first else self._waiting.heads():
            if not budget or len(self._running) >= self._max_running - first or self._legs.is_full(planned):
                break
            num_older = self._waiting.num_running(seq.tenant)
            # A sequence that just made way starts again when its last result is known.
            if seq.rows_in_flight or prompts.leave_out(seq, num_older):
                break
            if not (rows := self._admit(seq, budget, reserved + growth_pages(seq, self._running), first=first)):
                if first:
                    continue
                break
            prompts.add(seq, num_older)
            budget -= rows[0].row.num_new
            reserved += reserved_pages(seq, self.budget) if seq.num_uncomputed > 1 else 0
            entries.append(seq.entry())
            planned += rows

    def _admit(self, seq: Sequence, budget: int, reserved: int, *, first: bool) -> list[PlannedRow]:
        """Give `seq` a slot and its first row, resumed from the prefix cache if possible. Return [] if it must wait."""
        match = find_prefix(seq, self.page_allocator)
        num_left = len(seq.tokens) - match.resume
        if (first and num_left > min(budget, seq.max_chunk)) or not seq.ready_part(match.resume, min(budget, num_left)):
            return []
        # If nothing else is running, the sequence must start. So it tries again without the point, which may then be evicted.
        if match.resume and ((rows := self._start(seq, match, budget, reserved)) or self._running):
            return rows
        return self._start(seq, Match(None, 0, match.known), budget, reserved)

    def _start(self, seq: Sequence, match: Match, budget: int, reserved: int) -> list[PlannedRow]:
        if not take_known_pages(seq, match, self.page_allocator):
            return []
        seq.begin(match, is_alone=not self._running)
        rows: list[PlannedRow] = []
        num_new = seq.chunk_within(budget)
        if num_new and (not self._running or reserved + reserved_pages(seq, self.budget) <= self.page_allocator.available):
            seq.slot = heapq.heappop(self._free_slots)
            rows = self._plan_row(Grant(seq, num_new), may_preempt=False)
            if not rows:
                heapq.heappush(self._free_slots, seq.slot)
                seq.slot = None
        if not rows:
            seq.release_all(self.page_allocator)
            return []
        self._enter(seq)
        self._waiting.remove(seq)
        if seq.arrived_at and not seq.is_announced:
            seq.queue_s = self._clock() - seq.arrived_at
        complete_start(seq, match, self.page_allocator, self.counters)
        return rows

    def _enter(self, seq: Sequence) -> None:
        """Count `seq` among the running sequences."""
        self._slices.start(seq)
        insort(self._running, seq, key=BY_ORDER)
        self._waiting.begin(seq)

    def _fork(self, plan: PlannedRow) -> list[Entry]:
        """At the end of a prompt, let the other samples draw from the same logits. Samples without room wait in the queue."""
        seq = plan.owner
        if not (plan.drawers and seq.siblings):
            return []
        forked, siblings, seq.siblings = list[Sequence](), seq.siblings, []
        for sibling in siblings:
            # Each group needs one page, either the copy of the partial page or the next page.
            if len(self._running) < self._max_running and self.page_allocator.available >= len(self.layout.groups):
                sibling.slot = heapq.heappop(self._free_slots)
                sibling.fork_from(seq, self.page_allocator)
                self._enter(sibling)
                forked.append(sibling)
            else:
                self._waiting.push(sibling)
        plan.drawers += forked
        plan.row = plan.row._replace(draw_slots=tuple(drawer.slot for drawer in plan.drawers if drawer.slot is not None))
        self.counters.forks += len(forked)
        return [sibling.entry() for sibling in forked]

    # A result comes back

    def apply(self, result: StepResult) -> None:
        """Take the result of the oldest plan in flight."""
        step = self._in_flight.popleft()
        assert step.step_id == result.step_id, f"got the result of step {result.step_id}, expected that of step {step.step_id}"
        if self.features is not None:
            self.features.note_ready(result.encoded)
        self._step_timer.ended(step, result, self.step_budget, self.policy)
        drawn = iter(result.drawn)
        for plan in step.planned:
            row, members = plan.row, plan.members
            for seq in members:
                seq.rows_in_flight -= 1
            scores = result.prompt_logprobs[row.slot] if row.is_prompt_logprobs else ()
            if scores and not plan.drawers and plan.owner.finish_reason is None:
                self._deltas.append(plan.owner.delta(scores=scores))
            for seq, slot in zip(plan.drawers, row.draw_slots, strict=True):
                draw = next(drawn)
                assert draw.slot == slot, f"got a draw of slot {draw.slot}, expected one of slot {slot}"
                self._accept(seq, row, draw, scores if seq is plan.owner else ())
            for seq in members:
                if not seq.rows_in_flight and seq.is_running:
                    seq.release_behind(self.page_allocator)
        assert next(drawn, None) is None, "got more draws than the plan asked for"

    def _accept(self, seq: Sequence, row: Row, drawn: Drawn, scores: tuple[Logprobs, ...]) -> None:
        """Append the drawn tokens up to a stop, and forget the KV of rejected drafts."""
        num_drafts, token_ids, num_drawn = row.num_drafts, drawn.token_ids, len(drawn.token_ids)
        assert num_drawn <= num_drafts + 1, f"got {num_drawn} tokens, expected at most {num_drafts + 1}"
        assert drawn.num_proposed <= self.max_drafts, f"got {drawn.num_proposed} drafts, expected at most {self.max_drafts}"
        seq.draws_in_flight, seq.num_open, seq.is_bound = seq.draws_in_flight - 1, seq.num_open - num_drafts, drawn.is_bound
        if seq.finish_reason is not None:
            self.counters.dropped_tokens += num_drawn
            return
        if drawn.fault:
            self._finish(seq, FinishReason.ERROR)
            self._deltas.append(seq.delta(error=drawn.fault))
            return
        if not num_drawn:
            seq.take_back(self.page_allocator)
            return
        if num_drafts:
            self.counters.count_verify(num_drafts, num_drawn - 1)
        if self.policy is not None and (num_drafts or (row.num_wanted > drawn.num_proposed and not drawn.is_bound)):
            self.policy.note(seq.acceptance, num_drafts, num_drawn - 1)
        has_spare = num_drafts > 0 or self.plans_open  # an open row before this one may have left pages too
        seq.keep_drafts(num_drawn - 1, drawn.num_proposed, self.page_allocator, has_spare=has_spare)
        count, reason = seq.append(token_ids)
        if reason is not None:
            self.counters.dropped_tokens += num_drawn - count
            self._finish(seq, reason)
        num_kept = min(num_drawn - 1, count)
        drafts = num_kept, num_drafts - num_kept
        self._deltas.append(seq.delta(token_ids[:count], drawn.logprobs[:count], scores, drafts=drafts))

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End `seq` in any state. The tokens it has computed stay as a resume point for the next turn."""
        assert seq.finish_reason is None
        seq.finish_reason = reason
        self.counters.count_end(reason)
        if self.policy is not None:
            self.policy.ended(seq.acceptance)
        seq.unpark(self.page_allocator)
        is_held, request_id = False, seq.request.request_id
        alive = self._alive[request_id]
        del alive[seq.sample]
        if not alive:
            del self._alive[request_id]
            if seq.features is not None:
                seq.features.release(seq.request)
        if seq.is_running:
            if reason is not FinishReason.ERROR:
                keep_point(seq, min(seq.num_computed, len(seq.tokens)), self.page_allocator)
            self._leave(seq)
        elif seq in self._waiting:
            self._waiting.remove(seq)
        elif is_held := self._held.get(request_id) is seq:
            del self._held[request_id]
        else:
            leader = next(sibling for sibling in alive.values() if seq in sibling.siblings)
            leader.siblings.remove(seq)
        if (heir := seq.take_heir()) is not None:  # the siblings waited for its prompt, which the next one computes
            if is_held:
                self._held[request_id] = heir
            else:
                self._waiting.push(heir)
