"""Share a step's tokens. Decode comes first, then drafts and prefill, oldest sequence first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from culet.scheduler.sequence import Sequence
from culet.scheduler.tenants import FairQueue, StepPrompts, rank, share_tokens


@dataclass(frozen=True, slots=True)
class Grant:
    """The tokens that one sequence may compute in a step. `num_drafts` of the `num_new` tokens are drafts."""

    sequence: Sequence
    num_new: int
    num_drafts: int = 0


def share_step(
    running: Collection[Sequence], waiting: FairQueue, budget: int, max_running: int, prompts: StepPrompts
) -> list[Grant]:
    """Share a step's tokens among the sequences that can have a row. If there are several tenants, fill `prompts`."""
    if not waiting.is_shared:
        return share_budget([seq for seq in running if seq.is_ready], budget)
    head = waiting.head() if len(running) < max_running else None
    return share_among_tenants(running, budget, prompts, head, 0 if head is None else waiting.num_running(head.tenant))


def share_budget(ready: Iterable[Sequence], budget: int, waiting: Sequence | None = None) -> list[Grant]:
    """Return grants of at most `budget` tokens in total, in the order of `ready` (lowest rank first).

    Every decode gets its token. The scheduler never runs more sequences than the budget has tokens, so at least one token is
    left for a prefill. While a prompt wants the remaining tokens, drafts get at most half of them. Tenants whose prompts want
    more than there is get equal parts. One part is left over for `waiting`, which is about to start.
    """
    ready = list(ready)
    prefills = [seq for seq in ready if seq.num_uncomputed > 1]
    left = budget - (len(ready) - len(prefills))
    assert left >= bool(prefills), f"{len(ready)} sequences are running, but the budget is only {budget} tokens"
    num_wanted = sum(seq.next_chunk for seq in prefills)
    for_prefill = max((left + 1) // 2, prefills[0].min_chunk) if prefills else 0
    for_drafts = max(0, left - min(num_wanted, for_prefill))
    grants: dict[int, Grant] = {}
    for seq in ready:
        if seq.num_uncomputed == 1:
            num_drafts = min(seq.num_useful_drafts, for_drafts)
            for_drafts -= num_drafts
            left -= num_drafts
            grants[id(seq)] = Grant(seq, 1 + num_drafts, num_drafts)
    wanted: Counter[str] = Counter()
    for seq in [*prefills, waiting] if waiting is not None else prefills:
        wanted[seq.tenant] += seq.next_chunk
    shares = share_tokens(wanted, left)
    for seq in prefills:
        # The first one can always continue.
        share = max(shares[seq.tenant], seq.min_chunk) if seq is prefills[0] else shares[seq.tenant]
        num_new = seq.chunk_within(min(left, share))
        if num_new:
            left -= num_new
            shares[seq.tenant] -= min(num_new, shares[seq.tenant])
            grants[id(seq)] = Grant(seq, num_new)
    return [grants[id(seq)] for seq in ready if id(seq) in grants]


def share_among_tenants(
    running: Iterable[Sequence], budget: int, prompts: StepPrompts, waiting: Sequence | None, place: int
) -> list[Grant]:
    """Rank `running` and share the step by rank. Fill `prompts` with what it computes.

    `waiting` is about to start with the rank `place`. While a tenant's lone prompt is computed, a busy tenant's other
    sequences pause, except for its two oldest.
    """
    ranked = rank(running)
    starting = [] if waiting is None else [(waiting, place)]
    short_prompts = StepPrompts()
    for seq, seq_rank in [*((seq, seq.rank) for seq in ranked if seq.num_uncomputed > 1), *starting]:
        prompts.add(seq, seq_rank)
        if seq.num_uncomputed <= budget:
            short_prompts.add(seq, seq_rank)
    # Decoding pauses only for prompts that end with this step. A long prompt would hold it up for many.
    ready = [
        seq
        for seq in ranked
        if seq.is_ready and not (short_prompts if seq.num_uncomputed == 1 else prompts).leave_out(seq, seq.rank)
    ]
    return share_budget(ready, budget, waiting)
