"""Speculative decoding as the engine sets it up: what rounds cost here, and a look at start whether drafts are accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from culet.cache.spec import CacheLayout
from culet.config import DraftChoice
from culet.drafters.base import DrafterPlan
from culet.log import chose, logger
from culet.models.sizes import text_weights
from culet.models.spec import ModelSpec
from culet.runner.draft_round import draft_lengths
from culet.scheduler.draft_length import DraftPolicy, Pace, StepCost
from culet.scheduler.scheduler import Scheduler
from culet.scheduler.stats import Counters

# What a device reaches, by CUDA capability: (bytes/s, FLOP/s, seconds of a layer that reads nothing). Measured on an H200 (9),
# from public figures for others. Only ratios matter.
_GPU_RATES = {
    8: (1.6e12, 250e12, 2e-5),
    9: (4.0e12, 650e12, 1.3e-5),
    10: (6.5e12, 1300e12, 1.2e-5),
    12: (1.4e12, 300e12, 1.5e-5),
}
_CPU_RATES = (1.0e10, 1.0e11, 2.5e-4)
_GPU_TOKEN_S = 4e-7  # of a token in a layer
# Between rounds that are not planned ahead the host learns what was accepted before it launches the next step; H200.
_GPU_WAIT_S, _GPU_WAIT_PER_SEQ_S = 2.5e-4, 3e-5

PROBE_PROMPT = "Count from 1 to 60, separated by commas and spaces. Write the numbers only."
PROBE_TOKENS = 48  # with as many drafts as may be
TIMED_TOKENS = 20  # with one draft a round, and with none
UNTIMED_STEPS = 3  # at the beginning: the prompt, and what is made at first use
LEAST_ACCEPTED = 0.05  # share of the probe's drafts below which something must be wrong


def draft_policy(
    target: ModelSpec,
    drafter: DrafterPlan,
    choice: DraftChoice,
    layout: CacheLayout,
    device: torch.device,
    itemsize: int,
    *,
    plans_open: bool,
) -> DraftPolicy | None:
    """How many drafts to propose when; None where it is always as many as may be. `plans_open`: rounds wait for nothing."""
    if not choice.adaptive:
        return None
    weights = text_weights(target)
    experts = weights.pop("routed experts", 0)
    weights.pop("per-layer embeddings", 0)  # of which a token reads a row
    dense = sum(weights.values())
    moe = target.moe
    active = 0 if moe is None else experts * moe.top_k / moe.num_experts
    is_gpu = device.type == "cuda"
    rates = _GPU_RATES.get(torch.cuda.get_device_capability(device)[0], _GPU_RATES[8]) if is_gpu else _CPU_RATES
    waits = is_gpu and not plans_open
    # A drafter that reads the target's pages has all its weights of its own; another takes the target's head.
    own = sum(drafter.num_parameters().values()) + (0 if drafter.reads_target_pages else target.vocab_size * target.hidden_size)
    cost = StepCost(
        dense_bytes=dense * itemsize,
        expert_bytes=0 if moe is None else experts * itemsize / moe.num_experts,
        num_experts=0 if moe is None else moe.num_experts,
        top_k=0 if moe is None else moe.top_k,
        flops_per_token=2 * (dense + active),
        draft_bytes=own * itemsize,
        drafts_at_once=not drafter.reads_target_pages,
        bytes_per_s=rates[0],
        flops_per_s=rates[1],
        wait_s=_GPU_WAIT_S if waits else 0.0,
        step_s=len(target.layers) * rates[2],
        draft_s=sum(map(len, drafter.readers(layout).values())) * rates[2],
        token_s=len(target.layers) * _GPU_TOKEN_S if is_gpu else 0.0,
        wait_per_seq_s=_GPU_WAIT_PER_SEQ_S if waits else 0.0,
    )
    return DraftPolicy(cost, draft_lengths(drafter.max_drafts))


@dataclass(frozen=True)
class Probe:
    """What a short run with drafts at start has shown."""

    counters: Counters
    seconds: Mapping[int, float]  # of a round of one sequence, by number of drafts

    @property
    def is_suspicious(self) -> bool:
        drafted, accepted = self.counters.drafted_tokens, self.counters.accepted_tokens
        return drafted > 0 and accepted < LEAST_ACCEPTED * drafted

    def tell(self, choice: DraftChoice) -> None:
        """Say what was accepted; nearly nothing is a loud warning with what may be the cause."""
        drafted, accepted = self.counters.drafted_tokens, self.counters.accepted_tokens
        most = max(self.seconds)
        chose(f"a round of {most} drafts", f"{self.seconds[most] / self.seconds[0]:.2f} steps without", "measured at start")
        found = f"{accepted} of {drafted} drafts accepted, {self.counters.tokens_per_verify:.2f} tokens a verify"
        if not self.is_suspicious:
            chose("drafts at start", found, "a short run")
            return
        logger.warning(
            "DRAFTS ARE NOT ACCEPTED: %s in a short run at start. Output stays right, but drafting costs time.\n"
            "  likely causes: %s was made for another model or another revision of it (wrong pairing);\n"
            "  the chat template is not the model's, so that both read what they were not trained on (wrong template);\n"
            "  hidden states or keys of the wrong layer, or the other position convention"
            ' (with mtp try {"position": "%s"}).',
            found,
            choice.model,
            "hf" if choice.position == "engine" else "engine",
        )


class _Always:
    """In the place of a policy: so many drafts in every round."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def wanted(self, pace: Pace, num_seqs: int) -> int:
        return self.num_drafts

    def see(self, paces: Sequence[Pace]) -> None:
        """It matters not who runs."""

    def num_resting(self, paces: Sequence[Pace]) -> int:
        return 0

    def rest(self) -> None:
        """Nobody does."""

    def note(self, pace: Pace, num_drafts: int, num_accepted: int) -> None:
        """Nothing is learnt."""

    def took(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        """The probe has its own clock."""


def run_probe(scheduler: Scheduler, add: Callable[[int], None], step: Callable[[], object]) -> Probe:
    """See what is accepted with as many drafts as may be, and what rounds take with as many, with one and with none.

    `add` queues a request of so many tokens. Nothing of it all stays but what the policy has learnt.
    """
    policy, counters, seconds = scheduler.policy, Counters(), {}
    for num_drafts in (scheduler.max_drafts, 1, 0):
        scheduler.policy = _Always(num_drafts)
        add(PROBE_TOKENS if num_drafts == scheduler.max_drafts else TIMED_TOKENS)
        times = [time.perf_counter()]
        while scheduler.has_work:
            step()
            times.append(time.perf_counter())
        gaps = [after - before for before, after in pairwise(times)]
        gaps = sorted(gaps[UNTIMED_STEPS:] or gaps)
        seconds[num_drafts] = gaps[len(gaps) // 8]  # whatever else the machine does makes some longer
        if num_drafts == scheduler.max_drafts:
            counters = scheduler.counters.copy()
    if isinstance(policy, DraftPolicy):
        policy.believe(counters)
        policy.take_cost(policy.cost.fitted(seconds))
    scheduler.policy, scheduler.counters = policy, Counters()
    scheduler.drop_resume_points()
    return Probe(counters, seconds)
