"""How many tokens to draft for each sequence: from its recent acceptance and from what steps cost. No torch.

With acceptance p, k drafts bring 1 + p + ... + p^k tokens in a step; the step then verifies k + 1 tokens, and a draft round
goes before it. Sequences of a batch share steps, so the batch decides: of all lengths, and of all sets of the sequences that
accept most, it takes what brings the most tokens per second. The others get no drafts.

A sequence starts from what requests accepted in general, and learns from its own text. Once it has no drafts it learns
nothing, so it gets a short try after some steps, and each try that fails doubles the wait for the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from culet.scheduler.stats import Counters
from culet.scheduler.step_cost import MeasuredCost, StepCost, size_of

START_ACCEPTANCE = 0.75  # what requests are believed to accept before any has ended
MIN_PRIOR, MAX_PRIOR = 0.78, 0.95  # bounds of what a new sequence is believed to accept
OPTIMISM = 0.1  # that is so much more than requests accepted in general: a belief too high is corrected in a few rounds
START_WEIGHT = 3.0  # compared drafts that the belief counts as, and in a try what was accepted before: text changes
DECAY = 0.93  # of older rounds of a sequence
REQUEST_SHARE = 1 / 16  # of each request that ends in what requests accept in general
WORTHLESS = 0.1  # acceptance at start below which the drafter does not fit the model: nothing is believed without evidence
MIN_GAIN = 1.03  # tokens per second, against no drafts
TRY_ACCEPTANCE = 0.9  # what a try hopes for
TRY_SHARE = 0.01  # of the time that a sequence without drafts gives to its first try; later ones get less
MIN_REST, MAX_REST = 8, 256  # steps before a try
NUM_TIMED = 5  # steps of each length that are taken for their time,
TIMED_FIRST, TIMED_AGAIN = 16, 2048  # when a batch of one size has taken this many steps, and after this many more


class Acceptance:
    """What one sequence accepts."""

    def __init__(self) -> None:
        self.tried = self.accepted = 0.0  # drafts that were compared, older ones less, and those of them that agreed
        self.num_tried = self.num_accepted = 0  # the same over its whole life
        self.length: int | None = None  # drafts it gets now; None: it has not been in a batch yet
        self.rest = 0  # steps without drafts before its next try,
        self.try_at = -1  # and the number of the step of that try; -1: none was set
        self.is_trying = False

    @property
    def estimate(self) -> float:
        return self.accepted / self.tried


class DraftLengths(Protocol):
    """Decides how many drafts to propose, and hears what was accepted and how long steps took."""

    def plan(self, batch: Sequence[Acceptance]) -> None:
        """Decide for all sequences that decode in the next step."""

    def length(self, state: Acceptance, num_seqs: int) -> int:
        """Drafts for a sequence of the planned batch, or for one that joins it now as one of `num_seqs`."""

    def note(self, state: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """A sequence's drafts were verified."""

    def ended(self, state: Acceptance) -> None:
        """A sequence has ended."""

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """A step that only decodes took so long: `num_drafting` of its sequences had up to `num_drafts` drafts."""


