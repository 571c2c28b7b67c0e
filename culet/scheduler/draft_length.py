"""How many drafts a sequence is worth: from what of its drafts was accepted of late, and from what steps cost. No torch.

With acceptance p, k drafts bring 1 + p + ... + p^k tokens a step; the step then verifies k + 1 tokens of every sequence, and a
drafting round goes before it. The k with the most tokens per second is taken, down to none. Sequences that run together share
rounds, and who drafts alone makes all others wait: so it is what k drafts bring to all of them that counts, and only then each
one's own acceptance.

What a round costs, in steps without drafts, follows from sizes first, then from times of real steps. Times drift with the
machine, so only those taken close together are compared: where nobody drafts, a few rounds in a row are tried now and then, so
seldom that they cost no more than a hundredth, and more seldom where nothing at all is accepted; where drafting goes on, a few
steps without are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Protocol

from culet.scheduler.stats import Counters

START_ACCEPTANCE = 0.75  # what the first sequence is believed to accept: a belief too high is corrected within a few rounds
LEAST_PRIOR = 0.25  # what any new sequence is believed to accept at least: its text may be better than the last
PRIOR_WEIGHT = 3.0  # drafts that weigh as much as what others accepted
DECAY = 0.93  # of older rounds of a sequence
DECAY_OF_ALL = 0.99
MOST_BELIEVED = 40.0  # drafts that what was found at start weighs
WORTHLESS = 0.1  # acceptance of drafts that come from a drafter for another model, or the like
LEAST_GAIN = 1.06  # drafting that promises less is not begun,
KEPT_GAIN = 1.01  # and ends where it promises less: each change costs some time of its own
LEAST_ACCEPTED = 0.2  # acceptance of a sequence that gets more than the fewest drafts among others that draft
IN_A_ROW = 6  # rounds of a trial; steps without drafts between rounds
IN_A_ROW_IN_VAIN = 2  # rounds of a trial where nothing was accepted for long: whether anything is now is soon seen
CHANGE = 2.0  # what a trial costs besides its rounds, in steps: nothing is planned ahead where it ends
TRIAL_SHARE = 0.01  # of the time, for trials where nobody drafts
IN_VAIN = 24  # rounds of single sequences, all drafts of all of them refused, after which hardly any is worth its time:
PATIENCE = 5  # trials are so much more seldom, and new sequences are believed to be like the last ones
MIN_REST = 64  # steps between trials,
FIRST_REST = 8  # or of a batch of one size, where it is not known what a round takes in it
LOOK_AFTER = 512  # rounds between looks at steps without drafts,
LOOK_SOON = 128  # or fewer where little is won: it may be a mistake
LITTLE = 1.3
LEAST_TIMED = 4  # steps of one kind, before their time is believed
TIMES_KEPT = 16
EACH_TIMED = 8  # of the steps without drafts where nobody has drafted for long, each such is timed
FRESH = 64  # steps after which what was timed may not be compared with what is timed now
MOST_CORRECTED = 10.0  # times that a round's costs may differ from what sizes say


@dataclass(frozen=True)
class StepCost:
    """What steps cost on a device that reads weights, multiplies, and between rounds of drafts waits for the host."""

    dense_bytes: float  # weights that every step reads
    expert_bytes: float  # of one expert in all layers; 0: there are none
    num_experts: int
    top_k: int
    flops_per_token: float
    draft_bytes: float  # weights that one draft reads
    drafts_at_once: bool  # all drafts of a round come out of one pass
    bytes_per_s: float
    flops_per_s: float
    wait_s: float  # per round: what no look-ahead hides
    step_s: float = 0.0  # of a step, whatever it reads: its layers are started one after another
    draft_s: float = 0.0  # of a drafter's pass, likewise
    token_s: float = 0.0  # of each token of a step besides products: attention, norms, sampling
    wait_per_seq_s: float = 0.0  # more of the wait for each sequence
    each_draft_s: float | None = None  # of each draft of one sequence, its part of the verify included, if it was measured

    def step(self, num_tokens: int) -> float:
        """Seconds of a step of the target. More tokens touch more experts, as if each chose anew."""
        touched = 0.0
        if self.num_experts:
            touched = self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens)
        read = (self.dense_bytes + touched * self.expert_bytes) / self.bytes_per_s
        products = max(read, num_tokens * self.flops_per_token / self.flops_per_s)
        return self.step_s + num_tokens * self.token_s + products

    def round(self, num_seqs: int, num_drafts: int) -> float:
        """Seconds of a verify with `num_drafts` drafts for each sequence and of the drafting before it."""
        if num_drafts == 0:
            return self.step(num_seqs)
        extra = self._extra(num_seqs, num_drafts)
        if self.each_draft_s is not None:
            extra *= self.each_draft_s * num_drafts / self._extra(1, num_drafts)
        return self.step(num_seqs) + extra + self.wait_s + num_seqs * self.wait_per_seq_s

    def _extra(self, num_seqs: int, num_drafts: int) -> float:
        """Seconds of the drafting and of the drafts' tokens in the verify, as far as they follow from sizes."""
        passes = 1 if self.drafts_at_once else num_drafts
        drafting = passes * (self.draft_bytes / self.bytes_per_s + self.draft_s)
        return self.step(num_seqs * (num_drafts + 1)) - self.step(num_seqs) + drafting

    def fitted(self, measured: Mapping[int, float]) -> StepCost:
        """The same as found out here: `measured` has the seconds of a round of one sequence with no drafts, one and the most.

        What a round takes beyond a step without drafts is a part for each draft, and a wait that does not grow with them.
        """
        speed = measured[0] / self.step(1)
        most, wait_per_seq = max(measured), self.wait_per_seq_s * speed
        beyond = {count: max(0.0, measured[count] - measured[0] - wait_per_seq) for count in (1, most)}
        each = beyond[1] if most == 1 else max(0.0, (beyond[most] - beyond[1]) / (most - 1))
        return replace(
            self,
            bytes_per_s=self.bytes_per_s / speed,
            flops_per_s=self.flops_per_s / speed,
            step_s=self.step_s * speed,
            draft_s=self.draft_s * speed,
            token_s=self.token_s * speed,
            wait_per_seq_s=wait_per_seq,
            wait_s=max(0.0, beyond[most] - most * each),
            each_draft_s=each,
        )


