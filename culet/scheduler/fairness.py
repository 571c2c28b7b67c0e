"""Decide who runs: share the engine among tenants, the API keys that requests come from (decision 17), and let preempted
sequences share the cache with running ones in time slices (decision 24).

The waiting queue starts the sequence of the tenant that runs fewest. When tokens and pages are shared, running sequences
whose tenant runs fewer older ones come first: every tenant's oldest, then every tenant's second, and so on. So a tenant with a
thousand requests competes with one request at a time. Priorities come before all of this. With a single tenant, the order is by
arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import attrgetter

from culet.scheduler.sequence import TILE, Sequence

BY_ORDER = attrgetter("order")
BY_OLDER = attrgetter("request.priority", "num_older", "order")  # after `count_older`
SLICE_FACTOR = 4  # a time slice has this many times the work of computing its sequence again,
LEAST_STEPS = 4  # which counts as at least this many steps
# After a sequence has come back, nobody makes way for this many times the work that its return took, divided by the number of
# running sequences. So at most a twentieth of the tokens that these could draw is lost while one is computed again.
REST_FACTOR = 20
NEW_SLICES = 4  # a new sequence takes part after it has waited for as long as this many slices,
FEW_NEW = 8  # if at least this many sequences are running for each new one
AGAIN_STEPS, AGAIN_TOKENS = 64, 32  # most steps in which a sequence is computed again, and fewest tokens of a piece


class _Tenant:
    """A tenant with sequences that wait or run."""

    def __init__(self, served: int) -> None:
        self.waiting: list[Sequence] = []  # by order
        self.num_running = 0
        self.served = served  # tokens computed for it, at least as many as for the tenant that had fewest when it came


class FairQueue:
    """The waiting sequences of all tenants, and the number that each tenant runs."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for tenant in self._tenants.values() for seq in tenant.waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return self._place(seq) is not None

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have sequences."""
        return len(self._tenants) > 1

    def num_running(self, tenant: str) -> int:
        return self._tenants[tenant].num_running if tenant in self._tenants else 0

    def push(self, seq: Sequence) -> None:
        insort(self._tenant(seq).waiting, seq, key=BY_ORDER)
        self._num_waiting += 1

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence, because it starts or has ended."""
        place = self._place(seq)
        assert place is not None, "a sequence that does not wait cannot be removed"
        del self._tenants[seq.tenant].waiting[place]
        self._num_waiting -= 1
        self._forget_idle(seq.tenant)

    def head(self) -> Sequence | None:
        """Return the sequence to start next.

        It has the lowest priority value. Among tenants with such sequences, it belongs to the one that runs fewest, then to
        the one that was served fewest tokens.
        """
        heads = [(tenant.waiting[0], tenant) for tenant in self._tenants.values() if tenant.waiting]
        if len(heads) < 2:
            return heads[0][0] if heads else None
        key = [(seq.request.priority, tenant.num_running, tenant.served, seq.order) for seq, tenant in heads]
        return heads[key.index(min(key))][0]

    def heads(self) -> Iterator[Sequence]:
        """Yield the sequence to start next, as long as there is one. The caller removes each before it asks for another."""
        while (seq := self.head()) is not None:
            yield seq

    def next_ones(self, count: int) -> list[Sequence]:
        """Return up to `count` sequences that start soon: the next one, then each tenant's first before its second."""
        head = self.head()
        places = [(seq, place) for tenant in self._tenants.values() for place, seq in enumerate(tenant.waiting[:count])]
        places.sort(key=lambda pair: (pair[0] is not head, pair[0].request.priority, pair[1], pair[0].order))
        return [seq for seq, _ in places[:count]]

    def begin(self, seq: Sequence) -> None:
        """Count a sequence that starts to run."""
        self._tenant(seq).num_running += 1

    def end(self, seq: Sequence) -> None:
        """Count a sequence that no longer runs, and the tokens that were computed for it."""
        tenant = self._tenants[seq.tenant]
        tenant.num_running -= 1
        tenant.served += seq.num_computed - seq.num_resumed
        self._forget_idle(seq.tenant)

    def next_and_last(self, running: Iterable[Sequence]) -> tuple[Sequence, Sequence] | None:
        """Return the next sequence, and the one that makes way for it if there is no room. Return None if none must.

        It is the youngest of the tenant that runs most, if this tenant runs at least two more than that of the next sequence.
        """
        seq = self.head() if self.is_shared else None
        if seq is None:
            return None
        name, busiest = max(self._tenants.items(), key=lambda item: item[1].num_running)
        if busiest.num_running < self.num_running(seq.tenant) + 2:
            return None
        last = max((other for other in running if other.tenant == name), key=BY_ORDER)
        return (seq, last) if last.request.priority >= seq.request.priority else None

    def _tenant(self, seq: Sequence) -> _Tenant:
        if seq.tenant not in self._tenants:
            # A tenant gains nothing by having been away.
            self._tenants[seq.tenant] = _Tenant(min((tenant.served for tenant in self._tenants.values()), default=0))
        return self._tenants[seq.tenant]

    def _place(self, seq: Sequence) -> int | None:
        waiting = self._tenants[seq.tenant].waiting if seq.tenant in self._tenants else []
        place = bisect_left(waiting, seq.order, key=BY_ORDER)
        return place if place < len(waiting) and waiting[place] is seq else None

    def _forget_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if not (tenant.waiting or tenant.num_running):
            del self._tenants[name]


