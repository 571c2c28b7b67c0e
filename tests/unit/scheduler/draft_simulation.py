"""Chats with drafts on a fake clock. The simulation shows what a policy decides and how fast each chat runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from culet.scheduler.draft_length import DraftPolicy
from culet.scheduler.sequence import Acceptance
from culet.scheduler.step_cost import Rounds, StepCost

# Seconds that a round with this many drafts adds to a one-second step. They are close to the built-in model's on a CPU.
CPU_MTP = {0: 0.0, 1: 0.55, 2: 0.8, 3: 1.0}
CPU_DFLASH = {0: 0.0, 1: 0.7, 4: 0.85, 7: 1.1}
GPU_MTP = {0: 0.0, 1: 0.1, 2: 0.16, 3: 0.22}


# Milliseconds of plain steps of 1 to 8 sequences, with the built-in model on a CPU.
PLAIN_MS = (13.5, 17.5, 18.8, 20.0, 21.4, 22.7, 24.0, 25.4)


def dflash_ms(num_drafting: int, num_drafts: int) -> float:
    """Return what a round of DFlash adds to a step of the built-in model on a CPU, within a tenth of what was measured."""
    return 0.84 * (10.5 + num_drafting * (1.2 + 1.42 * num_drafts)) if num_drafting else 0.0


@dataclass
class Chat:
    """A chat whose drafts are accepted with probability `acceptance(position)`."""

    num_tokens: int
    acceptance: Callable[[int], float]
    state: Acceptance = field(default_factory=Acceptance)
    num_done: int = 0
    num_drafts: int = 0  # proposed for the next step
    num_rounds: int = 0
    seconds: float = 0.0


def good(num_tokens: int = 20) -> Chat:
    return Chat(num_tokens, lambda _: 0.88)


def bad(num_tokens: int = 120) -> Chat:
    return Chat(num_tokens, lambda _: 0.35)


def refused(num_tokens: int = 256) -> Chat:
    return Chat(num_tokens, lambda _: 0.0)


def probed_cost(overheads: dict[int, float], **changes: object) -> StepCost:
    """Return the cost model as a probe of one sequence would fit it."""
    is_at_once = 2 not in overheads
    cost = StepCost(5e7, 0, 0, 0, 2.5e7, 5e6, is_at_once, 1e10, 1e11, wait_s=0.0, step_s=1e-3, draft_s=1e-4, **changes)  # type: ignore[arg-type]
    most = max(overheads)
    return cost.fitted({0: 1.0, 1: 1.0 + overheads[1], most: 1.0 + overheads[most]})


def probed_dflash(num_several: int = 4) -> StepCost:
    """Return the cost model as the start fits it to one sequence, and to several if they are timed too."""
    cost = StepCost(5e7, 0, 0, 0, 2.5e7, 5e6, True, 1e10, 1e11, wait_s=0.0, step_s=1e-3, draft_s=1e-4)
    plain = PLAIN_MS[num_several - 1]
    several = Rounds(num_several, 4, plain, plain + dflash_ms(num_several, 4)) if num_several > 1 else None
    return cost.fitted({count: PLAIN_MS[0] + dflash_ms(count > 0, count) for count in (0, 1, 7)}, several)


class Simulation:
    """Runs chats, at most `batch` at a time. Part of a round's cost is per draft, and part is shared by the batch.

    With a `slow_share`, the policy sees times of a machine whose speed changes: after this share of steps, steps take twice as
    long or become fast again. The speeds of chats are those of the steady machine, so that they show only what is decided.
    """

    def __init__(
        self,
        overheads: dict[int, float],
        policy: DraftPolicy | None,
        *,
        seed: int = 0,
        shared: float = 0.7,
        slow_share: float = 0.0,
    ) -> None:
        self.overheads, self.policy, self.random, self.shared = overheads, policy, random.Random(seed), shared
        self.slow_share, self.is_slow = slow_share, False

    @classmethod
    def adaptive(cls, overheads: dict[int, float], **settings: object) -> Simulation:
        return cls(overheads, DraftPolicy(probed_cost(overheads), [count for count in overheads if count]), **settings)  # type: ignore[arg-type]

    def run(self, chats: Sequence[Chat], batch: int = 1) -> list[float]:
        """Run the chats and return the tokens per second of each. Plain decoding gives 1."""
        waiting, running = list(chats), []
        counts: list[int | None] = [None, None]  # the drafts of the last two steps
        while waiting or running:
            new = [waiting.pop(0) for _ in range(min(batch - len(running), len(waiting)))]
            shape = self._step(running, new)
            seconds = 0.0 if shape is None else 1.0 + self._overhead(*shape)
            self.is_slow ^= self.random.random() < self.slow_share
            for chat in running:
                chat.seconds += seconds
            if self.policy is not None and shape is not None:
                if counts == [shape[2]] * 2:  # as `StepTimer` times steps
                    self.policy.took(*shape, seconds * (1 + self.is_slow) * self.random.uniform(0.9, 1.1))
                for chat in running:
                    if chat.num_done >= chat.num_tokens:
                        self.policy.ended(chat.state)
            counts = [counts[1], None if shape is None else shape[2]]
            running = [chat for chat in (*running, *new) if chat.num_done < chat.num_tokens]
        return [chat.num_done / max(1e-9, chat.seconds) for chat in chats]

    def _overhead(self, num_seqs: int, num_drafting: int, num_drafts: int) -> float:
        share = self.shared + (1 - self.shared) * num_drafting / num_seqs
        return self.overheads[num_drafts] * share if num_drafting else 0.0

    def _step(self, running: list[Chat], new: list[Chat]) -> tuple[int, int, int] | None:
        """Run one step and return its shape, or None if no chat decodes. Chats that start are not timed."""
        if self.policy is not None:
            self.policy.plan([chat.state for chat in running])
        verified = [chat.num_drafts for chat in running]
        for chat in (*running, *new):
            num_drafts, chat.num_drafts = chat.num_drafts, 0
            if self.policy is not None:
                chat.num_drafts = self.policy.length(chat.state, len(running) + len(new))
            if chat in new:
                continue
            num_accepted = 0
            while num_accepted < num_drafts and self.random.random() < chat.acceptance(chat.num_done):
                num_accepted += 1
                chat.num_done += 1
            chat.num_done += 1
            chat.num_rounds += num_drafts > 0
            if num_drafts and num_accepted < chat.state.min_accepted:
                chat.num_drafts = 0
            if num_drafts and self.policy is not None:
                self.policy.note(chat.state, num_drafts, num_accepted)
        most = max(verified, default=0)
        return (len(running), sum(count > 0 for count in verified), most) if running else None


class DFlashSimulation(Simulation):
    """Runs chats with the measured costs of DFlash. A plain step takes one second, whatever its size."""

    def __init__(self, seed: int, num_several: int = 4) -> None:
        super().__init__({}, DraftPolicy(probed_dflash(num_several), (1, 4, 7)), seed=seed)

    def _overhead(self, num_seqs: int, num_drafting: int, num_drafts: int) -> float:
        return dflash_ms(num_drafting, num_drafts) / PLAIN_MS[num_seqs - 1]