class Pace:
    """What one sequence accepted of late."""

    def __init__(self) -> None:
        self.tried = self.accepted = 0.0  # drafts that were compared, older ones less; and those of them that agreed
        self.rests_at: tuple[int, int] | None = None  # what its drafter knew, and the size of the batch, as it was left to rest

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """A verify: the drafts up to the first that differed were compared."""
        self.tried = DECAY * self.tried + min(num_drafts, num_accepted + 1)
        self.accepted = DECAY * self.accepted + num_accepted

    def acceptance(self, prior: float) -> float:
        """How likely its next draft is accepted; what others accepted counts as a few drafts of its own."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


class _Times:
    """Seconds of the latest steps of one kind."""

    def __init__(self) -> None:
        self._taken: deque[tuple[int, float]] = deque(maxlen=TIMES_KEPT)  # number of the step, its seconds

    def add(self, number: int, seconds: float) -> None:
        self._taken.append((number, seconds))

    def typical(self, now: int) -> float | None:
        """The median of the fresh ones; None where they are too few. A late step does not count for much."""
        fresh = [seconds for number, seconds in self._taken if now - number <= FRESH]
        return median(fresh) if len(fresh) >= LEAST_TIMED else None


class Lengths(Protocol):
    """Who decides how many drafts to propose, and hears what was accepted and how long steps took."""

    def wanted(self, pace: Pace, num_seqs: int) -> int:
        """Drafts for the next step of a sequence among `num_seqs` that run."""

    def see(self, paces: Sequence[Pace]) -> None:
        """All sequences that run, before any is asked for in a step: they share its round."""

    def num_resting(self, paces: Sequence[Pace]) -> int:
        """Steps for which none of all sequences that run will want drafts, if nothing is verified meanwhile; 0: ask each."""

    def rest(self) -> None:
        """One of these steps has been planned."""

    def note(self, pace: Pace, num_drafts: int, num_accepted: int) -> None:
        """A verify of one sequence has come back."""

    def took(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        """A step of `num_seqs` sequences that decode, with at most `num_drafts` drafts each, took so long."""


class DraftPolicy:
    """Decides, for each sequence that draws, how many drafts to propose for its next step."""

    def __init__(self, cost: StepCost, lengths: Sequence[int]) -> None:
        """`lengths`: numbers of drafts to choose from, besides none."""
        self.lengths = tuple(sorted(lengths))
        self._of_all = Pace()
        # By drafts: tokens that they bring in a step, on the average of all that run; nothing: nobody has told who they are.
        self._expected_of_all: dict[int, float] = {}
        self._is_drafting = True
        self._times: dict[tuple[int, int], _Times] = {}  # by size of the batch, see `_size`, and drafts
        self._ratios: dict[tuple[int, int], float] = {}  # the same, against no drafts, where both were timed together
        self._corrections: dict[int, float] = {}  # by size: how much more a round adds to a step than the model says
        self._seen_plain: set[int] = set()  # sizes that have run without drafts
        self._num_timed = self._last_round = 0
        self._in_vain = 0  # rounds of sequences since any draft was accepted
        self._last_size, self._stayed = 0, 0.0  # of the batch, and steps since it was another
        # Each in steps; every sequence of a batch adds its share.
        self._rested = 0.0  # since anybody drafted
        self._drafted = 0.0  # since the last look at steps without drafts
        self._trial_left = self._look_left = 0.0
        self._num_learnt = 0  # changes of what decisions hang on
        self._sure_until = 0.0  # rested steps before which there is no trial
        self.take_cost(cost)

    def take_cost(self, cost: StepCost) -> None:
        """Decide by other costs from now on, where none were timed."""
        self.cost = cost
        self._forget()

    def _forget(self) -> None:
        """Costs are others: work out anew what follows from them."""
        self._num_learnt += 1
        self._best = lru_cache(maxsize=4096)(self._find_best)
        self._ratio = lru_cache(maxsize=1024)(self._find_ratio)
        self._rest = lru_cache(maxsize=1024)(self._find_rest)

    def believe(self, counters: Counters) -> None:
        """Begin with what drafts were found to be worth: new sequences are believed to accept as many.

        Unless it is little, though not nothing: a single text may be an odd one, and the first rounds will tell.
        """
        # A draft is compared where all before it were accepted.
        tried, accepted = sum(counters.drafted_at[:1]) + sum(counters.accepted_at[:-1]), sum(counters.accepted_at)
        if WORTHLESS * tried < accepted < START_ACCEPTANCE * tried:
            return
        weight = min(1.0, MOST_BELIEVED / tried) if tried else 0.0
        self._of_all.tried, self._of_all.accepted = weight * tried, weight * accepted

    def note(self, pace: Pace, num_drafts: int, num_accepted: int) -> None:
        """A verify of one sequence has come back."""
        pace.note(num_drafts, num_accepted)
        self._num_learnt += 1
        self._in_vain = 0 if num_accepted else self._in_vain + 1
        self._of_all.tried = DECAY_OF_ALL * self._of_all.tried + min(num_drafts, num_accepted + 1)
        self._of_all.accepted = DECAY_OF_ALL * self._of_all.accepted + num_accepted

    def took(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        """A step of `num_seqs` sequences that decode, with at most `num_drafts` drafts each, took so long."""
        self._num_learnt += self._num_timed == 0
        self._num_timed += 1
        if not num_drafts and self._num_timed - self._last_round > FRESH and self._num_timed % EACH_TIMED:
            return  # some of them will do, until somebody drafts again
        size = _size(num_seqs)
        times = self._times.get((size, num_drafts))
        if times is None:
            times = self._times[size, num_drafts] = _Times()
        times.add(self._num_timed, seconds)
        if num_drafts:
            self._last_round = self._num_timed
        else:
            self._seen_plain.add(size)
        # Where nobody has drafted for long there is nothing to compare with.
        if self._num_timed % LEAST_TIMED == 0 and self._num_timed - self._last_round <= FRESH:
            self._compare(size)

    def _compare(self, size: int) -> None:
        """Compare rounds with steps without drafts, where both were timed of late."""
        plain = self._typical(size, 0)
        if plain is None:
            return
        for count in self.lengths:
            seconds = self._typical(size, count)
            if seconds is None:
                continue
            # No round is cheaper than a step: if it seems so, the machine was slower before.
            before, ratio = self._ratio(size, count), max(1.0, seconds / plain)
            self._ratios[size, count] = ratio
            beyond = self.cost.round(size, count) / self.cost.round(size, 0) - 1.0
            correction = (ratio - 1.0) / beyond if beyond > 0.0 else 1.0
            self._corrections[size] = min(MOST_CORRECTED, max(1.0 / MOST_CORRECTED, correction))
            if abs(ratio - before) > 0.02 * before:
                self._forget()

    def _typical(self, size: int, num_drafts: int) -> float | None:
        """Seconds of such steps just now, where they are known."""
        times = self._times.get((size, num_drafts))
        return None if times is None else times.typical(self._num_timed)

    def see(self, paces: Sequence[Pace]) -> None:
        """All sequences that run, before any is asked for in a step: they share its round."""
        if len(paces) > 1 and not self.num_resting(paces):
            found = [self._acceptance(pace) for pace in paces]
            self._expected_of_all = {
                count: sum([_expected_tokens(one, count) for one in found]) / len(found) for count in self.lengths
            }

    def wanted(self, pace: Pace, num_seqs: int) -> int:
        """Drafts for the next step of a sequence among `num_seqs` that run."""
        share = 1.0 / num_seqs
        if self._rested + share < self._sure_until and pace.rests_at == (self._num_learnt, num_seqs):
            # Nothing has happened since it was decided that drafts do not pay; most steps on poor text are such.
            self._rested += share
            self._stayed += share
            return 0
        acceptance = self._acceptance(pace)
        count = self._choose(num_seqs, acceptance)
        size = _size(num_seqs)
        self._stayed = self._stayed + share if size == self._last_size else share
        self._last_size = size
        if self._trial_left > 0.0:
            self._trial_left -= share
            return count or self._trial(num_seqs)
        if self._look_left > 0.0:
            self._look_left -= share
            return 0
        if count == 0:
            self._rested += share
            if not self._is_rested(num_seqs):
                pace.rests_at, self._sure_until = (self._num_learnt, num_seqs), self._least_rest(num_seqs)
                return 0
            num_rounds = IN_A_ROW_IN_VAIN if self._is_vain else IN_A_ROW
            self._rested, self._trial_left, self._sure_until = 0.0, num_rounds - share, 0.0
            return self._trial(num_seqs)
        self._rested, self._drafted = 0.0, self._drafted + share
        if self._is_new(num_seqs) or (self._drafted >= LOOK_SOON and self._must_look(num_seqs, acceptance, count)):
            self._seen_plain.add(size)
            self._drafted, self._look_left = 0.0, IN_A_ROW - share
            return 0
        return count

    def _acceptance(self, pace: Pace) -> float:
        """How likely the next draft of a sequence is accepted."""
        prior = self._of_all.acceptance(START_ACCEPTANCE)
        if pace.tried < PRIOR_WEIGHT and not self._is_vain:
            prior = max(prior, LEAST_PRIOR)
        return round(pace.acceptance(prior), 2)

    def _choose(self, num_seqs: int, acceptance: float) -> int:
        """Drafts for a sequence, by what they bring to all that run."""
        best, best_gain = 0, KEPT_GAIN if self._is_drafting else LEAST_GAIN
        for count in self.lengths:
            shared = self._expected_of_all.get(count) if num_seqs > 1 else None
            expected = _expected_tokens(acceptance, count) if shared is None else shared
            gain = expected / self._ratio(num_seqs, count)
            if gain > best_gain:
                best, best_gain = count, gain
        if self._is_drafting != (best > 0):
            self._is_drafting = best > 0
            self._num_learnt += 1  # who rests must be asked again
        return self.lengths[0] if best and acceptance < LEAST_ACCEPTED else best

    def num_resting(self, paces: Sequence[Pace]) -> int:
        """Steps for which none of all sequences that run will want drafts, if nothing is verified meanwhile; 0: ask each."""
        key = self._num_learnt, len(paces)
        if any(pace.rests_at != key for pace in paces):
            return 0
        return max(0, math.ceil(self._sure_until - self._rested) - 1)

    def rest(self) -> None:
        """One of these steps has been planned."""
        self._rested += 1.0
        self._stayed += 1.0

    def _is_rested(self, num_seqs: int) -> bool:
        """Whether it is time for a trial."""
        if self._is_vain:
            return self._rested >= PATIENCE * self._rest(num_seqs)
        return self._rested >= self._rest(num_seqs) or (self._is_unknown(num_seqs) and self._stayed >= FIRST_REST)

    def _least_rest(self, num_seqs: int) -> float:
        """Rested steps before which it cannot be time for a trial, as long as nothing else happens."""
        if self._is_vain:
            return PATIENCE * self._rest(num_seqs)
        return 0.0 if self._is_unknown(num_seqs) else self._rest(num_seqs)

    @property
    def _is_vain(self) -> bool:
        """Whether of many drafts none was accepted."""
        return self._in_vain >= IN_VAIN

    def _must_look(self, num_seqs: int, acceptance: float, count: int) -> bool:
        """Whether it is time to see again what steps take without drafts."""
        return self._drafted >= LOOK_AFTER or self._gain(num_seqs, acceptance, count) < LITTLE

    def _is_new(self, num_seqs: int) -> bool:
        """Whether a batch of this size has yet to show what it takes without drafts; for one sequence the start has."""
        return num_seqs > 1 and self._num_timed > 0 and _size(num_seqs) not in self._seen_plain

    def _is_unknown(self, num_seqs: int) -> bool:
        """Whether no round was timed beside steps without drafts in a batch of this size; what the start timed may be wrong."""
        return self._num_timed > 0 and _size(num_seqs) not in self._corrections

    def _find_ratio(self, num_seqs: int, num_drafts: int) -> float:
        """What a round takes, in steps without drafts: as timed, else by the model, corrected by what was."""
        size = _size(num_seqs)
        timed = self._ratios.get((size, num_drafts))
        if timed is not None:
            return timed
        beyond = self.cost.round(num_seqs, num_drafts) / self.cost.round(num_seqs, 0) - 1.0
        return 1.0 + beyond * self._corrections.get(size, 1.0)

    def _gain(self, num_seqs: int, acceptance: float, num_drafts: int) -> float:
        """How many times as many tokens a second as without drafts."""
        return _expected_tokens(acceptance, num_drafts) / self._ratio(num_seqs, num_drafts)

    def _find_best(self, num_seqs: int, acceptance: float, least_gain: float = LEAST_GAIN) -> int:
        best, best_gain = 0, least_gain
        for count in self.lengths:
            gain = self._gain(num_seqs, acceptance, count)
            if gain > best_gain:
                best, best_gain = count, gain
        return best

    def _trial(self, num_seqs: int) -> int:
        """Drafts of a trial: as many as would be worth it if they were good."""
        return self._best(num_seqs, START_ACCEPTANCE, KEPT_GAIN) or self.lengths[0]

    def _find_rest(self, num_seqs: int) -> int:
        """Steps between trials."""
        cost = IN_A_ROW * (self._ratio(num_seqs, self._trial(num_seqs)) - 1.0) + CHANGE
        return max(MIN_REST, round(cost / TRIAL_SHARE))


@lru_cache(maxsize=4096)
def _expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens that a step with so many drafts brings."""
    return sum(acceptance**index for index in range(num_drafts + 1))


def _size(num_seqs: int) -> int:
    """Batches of about the same size are timed together: the next power of two."""
    return 1 << (num_seqs - 1).bit_length()
