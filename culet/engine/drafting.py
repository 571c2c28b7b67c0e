"""Set up speculative decoding: estimate what draft rounds cost on this device, and probe the drafter at startup."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from culet import hardware
from culet.cache.spec import CacheLayout
from culet.config import DraftChoice
from culet.drafters.base import Drafter, DrafterPlan
from culet.layers.weight.byte_sizes import bytes_per_value
from culet.log import chose, logger
from culet.models.gemma4 import Gemma4
from culet.models.sizes import text_weights
from culet.models.spec import ModelSpec
from culet.runner.draft_round import draft_lengths
from culet.scheduler.draft_length import DraftPolicy
from culet.scheduler.scheduler import Scheduler
from culet.scheduler.sequence import Acceptance
from culet.scheduler.stats import Counters
from culet.scheduler.step_cost import Rounds, StepCost

_GPU_TOKEN_S, _CPU_TOKEN_S = 4e-7, 1e-4  # per token and layer
# Unless rounds are planned ahead, the host waits for the accepted counts before it launches the next step. Measured on an H200.
_GPU_WAIT_S, _GPU_WAIT_PER_SEQ_S = 2.5e-4, 3e-5

PROBE_PROMPT = "Count from 1 to 20."
PROBE_TOKENS = 40  # generated with the maximum number of drafts
TIMED_TOKENS = 16  # generated with one draft per round, and again with none
# Sequences that are timed together, the length of their prompts, and their steps of each kind. Prompts are short to save time.
TIMED_SEQS, TIMED_PROMPT, TIMED_STEPS = 4, 4, 2
UNTIMED_STEPS = 3  # the first steps are slower: they compute the prompt and touch new buffers
MIN_ACCEPTED = 0.1  # if the probe accepts fewer drafts than this per verify, something must be wrong


@dataclass(frozen=True)
class ReadBytes:
    """The bytes of the weights that steps and draft rounds read."""

    dense: float  # read in every step
    experts: float  # all routed experts, of which a step reads some
    draft: float  # read in each pass of the drafter

    @classmethod
    def of_models(cls, target: Gemma4, drafter: Drafter) -> ReadBytes:
        return cls(*target.step_bytes(), drafter.pass_bytes)

    @classmethod
    def of_specs(
        cls, target: ModelSpec, drafter: DrafterPlan, itemsize: int, parts: Mapping[str, int] | None = None
    ) -> ReadBytes:
        """Estimate the bytes if the weights are not in this process. `itemsize` is that of activations.

        `parts` are the bytes of the target's parts, if its weights are quantised.
        """
        each = bytes_per_value(itemsize)
        sizes = {part: count * each for part, count in text_weights(target).items()} if parts is None else dict(parts)
        experts = sizes.get("routed experts", 0)
        dense = sum(sizes.values()) - experts - sizes.get("per-layer embeddings", 0)  # each token reads only one row of these
        # A drafter that reads the target's pages has its own head. Other drafters use the target's.
        head = 0 if drafter.reads_target_pages else sizes["token embedding"]
        return cls(dense, experts, drafter.weight_bytes(itemsize) + head)

    def shared_by(self, num_ranks: int) -> ReadBytes:
        """Return the bytes that each of `num_ranks` ranks reads."""
        return ReadBytes(self.dense / num_ranks, self.experts / num_ranks, self.draft / num_ranks)


def _count_weights(target: ModelSpec) -> tuple[int, int]:
    """Return how many weights every step uses, and how many all routed experts have."""
    weights = text_weights(target)
    experts = weights.pop("routed experts", 0)
    weights.pop("per-layer embeddings", 0)  # each token reads only one row
    return sum(weights.values()), experts


def draft_policy(
    target: ModelSpec,
    drafter: DrafterPlan,
    choice: DraftChoice,
    layout: CacheLayout,
    device: torch.device,
    read: ReadBytes,
    *,
    plans_open: bool,
) -> DraftPolicy | None:
    """Return the policy for draft lengths, or None to always draft the maximum.

    With `plans_open`, rounds do not wait for the host.
    """
    if not choice.adaptive:
        return None
    dense, experts = _count_weights(target)
    moe = target.moe
    active = 0 if moe is None else experts * moe.top_k / moe.num_experts
    is_gpu = device.type == "cuda"
    rates = (hardware.arch_of(hardware.capability_of(device)) if is_gpu else hardware.CPU).rates
    waits = is_gpu and not plans_open
    # On a CPU, the cost of drafters with weights is fitted to a probe.
    token_s = _GPU_TOKEN_S if is_gpu else _CPU_TOKEN_S if choice.method == "suffix" else 0.0
    cost = StepCost(
        dense_bytes=read.dense,
        expert_bytes=0 if moe is None else read.experts / moe.num_experts,
        num_experts=0 if moe is None else moe.num_experts,
        top_k=0 if moe is None else moe.top_k,
        flops_per_token=2 * (dense + active),
        draft_bytes=read.draft,
        drafts_at_once=not drafter.reads_target_pages,
        bytes_per_s=rates.bytes_per_s,
        flops_per_s=rates.flops_per_s,
        wait_s=_GPU_WAIT_S if waits else 0.0,
        step_s=len(target.layers) * rates.layer_s,
        draft_s=sum(map(len, drafter.readers(layout).values())) * rates.layer_s,
        token_s=len(target.layers) * token_s,
        is_padded=plans_open,
        wait_per_seq_s=_GPU_WAIT_PER_SEQ_S if waits else 0.0,
    )
    return DraftPolicy(cost, draft_lengths(drafter.max_drafts), is_ahead=plans_open)


@dataclass(frozen=True)
class Probe:
    """The results of a short run with drafts at startup."""

    counters: Counters
    seconds: Mapping[int, float]  # duration of a round of one sequence, by number of drafts (0 is a plain step)

    @property
    def is_suspicious(self) -> bool:
        return self.counters.accepted_tokens < MIN_ACCEPTED * self.counters.verifies

    def log(self, choice: DraftChoice) -> None:
        """Log how many drafts were accepted. If almost none were, warn and list the likely causes."""
        drafted, accepted = self.counters.drafted_tokens, self.counters.accepted_tokens
        most = max(self.seconds)
        chose(f"a round of {most} drafts", f"{self.seconds[most] / self.seconds[0]:.2f} plain steps", "measured at startup")
        summary = f"{accepted} of {drafted} drafts accepted, {self.counters.tokens_per_verify:.2f} tokens per verify"
        if not self.is_suspicious:
            chose("drafts at startup", summary, "a short run")
            return
        logger.warning(
            "DRAFTS ARE NOT ACCEPTED: %s in a short run at startup. The output stays correct, but drafting costs time.\n"
            "  Likely causes:\n"
            "  - %s belongs to another model or to another revision of it (wrong pairing).\n"
            "  - The chat template is not the one that both were trained with (wrong template).\n"
            "  - The drafter reads hidden states or keys of the wrong layer, or uses the other position convention"
            ' (with mtp, try {"position": "%s"}).',
            summary,
            choice.model,
            "hf" if choice.position == "engine" else "engine",
        )


class _Fixed:
    """A policy for the probe that drafts the same number of tokens in every round."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.times: dict[tuple[int, int, int], list[float]] = {}  # by the shape of a step

    def plan(self, batch: Sequence[Acceptance]) -> None:
        pass

    def length(self, state: Acceptance, num_seqs: int) -> int:
        return self.num_drafts

    def note(self, state: Acceptance, num_drafts: int, num_accepted: int) -> None:
        pass

    def ended(self, state: Acceptance) -> None:
        pass

    def took(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        self.times.setdefault((num_seqs, num_drafting, num_drafts), []).append(seconds)


def run_probe(
    scheduler: Scheduler, add: Callable[[str, int, int], None], step: Callable[[], object], *, num_several: int = 1
) -> Probe:
    """Measure acceptance with the maximum number of drafts, and round times with the maximum, with one and with none.

    `add` queues a request. It takes an id, the most tokens of the prompt, and the number of tokens to generate. Rounds of
    `num_several` sequences are timed too. Only what the policy has learned is kept.
    """
    policy, counters, seconds = scheduler.policy, Counters(), {}
    for num_drafts in (scheduler.max_drafts, 1, 0):
        scheduler.policy = _Fixed(num_drafts)
        add("draft-probe", sys.maxsize, PROBE_TOKENS if num_drafts == scheduler.max_drafts else TIMED_TOKENS)
        times = [time.perf_counter()]
        while scheduler.has_work:
            step()
            times.append(time.perf_counter())
        gaps = [after - before for before, after in pairwise(times)]
        gaps = sorted(gaps[UNTIMED_STEPS:-1] or gaps)  # the last step makes no proposals
        seconds[num_drafts] = gaps[len(gaps) // 8]  # a low quantile, because other work on the machine slows some steps
        if num_drafts == scheduler.max_drafts:
            counters = scheduler.counters.copy()
    if isinstance(policy, DraftPolicy):
        middle = policy.lengths[len(policy.lengths) // 2]
        several = _time_several(scheduler, num_several, middle, add, step) if num_several > 1 else None
        policy.believe(counters, policy.cost.model.fitted(seconds, several))
    scheduler.policy, scheduler.counters = policy, Counters()
    scheduler.drop_resume_points()
    return Probe(counters, seconds)


def _time_several(
    scheduler: Scheduler, num_seqs: int, num_drafts: int, add: Callable[[str, int, int], None], step: Callable[[], object]
) -> Rounds | None:
    """Time plain steps and then rounds of several sequences. Return None if they never ran together."""
    scheduler.policy = fixed = _Fixed(0)
    names = [f"draft-probe-{number}" for number in range(num_seqs)]
    for name in names:
        add(name, TIMED_PROMPT, PROBE_TOKENS)
    plain: list[float] = []
    drafting: list[float] = []
    fixed.times = {(num_seqs, 0, 0): plain, (num_seqs, num_seqs, num_drafts): drafting}
    while scheduler.has_work and len(drafting) < TIMED_STEPS:
        step()
        if len(plain) >= TIMED_STEPS:
            fixed.num_drafts = num_drafts
    for name in names:
        scheduler.cancel(name)
    while scheduler.has_work:
        step()
    scheduler.deltas()  # nobody waits for the ends of cancelled requests
    return Rounds(num_seqs, num_drafts, min(plain), min(drafting)) if plain and drafting else None
