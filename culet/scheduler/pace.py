"""How many drafts a sequence is worth: from what of its drafts was accepted of late, and from what steps cost. No torch.

With acceptance p, k drafts bring 1 + p + ... + p^k tokens a step; the step then verifies k + 1 tokens of every sequence, and a
drafting round goes before it. The k with the most tokens per second is taken, down to none; a sequence that gets none tries one
draft now and then, so seldom that it costs no more than a hundredth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from culet.scheduler.stats import Counters

START_ACCEPTANCE = 0.6  # what the first sequence is believed to accept
PRIOR_WEIGHT = 4.0  # drafts that weigh as much as what others accepted
DECAY = 0.9  # of older rounds of a sequence
DECAY_OF_ALL = 0.99
MOST_BELIEVED = 40.0  # drafts that what was found at start weighs
LEAST_GAIN = 1.02  # drafting that promises less is not worth its risk
TRIAL_SHARE = 0.01  # of the time, for trials of sequences that do not draft
MIN_REST, MAX_REST = 16, 512  # steps between such trials


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
        passes = 1 if self.drafts_at_once else num_drafts
        drafting = passes * (self.draft_bytes / self.bytes_per_s + self.draft_s)
        return self.step(num_seqs * (num_drafts + 1)) + drafting + self.wait_s + num_seqs * self.wait_per_seq_s


class Pace:
    """What one sequence accepted of late."""

    def __init__(self) -> None:
        self.tried = self.accepted = 0.0  # drafts that were compared, older ones less; and those of them that agreed
        self.rest = 0  # steps since it last drafted

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """A verify: the drafts up to the first that differed were compared."""
        self.tried = DECAY * self.tried + min(num_drafts, num_accepted + 1)
        self.accepted = DECAY * self.accepted + num_accepted

    def acceptance(self, prior: float) -> float:
        """How likely its next draft is accepted; what others accepted counts as a few drafts of its own."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


class DraftPolicy:
    """Decides, for each sequence that draws, how many drafts to propose for its next step."""

    def __init__(self, cost: StepCost, lengths: Sequence[int]) -> None:
        """`lengths`: numbers of drafts to choose from, besides none."""
        self.cost, self.lengths = cost, tuple(sorted(lengths))
        self._of_all = Pace()
        self._best = lru_cache(maxsize=4096)(self._find_best)
        self._rest = lru_cache(maxsize=1024)(self._find_rest)

    def believe(self, counters: Counters) -> None:
        """Begin with what drafts were found to be worth: new sequences are believed to accept as many."""
        # A draft is compared where all before it were accepted.
        tried = sum(counters.drafted_at[:1]) + sum(counters.accepted_at[:-1])
        weight = min(1.0, MOST_BELIEVED / tried) if tried else 0.0
        self._of_all.tried, self._of_all.accepted = weight * tried, weight * sum(counters.accepted_at)

    def note(self, pace: Pace, num_drafts: int, num_accepted: int) -> None:
        """A verify of one sequence has come back."""
        pace.note(num_drafts, num_accepted)
        self._of_all.tried = DECAY_OF_ALL * self._of_all.tried + min(num_drafts, num_accepted + 1)
        self._of_all.accepted = DECAY_OF_ALL * self._of_all.accepted + num_accepted

    def wanted(self, pace: Pace, num_seqs: int) -> int:
        """Drafts for the next step of a sequence among `num_seqs` that run."""
        prior = self._of_all.acceptance(START_ACCEPTANCE)
        count = self._best(num_seqs, round(pace.acceptance(prior), 2))
        if count == 0:
            pace.rest += 1
            if pace.rest >= self._rest(num_seqs):
                count = self.lengths[0]
        if count:
            pace.rest = 0
        return count

    def _find_best(self, num_seqs: int, acceptance: float) -> int:
        plain = 1.0 / self.cost.round(num_seqs, 0)
        best, best_gain = 0, LEAST_GAIN
        for count in self.lengths:
            tokens = sum(acceptance**index for index in range(count + 1))
            gain = tokens / self.cost.round(num_seqs, count) / plain
            if gain > best_gain:
                best, best_gain = count, gain
        return best

    def _find_rest(self, num_seqs: int) -> int:
        extra = self.cost.round(num_seqs, self.lengths[0]) / self.cost.round(num_seqs, 0) - 1.0
        return min(MAX_REST, max(MIN_REST, round(extra / TRIAL_SHARE)))
