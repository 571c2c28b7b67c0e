"""Estimate the cost of steps with a model based on sizes, corrected by measured times of real steps. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

NUM_TIMES = 8  # times kept for each run of steps
MIN_TIMES = 3  # plain steps that must be timed before rounds, and again after them, to compare them
MIN_ROUNDS = 2  # rounds that must be timed
FRESH = 96  # compare only runs at most this many steps apart, because a machine's speed drifts
MAX_DRIFT = 1.2  # plain steps before and after a round may differ by this factor
SAME = 1.3  # comparisons within this factor agree
NUM_FOUND = 5  # comparisons whose median counts
FADE = 0.25  # how far each measurement of one length moves the corrections of the others
MAX_CORRECTION = 100.0  # largest factor between a round's measured and modelled cost, in either direction
MIN_OVERHEAD = 0.02  # smallest modelled overhead of a round, because a noisy probe may find none
# Costs may be wrong by this factor until a comparison confirms them. In simulations that alternate good and bad chats, 3 makes
# good chats slower, and 5 bad ones.
DOUBT = 4.0
# Steps of a block that is run to be timed: rounds with drafts between plain steps. Two of each kind do not count: the
# first still verifies the drafts of the kind before, and the next one has no step of its kind right before it.
TIMED_ROUNDS, TIMED_PLAIN = MIN_ROUNDS + 2, MIN_TIMES + 2
TIMED_FIRST, TIMED_LAST = 16, 2048  # steps of a batch size before it is timed first, and the most before it is timed again
TIMED_GROWTH, CONFIRMED_GROWTH = 2, 4  # how that grows each time but the first, and how if the last comparison agreed


class Rounds(NamedTuple):
    """Measured seconds of plain steps and of rounds of several sequences."""

    num_seqs: int
    num_drafts: int  # of each sequence in a round
    plain: float
    drafting: float


class BatchCost(NamedTuple):
    """What sequences beyond the first add, measured with `num_seqs` of them."""

    num_seqs: int
    seq_s: float  # time that each adds to a plain step
    draft_s: float  # time that each of its drafts adds to a round

    def plain(self, first_s: float, num_seqs: int) -> float:
        """Return the seconds of a plain step if that of one sequence takes `first_s`.

        The second sequence may add more than later ones, because products of one row are faster. So beyond the measured
        size, a sequence adds no more than a draft, which also is one more token in the step.
        """
        num_beyond = max(0, num_seqs - self.num_seqs)
        return first_s + (num_seqs - 1 - num_beyond) * self.seq_s + num_beyond * min(self.seq_s, self.draft_s)


@dataclass(frozen=True)
class StepCost:
    """A model of step times on a device that reads weights, multiplies, and waits for the host between draft rounds."""

    dense_bytes: float  # weights that every step reads
    expert_bytes: float  # weights of one expert in all layers, or 0 if the model has no experts
    num_experts: int
    top_k: int
    flops_per_token: float
    draft_bytes: float  # weights that one pass of the drafter reads
    drafts_at_once: bool  # whether one pass of the drafter makes all drafts of a round
    bytes_per_s: float
    flops_per_s: float
    wait_s: float  # time per round that look-ahead does not hide
    step_s: float = 0.0  # fixed time of a step, to launch its layers
    draft_s: float = 0.0  # fixed time of a drafter's pass
    token_s: float = 0.0  # time per token outside matrix products (attention, norms, sampling)
    wait_per_seq_s: float = 0.0  # part of the wait that grows with the batch
    each_draft_s: float | None = None  # time of one draft of one sequence and its share of the verify, if measured
    is_padded: bool = False  # whether every row of a verify step is padded to the longest
    batch: BatchCost | None = None  # what further sequences cost, if measured

    def step(self, num_tokens: int) -> float:
        """Return the seconds of a step of the target.

        More tokens touch more experts. The model assumes that each token chooses its experts independently.
        """
        touched = 0.0
        if self.num_experts:
            touched = self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens)
        read = (self.dense_bytes + touched * self.expert_bytes) / self.bytes_per_s
        products = max(read, num_tokens * self.flops_per_token / self.flops_per_s)
        return self.step_s + num_tokens * self.token_s + products

    def overhead(self, num_seqs: int, num_drafting: int, num_drafts: int) -> float:
        """Return the time that a round adds to a plain step of `num_seqs` sequences, as a share of that step.

        `num_drafting` of the sequences have `num_drafts` drafts each. The others have none.
        """
        if not num_drafts or not num_drafting:
            return 0.0
        num_verifying = num_seqs if self.is_padded else num_drafting
        if self.batch is not None and self.each_draft_s is not None:
            extra = num_drafts * (self.each_draft_s + (num_verifying - 1) * self.batch.draft_s)
            return (extra + self.wait_s + num_seqs * self.wait_per_seq_s) / self.batch.plain(self.step(1), num_seqs)
        extra = self._extra(num_seqs, num_verifying, num_drafts)
        if self.each_draft_s is not None:
            extra *= self.each_draft_s * num_drafts / self._extra(1, 1, num_drafts)
        return (extra + self.wait_s + num_seqs * self.wait_per_seq_s) / self.step(num_seqs)

    def _extra(self, num_seqs: int, num_drafting: int, num_drafts: int) -> float:
        """Return the seconds of drafting and of the drafts' tokens in the verify, estimated from sizes alone."""
        num_passes = 1 if self.drafts_at_once else num_drafts
        drafting = num_passes * (self.draft_bytes / self.bytes_per_s + self.draft_s)
        return self.step(num_seqs + num_drafting * num_drafts) - self.step(num_seqs) + drafting

    def fitted(self, measured: Mapping[int, float], several: Rounds | None = None) -> StepCost:
        """Return this model fitted to measured seconds of rounds of one sequence with 0, 1 and the most drafts.

        A round adds a fixed time per draft to a plain step, plus a wait that does not depend on the number of drafts. If
        rounds of several sequences were measured too, each further sequence adds a fixed time per draft.
        """
        speed = measured[0] / self.step(1)
        most, wait_per_seq = max(measured), self.wait_per_seq_s * speed
        beyond = {count: max(0.0, measured[count] - measured[0] - wait_per_seq) for count in (1, most)}
        each = beyond[1] if most == 1 else max(0.0, (beyond[most] - beyond[1]) / (most - 1))
        wait, batch = max(0.0, beyond[most] - most * each), None
        if several is not None:
            num_more = several.num_seqs - 1
            more = several.drafting - several.plain - wait - wait_per_seq - several.num_drafts * each
            seq_s = max(0.0, (several.plain - measured[0]) / num_more)
            batch = BatchCost(several.num_seqs, seq_s, max(0.0, more / (num_more * several.num_drafts)))
        return replace(
            self,
            bytes_per_s=self.bytes_per_s / speed,
            flops_per_s=self.flops_per_s / speed,
            step_s=self.step_s * speed,
            draft_s=self.draft_s * speed,
            token_s=self.token_s * speed,
            wait_per_seq_s=wait_per_seq,
            wait_s=wait,
            each_draft_s=each,
            batch=batch,
        )


