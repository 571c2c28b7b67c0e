"""Choose how many tokens to draft for each sequence, from its recent acceptance and the cost of steps. No torch.

With acceptance p, a step with k drafts yields 1 + p + ... + p^k tokens on average. The step verifies k + 1 tokens, and a
draft round runs before it. All sequences of a batch share the step, so the choice is made for the batch. It considers every
length, given to any number of the sequences with the highest acceptance, and takes the option with the most tokens per
second. The other sequences get no drafts.

A sequence starts from the average acceptance of past requests and then learns from its own text. If the average is low, some
sequences start optimistic, so that better text is noticed. A sequence without drafts learns nothing, so after some steps it
gets a short try. Each failed try doubles the wait before the next. Unless rounds are launched ahead of results, a round is
skipped if the verify before it accepts too few drafts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from culet.scheduler.sequence import Acceptance
from culet.scheduler.stats import Counters
from culet.scheduler.step_cost import MeasuredCost, StepCost, TimedSteps

GOOD_ACCEPTANCE = 0.78  # assumed acceptance before any request has finished, and of an optimistic start
OPTIMISM, MAX_PRIOR = 1.2, 0.85  # too high a prior is corrected within a few rounds, so it is a multiple of the average
EXPLORE_REST = 128  # average steps between optimistic starts if the average is low, so that better text is noticed
START_WEIGHT = 2.0  # weight of the prior in compared drafts, and of older evidence in a try, because text changes
DECAY = 0.93  # weight of a sequence's older rounds, per round
BETTER_SHARE, WORSE_SHARE = 1 / 4, 1 / 64  # weights of a finished request above the average, and below it
# Least gain in tokens per second over no drafts. Costs and acceptance are not known well enough to tell less from a loss.
MIN_GAIN = 1.1
TRY_ACCEPTANCE = 0.9  # acceptance that a try hopes for
TRY_SHARE = 0.005  # share of time that a sequence without drafts spends on its first try (later tries get less)
MIN_REST, MAX_REST = 8, 256  # steps before a try


class DraftLengths(Protocol):
    """Decides how many drafts to propose. It learns which drafts were accepted and how long steps took."""

    def plan(self, batch: Sequence[Acceptance]) -> None:
        """Choose the drafts of all sequences that decode in the next step."""

    def length(self, state: Acceptance, num_seqs: int) -> int:
        """Return the drafts for a sequence of the planned batch, or for one that joins it now as one of `num_seqs`."""

    def note(self, state: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """Record that a sequence's drafts were verified, or with zeros that the drafter proposed none for it."""

    def ended(self, state: Acceptance) -> None:
        """Record that a sequence has ended."""

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """Record the time of a decode-only step in which `num_drafting` sequences had up to `num_drafts` drafts."""