class TimeSlices:
    """Decides when a running sequence makes way for one that waits, because the cache has no room for both.

    Otherwise a preempted sequence would wait until another one ends. If all have long answers, its client would see the text
    stop for as long. And if all end at about the same time, it would run alone afterwards, in steps that take nearly as long
    as those of the whole batch. Slices are measured in tokens, so that plans do not depend on the speed of the machine.

    A preempted sequence is computed again in small pieces. They add little time to the steps of running sequences, which mostly
    wait for weights, and they need few pages at a time. A piece fills the tile of tokens that the running ones have begun.
    """

    def __init__(self, min_step: int) -> None:
        """Start counting. A step with fewer than `min_step` tokens takes as long as one of that size, so it counts as one."""
        self._min_step = min_step
        self._work = 0  # tokens of all steps, each with at least `min_step`
        self._next_at = 0  # the work at which the next sequence may make way
        self._num_moves = 0  # sequences that made way so far
        self._returning: list[Sequence] = []  # preempted sequences that are being computed again

    def count_step(self, num_tokens: int, num_running: int) -> None:
        """Count a step of this many tokens, with this many running sequences. Slices of those that are back begin after it."""
        self._work += max(num_tokens, self._min_step)
        returning = [seq for seq in self._returning if seq.is_running]  # the others were cancelled
        self._returning = [seq for seq in returning if not seq.is_prefilled]
        for seq in [seq for seq in returning if seq.is_prefilled]:
            took = self._done_since_start(seq)
            seq.started_at = self._work
            self._next_at = max(self._next_at, self._work + REST_FACTOR * took // max(1, num_running))

    def wait(self, *new: Sequence) -> None:
        """Note that new sequences wait."""
        for seq in new:
            seq.waiting_since = self._work

    def start(self, seq: Sequence) -> None:
        """Note that a sequence starts to run, perhaps not for the first time."""
        seq.started_at = self._work
        if seq.was_preempted:
            self._returning.append(seq)

    def stop(self, seq: Sequence) -> None:
        """Note that a sequence loses its pages, and decide in which pieces it is computed again."""
        seq.was_preempted = True
        if seq in self._returning:
            self._returning.remove(seq)
        if not seq.request.media:  # which may need larger pieces
            seq.max_chunk = max(AGAIN_TOKENS, len(seq.tokens) // AGAIN_STEPS) + TILE - 1
        self._next_at = max(self._next_at, self._work) + self._slice(seq)

    def making_way(
        self,
        queue: FairQueue,
        running: Collection[Sequence],
        num_missing: Callable[[Sequence, Collection[Sequence]], int],
        num_lacking: Callable[[], int],
    ) -> Iterator[Sequence]:
        """Yield the running sequences that make way for others. The caller preempts each at once.

        They make way for the next one in the queue if their tenant runs too many (`FairQueue.next_and_last`), or else if their
        time slice is over. They also make way if others need more pages, so that one that has come back does not lose its pages
        at once. `num_missing` returns how many pages a sequence lacks to start when some others have left, and `num_lacking`
        how many the running ones lack for their next tokens.
        """
        while (pair := queue.next_and_last(running)) is not None:
            if num_missing(pair[0], ()) <= 0:
                return
            yield pair[1]
        head = queue.head()
        if head is None:
            return
        while num_lacking() > 0:
            last = count_older(running)[-1] if queue.is_shared else max(running, key=BY_ORDER)  # would lose its pages otherwise
            if not last.was_preempted or not (over := self._whose_slice_is_over(last, running)):
                break
            self._put_behind(over[-1], queue, running)
            yield over[-1]
        if self._work < self._next_at or num_missing(head, ()) <= 0:
            return
        if any(seq.is_running for seq in self._returning):
            return  # one at a time, because it holds pages and gives no answer
        if head.started_at is None and len(queue) * FEW_NEW > len(running):
            return  # many new sequences wait until others end
        if head in self._sharing(queue, running):
            for seq in self._instead_of_waiting(head, running, num_missing):
                self._put_behind(seq, queue, running)
                yield seq

    def _sharing(self, queue: FairQueue, running: Collection[Sequence]) -> list[Sequence]:
        """Return the waiting sequences that get turns in place of running ones.

        A new one must have waited long, and be one of few.
        """
        num_new = sum(seq.started_at is None for seq in queue)
        is_few = num_new * FEW_NEW <= len(running)
        return [
            seq
            for seq in queue
            if seq.started_at is not None or (is_few and self._work - seq.waiting_since >= NEW_SLICES * self._slice(seq))
        ]

    def _put_behind(self, seq: Sequence, queue: FairQueue, running: Collection[Sequence]) -> None:
        """Place `seq` behind all that share the cache, and before other new ones."""
        self._num_moves += 1
        seq.place = max(other.place[0] for other in (*running, *self._sharing(queue, running))), self._num_moves

    def _instead_of_waiting(
        self, head: Sequence, running: Collection[Sequence], num_missing: Callable[[Sequence, Collection[Sequence]], int]
    ) -> list[Sequence]:
        """Return the sequences that make way for `head`, which lacks pages, or [] if it must wait.

        If a sequence will end within a slice, `head` waits for that.
        """
        step = max(len(running), self._min_step)
        if any(seq.num_left * step < self._slice(seq) for seq in running):
            return []
        candidates = self._whose_slice_is_over(head, running)
        chosen: list[Sequence] = []
        while (missing := num_missing(head, chosen)) > 0 and candidates:
            chosen.append(candidates.pop())
        return chosen if missing <= 0 else []

    def _whose_slice_is_over(self, other: Sequence, running: Collection[Sequence]) -> list[Sequence]:
        """Return the sequences that may make way for `other`, of the same tenant. Last is the one that has run longest."""
        candidates = [
            seq
            for seq in running
            if seq.tenant == other.tenant
            and seq.request.priority >= other.request.priority
            and seq.is_prefilled
            and self._done_since_start(seq) >= self._slice(seq)
        ]
        return sorted(candidates, key=lambda seq: (self._done_since_start(seq), seq.arrival))

    def _done_since_start(self, seq: Sequence) -> int:
        assert seq.started_at is not None, "a running sequence has started"
        return self._work - seq.started_at

    def _slice(self, seq: Sequence) -> int:
        """Return the work in a time slice, which depends on how long it takes to compute this sequence again."""
        return SLICE_FACTOR * max(len(seq.tokens), LEAST_STEPS * self._min_step)


def count_older(running: Iterable[Sequence]) -> list[Sequence]:
    """Set `num_older` of each sequence and return them by it, the lowest priority value first."""
    counts: Counter[str] = Counter()
    by_age = sorted(running, key=BY_ORDER)
    for seq in by_age:
        seq.num_older = counts[seq.tenant]
        counts[seq.tenant] += 1
    return sorted(by_age, key=BY_OLDER)


class StepPrompts:
    """The prompts that a step computes. A tenant's lone prompt is not slowed down by the sequences of a busy tenant."""

    def __init__(self) -> None:
        self._lowest: dict[tuple[str, int], int] = {}  # tenant and priority -> lowest `num_older`

    def add(self, seq: Sequence, num_older: int) -> None:
        key = seq.tenant, seq.request.priority
        self._lowest[key] = min(num_older, self._lowest.get(key, num_older))

    def leave_out(self, seq: Sequence, num_older: int) -> bool:
        """Return whether `seq` waits for a later step, because another tenant's prompt has less than half as many older ones.

        A tenant's two oldest never wait, so every tenant makes progress. Nor does a sequence with a better priority.
        """
        return any(
            tenant != seq.tenant and priority <= seq.request.priority and num_older >= 2 * (lowest + 1)
            for (tenant, priority), lowest in self._lowest.items()
        )


def share_tokens(wanted: Mapping[str, int], total: int) -> dict[str, int]:
    """Share `total` tokens among tenants. Nobody gets more than wanted, and what one does not want is left to the others."""
    shares: dict[str, int] = {}
    for name, count in sorted(wanted.items(), key=lambda item: item[1]):
        shares[name] = min(count, total // (len(wanted) - len(shares)))
        total -= shares[name]
    return shares