class MeasuredCost:
    """A StepCost with corrections by batch size and number of drafts.

    A correction is the ratio of the measured overhead of a round to the modelled one. Rounds are compared with the plain steps
    right before and right after them. If those differ, the machine's speed has changed and the comparison is dropped. A
    correction is the median of the last comparisons, so one that went wrong does not count.
    """

    def __init__(self, model: StepCost) -> None:
        self.model = model
        self._runs: dict[int, deque[_Run]] = {}  # size -> the latest runs of steps of one kind
        self._found: dict[int, dict[int, deque[float]]] = {}  # size -> drafts -> the last corrections found
        self._confirmed: set[int] = set()  # sizes whose last comparison agreed with the corrections in use
        self._num_steps = 0
        self._known: dict[tuple[int, int, int], float] = {}

    def overhead(self, num_seqs: int, num_drafting: int, num_drafts: int) -> float:
        """Return the time that a round adds to a plain step, as a share of that step."""
        key = num_seqs, num_drafting, num_drafts
        if key not in self._known:
            found = self._found.get(size_of(num_seqs), {})
            nearest = min(found, key=lambda count: abs(count - num_drafts), default=None)
            self._known[key] = self._modelled(*key) * (1.0 if nearest is None else median(found[nearest]))
        return self._known[key]

    def doubt(self, num_seqs: int) -> float:
        """Return the factor by which the overhead may be wrong in either direction."""
        return SAME if self.is_confirmed(num_seqs) else DOUBT

    def is_confirmed(self, num_seqs: int) -> bool:
        return size_of(num_seqs) in self._confirmed

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """Learn from a decode step in which `num_drafting` sequences had `num_drafts` drafts each, or none had any."""
        self._num_steps += 1
        size = size_of(num_seqs)
        kind = size_of(num_drafting) if num_drafts else 0, num_drafts
        runs = self._runs.setdefault(size, deque(maxlen=3))
        if not runs or runs[-1].kind != kind:
            runs.append(_Run(kind))
        runs[-1].add(self._num_steps, seconds)
        if not num_drafts and len(runs) == 3 and len(runs[-1].seconds) == MIN_TIMES:
            self._compare(size, *runs)

    def _compare(self, size: int, before: _Run, rounds: _Run, after: _Run) -> None:
        is_near = after.last_step - before.last_step <= FRESH
        if before.kind[1] or not is_near or len(before.seconds) < MIN_TIMES or len(rounds.seconds) < MIN_ROUNDS:
            return
        low, high = sorted((before.low, after.low))
        if high > MAX_DRIFT * low:
            return
        num_drafting, num_drafts = rounds.kind
        modelled = self._modelled(size, num_drafting, num_drafts)
        ratio = (2 * rounds.low / (low + high) - 1.0) / modelled
        ratio = min(MAX_CORRECTION, max(1.0 / MAX_CORRECTION, ratio))
        found = self._found.setdefault(size, {})
        for count, ratios in found.items():  # a length that is not used any more follows the one that is
            if count != num_drafts:
                ratios.append(median(ratios) + FADE * (ratio - median(ratios)))
        ratios = found.setdefault(num_drafts, deque([1.0], maxlen=NUM_FOUND))  # the model counts as one
        if 1 / SAME <= ratio / median(ratios) <= SAME:
            self._confirmed.add(size)
        else:
            self._confirmed.discard(size)
        ratios.append(ratio)
        self._known.clear()

    def _modelled(self, num_seqs: int, num_drafting: int, num_drafts: int) -> float:
        return max(MIN_OVERHEAD, self.model.overhead(num_seqs, num_drafting, num_drafts))