class DraftPolicy:
    """Picks the lengths with the most tokens per second."""

    def __init__(self, cost: StepCost, lengths: Iterable[int]) -> None:
        """`lengths`: numbers of drafts to choose from, besides none."""
        self.lengths = tuple(sorted(lengths))
        self.cost = MeasuredCost(cost)
        self._gains = {count: [_expected_tokens(p / 100, count) - 1.0 for p in range(101)] for count in self.lengths}
        self._min_prior, self._general = MIN_PRIOR, START_ACCEPTANCE
        self._step = 0
        self._num_drafts: int | None = None  # of the planned step; None: nobody decodes in it
        self._num_until_timed: dict[int, int] = {}  # by size of batch: steps before some are taken for their time
        self._timed: list[int] = []  # lengths of the next steps, which are taken for their time
        self._num_changes = 0  # of anything that a decision depends on
        self._quiet: tuple[int, ...] = ()  # a batch that gets no drafts as long as nothing changes,
        self._quiet_until = 0  # up to this step

    def believe(self, counters: Counters, cost: StepCost) -> None:
        """Start from what a short run has shown."""
        # A draft is compared where all before it were accepted.
        tried, accepted = sum(counters.drafted_at[:1]) + sum(counters.accepted_at[:-1]), sum(counters.accepted_at)
        if tried:
            self._general = accepted / tried
            self._min_prior = MIN_PRIOR if self._general >= WORTHLESS else 0.0
        self.cost = MeasuredCost(cost)

    def note(self, state: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """A sequence's drafts were verified: those up to the first that differed were compared."""
        num_compared = min(num_drafts, num_accepted + 1)
        state.tried = DECAY * state.tried + num_compared
        state.accepted = DECAY * state.accepted + num_accepted
        state.num_tried += num_compared
        state.num_accepted += num_accepted
        self._num_changes += 1
        if state.is_trying and num_accepted == num_drafts:  # a try goes on while it succeeds
            state.rest, state.try_at = state.rest // 2, self._step

    def ended(self, state: Acceptance) -> None:
        """Each request counts the same, however long it was, and what is believed has a floor."""
        if state.num_tried:
            self._general += REQUEST_SHARE * (state.num_accepted / state.num_tried - self._general)

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        self.cost.took(num_seqs, num_drafting, num_drafts, seconds)

    def plan(self, batch: Sequence[Acceptance]) -> None:
        """Decide for all sequences that decode in the next step."""
        self._step += 1
        if not batch:
            self._num_drafts = None
            return
        self._count_down(len(batch))
        key = (self._num_changes, *map(id, batch))
        if key == self._quiet and self._step < self._quiet_until and not self._timed:
            return
        for state in batch:
            if not state.tried:
                self._start(state)
        estimates = [state.estimate for state in batch]
        hopes = [TRY_ACCEPTANCE if 0 <= state.try_at <= self._step else state.estimate for state in batch]
        num_drafts, least = self._choose(estimates)
        if not num_drafts and hopes != estimates:
            num_drafts, least = self._choose(hopes, is_try=True)
        if self._timed:
            num_drafts, least = self._timed.pop(), 0.0
        self._num_drafts = num_drafts
        first_rest = round(self.cost.overhead(len(batch), 1, self.lengths[0]) / TRY_SHARE)
        first_rest = min(MAX_REST, max(MIN_REST, first_rest))
        for state, hope in zip(batch, hopes, strict=True):
            self._decide(state, num_drafts if hope >= least else 0, first_rest)
        self._quiet, self._quiet_until = key, 0 if num_drafts else min([state.try_at for state in batch])

    def length(self, state: Acceptance, num_seqs: int) -> int:
        """Drafts for a sequence of the planned batch, or for one that joins it now as one of `num_seqs`."""
        if state.length is not None:
            return state.length
        self._start(state)
        return self._choose([state.estimate] * num_seqs)[0] if self._num_drafts is None else self._num_drafts

    def _start(self, state: Acceptance) -> None:
        prior = min(MAX_PRIOR, max(self._min_prior, self._general + OPTIMISM))
        state.tried, state.accepted = START_WEIGHT, START_WEIGHT * prior

    def _choose(self, hopes: list[float], *, is_try: bool = False) -> tuple[int, float]:
        """Drafts of the step that brings the most tokens per second, and the least acceptance of those who get them.

        `is_try`: only the shortest length counts that would pay if all accepted what a try hopes for.
        """
        ranked, num_seqs, lengths = sorted(hopes, reverse=True), len(hopes), self.lengths
        if is_try:
            costs = {count: MIN_GAIN * (1.0 + self.cost.overhead(num_seqs, num_seqs, count)) for count in lengths}
            lengths = tuple(count for count in lengths if _expected_tokens(TRY_ACCEPTANCE, count) > costs[count])[:1]
        best, best_rate, least = 0, MIN_GAIN * num_seqs, 0.0
        for count in lengths:
            first, last = 1.0 + self.cost.overhead(num_seqs, 1, count), 1.0 + self.cost.overhead(num_seqs, num_seqs, count)
            each = (last - first) / max(1, num_seqs - 1)
            gains, num_tokens, seconds = self._gains[count], float(num_seqs), first - each
            for hope in ranked:
                num_tokens += gains[int(100 * hope + 0.5)]
                seconds += each
                if num_tokens > best_rate * seconds:
                    best, best_rate, least = count, num_tokens / seconds, hope
        return best, least

    def _decide(self, state: Acceptance, num_drafts: int, first_rest: int) -> None:
        """Give a sequence its drafts, and set the time of its next try."""
        state.length = num_drafts
        state.is_trying = num_drafts > 0 and 0 <= state.try_at <= self._step
        if state.is_trying:
            forget = min(1.0, START_WEIGHT / state.tried)
            state.tried, state.accepted = forget * state.tried, forget * state.accepted
            state.rest = min(MAX_REST, 2 * max(first_rest, state.rest))
        elif num_drafts:
            state.rest = max(first_rest, state.rest // 2)
        if num_drafts or state.try_at < 0:
            state.rest = max(first_rest, state.rest)
            state.try_at = self._step + state.rest

    def _count_down(self, num_seqs: int) -> None:
        """Now and then take steps for their time: costs may be wrong, and where all are of one length nothing shows it."""
        size = size_of(num_seqs)
        num_left = self._num_until_timed.get(size, TIMED_FIRST) - 1
        if num_left <= 0:
            num_left = TIMED_AGAIN
            self._timed = [count for count in (*self.lengths[::-1], 0) for _ in range(NUM_TIMED)]  # from the last to the first
        self._num_until_timed[size] = num_left


def _expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens that a step with this many drafts brings."""
    return sum(acceptance**index for index in range(num_drafts + 1))
