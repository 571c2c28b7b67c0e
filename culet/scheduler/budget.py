"""Size a step and share its tokens. Decode comes first, then drafts and prefill, oldest sequence first."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from culet.config import ScheduleConfig
from culet.scheduler.fairness import FairQueue, StepPrompts, count_older, share_tokens
from culet.scheduler.sequence import Sequence

MIN_STEP = 256  # tokens that a step may have however slow it is, because smaller chunks waste the reading of weights
CPU_MIN_STEP = 16  # the same on a CPU, where a token takes about as long in any larger chunk
CPU_DECODE_FACTOR = 2  # a step on a CPU may take this many times as long as one that only decodes, however slow that is
FIRST_FACTOR = 4  # before any step is measured, chunks beside running answers have this many times the minimum
NUM_SPEEDS = 16  # latest measured steps that decide the size of the next
LEARN_SHARE = 0.3  # of the tokens that a step may have. Smaller steps mostly wait for weights, so they are not measured.
LONG_STEP = 16  # tokens of a step that short prompts need not wait for
NEW_GRAMMAR_TOKENS = 4  # a row with a new grammar takes as long as this many tokens, because its masks are slow
MAX_SHORT = 16  # waiting sequences among which short prompts are looked for
NUM_BRISK = 32  # steps after a short prompt in which the next one is expected
BRISK_SHARE = 0.4  # of the usual time, for a step with chunks while short prompts are expected


class StepBudget:
    """How many tokens a step may have while answers are running, so that none of them waits long for a prompt's chunk.

    The number follows the measured times. If a step of n tokens took t seconds, the next may have n * max_step_s / t. A step's
    time grows with its tokens, so this settles where a step takes `max_step_s`, whatever the length of the prompts. Times vary,
    and answers wait for the slow steps, so the second slowest of the last steps counts. The slowest may have other causes. The
    number changes by a factor of two at most.

    If decoding alone takes nearly `max_step_s` or longer, prompts would get tiny chunks and hardly advance. So a step may
    always take `decode_factor` times as long as the fastest of the last steps with hardly any chunks.
    """

    def __init__(self, max_tokens: int, max_step_s: float, min_tokens: int = MIN_STEP, decode_factor: float = 0.0) -> None:
        self.max_tokens = max_tokens
        self._max_step_s = max_step_s
        self.decode_factor = decode_factor  # or 0, where decoding is never that slow
        self._decode_s: deque[float] = deque(maxlen=NUM_SPEEDS)  # times of the last steps with hardly any chunks
        self.min_tokens = min(min_tokens, max_tokens)
        self._num_tokens = float(min(FIRST_FACTOR * min_tokens, max_tokens))
        self._speeds: deque[float] = deque(maxlen=NUM_SPEEDS)  # tokens per second of the last steps

    def took(self, num_tokens: int, seconds: float, chunk_tokens: int = sys.maxsize) -> None:
        """Learn from a step. Those with few tokens say nothing about chunks. `chunk_tokens` are those that do not decode."""
        limit_s = self._learn_decode(seconds, chunk_tokens) if self.decode_factor else 0.0
        if not self._max_step_s or num_tokens < max(self.min_tokens, LEARN_SHARE * self._num_tokens) or seconds <= 0:
            return
        self._speeds.append(num_tokens / seconds)
        within = sorted(self._speeds)[:2][-1] * max(self._max_step_s, limit_s)
        within = min(max(within, self._num_tokens / 2), 2 * max(self._num_tokens, num_tokens))
        self._num_tokens = min(max(within, self.min_tokens), self.max_tokens)

    def _learn_decode(self, seconds: float, chunk_tokens: int) -> float:
        """Learn how long decoding alone takes. Return how long a step may take in any case."""
        fastest_s = min(self._decode_s, default=0.0)
        if chunk_tokens <= self.min_tokens:
            self._decode_s.append(seconds)
        elif seconds < fastest_s:  # decoding takes less than it did before
            self._decode_s.append(seconds / self.decode_factor)
        return self.decode_factor * fastest_s

    def of_step(
        self, running: Iterable[Sequence], waiting: Sequence | None, *, is_brisk: bool = False, is_shared: bool = False
    ) -> int:
        """Return how many tokens the next step may have. `waiting` is the next sequence that may start.

        `is_brisk` means that more short prompts are expected. They must not wait long for chunks, even if no answer is running.
        `is_shared` means that several tenants share the step. Then no prompt gets smaller chunks because of others' answers.
        """
        num_decoding, first = 0, waiting
        for seq in running:
            if seq.num_uncomputed == 1:
                num_decoding += 1
            elif first is waiting or seq.num_underway:
                first = seq
        if not self._max_step_s or not (num_decoding or is_brisk):
            return self.max_tokens
        # The first prompt can always go on, even with media that are computed as a whole, and not in tiny chunks.
        least = num_decoding + max(self.min_tokens // 2, first.min_chunk if first is not None else 1)
        # Never fewer than the minimum, because nothing is learned from smaller steps.
        num_tokens = max(int(self._num_tokens * (BRISK_SHARE if is_brisk else 1)), MIN_STEP if is_shared else self.min_tokens)
        return min(self.max_tokens, max(_round_down(num_tokens), least))


def make_step_budget(config: ScheduleConfig, *, on_cpu: bool) -> StepBudget:
    """Return the budget for these settings. On a CPU, chunks may be shorter, and steps that only decode may be slow."""
    least = (CPU_MIN_STEP, CPU_DECODE_FACTOR) if on_cpu else (MIN_STEP, 0)
    return StepBudget(config.max_num_batched_tokens, config.max_step_ms / 1e3, *least)


def _round_down(num_tokens: int) -> int:
    """Return one of eight sizes between two powers of two. The first step of a new size may be slow on a GPU."""
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens >> shift << shift


class ShortFirst:
    """Lets short prompts start in a step of their own before a long step, so that their first tokens come sooner.

    This pays off on a CPU, where a step takes longer the more tokens it has. Running answers and longer prompts wait in the
    meantime, so at most every other step is such a step, and it has at most half as many tokens as the step that it delays.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._last_step = -NUM_BRISK - 1

    def is_brisk(self, step: int) -> bool:
        """Return whether a short prompt went first not long before step number `step`, so that more of them are expected."""
        return step <= self._last_step + NUM_BRISK

    def num_tokens(self, grants: Iterable[Grant], step: int) -> int:
        """Return how many tokens of new prompts may run before `grants`, as step number `step`, or 0 if they join that step."""
        if not self._is_on or step < self._last_step + 2:
            return 0
        num_tokens = sum(max(grant.num_new, grant.sequence.has_new_grammar * NEW_GRAMMAR_TOKENS) for grant in grants)
        return num_tokens // 2 if num_tokens >= LONG_STEP else 0

    def used(self, step: int) -> None:
        """Remember that step number `step` had only new prompts."""
        self._last_step = step