class _Run:
    """Steps of one kind in a row: the sequences that draft, rounded up, and their drafts."""

    def __init__(self, kind: tuple[int, int]) -> None:
        self.kind = kind
        self.seconds: deque[float] = deque(maxlen=NUM_TIMES)
        self.last_step = 0

    def add(self, number: int, seconds: float) -> None:
        self.last_step = number
        self.seconds.append(seconds)

    @property
    def low(self) -> float:
        """Return the lower quartile, because other load only makes steps slower."""
        return sorted(self.seconds)[len(self.seconds) // 4]


class TimedSteps:
    """Decides when steps are run only to time them: some without drafts, some with, and some without again.

    Steps of a single length would never show a wrong cost. They are counted by batch size, and rarely run once a size is known.
    """

    def __init__(self) -> None:
        self._size = 0  # of the last step
        self._until: dict[int, tuple[int, int]] = {}  # batch size -> steps left before it may be timed, and of how many
        self._lengths: list[int] = []  # of the steps that are left to run, the next one last

    @property
    def is_running(self) -> bool:
        return bool(self._lengths)

    def count(self, num_seqs: int) -> int:
        """Count a step, and return how many steps of its batch size are left before it may be timed."""
        if (size := size_of(num_seqs)) != self._size:  # rounds are compared only with plain steps of the same size
            self._size, self._lengths = size, []
        num_left, wait = self._until.get(size, (TIMED_FIRST, TIMED_FIRST // TIMED_GROWTH))
        self._until[size] = max(0, num_left - 1), wait
        return self._until[size][0]

    def next(self, num_drafts: int, *, is_confirmed: bool) -> int | None:
        """Return the length of the step that was counted last if it is run to time it.

        `num_drafts` is the length that should be timed, or 0 if times do not matter now.
        """
        num_left, wait = self._until[self._size]
        if not num_drafts:
            self._lengths = []
        elif not self._lengths and not num_left:
            wait = min(TIMED_LAST, wait * (CONFIRMED_GROWTH if is_confirmed else TIMED_GROWTH))
            self._until[self._size] = wait, wait
            self._lengths = [0] * TIMED_PLAIN + [num_drafts] * TIMED_ROUNDS + [0] * TIMED_PLAIN
        return self._lengths.pop() if self._lengths else None


def size_of(num_seqs: int) -> int:
    """Round a batch size up to a power of two. Batches of about the same size are timed together."""
    return 1 << (num_seqs - 1).bit_length()
