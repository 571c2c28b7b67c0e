"""The matchers of the sequences in a runner's slots. They give masks for a step's draws, and advance by the drawn tokens.

A mask needs the tokens before it on the host. So the scheduler plans no row of a bound sequence before the result of the
previous row is known (see `culet.structured.matcher`). A drafter's proposals for it come to the host with the draws that they
follow, because the next step's masks depend on them. A free sequence has neither masks nor proposals on the host.

Shapes: R draws of a step · A draws with a mask · W words of 32 tokens · G groups of draws · K proposals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from culet.errors import InternalError
from culet.kernels.host_transfer import HostCopy, on_device
from culet.runner.draw_plan import DrawGroup
from culet.sampling.sampler import TokenMasks
from culet.types import Entry

if TYPE_CHECKING:  # the grammar engine is only loaded with the first grammar
    from culet.structured.compiler import GrammarCompiler
    from culet.structured.matcher import Matcher

MASK_LIMIT_S = 0.01  # A step waits this long for masks. Draws whose masks come later are drawn again in the next step.


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step's draws. `bits_AW[a]` is the mask of draw `draws[a]`."""

    draws: NDArray[np.int64]
    bits_AW: NDArray[np.int32]

    def of(self, part: slice) -> TokenMasks | None:
        """Return the masks of the draws in `part`, numbered from the beginning of `part`."""
        begin, end = np.searchsorted(self.draws, (part.start, part.stop))
        if begin == end:
            return None
        return TokenMasks((self.draws[begin:end] - part.start).tolist(), torch.from_numpy(self.bits_AW[begin:end]))


class KeptDraws(NamedTuple):
    """What the draws of a group become."""

    token_ids: tuple[int, ...]
    num_proposed: int
    fault: str = ""
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class StepGrammars:
    """The matchers of the sequences that drew in a step, by index of their group. They advance by the drawn tokens."""

    matchers: dict[int, Matcher]
    masked: dict[int, int]  # number of proposals for each group that drew with masks
    proposals: HostCopy  # [A, K], on its way to the host

    def accept(self, group: int, token_ids: tuple[int, ...], num_proposed: int) -> KeptDraws:
        """Advance the matcher of a group by the tokens that it drew."""
        matcher = self.matchers.get(group)
        if matcher is None:
            return KeptDraws(token_ids, num_proposed)
        is_masked = group in self.masked
        if is_masked and len(token_ids) > matcher.num_masks:  # draws whose masks were late do not count
            token_ids, num_proposed, self.masked[group] = token_ids[: matcher.num_masks], 0, 0
        kept = token_ids[: matcher.take(token_ids, is_masked=is_masked)]
        is_bound = matcher.is_bound
        # The host does not know what was proposed after a draw without masks, so nothing can be verified with masks.
        return KeptDraws(kept, num_proposed if is_masked or not is_bound else 0, matcher.fault, is_bound)

    def take_proposals(self) -> None:
        """Wait for the proposals and give them to the matchers that need them."""
        flat = next(iter(self.proposals.lists()), [])
        width = len(flat) // max(1, len(self.masked))
        for index, (group, count) in enumerate(self.masked.items()):
            drafts = flat[index * width : index * width + count]
            self.matchers[group].drafts = tuple(int(token_id) for token_id in drafts)


class SlotGrammars:
    """The matcher of each slot's sequence, if it has a grammar or rules."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.grammars: GrammarCompiler | None = None  # compiles grammars. Without it, no entry may have one.
        # A mask may be late on one rank only, and ranks must draw the same tokens. So they wait for all masks.
        self._limit_s = MASK_LIMIT_S if num_ranks == 1 else None
        self._by_slot: dict[int, Matcher] = {}
        self._budgeted: dict[int, Matcher] = {}  # those with a thinking budget that is not used up

    def enter(self, entries: Iterable[Entry]) -> None:
        """Start the matchers of sequences that take their slots."""
        for entry in entries:
            self._by_slot.pop(entry.slot, None)
            self._budgeted.pop(entry.slot, None)
            if entry.grammar is None and entry.rules is None:
                continue
            if self.grammars is None:
                raise InternalError(f"slot {entry.slot} has a grammar, but the runner was built without grammars")
            matcher = self.grammars.start(entry.grammar, entry.token_ids, entry.prompt_len, entry.rules)
            self._by_slot[entry.slot] = matcher
            if entry.rules is not None and entry.rules.thinking_budget is not None:
                self._budgeted[entry.slot] = matcher

    def take_bans(self) -> list[tuple[int, int]]:
        """Return (slot, token) for each token that a slot's sequence may not draw from now on. Each is returned once."""
        bans = [(slot, token_id) for slot, m in self._budgeted.items() if (token_id := m.banned_id) is not None]
        for slot, _ in bans:
            del self._budgeted[slot]
        return bans

    def bind(self, groups: Sequence[DrawGroup]) -> bool:
        """Return whether any of these draws needs a mask."""
        return bool(self._by_slot) and any(map(self._is_bound, groups))

    def _is_bound(self, group: DrawGroup) -> bool:
        """Return whether a group's draws need masks. A row that was planned as free has none, whatever is known by now."""
        return group.is_bound and (matcher := self._by_slot.get(group.slot)) is not None and matcher.is_bound

    def masks(self, groups: Sequence[DrawGroup]) -> StepMasks | None:
        """Return the masks for the draws of `groups`, or None if all are free. Runs while the device is busy with the step."""
        if not self.bind(groups):
            return None
        assert self.grammars is not None
        bound = [group for group in groups if self._is_bound(group)]
        rows = [(self._by_slot[group.slot], group.num_drafts) for group in bound]
        skip_slow = self._limit_s is not None and len(bound) < len(groups)
        bits_AW = self.grammars.masks(rows, limit_s=self._limit_s, skip_slow=skip_slow)
        draws = [group.first + index for group in bound for index in range(group.num_drafts + 1)]
        return StepMasks(np.array(draws), bits_AW)

    def follow(
        self, groups: Sequence[DrawGroup], accepted_G: Tensor | None, num_proposed: Sequence[int], tokens_SL: Tensor
    ) -> StepGrammars | None:
        """Start sending the proposals that the matchers need to the host. Call after the drafter has written them."""
        if not self._by_slot:
            return None
        matchers = {index: self._by_slot[group.slot] for index, group in enumerate(groups) if group.slot in self._by_slot}
        if not matchers:
            return None
        masked = {index: num_proposed[index] for index in matchers if self._is_bound(groups[index])}
        proposals = []
        if width := max(masked.values(), default=0):
            index_A = on_device(list(masked), tokens_SL.device)
            facts = [(groups[index].slot, groups[index].position) for index in masked]
            slots_A, length_A = on_device(facts, tokens_SL.device).T
            length_A = length_A + 1 if accepted_G is None else length_A + 1 + accepted_G[index_A]
            column_K = torch.arange(width, device=tokens_SL.device)
            # A sequence near the end of its slot has fewer proposals than columns.
            places_AK = (length_A[:, None] + column_K).clamp_(max=tokens_SL.shape[1] - 1)
            proposals = [tokens_SL[slots_A[:, None], places_AK].long()]
        return StepGrammars(matchers, masked, HostCopy(proposals))
