"""How many drafts a sequence is worth: from what of its drafts was accepted of late, and from what steps cost. No torch.

With acceptance p, k drafts bring 1 + p + ... + p^k tokens a step; the step then verifies k + 1 tokens of every sequence, and a
drafting round goes before it. The k with the most tokens per second is taken, down to none; a sequence that gets none tries one
draft now and then, so seldom that it costs no more than a hundredth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from culet.scheduler.stats import Counters

START_ACCEPTANCE = 0.75  # what the first sequence is believed to accept: a belief too high is corrected within a few rounds
PRIOR_WEIGHT = 4.0  # drafts that weigh as much as what others accepted
DECAY = 0.9  # of older rounds of a sequence
DECAY_OF_ALL = 0.99
MOST_BELIEVED = 40.0  # drafts that what was found at start weighs
WORTHLESS = 0.1  # acceptance of drafts that come from a drafter for another model, or the like
LEAST_GAIN = 1.06  # drafting that promises less is not begun,
KEPT_GAIN = 1.01  # and ends where it promises less: each change costs some time of its own
TRIAL_SHARE = 0.01  # of the time, for trials where nobody drafts
MIN_REST, MAX_REST = 64, 1024  # steps between such trials
LEAST_TIMED = 6  # steps of one kind, before their time is believed
TIMES_KEPT = 64  # steps between two looks at what was timed
FRESH = 256  # steps after which what was timed may not be compared with what is timed now


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
        self.is_drafting = True

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """A verify: the drafts up to the first that differed were compared."""
        self.tried = DECAY * self.tried + min(num_drafts, num_accepted + 1)
        self.accepted = DECAY * self.accepted + num_accepted

    def acceptance(self, prior: float) -> float:
        """How likely its next draft is accepted; what others accepted counts as a few drafts of its own."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


@dataclass
class _Timed:
    """Seconds of steps of one kind: near the lower end of what they took of late, whatever else the machine does."""

    seconds: float = 0.0
    count: int = 0
    last: int = 0  # number of the step that was timed last

    def add(self, seconds: float, number: int) -> None:
        if number - self.last > FRESH:  # the machine may be another by now
            self.count = 0
        self.count, self.last = self.count + 1, number
        if self.count <= 3:
            self.seconds = seconds if self.count == 1 else min(seconds, self.seconds)
        else:
            self.seconds += (0.2 if seconds < self.seconds else 0.05) * (min(seconds, 2 * self.seconds) - self.seconds)


class Lengths(Protocol):
    """Who decides how many drafts to propose, and hears what was accepted and how long steps took."""

    def wanted(self, pace: Pace, num_seqs: int) -> int:
        """Drafts for the next step of a sequence among `num_seqs` that run."""

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
        self._timed: dict[tuple[int, int], _Timed] = {}  # by size of the batch, see `_size`, and drafts
        self._ratios: dict[tuple[int, int], float] = {}  # the same, against no drafts, where both were timed together
        self._num_timed = 0
        self._rested = 0.0  # steps without drafts since the last ones with
        self.take_cost(cost)

    def take_cost(self, cost: StepCost) -> None:
        """Decide by other costs from now on, where none were timed."""
        self.cost = cost
        self._forget()

    def _forget(self) -> None:
        """Costs are others: work out anew what follows from them."""
        self._best = lru_cache(maxsize=4096)(self._find_best)
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
        self._of_all.tried = DECAY_OF_ALL * self._of_all.tried + min(num_drafts, num_accepted + 1)
        self._of_all.accepted = DECAY_OF_ALL * self._of_all.accepted + num_accepted

    def took(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        """A step of `num_seqs` sequences that decode, with at most `num_drafts` drafts each, took so long."""
        size, self._num_timed = _size(num_seqs), self._num_timed + 1
        self._timed.setdefault((size, num_drafts), _Timed()).add(seconds, self._num_timed)
        if self._is_timed(size, 0):
            for count in self.lengths if num_drafts == 0 else (num_drafts,):
                if self._is_timed(size, count):
                    self._ratios[size, count] = self._timed[size, count].seconds / self._timed[size, 0].seconds
        if self._num_timed % TIMES_KEPT == 0:
            self._forget()

    def _is_timed(self, size: int, num_drafts: int) -> bool:
        """Whether it is known what such steps take just now."""
        timed = self._timed.get((size, num_drafts))
        return timed is not None and timed.count >= LEAST_TIMED and self._num_timed - timed.last <= FRESH

    def wanted(self, pace: Pace, num_seqs: int) -> int:
        """Drafts for the next step of a sequence among `num_seqs` that run."""
        prior = self._of_all.acceptance(START_ACCEPTANCE)
        count = self._best(num_seqs, round(pace.acceptance(prior), 2), KEPT_GAIN if pace.is_drafting else LEAST_GAIN)
        pace.is_drafting = count > 0
        if count and self._is_new(num_seqs):
            return 0
        if count == 0:
            self._rested += 1.0 / num_seqs
            if self._rested >= self._rest(num_seqs):
                count = self._trial(num_seqs)
        if count:
            self._rested = 0.0
        return count

    def _is_new(self, num_seqs: int) -> bool:
        """Whether a batch of this size has yet to show what it takes without drafts; of one sequence that is known."""
        size = _size(num_seqs)
        is_known = size == 1 or not self._num_timed or any((size, count) in self._ratios for count in self.lengths)
        return not is_known and not self._is_timed(size, 0)

    def _ratio(self, num_seqs: int, num_drafts: int) -> float:
        """What a round takes, in steps without drafts: as timed, else by the model."""
        timed = self._ratios.get((_size(num_seqs), num_drafts))
        return self.cost.round(num_seqs, num_drafts) / self.cost.round(num_seqs, 0) if timed is None else timed

    def _find_best(self, num_seqs: int, acceptance: float, least_gain: float = LEAST_GAIN) -> int:
        best, best_gain = 0, least_gain
        for count in self.lengths:
            gain = sum(acceptance**index for index in range(count + 1)) / self._ratio(num_seqs, count)
            if gain > best_gain:
                best, best_gain = count, gain
        return best

    def _trial(self, num_seqs: int) -> int:
        """Drafts of a trial: as many as would be worth it if they were good."""
        return self._best(num_seqs, START_ACCEPTANCE, KEPT_GAIN) or self.lengths[0]

    def _find_rest(self, num_seqs: int) -> int:
        """Steps between trials. One costs its round, and about a step more: nothing is planned ahead of it."""
        return min(MAX_REST, max(MIN_REST, round(self._ratio(num_seqs, self._trial(num_seqs)) / TRIAL_SHARE)))


def _size(num_seqs: int) -> int:
    """Batches of about the same size are timed together: the next power of two."""
    return 1 << (num_seqs - 1).bit_length()
