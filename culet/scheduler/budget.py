"""How a step's tokens are shared: decode first, then drafts and prefill, the oldest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from culet.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Grant:
    """What one sequence may compute in a step; `num_drafts` of the `num_new` tokens are drafts."""

    sequence: Sequence
    num_new: int
    num_drafts: int = 0


def share_budget(ready: Iterable[Sequence], budget: int) -> list[Grant]:
    """Grants in the order of `ready` (oldest first), `budget` tokens in all.

    Every decode gets its token: the scheduler never runs more sequences than the budget has tokens, so this leaves at
    least one for a prefill if there is one. Of the rest, drafts may not take more than half while a prompt wants it.
    """
    ready = list(ready)
    prefills = [one for one in ready if one.num_uncomputed > 1]
    left = budget - (len(ready) - len(prefills))
    assert left >= bool(prefills), f"{len(ready)} sequences run on a budget of {budget} tokens"
    wanted = sum(one.next_chunk for one in prefills)
    for_drafts = left - min(wanted, (left + 1) // 2)
    grants: dict[int, Grant] = {}
    for one in ready:
        if one.num_uncomputed == 1:
            num_drafts = min(one.num_useful_drafts, for_drafts)
            for_drafts -= num_drafts
            left -= num_drafts
            grants[id(one)] = Grant(one, 1 + num_drafts, num_drafts)
    for one in prefills:
        num_new = min(one.next_chunk, left)
        if num_new:
            left -= num_new
            grants[id(one)] = Grant(one, num_new)
    return [grants[id(one)] for one in ready if id(one) in grants]