class DraftPolicy:
    """Chooses the lengths that yield the most tokens per second."""

    def __init__(self, cost: StepCost, lengths: Iterable[int], *, is_ahead: bool = False) -> None:
        """Set up the policy. `lengths` are the numbers of drafts to choose from, besides zero.

        With `is_ahead`, a round is launched before it is known how many drafts were accepted, so it cannot be skipped.
        """
        self.lengths, self.is_ahead = tuple(sorted(lengths)), is_ahead
        self.cost = MeasuredCost(cost)
        # Accepted drafts to expect, by the number of drafts and the acceptance in percent.
        self._gains = {n: [sum((p / 100) ** k for k in range(1, n + 1)) for p in range(101)] for n in self.lengths}
        self._general = GOOD_ACCEPTANCE  # average acceptance of requests
        self._step, self._explored_at, self._explore_from, self._random = 0, -1, 0, random.Random(0)
        self._num_drafts: int | None = None  # drafts of the planned step, or None if no sequence decodes in it
        self._timed = TimedSteps()
        self._quiet: list[Acceptance] = []  # a batch that gets no drafts until something changes
        self._quiet_until = 0  # the step at which it is decided again even if nothing changes

    def believe(self, counters: Counters, cost: StepCost) -> None:
        """Start from the acceptance and the costs measured in a short run."""
        # A draft is compared only if all drafts before it were accepted.
        tried, accepted = sum(counters.drafted_at[:1]) + sum(counters.accepted_at[:-1]), sum(counters.accepted_at)
        if tried:
            self._general = accepted / tried
        self.cost = MeasuredCost(cost)

    def note(self, state: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """Record that a sequence's drafts were verified. Only those up to the first mismatch were compared."""
        num_compared, decay = min(num_drafts, num_accepted + 1), DECAY if num_drafts else 1.0
        state.tried = decay * state.tried + num_compared
        state.accepted = decay * state.accepted + num_accepted
        state.num_tried += num_compared
        state.num_accepted += num_accepted
        self._quiet = []
        if state.is_trying and num_accepted == num_drafts:  # a try continues while it succeeds
            state.rest, state.try_at = state.rest // 2, self._step

    def ended(self, state: Acceptance) -> None:
        """Add a finished request to the average over requests. Long and short requests count the same."""
        if state.num_tried:
            above = state.num_accepted / state.num_tried - self._general
            self._general += (BETTER_SHARE if above > 0 else WORSE_SHARE) * above

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        self.cost.took(num_seqs, num_drafting, num_drafts, seconds)

    def plan(self, batch: Sequence[Acceptance]) -> None:
        """Choose the drafts of all sequences that decode in the next step."""
        self._step += 1
        if not batch:
            self._num_drafts = None
            return
        num_left = self._timed.count(len(batch))
        if batch == self._quiet and self._step < self._quiet_until and not self._timed.is_running:
            return
        for state in batch:
            if not state.tried:
                self._start(state)
        estimates = [state.estimate for state in batch]
        hopes = [TRY_ACCEPTANCE if 0 <= state.try_at <= self._step else state.estimate for state in batch]
        num_drafts, least = self._choose(estimates)
        doubtful = self._doubtful(estimates, num_drafts) if self._timed.is_running or not num_left or not num_drafts else 0
        if not num_drafts and hopes != estimates:
            num_drafts, least = self._choose(hopes, is_try=True)
        timed = self._timed.next(doubtful, is_confirmed=self.cost.is_confirmed(len(batch)))
        if is_timed := timed is not None:
            num_drafts, least = timed, 0.0
        self._num_drafts = num_drafts
        try_cost = self.cost.overhead(len(batch), len(batch), self.lengths[0])  # sequences that start together try together
        first_rest = min(MAX_REST, max(MIN_REST, round(try_cost / TRY_SHARE)))
        for state, hope in zip(batch, hopes, strict=True):
            self._decide(state, num_drafts if hope >= least else 0, first_rest)
            state.min_accepted = 0 if is_timed or self.is_ahead else self._least_accepted(state, len(batch))
        quiet_until = [state.try_at for state in batch] + ([self._step + num_left] if doubtful else [])
        self._quiet, self._quiet_until = list(batch), 0 if num_drafts or is_timed else min(quiet_until)

    def length(self, state: Acceptance, num_seqs: int) -> int:
        """Return the drafts for a sequence of the planned batch, or for one that joins it now as one of `num_seqs`."""
        if state.length is not None:
            return state.length
        self._start(state)
        return self._choose([state.estimate] * num_seqs)[0] if self._num_drafts is None else self._num_drafts

    def _start(self, state: Acceptance) -> None:
        prior = min(MAX_PRIOR, OPTIMISM * self._general)
        if prior < GOOD_ACCEPTANCE and (self._step == self._explored_at or self._step >= self._explore_from):
            prior, self._explored_at = GOOD_ACCEPTANCE, self._step
            # With a fixed rest, requests that come at regular intervals would always or never start optimistic.
            self._explore_from = self._step + self._random.randint(EXPLORE_REST // 2, 3 * EXPLORE_REST // 2)
        state.tried, state.accepted = START_WEIGHT, START_WEIGHT * prior

    def _choose(self, hopes: list[float], *, is_try: bool = False, factor: float = 1.0) -> tuple[int, float]:
        """Return the drafts that yield the most tokens per second, and the lowest acceptance of the sequences that get them.

        With `is_try`, consider only the shortest length that would pay off if all sequences reached `TRY_ACCEPTANCE`. `factor`
        multiplies the cost of rounds.
        """
        ranked, num_seqs, lengths = sorted(hopes, reverse=True), len(hopes), self.lengths
        if is_try:
            costs = {count: MIN_GAIN * (1.0 + self.cost.overhead(num_seqs, num_seqs, count)) for count in lengths}
            gain_index = round(100 * TRY_ACCEPTANCE)
            lengths = tuple(count for count in lengths if 1.0 + self._gains[count][gain_index] > costs[count])[:1]
        best, best_rate, least = 0, MIN_GAIN * num_seqs, 0.0
        for count in lengths:
            first, last = (1.0 + factor * self.cost.overhead(num_seqs, some, count) for some in (1, num_seqs))
            each = (last - first) / max(1, num_seqs - 1)
            gains, num_tokens, seconds = self._gains[count], float(num_seqs), first - each
            for hope in ranked:
                num_tokens += gains[int(100 * hope + 0.5)]
                seconds += each
                if num_tokens > best_rate * seconds:
                    best, best_rate, least = count, num_tokens / seconds, hope
        return best, least

    def _least_accepted(self, state: Acceptance, num_seqs: int) -> int:
        """Return how many drafts must be accepted so that another round of the same length still pays off."""
        if not (count := state.length or 0):
            return 0
        least_gain = MIN_GAIN * (1.0 + self.cost.overhead(num_seqs, num_seqs, count)) - 1.0
        tried, accepted, gains = DECAY * state.tried, DECAY * state.accepted, self._gains[count]
        later = (gains[int(100 * (accepted + kept) / (tried + min(count, kept + 1)) + 0.5)] for kept in range(count))
        return next((kept for kept, gain in enumerate(later) if gain > least_gain), count)

    def _decide(self, state: Acceptance, num_drafts: int, first_rest: int) -> None:
        """Set a sequence's drafts and the step of its next try."""
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

    def _doubtful(self, estimates: list[float], num_drafts: int) -> int:
        """Return the length to time, or 0 if no likely cost would change whether to draft, because then times do not matter."""
        doubt = self.cost.doubt(len(estimates))
        other = self._choose(estimates, factor=doubt if num_drafts else 1.0 / doubt)[0]
        return 0 if num_drafts and other else num_drafts or other