def short_prompts(queue: FairQueue) -> list[Sequence]:
    """Return sequences that may go first, if their prompts are short. They may overtake others of the same priority.

    A new grammar makes a sequence too slow for that. Several samples would take the room of those that they overtake.
    """
    soon = queue.next_ones(MAX_SHORT)
    alone = [seq for seq in soon if not (seq.has_new_grammar or seq.siblings)]
    return [seq for seq in alone if seq.request.priority == soon[0].request.priority]


@dataclass(frozen=True, slots=True)
class Grant:
    """The tokens that one sequence may compute in a step. `num_drafts` of the `num_new` tokens are drafts."""

    sequence: Sequence
    num_new: int
    num_drafts: int = 0


def share_step(
    running: Collection[Sequence], queue: FairQueue, waiting: Sequence | None, budget: int, prompts: StepPrompts
) -> list[Grant]:
    """Share `budget` tokens among the sequences that can have a row. If there are several tenants, fill `prompts`.

    `waiting` is the next sequence of the queue that may start.
    """
    if not queue.is_shared:
        return share_budget([seq for seq in running if seq.is_ready], budget, waiting)
    return share_among_tenants(running, budget, prompts, waiting, 0 if waiting is None else queue.num_running(waiting.tenant))


def share_budget(ready: Iterable[Sequence], budget: int, waiting: Sequence | None = None) -> list[Grant]:
    """Return grants of at most `budget` tokens in total, in the order of `ready` (each tenant's oldest first).

    Every decode gets its token. The scheduler never runs more sequences than the budget has tokens, so at least one token is
    left for a prefill. While a prompt wants the remaining tokens, drafts get at most half of them. Tenants whose prompts want
    more than there is get equal parts. One part is left over for `waiting`, which is about to start.
    """
    ready = list(ready)
    # A chunk in legs goes first, because its sequence holds pages for it.
    prefills = sorted([seq for seq in ready if seq.num_uncomputed > 1], key=lambda seq: not seq.num_underway)
    left = budget - (len(ready) - len(prefills))
    assert left >= bool(prefills), f"{len(ready)} sequences are running, but the budget is only {budget} tokens"
    prompts = prefills if waiting is None else [*prefills, waiting]
    num_wanted = sum(seq.next_chunk for seq in prompts)
    for_prefill = max((left + 1) // 2, prompts[0].min_chunk) if prompts else 0
    for_drafts = max(0, left - min(num_wanted, for_prefill))
    grants: dict[int, Grant] = {}
    for seq in ready:
        if seq.num_uncomputed == 1:
            num_drafts = min(seq.num_useful_drafts, for_drafts)
            for_drafts -= num_drafts
            left -= num_drafts
            grants[id(seq)] = Grant(seq, 1 + num_drafts, num_drafts)
    wanted: Counter[str] = Counter()
    for seq in prompts:
        wanted[seq.tenant] += seq.next_chunk
    shares = share_tokens(wanted, left)
    for seq in prefills:
        # The first one can always continue.
        share = max(shares[seq.tenant], seq.min_chunk) if seq is prefills[0] else shares[seq.tenant]
        num_new = seq.chunk_within(min(left, share, seq.piece_beside(budget - left)))
        if num_new:
            left -= num_new
            shares[seq.tenant] -= min(num_new, shares[seq.tenant])
            grants[id(seq)] = Grant(seq, num_new)
    return [grants[id(seq)] for seq in ready if id(seq) in grants]


def share_among_tenants(
    running: Iterable[Sequence], budget: int, prompts: StepPrompts, waiting: Sequence | None, num_older: int
) -> list[Grant]:
    """Share the step among tenants: each one's oldest sequence first. Fill `prompts` with what it computes.

    `waiting` is about to start, and its tenant runs `num_older` sequences. While a tenant's lone prompt is computed, a busy
    tenant's other sequences pause, except for its two oldest.
    """
    ordered = count_older(running)
    starting = [] if waiting is None else [(waiting, num_older)]
    short_prompts = StepPrompts()
    for seq, count in [*((seq, seq.num_older) for seq in ordered if seq.num_uncomputed > 1), *starting]:
        prompts.add(seq, count)
        if seq.num_uncomputed <= budget:
            short_prompts.add(seq, count)
    # Decoding pauses only for prompts that end with this step. A long prompt would hold it up for many.
    ready = [
        seq
        for seq in ordered
        if seq.is_ready and not (short_prompts if seq.num_uncomputed == 1 else prompts).leave_out(seq, seq.num_older)
    ]
    return share_budget(ready, budget, waiting)
